package outbound

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/headroom-mesh/headroom/dataplane/identity"
	"github.com/headroom-mesh/headroom/dataplane/relay"
)

// TestWaysThatNobodyTakesAreForgotten has workloads that come and go, as in a cluster with a namespace for each branch.
func TestWaysThatNobodyTakesAreForgotten(t *testing.T) {
	engine := relay.New(relay.Config{})
	as := newAgents(func(netip.AddrPort, identity.Workload) *relay.Upstream { return engine.NewUpstream(relay.Target{}) })
	agent, gone := netip.MustParseAddrPort("10.0.0.1:15008"), netip.MustParseAddrPort("10.0.0.2:15008")
	stays := identity.Workload{Namespace: "shop", ServiceAccount: "clerk"}
	first := as.to(agent, stays)
	as.to(gone, identity.Workload{})
	for range 1000 {
		as.to(agent, identity.Workload{Namespace: "branch", ServiceAccount: fmt.Sprint(as.round)})
		as.forget()
		if as.to(agent, stays) != first {
			t.Fatal("a workload that goes on to call has got another way")
		}
	}
	if ways := len(as.all[agent].workloads); ways > keptRounds+2 {
		t.Errorf("there are %d ways to an agent, also for workloads that don't call any more", ways)
	}
	if as.all[gone] != nil {
		t.Error("there is still a way to an agent that nobody calls")
	}
}
