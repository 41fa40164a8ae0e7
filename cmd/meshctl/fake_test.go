package main

import (
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// fakeAgent answers as an agent would, from memory.
type fakeAgent struct {
	meshv1.UnimplementedAdminServer

	mu sync.Mutex
	// mu guards the fields below

	revision int64
	policies map[string]*meshv1.ServicePolicy
	local    map[string]*meshv1.LocalService
	rivals   int // how many times somebody else is to write first
	lagging  bool
	mute     bool            // whether it gives no answers to top
	away     bool            // whether the registry is unreachable
	garbled  map[string]bool // services whose policy can't be read
	empty    map[string]bool // services whose policy says nothing
	sampled  int
	captures []*meshv1.CaptureView
	blind    string // what the agent can't ask Kubernetes
}

func (f *fakeAgent) GetCapture(context.Context, *meshv1.GetCaptureRequest) (*meshv1.GetCaptureResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return &meshv1.GetCaptureResponse{Captures: f.captures, KubernetesError: f.blind}, nil
}

func newFakeAgent() *fakeAgent {
	return &fakeAgent{
		revision: 10,
		policies: map[string]*meshv1.ServicePolicy{},
		local: map[string]*meshv1.LocalService{"checkout": {
			Metadata: &meshv1.Metadata{Name: "checkout"},
			Spec:     &meshv1.LocalServiceSpec{Endpoints: []*meshv1.LocalEndpoint{{Address: "127.0.0.1:8080"}}},
		}},
	}
}

// listen starts to serve and returns what to give to --agent.
func (f *fakeAgent) listen(network, address string) (*grpc.Server, string, error) {
	server := grpc.NewServer()
	meshv1.RegisterAdminServer(server, f)
	return serve(server, network, address)
}

func serve(server *grpc.Server, network, address string) (*grpc.Server, string, error) {
	listener, err := net.Listen(network, address)
	if err != nil {
		return nil, "", err
	}
	var serving sync.WaitGroup
	serving.Go(func() { server.Serve(listener) })
	return server, listener.Addr().String(), nil
}

func (f *fakeAgent) set(what string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	word, count, _ := strings.Cut(what, " ")
	switch word {
	case "rivals":
		f.rivals, _ = strconv.Atoi(count)
	case "mute":
		f.mute = true
	case "lagging":
		f.lagging = true
	case "away":
		f.away = true
	case "captures":
		f.captures = append(f.captures, &meshv1.CaptureView{Netns: "pod " + count, Active: true})
	case "blind":
		f.blind = count
	case "empty":
		f.empty = map[string]bool{count: true}
	case "managing":
		f.policies[count].Metadata.ManagedBy = "kubernetes"
	case "garbled":
		f.garbled = map[string]bool{count: true}
	default:
		return fmt.Errorf("the fake agent can't be %q", what)
	}
	return nil
}

func (f *fakeAgent) ListServices(context.Context, *meshv1.ListServicesRequest) (*meshv1.ListServicesResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	names := map[string]bool{}
	for name := range f.local {
		names[name] = true
	}
	for name := range f.policies {
		names[name] = true
	}
	answer := &meshv1.ListServicesResponse{}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		summary := &meshv1.ServiceSummary{Name: name, Balancer: "prequal", Ready: uint32(len(f.local[name].GetSpec().GetEndpoints()))}
		if f.local[name] != nil {
			summary.Ipv4, summary.Ipv6 = "240.64.1.17", "fd68:6561:6472::111"
		}
		if doc := f.policies[name]; doc != nil {
			summary.PolicyRevision, _ = strconv.ParseInt(doc.Metadata.ResourceVersion, 10, 64)
			summary.Balancer = policy.Effective(doc).Spec.Balancer
		}
		answer.Services = append(answer.Services, summary)
	}
	return answer, nil
}

func (f *fakeAgent) ListEndpoints(_ context.Context, r *meshv1.ListEndpointsRequest) (*meshv1.ListEndpointsResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	answer := &meshv1.ListEndpointsResponse{}
	for _, name := range slices.Sorted(maps.Keys(f.local)) {
		if r.Service != "" && r.Service != name {
			continue
		}
		for _, e := range f.local[name].Spec.Endpoints {
			answer.Endpoints = append(answer.Endpoints, &meshv1.EndpointRecord{Service: name, Node: "a", Address: e.Address,
				Agent: "10.0.0.1:15008", State: meshv1.EndpointRecord_READY, Weight: e.GetWeight(), Protocol: f.local[name].Spec.Protocol})
		}
	}
	return answer, nil
}

