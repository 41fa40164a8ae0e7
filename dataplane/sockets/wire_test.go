package sockets_test

import (
	"bytes"
	"io"
	"net"
	"testing"

	"github.com/headroom-mesh/headroom/dataplane/sockets"
)

// pair returns two ends of a TCP connection, of which one is a Wire.
func pair(t *testing.T) (*sockets.Wire, *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	far, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { far.Close() })
	near, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { near.Close() })
	return sockets.Wired(near).(*sockets.Wire), far.(*net.TCPConn)
}

// TestAttend expects a function to be called when something comes, to read it without waiting, and to learn of the end though
// that comes together with bytes that are of no use alone.
func TestAttend(t *testing.T) {
	w, far := pair(t)
	if sockets.WireOf(w) != w || sockets.Wired(w) != net.Conn(w) {
		t.Error("a Wire is not known as one")
	}
	var got []byte
	calls := 0
	err := w.Attend(func() bool {
		if calls++; calls == 1 {
			if _, err := w.Read(make([]byte, 10)); err != sockets.ErrNothing {
				t.Errorf("read before anything has come: %v", err)
			}
			io.WriteString(far, "ab")
			far.CloseWrite()
			return false
		}
		records := &pairs{w: w}
		for {
			b := make([]byte, 100)
			n, err := w.ReadThrough(records, b)
			if got = append(got, b[:n]...); err != nil {
				return err == io.EOF
			}
		}
	})
	if err != nil || string(got) != "ab" {
		t.Errorf("got %q, %v after %d calls", got, err, calls)
	}
}

// pairs hands on what has come in records of three bytes, the last of which may be shorter.
type pairs struct {
	net.Conn
	w    *sockets.Wire
	have []byte
}

func (p *pairs) Read(b []byte) (int, error) {
	for len(p.have) < 3 {
		part := make([]byte, 3-len(p.have))
		n, err := p.w.Read(part)
		p.have = append(p.have, part[:n]...)
		if err == io.EOF && len(p.have) > 0 {
			break
		}
		if err != nil {
			return 0, err
		}
	}
	n := copy(b, p.have)
	p.have = nil
	return n, nil
}

// TestWriteMoreThanFits expects all to arrive, in order, however it is written, when it is more than the kernel takes at once.
func TestWriteMoreThanFits(t *testing.T) {
	w, far := pair(t)
	sent := bytes.Repeat([]byte("0123456789abcdef"), 1<<19)
	part := len(sent) / 3
	done := make(chan error, 1)
	go func() {
		got, err := io.ReadAll(far)
		if err == nil && !bytes.Equal(got, sent) {
			err = io.ErrUnexpectedEOF
		}
		done <- err
	}()
	asked := false
	err := w.Attend(func() bool {
		if asked {
			return true
		}
		asked = true
		w.Direct(true)
		defer w.Direct(false)
		if n, err := w.Write(sent[:part]); n != part || err != nil {
			t.Errorf("wrote %d, %v", n, err)
		}
		return true
	})
	if err != nil {
		t.Error(err)
	}
	w.Gather(make([]byte, 0, 16))
	w.Write(sent[part : part+10])
	w.Write(sent[part+10 : 2*part])
	if err := w.Flush(); err != nil {
		t.Error(err)
	}
	rest := sent[2*part:]
	for len(rest) > 1<<20 {
		n, err := w.WriteNow(rest)
		if err != nil {
			t.Fatal(err)
		}
		rest = rest[n:]
	}
	if _, err := w.Write(rest); err != nil {
		t.Error(err)
	}
	w.CloseWrite()
	if err := <-done; err != nil {
		t.Errorf("the other end: %v", err)
	}
}

// TestGatherInAttend expects what is gathered to keep its order, though the connection takes bytes now and then only.
func TestGatherInAttend(t *testing.T) {
	w, far := pair(t)
	var filled int
	err := w.Attend(func() bool {
		w.Direct(true)
		defer w.Direct(false)
		chunk := make([]byte, 64<<10)
		for {
			n, err := w.WriteNow(chunk)
			if err != nil {
				t.Fatal(err)
			}
			if filled += n; n == 0 {
				break
			}
		}
		w.Gather(make([]byte, 0, 16))
		io.WriteString(w, "first")
		if _, err := io.CopyN(io.Discard, far, int64(filled)); err != nil {
			t.Error(err)
		}
		io.WriteString(w, "second")
		if err := w.Flush(); err != nil {
			t.Error(err)
		}
		return true
	})
	if err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len("firstsecond"))
	if _, err := io.ReadFull(far, got); err != nil || string(got) != "firstsecond" {
		t.Errorf("got %q, %v", got, err)
	}
}
