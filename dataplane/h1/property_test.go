package h1

import (
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// TestSegments reads pipelined requests, which come in pieces of any size, and wants them to be the same as in one piece.
func TestSegments(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var stream strings.Builder
		for range rapid.IntRange(1, 5).Draw(t, "requests") {
			stream.WriteString(drawRequest(t))
		}
		cuts := rapid.SliceOfN(rapid.IntRange(1, 40), 1, 50).Draw(t, "pieces")
		whole, pieces := readStream(stream.String(), []int{len(stream.String())}), readStream(stream.String(), cuts)
		if whole != pieces {
			t.Fatalf("%q\nin one piece:\n%s\nin pieces:\n%s", stream.String(), whole, pieces)
		}
	})
}

// TestDamage puts odd bytes into requests, and wants net/http to read what is accepted, and what is sent on, in the same way.
func TestDamage(t *testing.T) {
	odd := []string{"\r", "\n", "\r\n", "\r\n\r\n", " ", "\t", ":", ",", "\x00", "\x0b", "\x7f", "\xff", "\u2028", "%", "%00", "#", "@", "/", "[", "]", ";", "0", "-", "+", "_",
		"chunked", "close", "Host: b\r\n", "Content-Length: 1\r\n", "Transfer-Encoding: chunked\r\n", "Connection: host\r\n", " \r\n"}
	rapid.Check(t, func(t *rapid.T) {
		b := drawRequest(t) + drawRequest(t)
		for range rapid.IntRange(1, 3).Draw(t, "damages") {
			at := rapid.IntRange(0, len(b)).Draw(t, "at")
			end := min(len(b), at+rapid.IntRange(0, 3).Draw(t, "lost"))
			b = b[:at] + rapid.SampledFrom(odd).Draw(t, "odd") + b[end:]
		}
		checkRequest(t, []byte(b))
	})
}

func drawRequest(t *rapid.T) string {
	pick := func(label string, of ...string) string { return rapid.SampledFrom(of).Draw(t, label) }
	var out strings.Builder
	out.WriteString(pick("before", "", "", "\r\n"))
	out.WriteString(pick("method", "GET", "POST", "OPTIONS", "X") + " " + pick("target", "/", "/a?b", "http://a.mesh/c", "http://a.mesh") + " " + pick("version", "HTTP/1.1", "HTTP/1.0") + "\r\n")
	fields := []string{"Host: a.mesh"}
	for range rapid.IntRange(0, 5).Draw(t, "fields") {
		fields = append(fields, pick("field", "Accept: */*", "X-A:b", "x-b:  c\t", "Empty:", "Connection: keep-alive", "Connection: close, x-a", "Headroom-Key: 1",
			"TE: trailers", "Connection: upgrade\r\nUpgrade: a", "Cookie: \"\xe9\"", "Expect: 100-continue", "Pragma: no-cache"))
	}
	data := rapid.StringN(0, 20, 40).Draw(t, "body")
	switch pick("framing", "none", "length", "chunked") {
	case "length":
		fields = append(fields, fmt.Sprintf("Content-Length: %d", len(data)))
	case "chunked":
		fields = append(fields, "Transfer-Encoding: chunked", "Trailer: X-Sum")
		if data != "" {
			data = fmt.Sprintf("%x\r\n%s\r\n", len(data), data)
		}
		data += pick("end", "0\r\n\r\n", "00\r\nX-Sum: 1\r\n\r\n", "0\r\nHeadroom-Load: a\r\nX-Sum: \r\nCookie: b\r\n\r\n")
	default:
		data = ""
	}
	for _, i := range rapid.Permutation(indices(len(fields))).Draw(t, "order") {
		out.WriteString(fields[i] + "\r\n")
	}
	return out.String() + "\r\n" + data
}

func indices(n int) (all []int) {
	for i := range n {
		all = append(all, i)
	}
	return all
}

// readStream tells what a connection brings on which the bytes come in pieces, whose sizes are repeated to the end.
func readStream(stream string, pieces []int) string {
	var out strings.Builder
	var r Request
	var in []byte
	more := func() bool {
		n := min(pieces[0], len(stream))
		in = append([]byte(nil), in...) // elsewhere, as buffers grow
		in, stream, pieces = append(in, stream[:n]...), stream[n:], append(pieces[1:len(pieces):len(pieces)], pieces[0])
		return n > 0
	}
	for {
		n, err := r.Parse(in)
		switch {
		case err != nil:
			fmt.Fprintf(&out, "refused: %v\n", err)
			return out.String()
		case n == 0:
			if !more() {
				fmt.Fprintf(&out, "left: %q\n", in)
				return out.String()
			}
			continue
		}
		fmt.Fprintf(&out, "%q for %q, %v %d\n", r.Append(nil), r.Authority, r.Framing, r.Length)
		in = in[n:]
		body, ok := readSegments(&r, &in, more)
		fmt.Fprintf(&out, "body %s\n", body)
		if !ok {
			return out.String()
		}
	}
}

// readSegments reads the body that follows.
func readSegments(r *Request, in *[]byte, more func() bool) (told string, ok bool) {
	if r.Framing != Chunked {
		for int64(len(*in)) < r.Length {
			if !more() {
				return "breaks off", false
			}
		}
		told, *in = fmt.Sprintf("%q", (*in)[:r.Length]), (*in)[r.Length:]
		return told, true
	}
	var d Decoder
	var body []byte
	for {
		data, n, done, err := d.Next(*in)
		body = append(body, data...)
		*in = (*in)[n:]
		switch {
		case err != nil:
			return fmt.Sprintf("%q, then %v", body, err), false
		case done:
			return fmt.Sprintf("%q, ending with %q", body, d.AppendEnd(nil)), true
		case n == 0 && !more():
			return fmt.Sprintf("%q breaks off", body), false
		}
	}
}
