package h1

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func FuzzRequest(f *testing.F) {
	for _, b := range seeds(f, "requests") {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) { checkRequest(t, b) })
}

func checkRequest(t rapid.TB, b []byte) {
	var r Request
	n, err := r.Parse(b)
	checkPrefixes(t, b, n, err, new(Request).Parse)
	if n == 0 {
		return
	}
	checkRequestRoundTrip(t, &r)
	checkRequestByHTTP(t, &r, b, n)
}

func FuzzResponse(f *testing.F) {
	for _, method := range []string{"GET", "HEAD", "CONNECT"} {
		for _, b := range seeds(f, "responses") {
			f.Add(b, method)
		}
	}
	f.Fuzz(func(t *testing.T, b []byte, method string) { checkResponse(t, b, method) })
}

func checkResponse(t rapid.TB, b []byte, method string) {
	var r Response
	n, err := r.Parse(b, []byte(method))
	checkPrefixes(t, b, n, err, func(b []byte) (int, error) {
		return new(Response).Parse(b, []byte(method))
	})
	if n == 0 {
		return
	}
	checkResponseRoundTrip(t, &r, method)
	if method != "CONNECT" { // net/http leaves it to its client
		checkResponseByHTTP(t, &r, b, n, method)
	}
}

func FuzzChunked(f *testing.F) {
	for _, b := range seeds(f, "bodies") {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) { checkChunked(t, b) })
}

