package registry

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// Encode returns m as the store keeps it: JSON that is the same for every build. (What protojson returns differs from
// build to build in its spaces, on purpose.)
func Encode(m proto.Message) ([]byte, error) {
	value, err := protojson.Marshal(m)
	if err != nil {
		return nil, err
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, value); err != nil {
		return nil, err
	}
	return compact.Bytes(), nil
}

// decode leaves out fields that a later version may have added.
func decode(value []byte, m proto.Message) error {
	return protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(value, m)
}

// Proto returns the endpoint as it is stored.
func (e Endpoint) Proto() *meshv1.EndpointRecord {
	r := &meshv1.EndpointRecord{
		Service: string(e.Service),
		Node:    string(e.Node),
		Zone:    strings.ToValidUTF8(e.Zone, "?"),
		Address: e.At(),
		State:   e.State.Proto(),
		Weight:  uint32(e.Weight),

		Protocol: string(e.Protocol),
	}
	if e.Agent.IsValid() {
		r.Agent = e.Agent.String()
	}
	return r
}

// Proto returns the state as it is stored.
func (s State) Proto() meshv1.EndpointRecord_State {
	switch s {
	case Ready:
		return meshv1.EndpointRecord_READY
	case Unhealthy:
		return meshv1.EndpointRecord_UNHEALTHY
	case Draining:
		return meshv1.EndpointRecord_DRAINING
	}
	return meshv1.EndpointRecord_UNKNOWN
}

// Proto returns the record of the service.
func (n ServiceName) Proto() *meshv1.ServiceRecord { return &meshv1.ServiceRecord{Name: string(n)} }

// NodeFromValue decodes the record of a node.
func NodeFromValue(value []byte) (*meshv1.NodeRecord, error) {
	record := new(meshv1.NodeRecord)
	if err := decode(value, record); err != nil {
		return nil, err
	}
	return record, NodeName(record.GetNode()).Validate()
}

// EndpointFromValue decodes the record of an endpoint.
func EndpointFromValue(value []byte) (Endpoint, error) {
	record := new(meshv1.EndpointRecord)
	if err := decode(value, record); err != nil {
		return Endpoint{}, err
	}
	return endpointFromProto(record)
}

// endpointFromProto returns the endpoint that a record describes. An endpoint outside the mesh has no agent.
func endpointFromProto(r *meshv1.EndpointRecord) (Endpoint, error) {
	e := Endpoint{
		Service: ServiceName(r.GetService()), Node: NodeName(r.GetNode()), Zone: r.GetZone(), Weight: weightFromProto(r.GetWeight()),
		Protocol: protocolFromProto(r.GetProtocol()),
	}
	var addressErr, agentErr, stateErr error
	if socket, ok := strings.CutPrefix(r.GetAddress(), unixPrefix); ok {
		e.Socket = socket
	} else if e.Address, addressErr = netip.ParseAddrPort(r.GetAddress()); addressErr != nil {
		return Endpoint{}, fmt.Errorf("address: %w", addressErr)
	}
	if r.GetAgent() != "" {
		if e.Agent, agentErr = netip.ParseAddrPort(r.GetAgent()); agentErr != nil {
			agentErr = fmt.Errorf("agent: %w", agentErr)
		}
	}
	if e.State, stateErr = stateFromProto(r.GetState()); stateErr != nil {
		stateErr = fmt.Errorf("state: %w", stateErr)
	}
	if err := errors.Join(e.Validate(), agentErr, stateErr); err != nil {
		return Endpoint{}, err
	}
	return e, nil
}

// weightFromProto keeps what is out of bounds out of bounds, for Validate.
func weightFromProto(weight uint32) int32 { return int32(min(weight, math.MaxInt32)) }

// protocolFromProto takes one that only a later version knows as not declared: the replica is there all the same.
func protocolFromProto(name string) policy.Protocol {
	switch p := policy.Protocol(name); p {
	case policy.ProtocolHTTP, policy.ProtocolHTTP2, policy.ProtocolTCP:
		return p
	}
	return policy.ProtocolUndeclared
}

func stateFromProto(s meshv1.EndpointRecord_State) (State, error) {
	switch s {
	case meshv1.EndpointRecord_READY:
		return Ready, nil
	case meshv1.EndpointRecord_UNHEALTHY:
		return Unhealthy, nil
	case meshv1.EndpointRecord_DRAINING:
		return Draining, nil
	}
	return 0, fmt.Errorf("want READY, UNHEALTHY or DRAINING, got %v", s)
}

