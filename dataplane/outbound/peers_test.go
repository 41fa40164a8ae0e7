package outbound

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"
)

// A request in flight to an agent that falls silent waits for it a while, and then fails; if the agent is back by then, it
// goes on.
func TestRequestsToASilentAgentEnd(t *testing.T) {
	agent := netip.MustParseAddrPort("10.0.0.2:15008")
	for _, tt := range []struct {
		name string
		back bool
	}{{"for good", false}, {"for a moment", true}} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ours, theirs := net.Pipe()
				defer theirs.Close()
				ps := newPeers(func(context.Context, netip.AddrPort) (net.Conn, error) { return ours, nil })
				defer ps.closeIdle()
				failed := make(chan error, 1)
				ctx, cancel := context.WithCancel(t.Context())
				go func() {
					r, _ := http.NewRequestWithContext(ctx, http.MethodGet, "http://service.mesh/", nil)
					_, err := ps.transport(agent).RoundTrip(r)
					failed <- err
				}()
				go io.Copy(io.Discard, theirs)
				synctest.Wait()

				start := time.Now()
				ps.fellSilent(start, agent)
				if tt.back {
					ps.isBack(agent)
				}
				ps.cutSilent(start.Add(patience - 1))
				synctest.Wait()
				select {
				case err := <-failed:
					t.Fatalf("the request failed too soon: %v", err)
				default:
				}
				ps.cutSilent(start.Add(patience))
				synctest.Wait()
				select {
				case err := <-failed:
					if tt.back || err == nil {
						t.Errorf("got %v", err)
					}
				default:
					if !tt.back {
						t.Error("the request still waits")
					}
				}
				cancel()
				theirs.Close()
				synctest.Wait()
			})
		})
	}
}
