package admin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/headroom-mesh/headroom/agent/gossip"
	"github.com/headroom-mesh/headroom/agent/local"
	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/policy/document"
	"github.com/headroom-mesh/headroom/policy/localservice"
	"github.com/headroom-mesh/headroom/registry"
)

// adminServer answers the operator.
type adminServer struct {
	*Admin
	meshv1.UnimplementedAdminServer
}

func (s *adminServer) ListServices(context.Context, *meshv1.ListServicesRequest) (*meshv1.ListServicesResponse, error) {
	services := s.cfg.Snapshot().Services
	answer := &meshv1.ListServicesResponse{}
	for _, name := range slices.Sorted(maps.Keys(services)) {
		answer.Services = append(answer.Services, summarize(services[name]))
	}
	return answer, nil
}

func summarize(s *registry.Service) *meshv1.ServiceSummary {
	summary := &meshv1.ServiceSummary{
		Name: string(s.Name), Balancer: string(s.Policy.Balancer), PolicyRevision: s.PolicyRevision,
		Ipv4: orNone(s.IPv4), Ipv6: orNone(s.IPv6),
	}
	for _, e := range s.Endpoints {
		switch e.State {
		case registry.Ready:
			summary.Ready++
		case registry.Unhealthy:
			summary.Unhealthy++
		case registry.Draining:
			summary.Draining++
		}
	}
	return summary
}

func orNone(a netip.Addr) string {
	if !a.IsValid() {
		return ""
	}
	return a.String()
}

func (s *adminServer) ListEndpoints(_ context.Context, r *meshv1.ListEndpointsRequest) (*meshv1.ListEndpointsResponse, error) {
	services := s.cfg.Snapshot().Services
	names := slices.Sorted(maps.Keys(services))
	if r.Service != "" {
		if err := s.known(registry.ServiceName(r.Service)); err != nil {
			return nil, err
		}
		names = []registry.ServiceName{registry.ServiceName(r.Service)}
	}
	answer := &meshv1.ListEndpointsResponse{}
	for _, name := range names {
		for _, e := range services[name].Endpoints {
			answer.Endpoints = append(answer.Endpoints, e.Proto())
		}
	}
	return answer, nil
}

// known tells a service without replicas from a name that nobody ever registered.
func (s *adminServer) known(service registry.ServiceName) error {
	snapshot := s.cfg.Snapshot()
	if _, ok := snapshot.Services[service]; ok {
		return nil
	}
	if snapshot.Revision == 0 {
		return status.Error(codes.Unavailable, "this agent has not reached the registry yet")
	}
	return status.Errorf(codes.NotFound, "no service %q was ever registered", service)
}

func (s *adminServer) GetReadiness(context.Context, *meshv1.GetReadinessRequest) (*meshv1.GetReadinessResponse, error) {
	return s.readiness(), nil
}

func (s *adminServer) TakeOver(stream grpc.BidiStreamingServer[meshv1.TakeOverRequest, meshv1.TakeOverResponse]) error {
	if s.cfg.TakeOver == nil {
		return s.UnimplementedAdminServer.TakeOver(stream)
	}
	return s.cfg.TakeOver(stream)
}

func (s *adminServer) ListMembers(context.Context, *meshv1.ListMembersRequest) (*meshv1.ListMembersResponse, error) {
	answer := &meshv1.ListMembersResponse{}
	for _, m := range s.cfg.Members() {
		answer.Members = append(answer.Members, memberProto(m))
	}
	return answer, nil
}

func memberProto(m gossip.Member) *meshv1.Member {
	p := &meshv1.Member{
		Node: string(m.Node), Zone: m.Zone, Version: m.Version, State: m.State.String(), GossipAddress: m.Gossip.String(),
	}
	if m.Mesh.IsValid() {
		p.MeshAddress = m.Mesh.String()
	}
	return p
}

// Register waits for what it started no longer than registerTimeout.
const (
	registerTimeout  = 3 * time.Second
	registerInterval = 10 * time.Millisecond
)

// Register answers when a request that comes next finds the replicas, or after a while: they are registered in any case.
func (s *adminServer) Register(ctx context.Context, r *meshv1.RegisterRequest) (*meshv1.RegisterResponse, error) {
	service, err := localservice.Compile(r.Service)
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	if err := s.cfg.Local.Register(ctx, r.Service); err != nil {
		return nil, failure(err)
	}
	s.awaitReplicas(ctx, service)
	return &meshv1.RegisterResponse{Node: string(s.cfg.Node)}, nil
}

