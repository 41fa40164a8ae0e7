// Package local knows the replicas on the agent's own node: which there are, from files, and which of them are healthy,
// from checks.
package local

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy/localservice"
	"github.com/headroom-mesh/headroom/registry"
)

// Config says whose replicas these are and where they are declared.
type Config struct {
	// Node and Zone of this agent. Node is required.
	Node registry.NodeName
	Zone string
	// Mesh is where this agent takes traffic from other agents. Required.
	Mesh netip.AddrPort
	// Services is the folder in which the operator declares replicas: LocalService documents in *.yaml, *.yml and
	// *.json. Its changes are followed. Default: none.
	Services string
	// Registered is the folder in which Register keeps what it is told. It is made if it is missing. Default: none;
	// then Register fails.
	Registered string
	// Control is the Control of the net.Dialer for checks: captured, they would come to other replicas. Default: none.
	Control func(network, address string, c syscall.RawConn) error
	// Log takes what operators should know. Default: nothing is logged.
	Log *slog.Logger
	// Metrics registers the metrics of this package. Default: they are kept and not shown.
	Metrics prometheus.Registerer
}

// Validate reports all that is wrong with the configuration.
func (c Config) Validate() error {
	errs := []error{c.Node.Validate()}
	if !c.Mesh.IsValid() || c.Mesh.Port() == 0 || c.Mesh.Addr().IsUnspecified() {
		errs = append(errs, fmt.Errorf("mesh: want the IP:PORT at which other agents reach this one, got %s", c.Mesh))
	}
	if c.Services != "" && c.Services == c.Registered {
		errs = append(errs, fmt.Errorf("registered: %s is the folder of services too: the agent needs one of its own", c.Registered))
	}
	return errors.Join(errs...)
}

var (
	// ErrNotRegistered means that there is nothing to deregister.
	ErrNotRegistered = errors.New("not registered on this node")
	// ErrDeclared means that a replica is declared in a file of the operator's, and is to be changed there.
	ErrDeclared = errors.New("declared in a file")
	// ErrDraining means that nothing can be registered any more.
	ErrDraining = errors.New("this agent is leaving the mesh and takes no new replicas: register again when it has restarted")
)

const (
	// settle is how long a folder must be quiet before it is read: files are seldom written at once.
	settle = 100 * time.Millisecond
	// rescanInterval is for what the notifications of the system miss, as on network file systems.
	rescanInterval = 10 * time.Second
	// lookInterval is for a folder that is renamed or removed, and made anew.
	lookInterval = time.Second
	// firstChecks bounds how long the first set waits for the first checks.
	firstChecks = 2 * time.Second
)

// Local keeps the replicas of this node.
type Local struct {
	cfg     Config
	log     *slog.Logger
	metrics *metrics
	rescan  chan struct{} // signals that a folder has changed
	publish chan struct{} // signals that the state of a replica has

	// mu guards the fields below.
	mu         sync.Mutex
	services   folder
	registered folder
	duplicates map[string]bool // those that were warned of
	replicas   map[replicaKey]*replica
	draining   bool
}

type replicaKey struct {
	service registry.ServiceName
	address localservice.Address
}

// replica is one that is declared, and what its checks have found.
type replica struct {
	terms
	check  *localservice.HealthCheck // nil: none
	health health
	err    string             // of the last check
	stop   context.CancelFunc // ends its checks
}

// New checks the configuration, and that the folders are there. Nothing is started before Run.
func New(cfg Config) (*Local, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("local services: %w", err)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if err := prepareFolders(cfg); err != nil {
		return nil, err
	}
	return &Local{
		cfg:        cfg,
		log:        cfg.Log,
		metrics:    newMetrics(cfg.Metrics),
		rescan:     make(chan struct{}, 1),
		publish:    make(chan struct{}, 1),
		services:   newFolder(cfg.Services),
		registered: newFolder(cfg.Registered),
		replicas:   map[replicaKey]*replica{},
	}, nil
}

func prepareFolders(cfg Config) error {
	if cfg.Services != "" {
		if _, err := os.ReadDir(cfg.Services); err != nil {
			return fmt.Errorf("local services: services: read the folder, which must exist: %w", err)
		}
	}
	if cfg.Registered != "" {
		if err := os.MkdirAll(cfg.Registered, 0o700); err != nil {
			return fmt.Errorf("local services: make the folder for registrations: %w", err)
		}
	}
	return nil
}