func (f *fakeAgent) ListMembers(context.Context, *meshv1.ListMembersRequest) (*meshv1.ListMembersResponse, error) {
	return &meshv1.ListMembersResponse{Members: []*meshv1.Member{
		{Node: "a", Zone: "z1", Version: "v1", GossipAddress: "10.0.0.1:15007", MeshAddress: "10.0.0.1:15008", State: "alive"},
		{Node: "b", Version: "v1", GossipAddress: "10.0.0.2:15007", MeshAddress: "10.0.0.2:15008", State: "suspect"},
	}}, nil
}

func (f *fakeAgent) Register(_ context.Context, r *meshv1.RegisterRequest) (*meshv1.RegisterResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	name := r.Service.Metadata.Name
	if f.local[name] == nil {
		f.local[name] = r.Service
	} else {
		f.local[name].Spec.Endpoints = append(f.local[name].Spec.Endpoints, r.Service.Spec.Endpoints...)
		f.local[name].Spec.Check = r.Service.Spec.Check
	}
	return &meshv1.RegisterResponse{Node: "a"}, nil
}

func (f *fakeAgent) Deregister(_ context.Context, r *meshv1.DeregisterRequest) (*meshv1.DeregisterResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	answer := &meshv1.DeregisterResponse{Node: "a"}
	if f.local[r.Service] == nil {
		return answer, nil
	}
	spec := f.local[r.Service].Spec
	spec.Endpoints = slices.DeleteFunc(spec.Endpoints, func(e *meshv1.LocalEndpoint) bool {
		if r.Address != "" && r.Address != e.Address {
			return false
		}
		answer.Addresses = append(answer.Addresses, e.Address)
		return true
	})
	return answer, nil
}

func (f *fakeAgent) GetPolicy(_ context.Context, r *meshv1.GetPolicyRequest) (*meshv1.GetPolicyResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.garbled[r.Service] {
		return nil, status.Error(codes.DataLoss, "it is garbage")
	}
	if f.empty[r.Service] {
		return &meshv1.GetPolicyResponse{Policy: &meshv1.ServicePolicy{Metadata: &meshv1.Metadata{ResourceVersion: "5"}}}, nil
	}
	doc := f.policies[r.Service]
	if doc == nil {
		doc = &meshv1.ServicePolicy{ApiVersion: policy.APIVersion, Kind: policy.Kind,
			Metadata: &meshv1.Metadata{Name: r.Service, ResourceVersion: "0"}}
	}
	return &meshv1.GetPolicyResponse{Policy: doc, Effective: policy.Effective(doc), FromCopy: f.away}, nil
}

func (f *fakeAgent) SetPolicy(_ context.Context, r *meshv1.SetPolicyRequest) (*meshv1.SetPolicyResponse, error) {
	if err := policy.Validate(r.Policy); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.away {
		return nil, status.Error(codes.Unavailable, "the registry is unreachable")
	}
	if f.rivals > 0 {
		f.rivals--
		rival := proto.CloneOf(r.Policy)
		rival.Spec = &meshv1.ServicePolicySpec{Timeout: fmt.Sprintf("%ds", f.rivals+1)}
		f.storeLocked(rival)
	}
	if f.policies[r.Policy.Metadata.Name].GetMetadata().GetManagedBy() != "" && !r.Force {
		return nil, status.Error(codes.FailedPrecondition, "it is managed by Kubernetes")
	}
	stored := f.policies[r.Policy.Metadata.Name].GetMetadata().GetResourceVersion()
	if want := r.Policy.Metadata.ResourceVersion; want != "" && want != max(stored, "0") {
		return nil, status.Error(codes.Aborted, "the policy was changed by somebody else meanwhile")
	}
	doc := f.storeLocked(proto.CloneOf(r.Policy))
	doc.Metadata.ManagedBy = ""
	return &meshv1.SetPolicyResponse{Policy: doc, Revision: f.revision}, nil
}

func (f *fakeAgent) storeLocked(doc *meshv1.ServicePolicy) *meshv1.ServicePolicy {
	f.revision++
	doc.Metadata.ResourceVersion = strconv.FormatInt(f.revision, 10)
	f.policies[doc.Metadata.Name] = doc
	return doc
}

func (f *fakeAgent) DeletePolicy(_ context.Context, r *meshv1.DeletePolicyRequest) (*meshv1.DeletePolicyResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.policies[r.Service] == nil {
		return nil, status.Errorf(codes.NotFound, "no policy is stored for %s", r.Service)
	}
	if f.policies[r.Service].Metadata.ManagedBy != "" && !r.Force {
		return nil, status.Error(codes.FailedPrecondition, "it is managed by Kubernetes")
	}
	delete(f.policies, r.Service)
	delete(f.garbled, r.Service)
	f.revision++
	return &meshv1.DeletePolicyResponse{Revision: f.revision}, nil
}

