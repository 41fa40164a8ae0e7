// Package probe carries probes and their answers between agents: for all services and replicas, one connection from
// each agent that probes to each that is probed.
//
// # Wire format
//
// The format belongs to protocol headroom-probe/2: whoever changes it gives the protocol another name. Numbers are
// big-endian. The dialer sends requests and the acceptor answers every one of them, in the order in which they came.
//
//	request:  length uint16   of what follows: 12 to 524
//	          id     uint32   any; returned with the answer
//	          key    uint64   hash of the key of the request that is to be placed; 0: none
//	          endpoint        the rest: SERVICE/NODE/ADDRESS, at most 512 bytes; empty: a ping
//
//	answer:   length  uint16  of what follows: 13
//	          id      uint32  of the request
//	          status  uint8   0 OK, 1 Unknown, 2 Unhealthy, 3 Draining
//	          rif     uint32  requests in flight, at most 2^20
//	          latency uint32  in µs, at most an hour; 2^32-1: unknown
//
// A ping asks only whether anybody is there; its answer has status Unknown. A replica that served the key lately may say
// less than its load. Either end closes the connection when the
// other breaks the format.
package probe

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/load"
	"github.com/headroom-mesh/headroom/registry"
)

// MaxEndpointID is the longest name of an endpoint that a probe carries.
const MaxEndpointID = 512

const (
	lengthSize     = 2
	idSize         = 4
	keySize        = 8
	answerSize     = idSize + 1 + 4 + 4
	minRequestSize = idSize + keySize
	maxRequestSize = minRequestSize + MaxEndpointID
	unknownLatency = math.MaxUint32
)

// Status says whether an endpoint takes requests.
type Status uint8

const (
	OK        Status = iota
	Unknown          // the probed agent has no such endpoint
	Unhealthy        // it fails its health check
	Draining         // it is about to leave
)

// Request is what a probe asks.
type Request struct {
	Endpoint registry.EndpointID // whose load
	Key      uint64              // hash of the key of the request that is to be placed; 0: none
	Urgent   bool                // whether somebody waits for the answer: it is sent at once, and not with those that follow
}

// Answer is what a probe finds out.
type Answer struct {
	Status Status
	Report load.Report
}

var (
	errFormat   = errors.New("not in the format of headroom-probe/2")
	errEndpoint = errors.New("the name of the endpoint is too long for a probe")
)

// AppendRequest appends the frame of a request to b. It fails only if the endpoint's name is longer than MaxEndpointID.
func AppendRequest(b []byte, id uint32, q Request) ([]byte, error) {
	if len(q.Endpoint) > MaxEndpointID {
		return b, fmt.Errorf("%.40q...: %d bytes, %d at most: %w", q.Endpoint, len(q.Endpoint), MaxEndpointID, errEndpoint)
	}
	b = binary.BigEndian.AppendUint16(b, uint16(minRequestSize+len(q.Endpoint)))
	b = binary.BigEndian.AppendUint32(b, id)
	b = binary.BigEndian.AppendUint64(b, q.Key)
	return append(b, q.Endpoint...), nil
}

// ReadRequest reads the frame of a request. The endpoint is valid until r is read again. The error wraps io.EOF if r ends
// before the frame begins. The buffer of r must hold a whole frame, as one of a KiB does.
func ReadRequest(r *bufio.Reader) (id uint32, key uint64, endpoint []byte, err error) {
	frame, err := readFrame(r, minRequestSize, maxRequestSize)
	if err != nil {
		return 0, 0, nil, fmt.Errorf("read a probe: %w", err)
	}
	return binary.BigEndian.Uint32(frame), binary.BigEndian.Uint64(frame[idSize:]), frame[minRequestSize:], nil
}

// AppendAnswer appends the frame of an answer to b. A report out of bounds is brought within them.
func AppendAnswer(b []byte, id uint32, a Answer) []byte {
	latency := uint32(unknownLatency)
	if a.Report.Known {
		latency = uint32(min(max(a.Report.Latency, 0), load.MaxLatency).Microseconds())
	}
	b = binary.BigEndian.AppendUint16(b, answerSize)
	b = binary.BigEndian.AppendUint32(b, id)
	b = append(b, byte(a.Status))
	b = binary.BigEndian.AppendUint32(b, uint32(min(max(a.Report.RIF, 0), load.MaxRIF)))
	return binary.BigEndian.AppendUint32(b, latency)
}

// ReadAnswer reads the frame of an answer. The error wraps io.EOF if r ends before the frame begins.
func ReadAnswer(r *bufio.Reader) (id uint32, a Answer, err error) {
	frame, err := readFrame(r, answerSize, answerSize)
	if err != nil {
		return 0, Answer{}, fmt.Errorf("read an answer: %w", err)
	}
	id = binary.BigEndian.Uint32(frame)
	a.Status = Status(frame[4])
	rif, latency := binary.BigEndian.Uint32(frame[5:]), binary.BigEndian.Uint32(frame[9:])
	if latency != unknownLatency {
		a.Report.Known = true
		a.Report.Latency = time.Duration(latency) * time.Microsecond
	}
	a.Report.RIF = int32(min(rif, math.MaxInt32))
	if a.Status > Draining || !a.Report.Valid() {
		return 0, Answer{}, fmt.Errorf("answer with status %d, %v: %w", a.Status, a.Report, errFormat)
	}
	return id, a, nil
}

// readFrame returns the next frame without its length, valid until r is read again.
func readFrame(r *bufio.Reader, least, most int) ([]byte, error) {
	head, err := r.Peek(lengthSize)
	if err != nil {
		return nil, endOfFrame(err, len(head))
	}
	n := int(binary.BigEndian.Uint16(head))
	if n < least || n > most {
		return nil, fmt.Errorf("a frame of %d bytes, want %d to %d: %w", n, least, most, errFormat)
	}
	frame, err := r.Peek(lengthSize + n)
	if err != nil {
		return nil, endOfFrame(err, len(frame))
	}
	r.Discard(len(frame)) // can't fail: they are buffered
	return frame[lengthSize:], nil
}

func endOfFrame(err error, got int) error {
	if err == io.EOF && got > 0 {
		return io.ErrUnexpectedEOF
	}
	return err
}
