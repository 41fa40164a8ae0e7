// Package h2 is one HTTP/2 connection (RFC 9113), at either end. It works on events: what comes is handed to a Handler as
// it is read, what goes is gathered and written many frames at once. No stream has a goroutine of its own.
package h2

import (
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// Bounds on what the other end may do.
const (
	// MaxHeaderBytes bounds a decoded list of fields, as RFC 9113, 6.5.2, counts: 32 bytes a field and its own. MaxFields
	// bounds their number.
	MaxHeaderBytes = 64 << 10
	MaxFields      = 256
	// MaxStreams is how many streams the other end may have open.
	MaxStreams = 1000
	// streamWindow is how much of a stream may come before somebody has taken it in: at 10 ms a round trip, 100 MB/s. It
	// bounds what waits in memory for a receiver that is slow.
	streamWindow = 1 << 20
	// connWindow is how much of all streams may come before it was read; what is read but waits for somebody counts only
	// beyond mostQueued. So a stream that nobody reads does not stop the others.
	connWindow = 4 << 20
	mostQueued = 16 << 20
	// mostPending is how much may wait to be written before streams are told to wait. While others wait, a stream may add
	// turn at a time.
	mostPending = 256 << 10
	turn        = 64 << 10
	// mostBacklog is how much may wait that no window bounds. Who does not read it is cut off.
	mostBacklog = 8 << 20
	// frameSize is the largest frame that either end sends: the smallest bound that anybody may set.
	frameSize = 16 << 10
	// tableSize is the size of the table of fields that either end keeps.
	tableSize = 4096
	// mostFragments bounds the frames that one list of fields comes in (CVE-2024-27316).
	mostFragments = 128
)

// Bounds on how often. What is spent comes back with time, and with what is of use.
const (
	// mostResets is how many streams may be reset in a burst, and resetsPerSecond how many for long. Each that ends well
	// makes up for one (CVE-2023-44487, CVE-2025-8671).
	mostResets      = 1000
	resetsPerSecond = 100
	// mostIdle is how many frames may come that carry nothing: pings, settings, priorities, empty data (CVE-2019-9512,
	// -9515, -9518). One that carries something makes up for ten.
	mostIdle = 10000
)

const (
	// pingAfter is how long a connection with open streams may be silent before the other end is asked if it is there, and
	// pingTimeout how long it may take to answer.
	pingAfter   = 10 * time.Second
	pingTimeout = 5 * time.Second
	// prefaceTimeout bounds the time for the first words of the other end.
	prefaceTimeout = 10 * time.Second
	// goAwayTimeout is how long the other end may take to hear that it is to open no more streams.
	goAwayTimeout = time.Second
	// lingerTime is how long a connection at its end waits for the other end to close it, too.
	lingerTime = time.Second
)

// Handler is told what comes. Its methods are called by the goroutine that reads the connection; Writable also by others.
// They must not wait. What they are given is theirs until they return, but for strings. What they write to other
// connections goes out when those are flushed: see FlushAfter.
type Handler interface {
	// Headers hands over the head of a message: at the server's end, that of a new stream; at the client's, that of a
	// response, which may be an informational one.
	Headers(s *Stream, fields []hpack.HeaderField, end bool)
	// Data hands over a part of the body. Its length is to be given to Consumed some time.
	Data(s *Stream, p []byte, end bool)
	// Trailers hands over the fields after the body.
	Trailers(s *Stream, fields []hpack.HeaderField)
	// Writable says that a stream whose Write took less than all may go on.
	Writable(s *Stream)
	// Reset says that a stream has ended before its time.
	Reset(s *Stream, code http2.ErrCode, why Cause)
}

// Cause is why a stream has ended before its time.
type Cause int

const (
	ByPeer    Cause = iota // the other end has reset it
	Unseen                 // the other end has done nothing about it: it can be sent again
	Malformed              // the other end has broken the rules of HTTP
	Broken                 // the connection has failed
)

// Field is a field that neither end remembers for later messages.
type Field struct {
	Name  string
	Value []byte
}
