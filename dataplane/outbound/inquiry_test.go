package outbound

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/balancer"
	"github.com/headroom-mesh/headroom/dataplane/inbound"
	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/dataplane/probe"
	"github.com/headroom-mesh/headroom/dataplane/relay"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/registry"
)

// reply is what a replica makes of a probe.
type reply struct {
	after  time.Duration
	status probe.Status
	lost   bool
	down   bool // its agent is: the probe is not sent
}

// scripted is a Prober whose replies are known beforehand, by the number of the probe.
type scripted struct {
	replies []reply
	wg      sync.WaitGroup
	keys    []uint64
}

func (s *scripted) Probe(_ netip.AddrPort, q probe.Request, _ time.Duration, sink probe.Sink, token uint64) bool {
	r := s.replies[len(s.keys)]
	s.keys = append(s.keys, q.Key)
	if r.down {
		return false
	}
	s.wg.Go(func() {
		time.Sleep(r.after)
		if r.lost {
			sink.Lost(token, time.Now())
		} else {
			sink.Answered(token, probe.Answer{Status: r.status, Report: load.Report{RIF: int32(token)}}, time.Now())
		}
	})
	return true
}

// asked is a service with n replicas on other nodes, balanced by prequal_sync.
func asked(n int, prober Prober) (*Outbound, *service) {
	o := New(Config{Node: "here", Inbound: inbound.New(inbound.Config{Relay: relay.New(relay.Config{})}), Prober: prober, Seed: 1})
	p := policy.Default()
	p.Balancer, p.PrequalSync.Probes = policy.BalancerPrequalSync, n
	record := &registry.Service{Name: "web", Policy: p}
	for i := range n {
		record.Endpoints = append(record.Endpoints, registry.Endpoint{
			Service: "web", Node: registry.NodeName(fmt.Sprint("n", i)),
			Address: netip.MustParseAddrPort("127.0.0.1:80"), Agent: netip.MustParseAddrPort(fmt.Sprintf("10.0.0.%d:1", i+1)),
		})
	}
	o.Update(time.Now(), &registry.Snapshot{Services: map[registry.ServiceName]*registry.Service{"web": record}})
	return o, o.service("web")
}

func TestInquiry(t *testing.T) {
	const ms = time.Millisecond
	tests := []struct {
		name     string
		replies  []reply
		patience time.Duration // of the caller; 0: any
		answers  int           // -1: an error
		took     time.Duration
	}{
		{"all answer", []reply{{after: 3 * ms}, {after: 1 * ms}, {after: 2 * ms}}, 0, 2, 2 * ms},
		{"one is lost", []reply{{after: 3 * ms}, {after: 1 * ms}, {after: 100 * ms, lost: true}}, 0, 2, 3 * ms},
		{"one answers late", []reply{{after: 1 * ms}, {after: 500 * ms}, {after: 4 * ms}}, 0, 2, 4 * ms},
		{"one drains, one is lost", []reply{{after: 1 * ms}, {after: 2 * ms, status: probe.Draining}, {after: 100 * ms, lost: true}}, 0, 1, 2 * ms},
		{"as many as would be enough fail", []reply{{after: 50 * ms}, {after: 2 * ms, status: probe.Unknown}, {after: 1 * ms, status: probe.Unhealthy}}, 0, 0, 2 * ms},
		{"two agents are down", []reply{{after: 50 * ms}, {down: true}, {down: true}}, 0, 0, 0},
		{"all are down", []reply{{down: true}, {down: true}, {down: true}}, 0, 0, 0},
		{"the caller's time runs out", []reply{{after: 50 * ms}, {after: 60 * ms}, {after: 70 * ms}}, 20 * ms, -1, 20 * ms},
		{"of two", []reply{{after: 5 * ms}, {after: 3 * ms}}, 0, 1, 3 * ms},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				prober := &scripted{replies: tt.replies}
				o, s := asked(len(tt.replies), prober)
				ctx := t.Context()
				if tt.patience > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, tt.patience)
					defer cancel()
				}
				b, req := s.balancer.Load(), balancer.Request{Key: 42, Keyed: true}
				targets, enough, asks := b.Inquire(time.Now(), req, nil)
				if !asks || len(targets) != len(tt.replies) {
					t.Fatalf("asks %d replicas", len(targets))
				}
				began := time.Now()
				answers, err := o.inquire(ctx, s, b, req, targets, enough)
				if took := time.Since(began); took != tt.took {
					t.Errorf("took %v, want %v", took, tt.took)
				}
				if tt.answers < 0 {
					if !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("error %v", err)
					}
				} else if err != nil || len(answers) != tt.answers {
					t.Errorf("%d answers, %v, want %d", len(answers), err, tt.answers)
				}
				for _, key := range prober.keys {
					if key != 42 {
						t.Errorf("a probe carried the key %d", key)
					}
				}
				n := len(answers)
				prober.wg.Wait() // late answers change nothing
				if len(answers) != n {
					t.Error("a late answer counts")
				}
				if _, err := b.Choose(time.Now(), req, answers); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// TestWhatMakesABalancerNew keeps what a balancer has learnt over changes that do not concern it.
func TestWhatMakesABalancerNew(t *testing.T) {
	tests := []struct {
		name   string
		change func(*policy.Policy)
		fresh  bool
	}{
		{"timeout", func(p *policy.Policy) { p.Timeout = time.Second }, false},
		{"retries", func(p *policy.Policy) { p.RetryBudget.Ratio = 1 }, false},
		{"subset", func(p *policy.Policy) { p.Scope.Subset = 1 }, false},
		{"zone", func(p *policy.Policy) { p.Scope.Zone = policy.ZonePrefer }, false},
		{"rule", func(p *policy.Policy) { p.Balancer = policy.BalancerC3 }, true},
		{"probes", func(p *policy.Policy) { p.PrequalSync.Probes = 5 }, true},
		{"slots", func(p *policy.Policy) { p.Slots = 7 }, true},
		{"key", func(p *policy.Policy) { p.Hash.Key.Source = policy.KeyPath }, true},
	}
	for _, tt := range tests {
		o, s := asked(3, &scripted{})
		before := s.balancer.Load()
		record := *s.record
		tt.change(&record.Policy)
		o.Update(time.Now(), &registry.Snapshot{Services: map[registry.ServiceName]*registry.Service{"web": &record}})
		if fresh := s.balancer.Load() != before; fresh != tt.fresh {
			t.Errorf("%s: a new balancer: %v, want %v", tt.name, fresh, tt.fresh)
		}
	}
}
