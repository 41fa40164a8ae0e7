// Package h2 is one HTTP/2 connection (RFC 9113), at either end. It works on events: what comes is handed to a Handler as
// it is read, what goes is gathered and written by one goroutine. No stream has a goroutine of its own.
package h2

import (
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// Bounds on what the other end may do.
const (
	// MaxHeaderBytes bounds a decoded list of fields, as RFC 9113, 6.5.2, counts: 32 bytes a field and its own.
	MaxHeaderBytes = 64 << 10
	// MaxStreams is how many streams the other end may have open.
	MaxStreams = 1000
	// streamWindow is how much of a stream may come before somebody has taken it in. It bounds what waits in memory.
	streamWindow = 512 << 10
	// connWindow is how much of all streams may come before it was read; what is read but waits for somebody counts only
	// beyond mostQueued. So a stream that nobody reads does not stop the others.
	connWindow = 4 << 20
	mostQueued = 16 << 20
	// mostPending is how much may wait to be written. Beyond, streams are told to wait.
	mostPending = 256 << 10
	// frameSize is the largest frame that either end sends: the smallest bound that anybody may set.
	frameSize = 16 << 10
	// tableSize is the size of the table of fields that either end keeps.
	tableSize = 4096

	// A connection may have so many of its streams reset beyond those that ended well, and so many frames in a row that carry
	// nothing: more is an attack (CVE-2023-44487, CVE-2019-9512, -9515, -9518).
	mostResets = 1000
	mostEmpty  = 10000
)

const (
	// pingAfter is how long a connection with open streams may be silent before the other end is asked if it is there, and
	// pingTimeout how long it may take to answer.
	pingAfter   = 10 * time.Second
	pingTimeout = 5 * time.Second
	// prefaceTimeout bounds the time for the first words of the other end.
	prefaceTimeout = 10 * time.Second
)

// Handler is told what comes. Its methods are called by the goroutine that reads the connection, and Writable by the one
// that writes it, too; they must not wait. What they are given is theirs until they return.
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
	// Reset says that a stream has ended before its time. If unsent is true, the other end has done nothing about it.
	Reset(s *Stream, code http2.ErrCode, unsent bool)
}
