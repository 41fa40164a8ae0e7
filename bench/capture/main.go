//go:build linux

// Capture measures what it costs to be captured: connections and bytes to one replica, directly, by a port that stands for its
// service (--listen), and by the service's virtual address (--capture). It runs in a network namespace of its own.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"
)

const (
	service = "bench"
	inside  = "HEADROOM_BENCH_INSIDE" // set in the namespace
)

func main() {
	bin := flag.String("bin", "bin", "folder with the programs agent and meshctl")
	rounds := flag.Int("rounds", 10, "how many times each way is measured, in turns")
	flag.Parse()
	err := errors.New("measure in a network namespace: want root")
	switch {
	case os.Getenv(inside) != "":
		err = measure(*bin, *rounds)
	case os.Getuid() == 0:
		err = enter()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "capture:", err)
		os.Exit(1)
	}
}

// enter runs this program again in a network namespace of its own.
func enter() error {
	c := exec.Command("/proc/self/exe", os.Args[1:]...)
	c.Env = append(os.Environ(), inside+"=1")
	c.Stdout, c.Stderr = os.Stdout, os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	return c.Run()
}

// way is how callers get to the replica.
type way struct {
	name    string
	address string

	connections []float64 // µs each, by round
	bytes       []float64 // MiB/s, by round
}

func measure(bin string, rounds int) error {
	if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		return fmt.Errorf("ip link set lo up: %w: %s", err, out)
	}
	dir, err := os.MkdirTemp("", "headroom-bench-capture-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	ctx, cancel := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	defer serving.Wait()
	defer cancel()
	replica, err := serve(ctx, &serving)
	if err != nil {
		return err
	}
	const listen = "127.0.0.1:9000"
	agent := exec.CommandContext(ctx, filepath.Join(bin, "agent"), "--node", "a", "--data-dir", dir, "--etcd-embedded", filepath.Join(dir, "etcd"),
		"--log-level", "error", "--capture", "--dns", "off", "--listen", service+"="+listen)
	agent.Stderr = os.Stderr
	if err := agent.Start(); err != nil {
		return err
	}
	defer agent.Wait()
	defer cancel()
	virtual, err := declare(ctx, bin, replica)
	if err != nil {
		return err
	}
	ways := []*way{{name: "direct", address: replica}, {name: "by --listen", address: listen}, {name: "captured", address: virtual}}
	for i := range rounds {
		for j := range ways {
			if err := ways[(i+j)%len(ways)].measure(); err != nil {
				return err
			}
		}
	}
	report(ways, rounds)
	return nil
}

// serve answers each connection: a byte for a byte, until one asks for much.
func serve(ctx context.Context, wg *sync.WaitGroup) (address string, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	wg.Go(func() {
		<-ctx.Done()
		l.Close()
	})
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return // closed
			}
			wg.Go(func() { answer(c) })
		}
	})
	return l.Addr().String(), nil
}

const (
	one  = 'o'
	much = 'm'
	size = 256 << 20 // bytes of what is much
)

func answer(c net.Conn) {
	defer c.Close()
	var ask [1]byte
	if _, err := io.ReadFull(c, ask[:]); err != nil {
		return
	}
	if ask[0] == one {
		c.Write(ask[:])
		return
	}
	piece := make([]byte, 1<<20)
	for range size / len(piece) {
		if _, err := c.Write(piece); err != nil {
			return
		}
	}
}

// declare registers the replica, and returns the virtual address of the service once it is there.
func declare(ctx context.Context, bin, replica string) (address string, err error) {
	meshctl := func(args ...string) ([]byte, error) {
		return exec.CommandContext(ctx, filepath.Join(bin, "meshctl"), args...).CombinedOutput()
	}
	var out []byte
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); <-tick.C {
		if out, err = meshctl("register", service, "--address", replica, "--protocol", "tcp"); err == nil {
			break
		}
	}
	if err != nil {
		return "", fmt.Errorf("register the replica: %w: %s", err, out)
	}
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); <-tick.C {
		var answer struct {
			Services []struct{ Name, Ipv4 string }
		}
		if out, err = meshctl("services", "-o", "json"); err != nil || json.Unmarshal(out, &answer) != nil {
			continue
		}
		for _, s := range answer.Services {
			at, err := netip.ParseAddr(s.Ipv4)
			if err != nil {
				continue
			}
			address = netip.AddrPortFrom(at, 80).String()
			if c, err := net.Dial("tcp", address); err == nil {
				c.Close()
				return address, nil
			}
		}
	}
	return "", fmt.Errorf("wait for a virtual address: %s", out)
}

const connections = 2000 // in a round

func (w *way) measure() error {
	began := time.Now()
	for range connections {
		if _, err := w.ask(one); err != nil {
			return fmt.Errorf("%s (%s): %w", w.name, w.address, err)
		}
	}
	w.connections = append(w.connections, float64(time.Since(began).Microseconds())/connections)
	began = time.Now()
	n, err := w.ask(much)
	if err != nil || n != size {
		return fmt.Errorf("%s (%s): %d of %d bytes: %w", w.name, w.address, n, size, err)
	}
	w.bytes = append(w.bytes, float64(n>>20)/time.Since(began).Seconds())
	return nil
}

// ask makes a connection, and reads what is answered to its end.
func (w *way) ask(what byte) (int64, error) {
	c, err := net.Dial("tcp", w.address)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	if _, err := c.Write([]byte{what}); err != nil {
		return 0, err
	}
	return io.Copy(io.Discard, struct{ io.Reader }{c})
}

func report(ways []*way, rounds int) {
	fmt.Printf("%d rounds in turns, median (quartiles). A connection is made, asks a byte, is answered, and ends, one after the other.\n\n", rounds)
	fmt.Println("| way | µs a connection | MiB/s in one connection |")
	fmt.Println("|---|--:|--:|")
	for _, w := range ways {
		fmt.Printf("| %s | %s | %s |\n", w.name, spread(w.connections), spread(w.bytes))
	}
}

func spread(all []float64) string {
	slices.Sort(all)
	at := func(share float64) float64 { return all[int(share*float64(len(all)-1)+0.5)] }
	return fmt.Sprintf("%.0f (%.0f to %.0f)", at(0.5), at(0.25), at(0.75))
}