// Run follows the folders and checks the replicas until ctx ends. It calls publish from one goroutine with the complete
// set, sorted by ID, whenever it has changed. A replica with a check is in the set once it has been checked; the first
// set waits for that, but not for long.
func (l *Local) Run(ctx context.Context, publish func([]registry.Endpoint)) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	w := l.watch()
	defer w.close()
	l.apply(ctx, &wg)
	if !l.awaitFirstChecks(ctx) {
		return nil
	}
	last := l.endpoints()
	publish(slices.Clone(last))
	for l.wait(ctx, w, func() { l.apply(ctx, &wg) }) {
		if now := l.endpoints(); !slices.Equal(now, last) {
			last = now
			publish(slices.Clone(now))
		}
	}
	return nil
}

// awaitFirstChecks waits until every replica has been checked, so that an agent that restarts doesn't withdraw what it is
// about to announce again. It returns false when ctx has ended.
func (l *Local) awaitFirstChecks(ctx context.Context) bool {
	enough, cancel := context.WithTimeout(ctx, firstChecks)
	defer cancel()
	for l.unchecked() && enough.Err() == nil {
		select {
		case <-l.publish:
		case <-enough.Done():
		}
	}
	return ctx.Err() == nil
}

func (l *Local) unchecked() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.replicas {
		if r.check != nil && !r.health.known {
			return true
		}
	}
	return false
}

// wait returns when the set may have changed, or false when ctx has ended. It calls apply if the folders are to be read.
func (l *Local) wait(ctx context.Context, w *watcher, apply func()) bool {
	select {
	case <-ctx.Done():
		return false
	case change := <-w.changes:
		w.heed(change)
		return true
	case <-w.errors: // some changes were lost
		w.quiet.Reset(settle)
		return true
	case <-w.tick.C:
		w.renew()
	case <-w.look.C:
		if !w.replaced() {
			return true
		}
		w.renew()
	case <-w.quiet.C:
	case <-l.rescan:
	case <-l.publish:
		return true
	}
	apply()
	return true
}

// apply reads the folders, and starts and stops checks as they say.
func (l *Local) apply(ctx context.Context, wg *sync.WaitGroup) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.readLocked()
	declared, duplicates := merge(l.services, l.registered)
	l.warnLocked(duplicates)
	for key, r := range l.replicas {
		if d, ok := declared[key]; !ok {
			l.log.Info("replica gone from this node", "service", key.service, "endpoint", key.address)
			r.stopChecks()
			delete(l.replicas, key)
		} else {
			r.terms = d.terms
			if !sameCheck(r.check, d.check) {
				r.stopChecks()
				r.check = d.check
				l.startChecks(ctx, wg, key, r)
			}
		}
	}
	for key, d := range declared {
		if _, ok := l.replicas[key]; !ok {
			l.log.Info("replica on this node", "service", key.service, "endpoint", key.address)
			r := &replica{terms: d.terms, check: d.check}
			l.replicas[key] = r
			l.startChecks(ctx, wg, key, r)
		}
	}
	l.countLocked()
}

func (l *Local) readLocked() {
	l.services.read(l.log)
	l.registered.read(l.log)
	l.metrics.badFiles.Set(float64(l.services.bad() + l.registered.bad()))
}

func (l *Local) warnLocked(duplicates map[string]bool) {
	for _, d := range slices.Sorted(maps.Keys(duplicates)) {
		if !l.duplicates[d] {
			l.log.Warn("replica declared twice; the first file by name holds", "reason", d)
		}
	}
	l.duplicates = duplicates
}

func (l *Local) startChecks(ctx context.Context, wg *sync.WaitGroup, key replicaKey, r *replica) {
	if r.check == nil {
		// What counts as healthy without a check goes on from there if it gets one.
		r.health, r.err = health{known: true, healthy: true}, ""
		return
	}
	ctx, r.stop = context.WithCancel(ctx)
	c := *r.check
	wg.Go(func() {
		checker{l.cfg.Control}.repeat(ctx, c, key.address, func(err error) { l.checked(ctx, key, err) })
	})
}

func (r *replica) stopChecks() {
	if r.stop != nil {
		r.stop()
		r.stop = nil
	}
}

// checked takes the result of one check. ctx ends under mu, so that a check that was stopped says nothing any more.
func (l *Local) checked(ctx context.Context, key replicaKey, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if ctx.Err() != nil {
		return
	}
	l.metrics.checked(err)
	r := l.replicas[key]
	before := r.health
	r.health = before.after(err == nil, r.check.Rise, r.check.Fall)
	r.err = ""
	if err != nil {
		r.err = err.Error()
	}
	if r.health.known == before.known && r.health.healthy == before.healthy {
		return
	}
	if r.health.healthy {
		l.log.Info("replica healthy", "service", key.service, "endpoint", key.address)
	} else {
		l.log.Warn("replica unhealthy", "service", key.service, "endpoint", key.address, "err", err)
	}
	l.countLocked()
	signal(l.publish)
}

