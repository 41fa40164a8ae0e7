// Package pods captures the connections of this node's pods, each inside its pod's network namespace.
package pods

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/headroom-mesh/headroom/agent/capture"
	"github.com/headroom-mesh/headroom/dataplane/identity"
)

// Pod is a pod of this node.
type Pod struct {
	UID, Namespace, Name string
	ServiceAccount       string // what it runs as
}

func (p Pod) workload() identity.Workload {
	return identity.Workload{Namespace: p.Namespace, ServiceAccount: p.ServiceAccount}
}

func (p Pod) String() string { return p.Namespace + "/" + p.Name }

// Config configures Pods.
type Config struct {
	// Capture is what is captured in each pod, and how. Netns, Pod and Log are set here.
	Capture capture.Config
	// Proc is where the processes of all pods are seen. Default /proc.
	Proc string
	Log  *slog.Logger // nil: no logs
}

// Pods captures connections of the pods that it is told of. It is safe for concurrent use.
type Pods struct {
	cfg      Config
	finder   finder
	listener *listener
	changed  chan struct{} // holds one if there are orders
	settling chan struct{} // holds one for each pod that is just being entered

	mu sync.Mutex
	// mu guards the fields below.

	orders orders
	inside map[string]*inside // by UID; only Run changes it
	failed map[string]error   // why a pod could not be captured, by UID
	looked uint64             // the latest order of pods, of which all have been looked for
	looks  chan struct{}      // closed when that changes, or all ends
	ended  bool
}

// orders are what others want of Run.
type orders struct {
	wanted   map[string]Pod // by UID
	asked    uint64         // how often that was ordered
	hinted   bool           // a pod that was not found may be there now
	real     capture.Real
	realNew  bool
	released bool
}

const (
	atOnce    = 4                      // pods that are entered at a time
	firstTry  = 200 * time.Millisecond // after which a pod that was not found is looked for again; twice as long each time
	lastTry   = 5 * time.Second        // the longest time between such tries, and that in which other changes are noticed
	leaveTry  = time.Second            // the time between looks at what is left of a pod
	forgetful = time.Minute            // how long the namespace of a pod is kept that has no process
)

// New returns Pods that capture nothing yet. What is wrong with the configuration is said of each pod.
func New(cfg Config) *Pods {
	cfg.Proc = cmp.Or(cfg.Proc, "/proc")
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	cfg.Capture.Pod = true
	return &Pods{
		cfg: cfg, finder: finder{cfg.Proc}, listener: newListener(),
		changed: make(chan struct{}, 1), settling: make(chan struct{}, atOnce),
		inside: map[string]*inside{}, failed: map[string]error{}, looks: make(chan struct{}),
	}
}

// Listener accepts the captured connections of all pods.
func (p *Pods) Listener() net.Listener { return p.listener }

// Set says which pods are captured. Connections that others have go on.
func (p *Pods) Set(all []Pod) {
	wanted := make(map[string]Pod, len(all))
	for _, pod := range all {
		wanted[pod.UID] = pod
	}
	p.order(func(o *orders) { o.wanted, o.asked, o.hinted = wanted, o.asked+1, true })
}

// Settled waits until each pod that is wanted now is captured, unless that has failed, or it has no process; or Run has ended.
// It fails when ctx ends.
func (p *Pods) Settled(ctx context.Context) error {
	p.mu.Lock()
	wanted, asked := p.orders.wanted, p.orders.asked
	p.mu.Unlock()
	for {
		entered, looks := p.entered(wanted, asked)
		if looks == nil {
			return awaitAll(ctx, entered)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-looks:
		}
	}
}

// entered returns those of the wanted in which there is something, or what to wait for, if not all have been looked for.
func (p *Pods) entered(wanted map[string]Pod, asked uint64) (all []*inside, looks <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.looked < asked && !p.ended {
		return nil, p.looks
	}
	for uid := range wanted {
		if in := p.inside[uid]; in != nil {
			all = append(all, in)
		}
	}
	return all, nil
}

// awaitAll waits until connections are captured in all, or can't be.
func awaitAll(ctx context.Context, all []*inside) error {
	for _, in := range all {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-in.capture.Ready():
		case <-in.over:
		}
	}
	return nil
}

// SetReal says which real addresses are captured in every pod. Those that can't be captured are left out, and named in the error.
func (p *Pods) SetReal(addrs []netip.AddrPort) error {
	real, err := capture.RealOf(addrs)
	p.order(func(o *orders) {
		if !real.Equal(o.real) {
			o.real, o.realNew = real, true
		}
	})
	return err
}

func (p *Pods) order(change func(*orders)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change(&p.orders)
	select {
	case p.changed <- struct{}{}:
	default:
	}
}

// Release lets new connections of all pods go where they would without an agent, and captures none in others. Those that are
// captured go on until Run ends.
func (p *Pods) Release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.orders.released = true
	for _, in := range p.inside {
		in.release(p.cfg.Log)
	}
}

// Run captures until ctx ends. That it can't in some pod is no reason to end.
func (p *Pods) Run(ctx context.Context) error {
	var entered sync.WaitGroup
	defer p.finish()
	defer entered.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	look := lookout{}
	for ctx.Err() == nil {
		timer := time.NewTimer(p.reconcile(ctx, &entered, &look))
		select {
		case <-ctx.Done():
		case <-p.changed:
		case <-timer.C:
		}
		timer.Stop()
	}
	return nil
}

