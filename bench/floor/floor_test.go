package floor

import (
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/headroom-mesh/headroom/bench/certs"
)

// TestTwoRelays wants bytes to come through two relays with TLS between them, and back, also after half a close.
func TestTwoRelays(t *testing.T) {
	dir := t.TempDir()
	if err := certs.Make(dir); err != nil {
		t.Fatal(err)
	}
	in, out, err := certs.TLS(dir)
	if err != nil {
		t.Fatal(err)
	}
	echo := listen(t)
	var serving sync.WaitGroup
	t.Cleanup(serving.Wait)
	serving.Go(func() {
		c, err := echo.Accept()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		text, err := io.ReadAll(c)
		if err != nil {
			t.Error(err)
		}
		io.WriteString(c, strings.ToUpper(string(text)))
	})
	first, second := listen(t), listen(t)
	serving.Go(func() { (&Relay{To: []string{second.Addr().String()}, Out: out}).Serve(t.Context(), first) })
	serving.Go(func() { (&Relay{To: []string{echo.Addr().String()}, In: in}).Serve(t.Context(), second) })

	c, err := net.Dial("tcp", first.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	io.WriteString(c, "hello")
	c.(*net.TCPConn).CloseWrite()
	if answer, err := io.ReadAll(c); err != nil || string(answer) != "HELLO" {
		t.Errorf("%q, error %v", answer, err)
	}
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}