// awaitReplicas waits until the replicas, healthy or not, have come back from the registry.
func (s *adminServer) awaitReplicas(ctx context.Context, service localservice.LocalService) {
	ctx, cancel := context.WithTimeout(ctx, registerTimeout)
	defer cancel()
	tick := time.NewTicker(registerInterval)
	defer tick.Stop()
	for !s.haveReplicas(service) {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		case <-s.closing:
			return
		}
	}
}

func (s *adminServer) haveReplicas(service localservice.LocalService) bool {
	found := map[localservice.Endpoint]bool{}
	if known := s.cfg.Snapshot().Services[registry.ServiceName(service.Service)]; known != nil {
		for _, e := range known.Endpoints {
			// One that is draining may be left over from before.
			if e.Node == s.cfg.Node && e.State != registry.Draining && e.Protocol == service.Protocol {
				at := localservice.Address{Port: e.Address, Socket: e.Socket}
				found[localservice.Endpoint{Address: at, Weight: int(max(e.Weight, 1))}] = true
			}
		}
	}
	return !slices.ContainsFunc(service.Endpoints, func(e localservice.Endpoint) bool { return !found[e] })
}

func (s *adminServer) Deregister(ctx context.Context, r *meshv1.DeregisterRequest) (*meshv1.DeregisterResponse, error) {
	service, err := serviceName(r.Service)
	if err != nil {
		return nil, err
	}
	if r.Address != "" {
		if _, err := localservice.ParseAddress(r.Address); err != nil {
			return nil, status.Errorf(codes.InvalidArgument, "address: %v", err)
		}
	}
	removed, err := s.cfg.Local.Deregister(ctx, service, r.Address)
	if err != nil {
		return nil, failure(err)
	}
	answer := &meshv1.DeregisterResponse{Node: string(s.cfg.Node)}
	for _, address := range removed {
		answer.Addresses = append(answer.Addresses, address.String())
	}
	return answer, nil
}

func serviceName(name string) (registry.ServiceName, error) {
	service := registry.ServiceName(name)
	if err := service.Validate(); err != nil {
		return "", status.Error(codes.InvalidArgument, err.Error())
	}
	return service, nil
}

// GetPolicy answers from the agent's snapshot when the store is away.
func (s *adminServer) GetPolicy(ctx context.Context, r *meshv1.GetPolicyRequest) (*meshv1.GetPolicyResponse, error) {
	service, err := serviceName(r.Service)
	if err != nil {
		return nil, err
	}
	doc, err := s.storedPolicy(ctx, service)
	snapshot := s.cfg.Snapshot()
	fromCopy := errors.Is(err, registry.ErrUnavailable) && snapshot.Revision > 0
	if fromCopy {
		doc, err = lastKnown(snapshot, service)
	}
	if errors.Is(err, registry.ErrNotFound) {
		doc, err = &meshv1.ServicePolicy{
			ApiVersion: policy.APIVersion, Kind: policy.Kind,
			Metadata: &meshv1.Metadata{Name: r.Service, ResourceVersion: "0"},
		}, nil
	}
	if err != nil {
		return nil, failure(err)
	}
	return &meshv1.GetPolicyResponse{Policy: doc, Effective: policy.Effective(doc), FromCopy: fromCopy}, nil
}

// readTimeout is how long the store is waited for before the snapshot has to do.
const readTimeout = 2 * time.Second

func (s *adminServer) storedPolicy(ctx context.Context, service registry.ServiceName) (*meshv1.ServicePolicy, error) {
	limited, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	doc, err := s.cfg.Registry.Policy(limited, service)
	if ctx.Err() == nil && errors.Is(err, context.DeadlineExceeded) {
		return nil, fmt.Errorf("%w: no answer within %v", registry.ErrUnavailable, readTimeout)
	}
	return doc, err
}

func lastKnown(snapshot *registry.Snapshot, service registry.ServiceName) (*meshv1.ServicePolicy, error) {
	if s, ok := snapshot.Services[service]; ok && s.Document != nil {
		return s.Document, nil
	}
	return nil, registry.ErrNotFound
}

func (s *adminServer) SetPolicy(ctx context.Context, r *meshv1.SetPolicyRequest) (*meshv1.SetPolicyResponse, error) {
	if err := policy.Validate(r.Policy); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	doc, err := s.setPolicy(ctx, r.Policy, r.Force)
	if err != nil {
		return nil, failure(unconfirmed(err))
	}
	revision, err := strconv.ParseInt(doc.GetMetadata().GetResourceVersion(), 10, 64)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "the store gave the policy revision %q", doc.GetMetadata().GetResourceVersion())
	}
	return &meshv1.SetPolicyResponse{Policy: doc, Revision: revision}, nil
}

