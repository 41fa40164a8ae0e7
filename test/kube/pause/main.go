// Command pause holds a pod's namespaces open and reaps what the pod's other containers leave behind.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGCHLD, syscall.SIGINT, syscall.SIGTERM)
	for s := range ended {
		if s != syscall.SIGCHLD {
			return
		}
		for reaped := 1; reaped > 0; {
			reaped, _ = syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
		}
	}
}