func (l *Local) countLocked() {
	n := map[registry.State]int{}
	for _, r := range l.replicas {
		if state, ok := l.stateLocked(r); ok {
			n[state]++
		}
	}
	l.metrics.count(n)
}

// stateLocked returns the state of a replica, if it is known yet.
func (l *Local) stateLocked(r *replica) (registry.State, bool) {
	switch {
	case r.check != nil && !r.health.known:
		return 0, false
	case l.draining:
		return registry.Draining, true
	case r.check != nil && !r.health.healthy:
		return registry.Unhealthy, true
	}
	return registry.Ready, true
}

func (l *Local) endpoints() []registry.Endpoint {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []registry.Endpoint
	for key, r := range l.replicas {
		if state, ok := l.stateLocked(r); ok {
			e := l.endpoint(key)
			e.State, e.Weight, e.Protocol = state, int32(r.weight), r.protocol
			all = append(all, e)
		}
	}
	slices.SortFunc(all, func(a, b registry.Endpoint) int { return cmp.Compare(a.ID(), b.ID()) })
	return all
}

func (l *Local) endpoint(key replicaKey) registry.Endpoint {
	return registry.Endpoint{
		Service: key.service, Node: l.cfg.Node, Zone: l.cfg.Zone,
		Address: key.address.Port, Socket: key.address.Socket, Agent: l.cfg.Mesh,
	}
}

// Drain marks all replicas as draining, from now on and for good.
func (l *Local) Drain() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.draining = true
	l.countLocked()
	signal(l.publish)
}

// CheckErrors returns what the last check said of each replica that failed it.
func (l *Local) CheckErrors() map[registry.EndpointID]string {
	l.mu.Lock()
	defer l.mu.Unlock()
	errs := map[registry.EndpointID]string{}
	for key, r := range l.replicas {
		if r.err != "" {
			errs[l.endpoint(key).ID()] = r.err
		}
	}
	return errs
}

// Register adds replicas, or changes their weight, protocol and check. They stay over restarts. Its error is ErrDeclared for a replica that a
// file of the operator's declares, and ErrDraining after Drain.
func (l *Local) Register(ctx context.Context, doc *meshv1.LocalService) error {
	s, err := localservice.Compile(doc)
	if err != nil {
		return err
	}
	if l.cfg.Registered == "" {
		return errors.New("this agent has no folder to keep registrations in")
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.draining {
		return fmt.Errorf("%s: %w", s.Service, ErrDraining)
	}
	l.readLocked()
	for _, e := range s.Endpoints {
		key := replicaKey{registry.ServiceName(s.Service), e.Address}
		if file, ok := l.services.find(key); ok {
			return fmt.Errorf("%s %s: %w, %s: change it there", s.Service, e.Address, ErrDeclared, file)
		}
	}
	for _, e := range s.Endpoints {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := l.registered.write(s.Service, e, doc.GetSpec()); err != nil {
			return err
		}
	}
	signal(l.rescan)
	return nil
}

// Deregister removes what Register added: the replica at address, or all of the service if address is empty. It
// returns their addresses. Its error is ErrNotRegistered if there is none, and ErrDeclared if a file of the operator's
// declares it.
func (l *Local) Deregister(ctx context.Context, service registry.ServiceName, address string) ([]localservice.Address, error) {
	wanted, err := parseWanted(address)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.readLocked()
	keys := l.registered.matching(service, wanted)
	if len(keys) == 0 {
		return nil, l.notRegisteredLocked(service, wanted)
	}
	defer signal(l.rescan)
	var removed []localservice.Address
	for _, key := range keys {
		if err := ctx.Err(); err != nil {
			return removed, err
		}
		if err := l.registered.remove(key); err != nil {
			return removed, err
		}
		removed = append(removed, key.address)
	}
	return removed, nil
}

// parseWanted reads the address of a request: that of nothing if it is empty, which stands for all.
func parseWanted(address string) (localservice.Address, error) {
	if address == "" {
		return localservice.Address{}, nil
	}
	a, err := localservice.ParseAddress(address)
	if err != nil {
		return localservice.Address{}, fmt.Errorf("address: %w", err)
	}
	return a, nil
}

func (l *Local) notRegisteredLocked(service registry.ServiceName, wanted localservice.Address) error {
	what := string(service)
	if wanted != (localservice.Address{}) {
		what += " " + wanted.String()
	}
	var files []string
	for _, key := range l.services.matching(service, wanted) {
		file, _ := l.services.find(key)
		files = append(files, file)
	}
	if len(files) > 0 {
		return fmt.Errorf("%s: %w, %s: remove it there", what, ErrDeclared, strings.Join(slices.Compact(files), ", "))
	}
	return fmt.Errorf("%s: %w", what, ErrNotRegistered)
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