// Proto returns the addresses as they are stored.
func (a Addresses) Proto() *meshv1.AddressRecord {
	r := &meshv1.AddressRecord{Service: string(a.Service), Ipv4: a.IPv4.String(), Ipv6: a.IPv6.String()}
	if !a.Released.IsZero() {
		r.Released = timestamppb.New(a.Released)
	}
	return r
}

// AddressesFromValue decodes the record of the virtual addresses of a service.
func AddressesFromValue(value []byte) (Addresses, error) {
	record := new(meshv1.AddressRecord)
	if err := decode(value, record); err != nil {
		return Addresses{}, err
	}
	return addressesFromProto(record)
}

func addressesFromProto(r *meshv1.AddressRecord) (Addresses, error) {
	a := Addresses{Service: ServiceName(r.GetService())}
	var err4, err6 error
	if a.IPv4, err4 = netip.ParseAddr(r.GetIpv4()); err4 != nil {
		err4 = fmt.Errorf("ipv4: %w", err4)
	}
	if a.IPv6, err6 = netip.ParseAddr(r.GetIpv6()); err6 != nil {
		err6 = fmt.Errorf("ipv6: %w", err6)
	}
	if r.GetReleased() != nil {
		a.Released = r.GetReleased().AsTime()
	}
	if err := errors.Join(err4, err6); err != nil {
		return Addresses{}, err
	}
	return a, a.Validate()
}

// Proto returns the snapshot as it is kept on disk.
func (s *Snapshot) Proto() *meshv1.SnapshotRecord {
	r := &meshv1.SnapshotRecord{Revision: s.Revision}
	for _, name := range slices.Sorted(maps.Keys(s.Services)) {
		service := s.Services[name]
		r.Services = append(r.Services, service.Name.Proto())
		for _, e := range service.Endpoints {
			r.Endpoints = append(r.Endpoints, e.Proto())
		}
		if service.Document != nil {
			r.Policies = append(r.Policies, service.Document)
		}
		if a := service.addresses(); a != (Addresses{}) {
			r.Addresses = append(r.Addresses, a.Proto())
		}
	}
	return r
}

// SnapshotFromProto returns the snapshot that a record describes. What is wrong in the record is left out and told by
// the error; the snapshot holds the rest.
func SnapshotFromProto(r *meshv1.SnapshotRecord) (*Snapshot, error) {
	b := NewBuilder(nil, nil)
	var problems []error
	for _, s := range r.GetServices() {
		problems = append(problems, b.putService(ServiceName(s.GetName())))
	}
	for _, p := range r.GetPolicies() {
		revision, err := strconv.ParseInt(p.GetMetadata().GetResourceVersion(), 10, 64)
		if err == nil {
			err = b.putPolicy(p, revision)
		}
		problems = append(problems, inRecord("policy", p.GetMetadata().GetName(), err))
	}
	for _, record := range r.GetEndpoints() {
		e, err := endpointFromProto(record)
		if err == nil {
			b.putEndpoint(time.Time{}, e)
		}
		problems = append(problems, inRecord("endpoint", record.GetAddress(), err))
	}
	for _, record := range r.GetAddresses() {
		a, err := addressesFromProto(record)
		if err == nil {
			b.putAddresses(a)
		}
		problems = append(problems, inRecord("addresses of", record.GetService(), err))
	}
	b.revision = r.GetRevision()
	return b.Snapshot(), errors.Join(problems...)
}

func inRecord(kind, name string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s %q: %w", kind, name, err)
}

// PolicyFromValue decodes a policy that was stored at a revision. It does not check what the policy says.
func PolicyFromValue(value []byte, revision int64) (*meshv1.ServicePolicy, error) {
	doc := new(meshv1.ServicePolicy)
	if err := decode(value, doc); err != nil {
		return nil, err
	}
	return withRevision(doc, revision), nil
}

// PolicyValue encodes a policy for the store, which keeps its revision by itself.
func PolicyValue(doc *meshv1.ServicePolicy) ([]byte, error) {
	stored := proto.CloneOf(doc)
	if stored.Metadata != nil {
		stored.Metadata.ResourceVersion = ""
	}
	return Encode(stored)
}

func withRevision(doc *meshv1.ServicePolicy, revision int64) *meshv1.ServicePolicy {
	if doc.Metadata == nil {
		doc.Metadata = new(meshv1.Metadata)
	}
	doc.Metadata.ResourceVersion = strconv.FormatInt(revision, 10)
	return doc
}
