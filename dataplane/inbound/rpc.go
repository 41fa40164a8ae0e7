package inbound

import (
	"errors"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/registry"
)

// ServeReserve is Reserve for another agent: method Reserve of service Peer. It ends with the stream.
func (in *Inbound) ServeReserve(r *meshv1.ReserveRequest, stream grpc.ServerStreamingServer[meshv1.Grant]) error {
	settled := make(chan bool, 1)
	place, err := in.Reserve(registry.EndpointID(r.Endpoint), func(granted bool) { settled <- granted })
	if err != nil {
		return refusal(err)
	}
	defer in.Release(place)
	for {
		select {
		case granted := <-settled:
			if !granted {
				return refusal(errNoReplica)
			}
			if err := stream.Send(&meshv1.Grant{Reservation: place.ID}); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		case <-in.ended:
			return stopping()
		}
	}
}

// stopping is what those are told who are still connected when the agent ends.
func stopping() error { return status.Error(codes.Unavailable, "the agent is stopping") }

func refusal(err error) error {
	if errors.Is(err, errNoReplica) {
		return status.Error(codes.NotFound, err.Error())
	}
	return status.Error(codes.FailedPrecondition, err.Error())
}

// toldAtOnce is how many idle replicas may wait to be told to one agent. One that takes them in more slowly misses some: it
// has more than enough.
const toldAtOnce = 1024

// ServeListenIdle is ListenIdle for another agent: the method of that name of service Peer. It ends with the stream.
func (in *Inbound) ServeListenIdle(r *meshv1.ListenIdleRequest, stream grpc.ServerStreamingServer[meshv1.IdleReplica]) error {
	idle := make(chan registry.EndpointID, toldAtOnce)
	defer in.ListenIdle(registry.ServiceName(r.Service), func(id registry.EndpointID) {
		select {
		case idle <- id:
		default:
		}
	})()
	for {
		select {
		case id := <-idle:
			if err := stream.Send(&meshv1.IdleReplica{Endpoint: string(id)}); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		case <-in.ended:
			return stopping()
		}
	}
}