func (f *fakeAgent) WaitApplied(_ *meshv1.WaitAppliedRequest, stream grpc.ServerStreamingServer[meshv1.WaitAppliedResponse]) error {
	if err := stream.Send(&meshv1.WaitAppliedResponse{Applied: 2, Members: 3, Waiting: []string{"c: unreachable"}}); err != nil {
		return err
	}
	f.mu.Lock()
	lagging := f.lagging
	f.mu.Unlock()
	if lagging {
		<-stream.Context().Done()
		return status.FromContextError(stream.Context().Err()).Err()
	}
	return stream.Send(&meshv1.WaitAppliedResponse{Applied: 3, Members: 3})
}

func (f *fakeAgent) Top(ctx context.Context, r *meshv1.TopRequest) (*meshv1.TopResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mute {
		<-ctx.Done()
	}
	f.sampled++
	answer := sample(f.sampled)
	if r.Service == "nosuch" {
		return nil, status.Error(codes.NotFound, `no service "nosuch" was ever registered`)
	}
	for _, agent := range answer.Agents {
		agent.Outbound = slices.DeleteFunc(agent.Outbound, func(o *meshv1.OutboundView) bool {
			return r.Service != "" && o.Service != r.Service
		})
		agent.Inbound = slices.DeleteFunc(agent.Inbound, func(i *meshv1.InboundView) bool {
			return r.Service != "" && serviceOf(i.Id) != r.Service
		})
	}
	return answer, nil
}

// sample is what three agents see, of which c gives no answer, n seconds after they started.
func sample(n int) *meshv1.TopResponse {
	started := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	at := timestamppb.New(started.Add(time.Duration(n) * time.Second))
	grown := func(perSecond int) uint64 { return uint64(n * perSecond) }
	ready := meshv1.EndpointRecord_READY
	probe := func(rif int32, latency, age time.Duration, hot bool) *meshv1.ProbeView {
		return &meshv1.ProbeView{Rif: rif, Latency: durationpb.New(latency), Age: durationpb.New(age), Hot: hot}
	}
	endpoint := func(service, node, address string, picks, errors int) *meshv1.EndpointView {
		return &meshv1.EndpointView{Id: service + "/" + node + "/" + address, Node: node, Zone: "zone-" + node, Address: address,
			State: ready, Picks: grown(picks), Errors: grown(errors)}
	}
	a1 := endpoint("checkout", "a", "10.0.0.1:8080", 300, 0)
	a1.Probe = probe(3, 12*time.Millisecond, 40*time.Millisecond, false)
	a2 := endpoint("checkout", "b", "10.0.0.2:8080", 100, 2)
	a2.Probe = probe(9, 1500*time.Microsecond, 120*time.Millisecond, true)
	a3 := endpoint("checkout", "c", "10.0.0.3:8080", 0, 0)
	a3.Avoided = "ejected"
	b1 := endpoint("checkout", "a", "10.0.0.1:8080", 50, 0)
	b2 := endpoint("checkout", "b", "10.0.0.2:8080", 50, 1)
	return &meshv1.TopResponse{
		Agents: []*meshv1.Observation{
			{
				Node: "a", Time: at, Started: timestamppb.New(started),
				Outbound: []*meshv1.OutboundView{{
					Service: "checkout", Balancer: "prequal", PolicyRevision: 17, Requests: grown(400), Errors: grown(2),
					Retries: grown(1), RetryBalance: 98, Probes: grown(1200), ProbeAnswers: grown(1200),
					HotThreshold: proto.Int32(7), Pooled: 12, PoolCapacity: 16, Endpoints: []*meshv1.EndpointView{a1, a2, a3},
				}},
				Inbound: []*meshv1.InboundView{
					{Id: "checkout/a/10.0.0.1:8080", State: ready, Rif: 3, Latency: durationpb.New(12 * time.Millisecond)},
					{Id: "ledger/a/10.0.0.1:9090", State: meshv1.EndpointRecord_UNHEALTHY, CheckError: "connection refused"},
				},
			},
			{
				Node: "b", Time: at, Started: timestamppb.New(started),
				Outbound: []*meshv1.OutboundView{{
					Service: "checkout", Balancer: "prequal", PolicyRevision: 16, Requests: grown(100), Errors: grown(1),
					Probes: grown(300), Endpoints: []*meshv1.EndpointView{b1, b2},
				}},
				Inbound: []*meshv1.InboundView{
					{Id: "checkout/b/10.0.0.2:8080", State: ready, Rif: 9, Latency: durationpb.New(1500 * time.Microsecond)},
				},
			},
		},
		Missing: []string{"c: connection refused"},
	}
}
