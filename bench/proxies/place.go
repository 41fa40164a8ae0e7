//go:build linux

package main

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"text/template"

	"github.com/headroom-mesh/headroom/bench/load"
)

// place is where a proxy is set up: for one cell, with loopback addresses and a folder of its own.
type place struct {
	cell
	dir    string
	certs  string // folder of the certificates
	bin    string // folder of the programs agent and meshctl
	net    netip.Addr
	origin []netip.Addr
	cores  cores
}

// address returns the loopback address of a hop.
func (p place) address(hop int) netip.Addr {
	b := p.net.As4()
	b[3] = byte(hop + 1)
	return netip.AddrFrom4(b)
}

// hop is one station of the way to the origin.
type hop struct {
	Dir           string
	At            netip.Addr
	To            []netip.Addr
	TLSIn, TLSOut bool
	Certs         string // folder with the files that package certs names
}

// hops returns the stations, the callers' first.
func (p place) hops() []hop {
	all := make([]hop, p.topology.hops)
	for i := range all {
		all[i] = hop{Dir: filepath.Join(p.dir, strconv.Itoa(i)), At: p.address(i), To: p.origin, TLSIn: p.topology.mtls && i > 0, Certs: p.certs}
		if i+1 < len(all) {
			all[i].To, all[i].TLSOut = []netip.Addr{p.address(i + 1)}, p.topology.mtls
		}
	}
	return all
}

// The ports of hops and origin, for templates.
func (h hop) H1() uint16  { return load.HTTP1.Port() }
func (h hop) H2() uint16  { return load.HTTP2.Port() }
func (h hop) TCP() uint16 { return load.TCP.Port() }

// write fills a template with what is known of the hop and writes the file.
func (h hop) write(name, text string) error {
	t, err := template.New(name).Delims("<<", ">>").Parse(text)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	var b strings.Builder
	if err := t.Execute(&b, h); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return os.WriteFile(h.file(name), []byte(b.String()), 0o600)
}

func (h hop) file(name string) string { return filepath.Join(h.Dir, name) }

// process is a program that was started. What it prints goes to a log.
type process struct {
	command *exec.Cmd
	log     string
}

// start starts a program on some cores. It ends with this one.
func start(on string, env []string, dir, name string, program string, args ...string) (*process, error) {
	p := &process{log: filepath.Join(dir, name+".log")}
	log, err := os.Create(p.log)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	p.command = exec.Command("taskset", append([]string{"-c", on, program}, args...)...)
	p.command.Dir = dir
	p.command.Env = append(os.Environ(), env...)
	p.command.Stdout, p.command.Stderr = log, log
	p.command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := p.command.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", program, err)
	}
	return p, nil
}

// kill ends it, and all that it has started.
func (p *process) kill() {
	_ = syscall.Kill(-p.command.Process.Pid, syscall.SIGKILL)
	_ = p.command.Wait()
}

// lastWords returns the end of the log.
func (p *process) lastWords() string {
	text, _ := os.ReadFile(p.log)
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(lines[max(0, len(lines)-5):], "\n")
}

// running is a proxy that was started.
type running struct {
	counted   []*process // their CPU and memory are the proxy's
	others    []*process // what it needs beside
	entry     netip.AddrPort
	authority string            // what callers ask for
	profiles  map[string]string // where profiles are to be had, HOST:PORT by the name of the process
}

func (r *running) stop() {
	for _, p := range append(r.counted, r.others...) {
		p.kill()
	}
}

// lastWords returns the ends of all logs that aren't empty.
func (r *running) lastWords() string {
	var all []string
	for _, p := range append(r.counted, r.others...) {
		if words := p.lastWords(); words != "" {
			all = append(all, filepath.Base(p.log)+": "+words)
		}
	}
	return strings.Join(all, "\n")
}
