package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/headroom-mesh/headroom/agent/admin"
	"github.com/headroom-mesh/headroom/agent/capture"
	"github.com/headroom-mesh/headroom/agent/kube"
	"github.com/headroom-mesh/headroom/agent/names"
	"github.com/headroom-mesh/headroom/agent/pods"
	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/dataplane"
	"github.com/headroom-mesh/headroom/dataplane/sockets"
	"github.com/headroom-mesh/headroom/registry"
)

// DNSOff is the value of Config.DNS for no DNS; the others are those of names.Mode.
const DNSOff = "off"

// mark returns what the agent's own connections carry: none, unless something captures connections.
func (c Config) mark() uint32 {
	if c.Capture {
		return capture.DefaultMark
	}
	return 0
}

// capturing leads connections here that were meant for virtual addresses: this node's, and those of the network namespaces
// that were named; and those of pods.
type capturing struct {
	dns  *meshv1.DNSView
	mark uint32
	log  *slog.Logger
	all  []*captured
	pods *pods.Pods
	// cluster is what tells of pods; nil: nothing does.
	cluster *kube.Watcher

	mu     sync.Mutex
	cancel context.CancelFunc                      // guarded by mu
	fronts map[netip.AddrPort]registry.ServiceName // guarded by mu
	ended  chan struct{}                           // closed when it is over
}

// captured is one network namespace.
type captured struct {
	netns   string
	capture *capture.Capture
	failed  atomic.Pointer[error] // why it does not, or no more
}

var _ admin.Capture = (*capturing)(nil)

func (a *Agent) newCapturing() error {
	a.capturing = &capturing{cluster: a.cluster, log: a.cfg.Log, mark: a.cfg.mark(), ended: make(chan struct{}), dns: &meshv1.DNSView{Mode: a.cfg.DNS}}
	if a.cfg.DNS != DNSOff {
		a.cfg.DNSListen = dnsListen(a.cfg)
		a.capturing.dns.Suffixes = a.cfg.DNSSuffixes
		for _, at := range a.cfg.DNSListen {
			a.capturing.dns.Addresses = append(a.capturing.dns.Addresses, at.String())
		}
	}
	a.capturing.pods = pods.New(pods.Config{Capture: a.podsConfig(), Log: a.cfg.Log})
	if !a.cfg.Capture {
		return nil
	}
	var problems []error
	for _, netns := range append([]string{""}, a.cfg.CaptureNetns...) {
		c, err := capture.New(a.captureConfig(netns))
		problems = append(problems, inFlags("capture", map[string]string{
			"Port": "--capture-port", "IPv4": "--virtual-ipv4", "IPv6": "--virtual-ipv6", "ExemptUIDs": "--capture-exempt-uids",
			"ExemptPorts": "--capture-exempt-ports", "ExemptCgroups": "--capture-exempt-cgroups", "Netns": "--capture-netns",
		}, err))
		a.capturing.all = append(a.capturing.all, &captured{netns: netns, capture: c})
	}
	return errors.Join(problems...)
}

// dnsListen returns where the DNS server listens: on loopback, where redirected queries arrive, too.
func dnsListen(c Config) []netip.AddrPort {
	if len(c.DNSListen) > 0 {
		return c.DNSListen
	}
	port := uint16(DNSPort)
	if c.DNS == string(names.ResolvConf) {
		port = 53
	}
	all := []netip.AddrPort{netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port)}
	if c.DNS != string(names.Redirect) {
		return all
	}
	l, err := net.Listen("tcp6", "[::1]:0") // is there IPv6?
	if err != nil {
		return all
	}
	l.Close()
	return append(all, netip.AddrPortFrom(netip.IPv6Loopback(), port))
}

func (a *Agent) captureConfig(netns string) capture.Config {
	c := capture.Config{
		Port: a.cfg.CapturePort, IPv4: a.cfg.VirtualIPv4, IPv6: a.cfg.VirtualIPv6, Netns: netns,
		ExemptUIDs: a.cfg.CaptureExemptUIDs, ExemptPorts: a.cfg.CaptureExemptPorts, ExemptCgroups: a.cfg.CaptureExemptCgroups,
		Log: a.cfg.Log,
	}
	if netns == "" && a.cfg.DNS == string(names.Redirect) {
		c.RedirectDNS, c.DNSPort = true, a.cfg.DNSListen[0].Port()
		c.RedirectPodDNS = a.cfg.DNSListen[0].Addr().IsUnspecified() // where those of others arrive
	}
	return c
}

