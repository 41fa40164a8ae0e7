package relay

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/headroom-mesh/headroom/dataplane/fault"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	testgrpc "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// grpcReplica answers what the tests ask.
type grpcReplica struct {
	testgrpc.UnimplementedTestServiceServer
	canceled chan error // contexts that have ended
}

func (r *grpcReplica) UnaryCall(ctx context.Context, in *testgrpc.SimpleRequest) (*testgrpc.SimpleResponse, error) {
	switch s := in.GetResponseStatus(); {
	case s.GetMessage() == "wait":
		<-ctx.Done()
		r.canceled <- ctx.Err()
		return nil, ctx.Err()
	case s.GetCode() != 0:
		grpc.SetTrailer(ctx, metadata.Pairs("x-why", "asked", "x-bin-bin", "\x00\xff"))
		return nil, status.Error(codes.Code(s.Code), s.Message)
	}
	return &testgrpc.SimpleResponse{Payload: &testgrpc.Payload{Body: make([]byte, in.ResponseSize)}, Username: fmt.Sprint(len(in.Payload.GetBody()))}, nil
}

func (r *grpcReplica) FullDuplexCall(s grpc.BidiStreamingServer[testgrpc.StreamingOutputCallRequest, testgrpc.StreamingOutputCallResponse]) error {
	for {
		in, err := s.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			r.canceled <- err
			return err
		}
		for _, p := range in.ResponseParameters {
			if err := s.Send(&testgrpc.StreamingOutputCallResponse{Payload: &testgrpc.Payload{Body: make([]byte, p.Size)}}); err != nil {
				return err
			}
		}
	}
}

func (r *grpcReplica) StreamingInputCall(s grpc.ClientStreamingServer[testgrpc.StreamingInputCallRequest, testgrpc.StreamingInputCallResponse]) error {
	sum := 0
	for {
		in, err := s.Recv()
		if err == io.EOF {
			return s.SendAndClose(&testgrpc.StreamingInputCallResponse{AggregatedPayloadSize: int32(sum)})
		}
		if err != nil {
			return err
		}
		sum += len(in.Payload.GetBody())
	}
}

// newGRPCLab puts an engine between a client and a server of grpc-go; two puts another one in between, as agents are.
func newGRPCLab(t testing.TB, two bool, options ...grpc.ServerOption) (*lab, testgrpc.TestServiceClient, *grpcReplica) {
	l, r := listen(t), &grpcReplica{canceled: make(chan error, 100)}
	s := grpc.NewServer(options...)
	testgrpc.RegisterTestServiceServer(s, r)
	var serving sync.WaitGroup
	serving.Go(func() { s.Serve(l) })
	t.Cleanup(func() {
		s.Stop()
		serving.Wait()
	})
	target := labTarget(l.Addr().String())
	if two {
		behind := newLab(t, Entry{Agents: true}, target)
		target = labTarget(behind.at)
		target.Agent = true
	}
	front := newLab(t, Entry{}, target)
	front.router.agent = two
	return front, front.dialGRPC(), r
}

func (l *lab) dialGRPC() testgrpc.TestServiceClient {
	conn, err := grpc.NewClient("passthrough:web.mesh", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", l.at)
		}))
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { conn.Close() })
	return testgrpc.NewTestServiceClient(conn)
}

func hops(t *testing.T, test func(t *testing.T, two bool)) {
	t.Run("one hop", func(t *testing.T) { test(t, false) })
	t.Run("two hops", func(t *testing.T) { test(t, true) })
}

func payload(n int) *testgrpc.Payload { return &testgrpc.Payload{Body: make([]byte, n)} }

