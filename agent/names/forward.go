package names

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/miekg/dns"
)

const (
	// maxForwarded bounds the queries that wait for resolvers.
	maxForwarded = 1000
	// forwardTimeout is how long a query may wait in all; clients give up after some five seconds.
	forwardTimeout = 4 * time.Second
	// attemptTimeout is how long one resolver is waited for before the next one is asked as well.
	attemptTimeout = time.Second
)

var errNotAnswer = errors.New("the resolver answered something else")

// forwarder asks the node's resolvers.
type forwarder struct {
	dial      func(ctx context.Context, network, address string) (net.Conn, error)
	upstreams atomic.Pointer[[]netip.AddrPort] // in the order in which they are asked
	waiting   chan struct{}
}

func newForwarder(control func(network, address string, c syscall.RawConn) error) *forwarder {
	dialer := net.Dialer{Control: control}
	f := &forwarder{dial: dialer.DialContext, waiting: make(chan struct{}, maxForwarded)}
	f.upstreams.Store(new([]netip.AddrPort))
	return f
}

// reserve makes room for one more query to wait, if there is any.
func (f *forwarder) reserve() (release func(), ok bool) {
	select {
	case f.waiting <- struct{}{}:
		return func() { <-f.waiting }, true
	default:
		return nil, false
	}
}

// forward returns the answer of a resolver as it came, or nil if none came in time.
func (f *forwarder) forward(ctx context.Context, network string, query []byte) (answer []byte, took time.Duration) {
	start := time.Now()
	ctx, cancel := context.WithTimeout(ctx, forwardTimeout)
	a := &asking{
		forwarder: f, ctx: ctx, network: network, query: query,
		results: make(chan result),
	}
	for range 2 { // UDP loses messages
		a.queue = append(a.queue, *f.upstreams.Load()...)
	}
	answer = a.run()
	cancel()
	a.wg.Wait()
	return answer, time.Since(start)
}

// asking is the way of one query through the resolvers. Whoever is asked next, an earlier one may still answer first.
type asking struct {
	*forwarder
	ctx     context.Context
	network string
	query   []byte

	queue   []netip.AddrPort // those still to ask
	asked   int              // how many may still answer
	results chan result
	wg      sync.WaitGroup
}

type result struct {
	from   netip.AddrPort
	answer []byte
	err    error
}

func (a *asking) run() (answer []byte) {
	timer := time.NewTimer(attemptTimeout)
	defer timer.Stop()
	a.askNext(timer)
	for a.asked > 0 {
		select {
		case <-a.ctx.Done():
			return answer
		case <-timer.C:
			a.askNext(timer)
		case r := <-a.results:
			a.asked--
			if r.err == nil && !isFailure(r.answer) {
				return r.answer
			}
			if r.err == nil {
				// Another one may do better. If not, the client is told what the first one said.
				a.queue = slices.DeleteFunc(a.queue, func(at netip.AddrPort) bool { return at == r.from })
				if answer == nil {
					answer = r.answer
				}
			}
			a.askNext(timer)
		}
	}
	return answer
}

func (a *asking) askNext(timer *time.Timer) {
	if len(a.queue) == 0 {
		return
	}
	at := a.queue[0]
	a.queue = a.queue[1:]
	a.asked++
	timer.Reset(attemptTimeout)
	a.wg.Go(func() {
		answer, err := a.exchange(a.ctx, a.network, at, a.query)
		select {
		case a.results <- result{at, answer, err}:
		case <-a.ctx.Done():
		}
	})
}

// isFailure reports whether the answer says more about the resolver than about the name.
func isFailure(answer []byte) bool {
	return slices.Contains([]int{dns.RcodeServerFailure, dns.RcodeNotImplemented, dns.RcodeRefused}, header(answer).rcode())
}

// exchange asks one resolver. The socket is new, so its port is a random one, as is the ID: an answer that somebody made
// up would have to guess both.
func (f *forwarder) exchange(ctx context.Context, network string, at netip.AddrPort, query []byte) ([]byte, error) {
	conn, err := f.dial(ctx, network, at.String())
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	query = slices.Clone(query)
	id := header(query).id()
	header(query).setID(randomID())
	read, write := readDatagram, writeDatagram
	if network == "tcp" {
		read, write = readStream, writeStream
	}
	if err := write(conn, query); err != nil {
		return nil, err
	}
	answer, err := read(conn, query)
	if err != nil {
		return nil, err
	}
	header(answer).setID(id)
	return answer, nil
}

func randomID() uint16 {
	var b [2]byte
	_, _ = rand.Read(b[:]) // never fails
	return binary.BigEndian.Uint16(b[:])
}

func writeDatagram(conn net.Conn, query []byte) error {
	_, err := conn.Write(query)
	return err
}

// readDatagram waits for the answer among all that may come.
func readDatagram(conn net.Conn, query []byte) ([]byte, error) {
	buf := make([]byte, largestAnswer(query))
	for {
		n, err := conn.Read(buf)
		if err != nil {
			return nil, err
		}
		if answer := buf[:n]; isAnswerTo(answer, query) {
			return answer, nil
		}
	}
}

// largestAnswer is the size of the largest datagram that may come. Many queries may wait at once, so it is not simply the
// largest there can be.
func largestAnswer(query []byte) int {
	var q dns.Msg
	if q.Unpack(query) != nil {
		return dns.MaxMsgSize
	}
	const most = 4096 // that resolvers send to those who don't ask for more
	return max(most, maxSize("udp", q.IsEdns0()))
}

func writeStream(conn net.Conn, query []byte) error { return writeFrame(conn, query) }

func readStream(conn net.Conn, query []byte) ([]byte, error) {
	answer, err := readFrame(conn)
	if err == nil && !isAnswerTo(answer, query) {
		err = errNotAnswer
	}
	return answer, err
}