// podsConfig leaves out users and control groups, which are those of this node.
func (a *Agent) podsConfig() capture.Config {
	return capture.Config{
		Port: a.cfg.CapturePort, IPv4: a.cfg.VirtualIPv4, IPv6: a.cfg.VirtualIPv6, ExemptPorts: a.cfg.CaptureExemptPorts,
		TakeOver: a.cfg.TakeOver != "",
	}
}

// listenCaptured returns where captured connections arrive.
func (a *Agent) listenCaptured() (all []dataplane.Listener, err error) {
	all = append(all, dataplane.Listener{Listener: a.capturing.pods.Listener()})
	for _, c := range a.capturing.all {
		listeners, err := c.capture.Listen()
		for _, l := range listeners {
			all = append(all, dataplane.Listener{Listener: l})
		}
		if err != nil {
			return all, fmt.Errorf("%w (--capture-port, --capture-netns)", err)
		}
	}
	return all, nil
}

// run captures until ctx ends or Stop is called. That it can't is no reason for the agent to end: its proxy works.
func (c *capturing) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c.mu.Lock()
	c.cancel = cancel
	c.mu.Unlock()
	defer close(c.ended)
	var wg sync.WaitGroup
	wg.Go(func() { _ = c.pods.Run(ctx) }) // which fails only alone
	for _, one := range c.all {
		wg.Go(func() {
			err := one.capture.Run(ctx)
			if errors.Is(err, capture.ErrTaken) {
				err = fmt.Errorf("%w, with --virtual-ipv4 or --virtual-ipv6, the same for all agents", err)
			}
			if err != nil {
				c.log.Error("connections are not captured; the proxy works", "err", err)
				one.failed.Store(&err)
			}
		})
	}
	wg.Wait()
	return nil
}

// Stop ends it. Without anything to end it removes what an agent may have left that was killed.
func (c *capturing) Stop(ctx context.Context) (removed []string, err error) {
	c.mu.Lock()
	cancel := c.cancel
	c.mu.Unlock()
	inPods := c.pods.Status()
	if len(c.all)+len(inPods) == 0 || cancel == nil {
		return capture.RemoveAll("/proc")
	}
	for _, s := range inPods {
		removed = append(removed, inPlace(podNetns(s.Pod), s.Capture)...)
	}
	for _, one := range c.all {
		status, err := one.capture.Status()
		if err != nil || one.failed.Load() != nil {
			continue // there is nothing, or it is another agent's
		}
		removed = append(removed, inPlace(one.netns, status)...)
	}
	cancel()
	select {
	case <-c.ended:
		return removed, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// setPods says which pods of this node are captured.
func (c *capturing) setPods(all []kube.Pod) {
	captured := make([]pods.Pod, len(all))
	for i, p := range all {
		captured[i] = pods.Pod{UID: p.UID, Namespace: p.Namespace, Name: p.Name, ServiceAccount: p.ServiceAccount}
	}
	c.pods.Set(captured)
}

// setFronts says which real addresses are captured in pods only. On the node, and in pods that are not to be captured, they lead
// where Kubernetes says.
func (c *capturing) setFronts(fronts map[netip.AddrPort]registry.ServiceName) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fronts = fronts
}

func (c *capturing) withoutFronts(addrs []netip.AddrPort) []netip.AddrPort {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(addrs), func(at netip.AddrPort) bool {
		_, front := c.fronts[at]
		return front
	})
}

// Check reports whether a connection of this node has come here, and tries one of the agent's own to the same address. If
// that is not refused, requests would come back to the agent that sends them.
func (c *capturing) Check(ctx context.Context, from, to netip.AddrPort) (arrived bool, loop string, err error) {
	if len(c.all) == 0 {
		return false, "", errors.New("this agent does not capture (--capture)")
	}
	if arrived, err = c.all[0].capture.Arrived(ctx, from); err != nil {
		return false, "", err
	}
	own := net.Dialer{Control: sockets.Mark(c.mark), Timeout: time.Second}
	conn, err := own.DialContext(ctx, "tcp", to.String())
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return arrived, "", nil
	case err != nil:
		return arrived, err.Error(), nil
	}
	conn.Close()
	return arrived, "it is answered", nil
}

// setReal says which real addresses are captured, too.
func (c *capturing) setReal(addrs []netip.AddrPort) {
	if err := c.pods.SetReal(addrs); err != nil {
		c.log.Warn("not all real addresses are captured in pods", "err", err)
	}
	if len(c.all) > 0 {
		addrs = c.withoutFronts(addrs)
	}
	for _, one := range c.all {
		if err := one.capture.SetReal(addrs); err != nil {
			c.log.Warn("not all real addresses are captured", "err", err)
		}
	}
}

// release lets new connections go where they would without an agent.
func (c *capturing) release() {
	c.pods.Release()
	for _, one := range c.all {
		if err := one.capture.Release(); err != nil {
			c.log.Warn("connections are still captured", "err", err)
		}
	}
}