func (p *Pods) finish() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	close(p.looks)
}

// haveLooked notes which orders Run has followed.
func (p *Pods) haveLooked(o orders) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.looked != o.asked {
		p.looked = o.asked
		close(p.looks)
		p.looks = make(chan struct{})
	}
}

// reconcile brings what is captured nearer to what should be. It returns how long it may be before it is called again.
func (p *Pods) reconcile(ctx context.Context, entered *sync.WaitGroup, look *lookout) (wait time.Duration) {
	o := p.take()
	now := time.Now()
	if o.realNew {
		for _, in := range p.inside {
			p.tell(in, o.real)
		}
	}
	leaving := p.leave(o.wanted)
	wait = lastTry
	if leaving {
		wait = leaveTry
	}
	missing := p.missing(now, o.wanted)
	if len(missing) == 0 || o.released {
		*look = lookout{}
		p.haveLooked(o)
		return wait
	}
	if look.due(now, o.hinted) {
		p.enter(ctx, entered, o, missing)
		p.haveLooked(o)
	}
	return min(wait, max(look.next().Sub(now), 0))
}

// take returns the orders, and notes that they are known.
func (p *Pods) take() orders {
	p.mu.Lock()
	defer p.mu.Unlock()
	o := p.orders
	p.orders.hinted, p.orders.realNew = false, false
	return o
}

// lookout is when those are looked for that were not found. All processes of the node are looked at then.
type lookout struct {
	last time.Time
	wait time.Duration
}

func (l *lookout) next() time.Time { return l.last.Add(max(l.wait, firstTry)) }

// due reports whether it is time, and if so notes that it is done.
func (l *lookout) due(now time.Time, hinted bool) bool {
	if hinted {
		l.wait = 0
	}
	if now.Before(l.next()) {
		return false
	}
	*l = lookout{now, min(max(2*l.wait, firstTry), lastTry)}
	return true
}

func (p *Pods) tell(in *inside, real capture.Real) {
	if err := in.capture.ShareReal(real); err != nil {
		p.cfg.Log.Warn("the real addresses that are captured in a pod are not what they should be", "peer", in.pod.String(), "err", err)
	}
}

// leave takes leave of pods that are no longer wanted, and of what is over. It reports whether some still have connections.
func (p *Pods) leave(wanted map[string]Pod) (leaving bool) {
	for uid, in := range p.inside {
		if _, stays := wanted[uid]; !stays && !in.leaving {
			in.leaving = true // and if it is wanted again, when it is over
			in.release(p.cfg.Log)
		}
		switch {
		case in.isOver():
			p.end(uid, in)
		case in.leaving && !p.busy(in):
			in.cancel()
		case in.leaving:
			leaving = true
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(p.failed, func(uid string, _ error) bool {
		_, stays := wanted[uid]
		return !stays
	})
	return leaving
}

// busy reports whether a pod has captured connections.
func (p *Pods) busy(in *inside) bool {
	if !p.finder.lives(in.at) {
		return false
	}
	n, err := p.finder.connections(in.at.id, in.capture.Port())
	return err == nil && n > 0
}

// end takes note that it has ended in a pod.
func (p *Pods) end(uid string, in *inside) {
	p.mu.Lock()
	delete(p.inside, uid)
	p.mu.Unlock()
	if in.err != nil {
		p.fail(uid, in.pod, in.err)
	}
}

// fail notes why a pod is not captured. It is said once.
func (p *Pods) fail(uid string, pod Pod, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if before := p.failed[uid]; before == nil || before.Error() != err.Error() {
		p.cfg.Log.Warn("a pod's connections are not captured; they go where they would without an agent", "peer", pod.String(), "err", err)
	}
	p.failed[uid] = err
}

// missing returns the UIDs of those that are to be looked for: they are not captured, or the process is gone by which their
// namespace was found.
func (p *Pods) missing(now time.Time, wanted map[string]Pod) map[string]bool {
	all := map[string]bool{}
	for uid := range wanted {
		in := p.inside[uid]
		switch {
		case in == nil:
			all[uid] = true
		case in.leaving:
		case p.finder.lives(in.at):
			in.lost = time.Time{}
		case in.lost.IsZero():
			in.lost = now
			all[uid] = true
		case now.Sub(in.lost) > forgetful:
			in.cancel()
		default:
			all[uid] = true
		}
	}
	return all
}

// enter captures in those of the missing that are found.
func (p *Pods) enter(ctx context.Context, entered *sync.WaitGroup, o orders, missing map[string]bool) {
	namespaces, err := p.finder.find(missing)
	if err != nil {
		p.cfg.Log.Warn("can't look for pods", "err", err)
	}
	for uid, at := range namespaces {
		if in := p.inside[uid]; in != nil {
			in.move(at)
			continue
		}
		in, err := p.newInside(o.wanted[uid], at)
		if err != nil {
			p.fail(uid, o.wanted[uid], err)
			continue
		}
		p.tell(in, o.real)
		p.start(ctx, entered, in)
	}
}

func (p *Pods) start(ctx context.Context, entered *sync.WaitGroup, in *inside) {
	ctx, in.cancel = context.WithCancel(ctx)
	entered.Go(func() {
		defer in.cancel()
		p.run(ctx, in)
	})
	p.mu.Lock()
	defer p.mu.Unlock()
	p.inside[in.pod.UID] = in
	if p.orders.released { // meanwhile
		in.release(p.cfg.Log)
	}
}