func TestGRPC(t *testing.T) {
	hops(t, func(t *testing.T, two bool) {
		l, c, _ := newGRPCLab(t, two, grpc.MaxRecvMsgSize(64<<20))
		t.Run("unary", func(t *testing.T) {
			for _, size := range []int{0, 1, 20_000, 5 << 20} {
				out, err := c.UnaryCall(t.Context(), &testgrpc.SimpleRequest{Payload: payload(size), ResponseSize: int32(size)})
				if err != nil || out.Username != fmt.Sprint(size) || len(out.Payload.Body) != size {
					t.Errorf("%d bytes: %v", size, err)
				}
			}
		})
		t.Run("at the same time", func(t *testing.T) {
			var all sync.WaitGroup
			for range 500 {
				all.Go(func() {
					if _, err := c.UnaryCall(t.Context(), &testgrpc.SimpleRequest{Payload: payload(100), ResponseSize: 100}); err != nil {
						t.Error(err)
					}
				})
			}
			all.Wait()
		})
		t.Run("stream in", func(t *testing.T) {
			s, err := c.StreamingInputCall(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for range 100 {
				if err := s.Send(&testgrpc.StreamingInputCallRequest{Payload: payload(10_000)}); err != nil {
					t.Fatal(err)
				}
			}
			if out, err := s.CloseAndRecv(); err != nil || out.AggregatedPayloadSize != 1_000_000 {
				t.Errorf("got %v, %v", out, err)
			}
		})
		t.Run("stream both ways", func(t *testing.T) {
			s, err := c.FullDuplexCall(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for i := range 100 {
				size := 1000 * i
				if err := s.Send(&testgrpc.StreamingOutputCallRequest{ResponseParameters: []*testgrpc.ResponseParameters{{Size: int32(size)}}}); err != nil {
					t.Fatal(err)
				}
				if out, err := s.Recv(); err != nil || len(out.Payload.Body) != size {
					t.Fatal(err)
				}
			}
			s.CloseSend()
			if _, err := s.Recv(); err != io.EOF {
				t.Errorf("got %v", err)
			}
		})
		t.Run("unimplemented", func(t *testing.T) {
			if _, err := c.EmptyCall(t.Context(), &testgrpc.Empty{}); status.Code(err) != codes.Unimplemented || !strings.Contains(err.Error(), "EmptyCall") {
				t.Errorf("got %v", err)
			}
		})
		t.Run("a status, and trailers", func(t *testing.T) {
			var trailers metadata.MD
			asked := &testgrpc.EchoStatus{Code: int32(codes.DataLoss), Message: "100 % \t♥\n"}
			_, err := c.UnaryCall(t.Context(), &testgrpc.SimpleRequest{ResponseStatus: asked}, grpc.Trailer(&trailers))
			if s := status.Convert(err); s.Code() != codes.DataLoss || s.Message() != asked.Message {
				t.Errorf("got %v", err)
			}
			if d := cmp.Diff(metadata.MD{"x-why": {"asked"}, "x-bin-bin": {"\x00\xff"}, "headroom-load": {"7"}}, trailers, cmp.FilterPath(func(p cmp.Path) bool {
				return strings.Contains(p.GoString(), "content-type")
			}, cmp.Ignore())); d != "" {
				t.Error(d)
			}
		})
		for _, r := range l.router.endings(t, 1) {
			if r != fault.None {
				t.Errorf("a call ended with %q", r)
			}
		}
	})
}

// TestGRPCEnds wants calls that end before their time to end everywhere.
func TestGRPCEnds(t *testing.T) {
	hops(t, func(t *testing.T, two bool) {
		l, c, r := newGRPCLab(t, two)
		wait := &testgrpc.SimpleRequest{ResponseStatus: &testgrpc.EchoStatus{Message: "wait"}}

		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		_, err := c.UnaryCall(ctx, wait)
		cancel()
		if status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("got %v", err)
		}
		<-r.canceled

		ctx, cancel = context.WithCancel(t.Context())
		s, err := c.FullDuplexCall(ctx)
		if err != nil {
			t.Fatal(err)
		}
		s.Send(&testgrpc.StreamingOutputCallRequest{ResponseParameters: []*testgrpc.ResponseParameters{{Size: 1}}})
		if _, err := s.Recv(); err != nil {
			t.Error(err)
		}
		cancel()
		if _, err := s.Recv(); status.Code(err) != codes.Canceled {
			t.Errorf("got %v", err)
		}
		if err := <-r.canceled; status.Code(err) != codes.Canceled {
			t.Errorf("the replica got %v", err)
		}

		l.router.limit = 50 * time.Millisecond
		if _, err = c.UnaryCall(t.Context(), wait); status.Code(err) != codes.DeadlineExceeded || !strings.Contains(err.Error(), "headroom: the service's timeout ran out") {
			t.Errorf("got %v", err)
		}
		<-r.canceled
		s, err = c.FullDuplexCall(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		s.Send(&testgrpc.StreamingOutputCallRequest{ResponseParameters: []*testgrpc.ResponseParameters{{Size: 1}}})
		s.Recv()
		if _, err := s.Recv(); status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("in the middle of an answer: got %v", err)
		}
		got := l.router.endings(t, 4)
		if want := []fault.Reason{got[0], fault.Canceled, fault.Timeout, fault.Timeout}; !cmp.Equal(got, want) || got[0] != fault.Canceled && got[0] != fault.Timeout {
			t.Errorf("the calls ended with %q", got)
		}
	})
}

// TestGRPCFaults wants answers of the mesh to be such that gRPC understands them.
func TestGRPCFaults(t *testing.T) {
	hops(t, func(t *testing.T, two bool) {
		l, c, _ := newGRPCLab(t, two)
		l.router.hops = nil
		var head metadata.MD
		_, err := c.UnaryCall(t.Context(), &testgrpc.SimpleRequest{}, grpc.Trailer(&head))
		if s := status.Convert(err); s.Code() != codes.Unavailable || s.Message() != "headroom: service \"no\n100%\" has no replicas" {
			t.Errorf("got %v", err)
		}
		if got := head["headroom-reason"]; !cmp.Equal(got, []string{"no_endpoints"}) {
			t.Errorf("got %v", head)
		}
		l.router.endings(t, 1)
	})
}

// TestGRPCMaxStreams wants more connections where each takes few streams, and no call to fail for that.
func TestGRPCMaxStreams(t *testing.T) {
	hops(t, func(t *testing.T, two bool) {
		_, c, _ := newGRPCLab(t, two, grpc.MaxConcurrentStreams(3))
		var all sync.WaitGroup
		for range 50 {
			all.Go(func() {
				if _, err := c.UnaryCall(t.Context(), &testgrpc.SimpleRequest{Payload: payload(100), ResponseSize: 100}); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
	})
}

// TestGRPCGoAway wants no call to fail while the server lets one connection go after the other.
func TestGRPCGoAway(t *testing.T) {
	hops(t, func(t *testing.T, two bool) {
		_, c, _ := newGRPCLab(t, two, grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionAge: 20 * time.Millisecond, MaxConnectionAgeGrace: time.Minute}))
		var all sync.WaitGroup
		for range 10 {
			all.Go(func() {
				for end := time.Now().Add(500 * time.Millisecond); time.Now().Before(end); {
					if _, err := c.UnaryCall(t.Context(), &testgrpc.SimpleRequest{Payload: payload(2000), ResponseSize: 2000}); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		all.Wait()
	})
}

// TestGRPCDrain wants calls under way to end well when the engine ends.
func TestGRPCDrain(t *testing.T) {
	hops(t, func(t *testing.T, two bool) {
		l, c, _ := newGRPCLab(t, two)
		s, err := c.FullDuplexCall(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		echo := func() error {
			if err := s.Send(&testgrpc.StreamingOutputCallRequest{ResponseParameters: []*testgrpc.ResponseParameters{{Size: 1}}}); err != nil {
				return err
			}
			_, err := s.Recv()
			return err
		}
		if err := echo(); err != nil {
			t.Fatal(err)
		}
		l.stop()
		eventually(t, "new calls are refused", func() bool {
			_, err := c.UnaryCall(t.Context(), &testgrpc.SimpleRequest{})
			return err != nil
		})
		if err := echo(); err != nil {
			t.Error(err)
		}
		s.CloseSend()
		if _, err := s.Recv(); err != io.EOF {
			t.Errorf("got %v", err)
		}
		for _, r := range l.router.endings(t, 1) {
			if r != fault.None {
				t.Errorf("a call ended with %q", r)
			}
		}
	})
}
