package relay

import (
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/dataplane/h1"
	"github.com/headroom-mesh/headroom/dataplane/h2"
	"github.com/headroom-mesh/headroom/policy"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// requestLocked makes x.fields and x.more the head of the request as the next station sees it.
func (x *stream) requestLocked(hop *Hop) {
	named := x.head.fields.get(":authority") != ""
	fields := x.fields[:0]
	for i := range x.head.fields {
		f := &x.head.fields[i]
		switch {
		case strings.HasPrefix(f.Name, Prefix):
		case f.Name == "host" && named: // it says the same
		case f.Name == "x-forwarded-for" && hop.Forwarded == policy.ForwardedXFF: // part of the new one
		case f.Name == "forwarded" && hop.Forwarded == policy.ForwardedRFC:
		case f.Name == fieldCertificate && hop.hidesCertificate():
		default:
			fields = append(fields, *f)
		}
	}
	if !x.entry.Agents {
		fields = append(fields, hpack.HeaderField{Name: "via", Value: viaHTTP2})
	}
	fields = x.appendForwarded(fields, hop.Forwarded)
	if hop.Certified && !x.caller.ID.IsZero() {
		fields = append(fields, hpack.HeaderField{Name: fieldCertificate, Value: string(x.engine.certificateOf(nil, &x.caller))})
	}
	x.fields = fields
	x.more = appendMore(x.more[:0], hop.Fields)
}

const viaHTTP2 = "2" + viaName

// loopedLocked reports whether the request has gone around in circles.
func (x *stream) loopedLocked() bool {
	n := 0
	for i := range x.head.fields {
		if f := &x.head.fields[i]; f.Name == "via" && !x.entry.Agents {
			n += visits([]byte(f.Value))
		}
	}
	return n >= maxVisits
}

// appendForwarded tells the replica where the caller is.
func (x *stream) appendForwarded(fields []hpack.HeaderField, how policy.Forwarded) []hpack.HeaderField {
	switch how {
	case policy.ForwardedRFC:
		node := appendNode([]byte("for="), x.source.Addr())
		return append(fields, hpack.HeaderField{Name: "forwarded", Value: x.joined("forwarded", string(node)+";proto=http")})
	case policy.ForwardedXFF:
	default:
		return fields
	}
	fields = append(fields, hpack.HeaderField{Name: "x-forwarded-for", Value: x.joined("x-forwarded-for", x.source.Addr().String())})
	if x.head.fields.get("x-forwarded-proto") == "" {
		fields = append(fields, hpack.HeaderField{Name: "x-forwarded-proto", Value: "http"})
	}
	if x.head.fields.get("x-forwarded-host") == "" {
		fields = append(fields, hpack.HeaderField{Name: "x-forwarded-host", Value: string(x.head.Authority(nil))})
	}
	return fields
}

// joined returns what the caller says in fields of a name, and one more, in one list.
func (x *stream) joined(name, last string) string {
	var list []string
	for i := range x.head.fields {
		if f := &x.head.fields[i]; f.Name == name && f.Value != "" {
			list = append(list, f.Value)
		}
	}
	return strings.Join(append(list, last), ", ")
}

func appendMore(dst []h2.Field, fields []Field) []h2.Field {
	for _, f := range fields {
		dst = append(dst, h2.Field(f))
	}
	return dst
}

// passed appends the fields that are for the other end, too.
func passed(dst, fields []hpack.HeaderField) []hpack.HeaderField {
	for i := range fields {
		if f := &fields[i]; !strings.HasPrefix(f.Name, Prefix) && f.Name != "endpoint-load-metrics" && f.Name != "endpoint-load-metrics-bin" {
			dst = append(dst, *f)
		}
	}
	return dst
}

// statusOf returns the status of a response.
func statusOf(fields []hpack.HeaderField) int {
	status, _ := strconv.Atoi(fields[0].Value)
	return status
}

// repeatableLocked reports whether the request can be sent twice, and that does what sending it once does.
func (x *stream) repeatableLocked() bool {
	return !x.spilt && h1.Idempotent(x.head.fields.get(":method"))
}

// grpcTimeout reads the field grpc-timeout: up to eight digits, and a unit.
func grpcTimeout(v string) (time.Duration, bool) {
	if len(v) < 2 || len(v) > 9 {
		return 0, false
	}
	unit := time.Duration(0)
	switch v[len(v)-1] {
	case 'n':
		unit = time.Nanosecond
	case 'u':
		unit = time.Microsecond
	case 'm':
		unit = time.Millisecond
	case 'S':
		unit = time.Second
	case 'M':
		unit = time.Minute
	case 'H':
		unit = time.Hour
	}
	n, err := strconv.ParseUint(v[:len(v)-1], 10, 32)
	if err != nil || unit == 0 || n > uint64(maxTimeout/unit) {
		return 0, false
	}
	return time.Duration(n) * unit, true
}

// maxTimeout is as good as none.
const maxTimeout = 10 * 365 * 24 * time.Hour

func (x *stream) isGRPC() bool {
	return strings.HasPrefix(x.head.fields.get("content-type"), "application/grpc")
}

// answerFaultLocked writes an answer of the mesh's own.
func (x *stream) answerFaultLocked(f *fault.Error) {
	fields := append(x.fields[:0], hpack.HeaderField{Name: ":status", Value: strconv.Itoa(f.Status())})
	text := "headroom: " + f.Detail + "\n"
	switch {
	case x.entry.Agents:
		fields = append(fields, reasonField(f), hpack.HeaderField{Name: FieldDetail, Value: strings.TrimSpace(oneLine(f.Detail))})
		text = ""
	case x.isGRPC():
		fields[0].Value = "200"
		fields = append(fields, hpack.HeaderField{Name: "content-type", Value: "application/grpc"}, reasonField(f))
		fields = appendGRPCStatus(fields, f)
		text = ""
	default:
		fields = append(fields, reasonField(f), hpack.HeaderField{Name: "content-type", Value: "text/plain; charset=utf-8"},
			hpack.HeaderField{Name: "content-length", Value: strconv.Itoa(len(text))})
		if x.head.fields.get(":method") == http.MethodHead {
			text = ""
		}
	}
	x.fields = fields
	x.down.WriteHeaders(fields, nil, text == "")
	if text != "" && x.down.Write([]byte(text), true) < len(text) { // its window is tiny
		x.down.Reset(http2.ErrCodeCancel)
	}
	if !x.upEnd {
		x.down.Reset(http2.ErrCodeNo)
	}
}

// breakOffLocked ends an answer so that nobody takes it for whole: for gRPC, with a status, which says more than a reset.
func (x *stream) breakOffLocked(f *fault.Error) {
	if !x.isGRPC() || x.toDown.len() > 0 {
		code := http2.ErrCodeInternal
		if f.Reason == fault.Timeout {
			code = http2.ErrCodeCancel
		}
		x.down.Reset(code)
		return
	}
	x.fields = appendGRPCStatus(append(x.fields[:0], reasonField(f)), f)
	x.down.WriteHeaders(x.fields, nil, true)
	if !x.upEnd {
		x.down.Reset(http2.ErrCodeNo)
	}
}

func reasonField(f *fault.Error) hpack.HeaderField {
	return hpack.HeaderField{Name: FieldReason, Value: string(f.Reason)}
}

func appendGRPCStatus(dst []hpack.HeaderField, f *fault.Error) []hpack.HeaderField {
	return append(dst, hpack.HeaderField{Name: "grpc-status", Value: strconv.Itoa(f.Reason.GRPC())},
		hpack.HeaderField{Name: "grpc-message", Value: grpcMessage("headroom: " + f.Detail)})
}

// grpcMessage encodes text for the field grpc-message.
func grpcMessage(text string) string {
	const hex = "0123456789ABCDEF"
	var b strings.Builder
	for i := range len(text) {
		if c := text[i]; c >= ' ' && c <= '~' && c != '%' {
			b.WriteByte(c)
		} else {
			b.WriteByte('%')
			b.WriteByte(hex[c>>4])
			b.WriteByte(hex[c&15])
		}
	}
	return b.String()
}

// leftFault is what becomes of a call whose caller has reset its stream.
func leftFault(why h2.Cause) *fault.Error {
	if why == h2.Malformed {
		return fault.New(fault.BadRequest, "the body of the request is malformed")
	}
	return fault.New(fault.Canceled, "the caller went away")
}