func checkChunked(t rapid.TB, b []byte) {
	whole := decode(b, len(b))
	for _, step := range []int{1, 2, 7} {
		if split := decode(b, step); !whole.equal(split) {
			t.Fatalf("%q: got %+v, but in pieces of %d %+v", b, whole, step, split)
		}
	}
	if !whole.done {
		return
	}
	again := whole.d.AppendEnd(AppendChunk(AppendChunk(nil, []byte("x")), whole.data))
	sent := decode(again, len(again))
	if !sent.done || sent.used != len(again) || string(sent.data) != "x"+string(whole.data) {
		t.Fatalf("%q: sent on as %q, which is read as %+v", b, again, sent)
	}
	head := []byte("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
	var r Request
	if _, err := r.Parse(head); err != nil {
		t.Fatal(err)
	}
	checkRequestByHTTP(t, &r, slices.Concat(head, b), len(head))
}

// seeds returns the examples, but for the longest, with which fuzzing is slow.
func seeds(f *testing.F, command string) [][]byte {
	return slices.DeleteFunc(examples(f, command), func(b []byte) bool { return len(b) > 1<<10 })
}

// TestExamplesByHTTP does what the fuzz targets do with the longest examples.
func TestExamplesByHTTP(t *testing.T) {
	for _, b := range examples(t, "requests") {
		checkRequest(t, b)
	}
	for _, b := range examples(t, "responses") {
		checkResponse(t, b, "GET")
	}
	for _, b := range examples(t, "bodies") {
		checkChunked(t, b)
	}
}

// checkPrefixes wants the same to be read however much of b has come, as soon as that is there.
func checkPrefixes(t rapid.TB, b []byte, n int, err error, parse func([]byte) (int, error)) {
	t.Helper()
	want, refused := errors.AsType[*Error](err)
	if err != nil && (!refused || n != 0 || want.Detail == "") {
		t.Fatalf("%q: got %d, %v", b, n, err)
	}
	wrong := false
	for i := 0; i <= len(b); i += 1 + len(b)/300 {
		got, err := parse(b[:i])
		if err != nil {
			if want == nil || err.(*Error).Status != want.Status {
				t.Fatalf("%q: got %d, %v, but of %q %v", b, n, want, b[:i], err)
			}
			wrong = true
			continue
		}
		if wrong || got > i || got != 0 && got != n || n > 0 && got == 0 && i >= n {
			t.Fatalf("%q: got %d, %v, but of %q %d", b, n, want, b[:i], got)
		}
	}
}

func checkRequestRoundTrip(t rapid.TB, r *Request) {
	t.Helper()
	sent := append(r.Append(nil), "\r\n"...)
	var again Request
	n, err := again.Parse(sent)
	if len(sent) > MaxHead && err != nil {
		return
	}
	if err != nil || n != len(sent) {
		t.Fatalf("sent on as %q, which is read as %d, %v", sent, n, err)
	}
	if string(again.Method) != string(r.Method) || string(again.Authority) != string(r.Authority) ||
		string(again.Path) != string(r.Path) || again.Framing != r.Framing || again.Length != r.Length ||
		string(again.Upgrade) != string(r.Upgrade) || again.TakesTrailers != r.TakesTrailers {
		t.Fatalf("got %+v, sent on as %q, which is read as %+v", r, sent, again)
	}
	checkSent(t, again.Fields)
	if twice := append(again.Append(nil), "\r\n"...); !bytes.Equal(twice, sent) {
		t.Fatalf("sent on as %q, and then as %q", sent, twice)
	}
}

func checkResponseRoundTrip(t rapid.TB, r *Response, method string) {
	t.Helper()
	sent := append(r.Append(nil, r.Framing), "\r\n"...)
	var again Response
	n, err := again.Parse(sent, []byte(method))
	if len(sent) > MaxHead && err != nil {
		return
	}
	if err != nil || n != len(sent) || again.Code != r.Code || string(again.Reason) != string(r.Reason) ||
		again.Framing != r.Framing || again.Length != r.Length {
		t.Fatalf("got %+v, sent on as %q, which is read as %+v, %v", r, sent, again, err)
	}
	checkSent(t, again.Fields)
	if twice := append(again.Append(nil, again.Framing), "\r\n"...); !bytes.Equal(twice, sent) {
		t.Fatalf("sent on as %q, and then as %q", sent, twice)
	}
}

// checkSent wants nothing to be sent on that is not for the other end.
func checkSent(t rapid.TB, fields []Field) {
	t.Helper()
	for _, f := range fields {
		name := strings.ToLower(string(f.Name))
		if strings.HasPrefix(name, "headroom-") ||
			slices.Contains([]string{"endpoint-load-metrics", "endpoint-load-metrics-bin", "keep-alive", "proxy-connection"}, name) {
			t.Fatalf("field %s was sent on", f.Name)
		}
	}
}

// checkRequestByHTTP wants net/http to read the same request, body and end in b.
func checkRequestByHTTP(t rapid.TB, r *Request, b []byte, n int) {
	t.Helper()
	body := readBody(r.Framing, r.Length, b[n:])
	in := bufio.NewReaderSize(bytes.NewReader(bytes.TrimPrefix(b, []byte("\r\n"))), 2*MaxHead)
	req, err := http.ReadRequest(in)
	if err != nil {
		t.Fatalf("%q: net/http says %v", b, err)
	}
	if req.Method != string(r.Method) || req.RequestURI != string(r.Target) || req.Host != string(r.Authority) ||
		req.ProtoMinor != r.Minor || req.Close == r.KeepAlive {
		t.Fatalf("%q: got %+v, but net/http %+v", b, r, req)
	}
	checkFields(t, r.Fields, req.Header, r.Framing)
	checkBody(t, body, req.Body, &req.Trailer, in)
}

func checkResponseByHTTP(t rapid.TB, r *Response, b []byte, n int, method string) {
	t.Helper()
	body := readBody(r.Framing, r.Length, b[n:])
	in := bufio.NewReaderSize(bytes.NewReader(b), 2*MaxHead)
	resp, err := http.ReadResponse(in, &http.Request{Method: method})
	if err != nil {
		t.Fatalf("%q: net/http says %v", b, err)
	}
	status := strings.TrimPrefix(strings.TrimPrefix(resp.Status, strconv.Itoa(r.Code)), " ")
	if resp.StatusCode != r.Code || status != string(r.Reason) || resp.ProtoMinor != r.Minor || resp.Close == r.KeepAlive {
		t.Fatalf("%q: got %+v, but net/http %+v", b, r, resp)
	}
	checkFields(t, r.Fields, resp.Header, r.Framing)
	checkBody(t, body, resp.Body, &resp.Trailer, in)
}

// checkFields compares the fields of a head, apart from those that net/http takes out, or adds.
func checkFields(t rapid.TB, fields []Field, header http.Header, framing Framing) {
	t.Helper()
	ours := byName(fields)
	theirs := maps.Clone(header)
	for _, h := range []http.Header{ours, theirs} {
		for _, name := range []string{"Host", "Connection", "Content-Length", "Transfer-Encoding"} {
			h.Del(name)
		}
		if framing == Chunked || len(theirs["Trailer"]) == 0 {
			h.Del("Trailer")
		}
		if ours.Get("Pragma") == "no-cache" && len(ours["Cache-Control"]) == 0 || len(h["Pragma"]) > 0 {
			h.Del("Cache-Control")
		}
	}
	if !maps.EqualFunc(ours, theirs, slices.Equal) {
		t.Fatalf("got %q, but net/http %q", ours, theirs)
	}
}

func byName(fields []Field) http.Header {
	h := http.Header{}
	for _, f := range fields {
		h.Add(string(f.Name), string(f.Value))
	}
	return h
}

// checkBody compares the body, the trailers, and what is left for the next message.
func checkBody(t rapid.TB, ours decoded, body io.Reader, trailer *http.Header, in *bufio.Reader) {
	t.Helper()
	theirs, err := io.ReadAll(body)
	if !ours.done {
		if ours.err == "" && err == nil {
			t.Fatalf("net/http reads %q where there should be more of the body", theirs)
		}
		return
	}
	if err != nil && strings.Contains(err.Error(), "too much non-data") {
		return
	}
	left, _ := io.ReadAll(in)
	if err != nil || !bytes.Equal(theirs, ours.data) || len(left) != ours.left {
		t.Fatalf("got body %q, %d bytes left, but net/http %q, %v, %d bytes", ours.data, ours.left, theirs, err, len(left))
	}
	for name, values := range byName(ours.d.Trailers()) {
		if !slices.Equal(values, (*trailer)[name]) {
			t.Fatalf("got trailer %s %q, but net/http %q", name, values, *trailer)
		}
	}
}

// decoded is what was read of a body.
type decoded struct {
	data []byte
	used int // bytes
	left int // bytes, if done
	done bool
	err  string
	d    Decoder
}

func (d *decoded) equal(o decoded) bool {
	return bytes.Equal(d.data, o.data) && d.done == o.done && (d.err == "") == (o.err == "") && (!d.done || d.used == o.used) &&
		slices.EqualFunc(d.d.Trailers(), o.d.Trailers(), func(a, b Field) bool {
			return bytes.Equal(a.Name, b.Name) && bytes.Equal(a.Value, b.Value)
		})
}

// decode reads a chunked body that comes in pieces.
func decode(b []byte, step int) (out decoded) {
	for end := 0; ; {
		data, n, done, err := out.d.Next(b[out.used:end])
		out.data = append(out.data, data...)
		out.used += n
		switch {
		case err != nil:
			out.err = err.Error()
			return out
		case done:
			out.done, out.left = true, len(b)-out.used
			return out
		case n == 0 && end == len(b):
			return out
		case n == 0:
			end = min(end+step, len(b))
		}
	}
}

func readBody(framing Framing, length int64, b []byte) decoded {
	switch framing {
	case Chunked:
		return decode(b, len(b))
	case UntilClose:
		return decoded{data: b, done: true}
	}
	if int64(len(b)) < length {
		return decoded{}
	}
	return decoded{data: b[:length], left: len(b) - int(length), done: true}
}
