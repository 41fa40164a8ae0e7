package pods

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/headroom-mesh/headroom/agent/capture"
	"github.com/headroom-mesh/headroom/dataplane/identity"
	"github.com/headroom-mesh/headroom/dataplane/sockets"
)

// inside is what captures inside one pod.
type inside struct {
	pod     Pod
	capture *capture.Capture
	taken   atomic.Uint64 // connections
	cancel  context.CancelFunc
	over    chan struct{} // closed when it has ended
	err     error         // then: why, if it was not to

	// using is held while the namespace is looked into: closed, its descriptor may soon be that of another one.
	using sync.RWMutex

	// Only Pods.Run knows of the fields below.

	at      found
	lost    time.Time // since when there is no process
	leaving bool      // it ends with its last connection
}

// newInside takes over the namespace.
func (p *Pods) newInside(pod Pod, at found) (*inside, error) {
	cfg := p.cfg.Capture
	cfg.Netns = fmt.Sprintf("/proc/self/fd/%d", at.namespace.Fd())
	cfg.Log = p.cfg.Log.With("peer", pod.String())
	c, err := capture.New(cfg)
	if err != nil {
		_ = at.namespace.Close()
		return nil, err
	}
	return &inside{pod: pod, capture: c, over: make(chan struct{}), at: at}, nil
}

func (in *inside) isOver() bool {
	select {
	case <-in.over:
		return true
	default:
		return false
	}
}

// move notes that another process is in the namespace now; if it is in another, what there is here ends.
func (in *inside) move(to found) {
	_ = to.namespace.Close()
	if !sameNamespace(in.at, to) {
		in.cancel()
		return
	}
	in.at.process, in.lost = to.process, time.Time{}
}

func (in *inside) release(log *slog.Logger) {
	if err := in.capture.Release(); err != nil {
		log.Warn("connections of a pod are still captured", "peer", in.pod.String(), "err", err)
	}
}

// run captures until ctx ends.
func (p *Pods) run(ctx context.Context, in *inside) {
	namespace := in.at.namespace
	in.err = p.capture(ctx, in)
	in.using.Lock()
	_ = namespace.Close()
	close(in.over)
	in.using.Unlock()
	p.order(func(*orders) {}) // to take note
}

// capture fails if it can't start.
func (p *Pods) capture(ctx context.Context, in *inside) error {
	select {
	case p.settling <- struct{}{}:
	case <-ctx.Done():
		return nil
	}
	listeners, err := in.capture.Listen()
	if err != nil {
		<-p.settling
		if errors.Is(err, syscall.EADDRINUSE) {
			err = fmt.Errorf("%w; choose another port for captured connections", err)
		}
		return err
	}
	running, end := context.WithCancel(ctx)
	captured, endCapture := context.WithCancel(context.WithoutCancel(ctx))
	var parts sync.WaitGroup
	defer parts.Wait()
	defer end()
	parts.Go(func() { p.settle(running, in) })
	var accepting sync.WaitGroup
	for _, l := range listeners {
		accepting.Go(func() { p.accept(running, in, l) })
	}
	parts.Go(func() {
		<-running.Done()
		in.release(p.cfg.Log) // so that nothing new comes to the listeners
		for _, l := range listeners {
			_ = l.(*net.TCPListener).SetDeadline(time.Now())
		}
		accepting.Wait()
		endCapture() // while connections were in line their addresses were to be translated
	})
	return in.capture.Run(captured)
}

// settle waits until connections are captured, or can't be.
func (p *Pods) settle(ctx context.Context, in *inside) {
	defer func() { <-p.settling }()
	select {
	case <-ctx.Done():
		return
	case <-in.capture.Ready():
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.failed, in.pod.UID)
}

// accept accepts until ctx has ended, and then what is still in line: the listener is not closed before that.
func (p *Pods) accept(ctx context.Context, in *inside, l net.Listener) {
	defer l.Close()
	for {
		c, err := sockets.Accept(ctx, l, p.cfg.Log)
		if err != nil {
			break
		}
		p.bring(in, c)
	}
	_ = l.(*net.TCPListener).SetDeadline(time.Time{})
	for range capture.Waiting(l) {
		c, err := l.Accept()
		if err != nil {
			return
		}
		p.bring(in, c)
	}
}

func (p *Pods) bring(in *inside, c net.Conn) {
	in.taken.Add(1)
	p.listener.hand(identity.WorkloadConn{Conn: c, Workload: in.pod.workload()})
}

// Status is what there is in one pod.
type Status struct {
	Pod Pod
	// Connections is how many were captured.
	Connections uint64
	// Capture is what is in the kernel.
	Capture capture.Status
	// Err is why nothing is captured, unless that is over.
	Err error
}

var (
	errNotFound = errors.New("it has no process yet, or none that can be seen: the agent must see those of all the node (hostPID)")
	errSettling = errors.New("it is about to be captured")
)

// Status tells of all pods that are to be captured, or still are, in the order of their names.
func (p *Pods) Status() []Status {
	p.mu.Lock()
	held, failed := maps.Clone(p.inside), maps.Clone(p.failed)
	wanted, ended := p.orders.wanted, p.ended
	p.mu.Unlock()
	var all []Status
	told := map[string]bool{}
	for uid, in := range held {
		s, ok := in.status()
		if told[uid] = ok; ok {
			if s.Err == errSettling {
				s.Err = cmp.Or(failed[uid], errSettling) // it is tried again
			}
			all = append(all, s)
		} else if in.err != nil {
			failed[uid] = in.err // of which Run has not taken note yet
		}
	}
	for uid, pod := range wanted {
		switch {
		case ended:
			all = append(all, Status{Pod: pod})
		case !told[uid]:
			all = append(all, Status{Pod: pod, Err: cmp.Or(failed[uid], errNotFound)})
		}
	}
	slices.SortFunc(all, func(a, b Status) int { return cmp.Compare(a.Pod.String(), b.Pod.String()) })
	return all
}

// status is false once all is over.
func (in *inside) status() (s Status, ok bool) {
	in.using.RLock()
	defer in.using.RUnlock()
	if in.isOver() {
		return s, false
	}
	s = Status{Pod: in.pod, Connections: in.taken.Load()}
	select {
	case <-in.capture.Ready():
		s.Capture, s.Err = in.capture.Status()
	default:
		s.Err = errSettling
	}
	return s, true
}
