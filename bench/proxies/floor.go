//go:build linux

package main

import (
	"context"
	"crypto/tls"
	"flag"
	"fmt"
	"net"
	"os"
	"sync"

	"github.com/headroom-mesh/headroom/bench/certs"
	"github.com/headroom-mesh/headroom/bench/floor"
	"github.com/headroom-mesh/headroom/bench/load"
)

const (
	floorName    = "floor"
	floorCommand = "copy" // the first argument of this program when it is a hop of the floor
)

// theFloor is this program again, where it does nothing but copy bytes. It is set up as the peers are.
func theFloor() peer {
	return peer{
		name:    floorName,
		install: func(context.Context, string) (string, error) { return os.Executable() },
		configure: func(h hop) ([]string, error) {
			args := []string{floorCommand, "-at", h.At.String(), "-certs", h.Certs, fmt.Sprintf("-tls-in=%t", h.TLSIn), fmt.Sprintf("-tls-out=%t", h.TLSOut)}
			for _, to := range h.To {
				args = append(args, to.String())
			}
			return args, nil
		},
	}
}

// runFloor is what a hop of the floor does: on the port of each protocol it copies to the same ports of those in args.
func runFloor(args []string) error {
	f := flag.NewFlagSet(floorCommand, flag.ExitOnError)
	at := f.String("at", "", "`IP` to listen on")
	dir := f.String("certs", "", "`DIR` of the certificates")
	tlsIn := f.Bool("tls-in", false, "mutual TLS with callers")
	tlsOut := f.Bool("tls-out", false, "mutual TLS with the next hop")
	_ = f.Parse(args) // it exits
	in, out, err := certs.TLS(*dir)
	if err != nil {
		return err
	}
	var serving sync.WaitGroup
	defer serving.Wait()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	failed := make(chan error, 3)
	for _, p := range []load.Protocol{load.HTTP1, load.HTTP2, load.TCP} {
		relay := &floor.Relay{In: only(*tlsIn, in), Out: only(*tlsOut, out)}
		for _, to := range f.Args() {
			relay.To = append(relay.To, fmt.Sprintf("%s:%d", to, p.Port()))
		}
		l, err := net.Listen("tcp", fmt.Sprintf("%s:%d", *at, p.Port()))
		if err != nil {
			return err
		}
		serving.Go(func() { failed <- relay.Serve(ctx, l) })
	}
	return <-failed
}

func only(wanted bool, c *tls.Config) *tls.Config {
	if wanted {
		return c
	}
	return nil
}
