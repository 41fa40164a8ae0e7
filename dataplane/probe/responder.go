package probe

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/headroom-mesh/headroom/registry"
)

const (
	responderIdle  = 10 * time.Minute // clients close what they don't use much sooner
	responderWrite = 5 * time.Second  // for a client to make room for answers
	maxAnswers     = 4 << 10          // bytes of answers that wait to be written
	maxNames       = 256              // endpoints that a connection remembers
)

// Responder answers probes.
type Responder struct {
	// Lookup answers a probe of an endpoint of this node. It must be quick and safe for concurrent use.
	Lookup func(now time.Time, q Request) Answer
	// Log is where to log. Default: nowhere.
	Log *slog.Logger
}

// Serve answers probes on the connections that l accepts, until ctx ends; then it closes l and the connections. When l
// is closed by somebody else it goes on with the connections it has. It returns when all of them have ended.
func (r *Responder) Serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer cancel() // after wg.Wait, unless accepting failed
	defer wg.Wait()
	defer context.AfterFunc(ctx, func() { l.Close() })()
	for {
		c, err := l.Accept()
		switch {
		case err == nil:
			wg.Go(func() { r.serve(ctx, c) })
		case ctx.Err() != nil || errors.Is(err, net.ErrClosed):
			return nil
		default:
			cancel()
			return fmt.Errorf("accept connections for probes: %w", err)
		}
	}
}

// serve answers the probes of one client. It reads no further while the client doesn't read answers.
func (r *Responder) serve(ctx context.Context, c net.Conn) {
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	err := r.answer(c)
	if ctx.Err() == nil && !errors.Is(err, io.EOF) && r.Log != nil {
		r.Log.Debug("a connection for probes broke", "peer", c.RemoteAddr(), "err", err)
	}
}

func (r *Responder) answer(c net.Conn) error {
	rw := &limitedConn{conn: c}
	in := bufio.NewReaderSize(rw, 4<<10)
	var answers []byte
	names := make(map[string]registry.EndpointID)
	for {
		id, key, endpoint, err := ReadRequest(in)
		if err != nil {
			return err
		}
		answers = AppendAnswer(answers, id, r.lookup(names, endpoint, key))
		if requestBuffered(in) && len(answers) < maxAnswers {
			continue
		}
		if _, err := rw.Write(answers); err != nil {
			return fmt.Errorf("write answers: %w", err)
		}
		answers = answers[:0]
	}
}

// requestBuffered reports whether the next request can be read without waiting.
func requestBuffered(in *bufio.Reader) bool {
	if in.Buffered() < lengthSize {
		return false
	}
	head, _ := in.Peek(lengthSize)
	return in.Buffered() >= lengthSize+int(head[0])<<8+int(head[1])
}

// lookup answers one request. The names of endpoints are remembered to have no garbage from every probe.
func (r *Responder) lookup(names map[string]registry.EndpointID, endpoint []byte, key uint64) Answer {
	if len(endpoint) == 0 {
		return Answer{Status: Unknown}
	}
	id, ok := names[string(endpoint)]
	if !ok {
		if len(names) == maxNames {
			clear(names)
		}
		id = registry.EndpointID(endpoint)
		names[string(id)] = id
	}
	return r.Lookup(time.Now(), Request{Endpoint: id, Key: key})
}

// limitedConn is a connection on which no read and no write takes too long. It moves the deadlines only now and then, as
// that costs as much as an answer: the limits are exceeded by a half at most.
type limitedConn struct {
	conn            net.Conn
	readBy, writeBy time.Time
}

func (l *limitedConn) Read(b []byte) (int, error) {
	if t := time.Now().Add(responderIdle); t.After(l.readBy) {
		l.readBy = t.Add(responderIdle / 2)
		l.conn.SetReadDeadline(l.readBy)
	}
	return l.conn.Read(b)
}

func (l *limitedConn) Write(b []byte) (int, error) {
	if t := time.Now().Add(responderWrite); t.After(l.writeBy) {
		l.writeBy = t.Add(responderWrite / 2)
		l.conn.SetWriteDeadline(l.writeBy)
	}
	return l.conn.Write(b)
}
