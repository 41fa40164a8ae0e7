//go:build linux

package conformance

import (
	"context"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	_ "google.golang.org/grpc/encoding/gzip" // registers itself
	"google.golang.org/grpc/grpclog"
	"google.golang.org/grpc/interop"
	testgrpc "google.golang.org/grpc/interop/grpc_testing"
)

// survivor is a log by which a test of gRPC fails, not the whole process.
type survivor struct{ grpclog.LoggerV2 }

func newSurvivor() survivor { return survivor{grpclog.NewLoggerV2(io.Discard, io.Discard, io.Discard)} }

// interopFailure is what a test of gRPC finds wrong.
type interopFailure string

func (survivor) Fatal(args ...any)   { panic(interopFailure(fmt.Sprint(args...))) }
func (survivor) Fatalln(args ...any) { panic(interopFailure(fmt.Sprintln(args...))) }
func (survivor) Fatalf(format string, args ...any) {
	panic(interopFailure(fmt.Sprintf(format, args...)))
}

// named tells in its answers which server it is.
type named struct {
	testgrpc.TestServiceServer
	name string
}

func (s named) UnaryCall(ctx context.Context, r *testgrpc.SimpleRequest) (*testgrpc.SimpleResponse, error) {
	answer, err := s.TestServiceServer.UnaryCall(ctx, r)
	if err == nil && r.FillServerId {
		answer.ServerId = s.name
	}
	return answer, err
}

func serveGRPC(t *testing.T, l net.Listener) {
	s := grpc.NewServer()
	testgrpc.RegisterTestServiceServer(s, named{interop.NewTestServer(), l.Addr().String()})
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := s.Serve(l); err != nil {
			t.Errorf("serve gRPC: %v", err)
		}
	})
	t.Cleanup(func() {
		s.Stop()
		serving.Wait()
	})
}

// testGRPC runs gRPC's interop tests with its own client and server. Left out are those that are about credentials of
// Google, TLS to the server, or a server's reports of its load, which agents keep to themselves; and pick_first_unary,
// as agents pick a replica for each call: see testPickPerCall.
func testGRPC(t *testing.T, at target) {
	ways := map[string]string{"listener": at.services[serviceGRPC]}
	if at.proxy != "" {
		ways["proxy"] = at.proxy
	}
	for name, address := range ways {
		t.Run(name, func(t *testing.T) { interopCases(t, at, address) })
	}
}

func interopCases(t *testing.T, at target, address string) {
	conn, err := grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority(serviceGRPC+".mesh"),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return at.node.DialContext(ctx, "tcp", address) }))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := testgrpc.NewTestServiceClient(conn)
	gzip := grpc.UseCompressor("gzip")
	for _, c := range []struct {
		name string
		run  func(context.Context)
	}{
		{"empty_unary", func(ctx context.Context) { interop.DoEmptyUnaryCall(ctx, client) }},
		{"large_unary", func(ctx context.Context) { interop.DoLargeUnaryCall(ctx, client) }},
		{"large_unary compressed", func(ctx context.Context) { interop.DoLargeUnaryCall(ctx, client, gzip) }},
		{"client_streaming", func(ctx context.Context) { interop.DoClientStreaming(ctx, client) }},
		{"client_streaming compressed", func(ctx context.Context) { interop.DoClientStreaming(ctx, client, gzip) }},
		{"server_streaming", func(ctx context.Context) { interop.DoServerStreaming(ctx, client) }},
		{"ping_pong", func(ctx context.Context) { interop.DoPingPong(ctx, client) }},
		{"ping_pong compressed", func(ctx context.Context) { interop.DoPingPong(ctx, client, gzip) }},
		{"empty_stream", func(ctx context.Context) { interop.DoEmptyStream(ctx, client) }},
		{"timeout_on_sleeping_server", func(ctx context.Context) { interop.DoTimeoutOnSleepingServer(ctx, client) }},
		{"cancel_after_begin", func(ctx context.Context) { interop.DoCancelAfterBegin(ctx, client) }},
		{"cancel_after_first_response", func(ctx context.Context) { interop.DoCancelAfterFirstResponse(ctx, client) }},
		{"status_code_and_message", func(ctx context.Context) { interop.DoStatusCodeAndMessage(ctx, client) }},
		{"special_status_message", func(ctx context.Context) { interop.DoSpecialStatusMessage(ctx, client) }},
		{"custom_metadata", func(ctx context.Context) { interop.DoCustomMetadata(ctx, client) }},
		{"unimplemented_method", func(context.Context) { interop.DoUnimplementedMethod(t.Context(), conn) }},
		{"unimplemented_service", func(ctx context.Context) {
			interop.DoUnimplementedService(ctx, testgrpc.NewUnimplementedServiceClient(conn))
		}},
		{"rpc_soak", func(ctx context.Context) { interop.DoSoakTest(ctx, soak(conn)) }},
		{"pick per call", func(ctx context.Context) { pickPerCall(ctx, client, at) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			defer func() {
				if r := recover(); r != nil {
					t.Errorf("%v", r)
				}
			}()
			c.run(ctx)
		})
	}
}

// soak is a steady stream of calls, of which none may fail.
func soak(conn *grpc.ClientConn) interop.SoakTestConfig {
	return interop.SoakTestConfig{
		RequestSize: 271828, ResponseSize: 314159, PerIterationMaxAcceptableLatency: 5 * time.Second, OverallTimeout: patience,
		NumWorkers: 4, Iterations: 40,
		ChannelForTest: func() (*grpc.ClientConn, func()) { return conn, func() {} },
	}
}

// pickPerCall wants calls on one connection to be answered by both servers.
func pickPerCall(ctx context.Context, client testgrpc.TestServiceClient, at target) {
	seen := map[string]bool{}
	for range 50 {
		answer, err := client.UnaryCall(ctx, &testgrpc.SimpleRequest{FillServerId: true})
		if err != nil {
			panic(err)
		}
		seen[answer.ServerId] = true
	}
	if at.proxy != "" && len(seen) != 2 {
		panic(fmt.Sprintf("answers came from %v", seen))
	}
}
