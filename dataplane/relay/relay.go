// Package relay carries calls from the connections of callers to those of replicas and agents, whatever protocol the two
// ends speak. Where a call goes is for a Router to say.
package relay

import (
	"context"
	"net/netip"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/policy"
)

// Protocol is how the bytes of a connection are to be understood.
type Protocol int

const (
	Unknown Protocol = iota // to be told by the first bytes
	HTTP1
	HTTP2
	TCP // bytes, nothing more
)

// Router decides where calls go, and is told how they fare. It is safe for concurrent use.
type Router interface {
	// Begin takes in a call, whose head stays valid until the Call ends. Every Call is ended once.
	Begin(h Head, now time.Time) Call
}

// Call is one request on its way through the agent; for TCP, one connection. No two of its methods are called at the same
// time.
type Call interface {
	// Waits reports whether Next may have to wait for other agents.
	Waits() bool
	// Next returns where to send the call: at first, and again after each try that left the call unsent, with what went
	// wrong. It returns the fault with which to answer if the call can't be sent anywhere (any more). When ctx ends it
	// waits no longer; if ctx has no end it does not wait at all.
	Next(ctx context.Context, failed *fault.Error) (Hop, *fault.Error)
	// Answered takes in the head of the response, which has come in answer to the last try, and returns the fields to add
	// to it for the caller; they are valid until the Call ends. If it is the word of the replica's agent, not of the replica,
	// Answered returns what it says: the try has failed.
	Answered(h Answer, now time.Time) ([]Field, *fault.Error)
	// End is called when all is over.
	End(e Ending, now time.Time)
}

// Fields are those of a message. The memory that they are in is not the reader's: values are appended to dst.
type Fields interface {
	// Field appends the first value of a field, whose name is given in lower case. It returns false if there is none.
	Field(dst []byte, name string) ([]byte, bool)
}

// Head is what the beginning of a call tells.
type Head interface {
	Fields
	Protocol() Protocol
	// Method, Authority (Host, without a port it may lack) and Path (with the query) append what the call says; nothing, if it
	// is a TCP connection.
	Method(dst []byte) []byte
	Authority(dst []byte) []byte
	Path(dst []byte) []byte
	// Source is where the caller is, and Caller who.
	Source() netip.AddrPort
	Caller() *Caller
}

// Answer is what the beginning of a response tells.
type Answer interface {
	Fields
	Status() int
}

// Field is a field that an agent adds. The name is in lower case.
type Field struct {
	Name  string
	Value []byte
}

// Hop is the next station of a call.
type Hop struct {
	To *Upstream
	// Fields are added to the request.
	Fields []Field
	// Deadline is when the response must have been passed on whole. Zero means never.
	Deadline time.Time
	// Forwarded says how the replica is to learn of the caller's address. Set where the caller is, not where the replica is.
	Forwarded policy.Forwarded
	// Certified is whether the replica is to learn who the caller is. Set where the replica is.
	Certified bool
}

// Ending is how a call ended.
type Ending struct {
	// Reason is None if the response was passed on whole, as it came. If Answered never returned without a fault, it is what
	// the caller was told.
	Reason fault.Reason
	// Trailers are those of the response, nil if it had none.
	Trailers Fields
}

// Fields between agents. Neither callers nor replicas ever see or set a field whose name begins with Prefix, but for
// fault.Header in answers of the mesh itself.
const (
	Prefix           = "headroom-"
	FieldEndpoint    = Prefix + "endpoint"    // request: the replica that was picked
	FieldKey         = Prefix + "key"         // request: the hash of its key, where the rule wants the replica to know
	FieldReservation = Prefix + "reservation" // request: the slot that was reserved for it
	FieldSource      = Prefix + "source"      // request: where the caller is, IP:PORT
	FieldLoad        = Prefix + "load"        // response: a load.Report
	FieldReason      = Prefix + "reason"      // response: the fault.Reason, where the agent could not deliver
	FieldDetail      = Prefix + "detail"      // response: what fault.Error.Detail says then
)
