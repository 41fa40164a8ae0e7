// Meshctl is the operator's tool: it sets policies, registers replicas and shows what the balancers see. It talks to
// any one agent of the mesh.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
)

// The exit codes.
const (
	done   = 0
	failed = 1
	misuse = 2
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // who asks a second time does not want to wait
	code := run(ctx, os.Args[1:], os.Stderr)
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string, stderr io.Writer) int {
	a := &app{}
	root := a.root()
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return done
	}
	fmt.Fprintf(stderr, "meshctl: %v\n", err)
	if _, isUsage := errors.AsType[usageError](err); !isUsage && a.ran {
		return failed
	}
	fmt.Fprintf(stderr, "See '%s --help'.\n", cmd.CommandPath())
	return misuse
}

// usageError is a command line that makes no sense.
type usageError string

func (e usageError) Error() string { return string(e) }

func misused(format string, args ...any) error { return usageError(fmt.Sprintf(format, args...)) }

// listed puts one problem on each line, below a heading.
func listed(heading string, problems error) error {
	return fmt.Errorf("%s:\n  %s", heading, strings.ReplaceAll(problems.Error(), "\n", "\n  "))
}