func (s *adminServer) DeletePolicy(ctx context.Context, r *meshv1.DeletePolicyRequest) (*meshv1.DeletePolicyResponse, error) {
	service, err := serviceName(r.Service)
	if err != nil {
		return nil, err
	}
	if !r.Force {
		if _, err := s.unmanaged(ctx, service, "delete"); err != nil {
			return nil, failure(unconfirmed(err))
		}
	}
	revision, err := s.cfg.Registry.DeletePolicy(ctx, service)
	if err != nil {
		return nil, failure(unconfirmed(err))
	}
	return &meshv1.DeletePolicyResponse{Revision: revision}, nil
}

// setPolicy stores a document that nobody manages; in the place of one that somebody manages only by force.
func (s *adminServer) setPolicy(ctx context.Context, doc *meshv1.ServicePolicy, force bool) (*meshv1.ServicePolicy, error) {
	doc = proto.CloneOf(doc)
	doc.Metadata.ManagedBy = ""
	if force {
		return s.cfg.Registry.SetPolicy(ctx, doc)
	}
	anyVersion := doc.Metadata.ResourceVersion == ""
	for {
		version, err := s.unmanaged(ctx, registry.ServiceName(doc.Metadata.Name), "edit")
		if err != nil {
			return nil, err
		}
		if anyVersion {
			doc.Metadata.ResourceVersion = version
		}
		stored, err := s.cfg.Registry.SetPolicy(ctx, doc)
		if anyVersion && errors.Is(err, registry.ErrConflict) {
			continue // whoever was faster may manage it
		}
		return stored, err
	}
}

// unmanaged returns the version of the stored policy, unless somebody manages it; "" is that of one which can't be read.
func (s *adminServer) unmanaged(ctx context.Context, service registry.ServiceName, verb string) (string, error) {
	doc, err := s.storedPolicy(ctx, service)
	switch {
	case errors.Is(err, registry.ErrNotFound):
		return "0", nil
	case errors.Is(err, proto.Error):
		return "", nil
	case err != nil:
		return "", err
	case doc.GetMetadata().GetManagedBy() == "":
		return doc.GetMetadata().GetResourceVersion(), nil
	}
	return "", managedError{service, verb}
}

// managedError is the answer to an operator who would change what is the copy of an object of Kubernetes.
type managedError struct {
	service registry.ServiceName
	verb    string // of kubectl
}

func (e managedError) Error() string {
	name, namespace := string(e.service), "default"
	if dot := strings.LastIndexByte(name, '.'); dot >= 0 {
		name, namespace = name[:dot], name[dot+1:]
	}
	return fmt.Sprintf("the policy of %s is managed by Kubernetes: use `kubectl %s servicepolicy -n %s %s`, or take it over with --force", e.service, e.verb, namespace, name)
}

// writeError adds to an error of the store what it means for a write.
type writeError struct{ error }

func (e writeError) Error() string {
	return strings.TrimSuffix(e.error.Error(), ".") + "; the write is not confirmed: repeat it when the registry is back"
}

func (e writeError) Unwrap() error { return e.error }

func unconfirmed(err error) error {
	if errors.Is(err, registry.ErrUnavailable) {
		return writeError{err}
	}
	return err
}

// failure gives an error the code that callers go by.
func failure(err error) error {
	code := codes.Internal
	var problems document.Problems
	var managed managedError
	switch {
	case errors.Is(err, registry.ErrConflict):
		code = codes.Aborted
	case errors.Is(err, registry.ErrNotFound), errors.Is(err, local.ErrNotRegistered):
		code = codes.NotFound
	case errors.Is(err, registry.ErrUnavailable):
		code = codes.Unavailable
	case errors.Is(err, local.ErrDeclared), errors.Is(err, local.ErrDraining), errors.As(err, &managed):
		code = codes.FailedPrecondition
	case errors.Is(err, context.Canceled):
		code = codes.Canceled
	case errors.Is(err, context.DeadlineExceeded):
		code = codes.DeadlineExceeded
	case errors.As(err, &problems):
		code = codes.InvalidArgument
	case errors.Is(err, proto.Error):
		code = codes.DataLoss // what is stored can't be decoded
	}
	return status.Error(code, err.Error())
}