// inPlace names what is in force.
func inPlace(netns string, s capture.Status) (all []string) {
	where := ""
	if netns != "" {
		where = " in " + netns
	}
	tables := map[string]bool{}
	for _, c := range s.Chains {
		if !tables[c.Table] {
			tables[c.Table] = true
			all = append(all, "table "+c.Table+where)
		}
	}
	for _, r := range s.Routes {
		all = append(all, "route "+r.String()+where)
	}
	return all
}

// View tells what is in force.
func (c *capturing) View() *meshv1.GetCaptureResponse {
	answer := &meshv1.GetCaptureResponse{Dns: c.dns, KubernetesError: c.kubernetesError()}
	for _, one := range c.all {
		answer.Captures = append(answer.Captures, one.view())
	}
	for _, s := range c.pods.Status() {
		answer.Captures = append(answer.Captures, view(podNetns(s.Pod), s.Capture, s.Err))
	}
	if c.dns.Mode == string(names.Redirect) && !answer.Captures[0].Active { // no rule redirects anything
		answer.Dns = &meshv1.DNSView{Mode: string(names.Listen), Addresses: c.dns.Addresses, Suffixes: c.dns.Suffixes}
	}
	return answer
}

func (c *capturing) kubernetesError() string {
	if c.cluster == nil {
		return ""
	}
	note, err := c.cluster.Ready()
	if err != nil {
		return err.Error()
	}
	return note
}

// podNetns is the name of a pod's network namespace.
func podNetns(p pods.Pod) string { return "pod " + p.String() }

func (c *captured) view() *meshv1.CaptureView {
	if failed := c.failed.Load(); failed != nil {
		return view(c.netns, capture.Status{}, *failed)
	}
	s, err := c.capture.Status()
	return view(c.netns, s, err)
}

func view(netns string, s capture.Status, err error) *meshv1.CaptureView {
	v := &meshv1.CaptureView{Netns: netns}
	if err != nil {
		v.Error = err.Error()
		return v
	}
	v.Active, v.Owner = s.Owner != 0, s.Owner
	if !v.Active {
		v.Error = "it was ended (`meshctl capture off`); start the agent again to capture"
	}
	for _, r := range s.Rules {
		v.Rules = append(v.Rules, &meshv1.CaptureRule{Table: r.Table, Chain: r.Chain, What: r.What, Packets: r.Packets, Bytes: r.Bytes})
	}
	for _, set := range s.Sets {
		v.Sets = append(v.Sets, &meshv1.CaptureSet{Table: set.Table, Name: set.Name, Elements: uint32(set.Elements)})
	}
	for _, r := range s.Routes {
		v.Routes = append(v.Routes, r.String())
	}
	v.Chains, v.Before = chainViews(s.Chains), chainViews(s.Before)
	v.ExemptMark, v.ExemptUids, v.ExemptCgroups = s.Exempt.Mark, s.Exempt.UIDs, s.Exempt.Cgroups
	for _, port := range s.Exempt.Ports {
		v.ExemptPorts = append(v.ExemptPorts, uint32(port))
	}
	return v
}

func chainViews(all []capture.Chain) (views []*meshv1.CaptureChain) {
	for _, c := range all {
		views = append(views, &meshv1.CaptureChain{Table: c.Table, Name: c.Name, Hook: c.Hook, Priority: int32(c.Priority), Rules: uint32(c.Rules)})
	}
	return views
}

func (a *Agent) newNames() error {
	if a.cfg.DNS == DNSOff {
		return nil
	}
	var err error
	a.names, err = names.New(names.Config{
		Mode: names.Mode(a.cfg.DNS), Addrs: a.cfg.DNSListen, Suffixes: a.cfg.DNSSuffixes, Upstreams: a.cfg.DNSUpstreams,
		Lookup: a.virtual, LookupAddr: func(at netip.Addr) (registry.ServiceName, bool) { return a.snapshot.Load().ServiceAt(at) },
		Control: sockets.Mark(a.cfg.mark()), Log: a.cfg.Log, Metrics: a.metrics,
	})
	return inFlags("names", map[string]string{
		"mode": "--dns", "addrs": "--dns-listen", "suffixes": "--dns-suffix", "upstreams": "--dns-upstream",
	}, err)
}

// virtual returns the virtual addresses of a service.
func (a *Agent) virtual(name registry.ServiceName) (ipv4, ipv6 netip.Addr, known bool) {
	s := a.snapshot.Load().Services[name]
	if s == nil {
		return ipv4, ipv6, false
	}
	return s.IPv4, s.IPv6, true
}
