package h1

import (
	"strings"
	"testing"
)

const (
	curl = "GET /index.html HTTP/1.1\r\nHost: web.mesh\r\nUser-Agent: curl/8.14.1\r\nAccept: */*\r\n\r\n"

	browser = "GET /api/v1/items?page=2&sort=price HTTP/1.1\r\nHost: shop.example.mesh\r\nConnection: keep-alive\r\n" +
		"User-Agent: Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/142.0.0.0 Safari/537.36\r\n" +
		"Accept: text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8\r\n" +
		"Accept-Encoding: gzip, deflate, br, zstd\r\nAccept-Language: en-GB,en;q=0.9\r\nReferer: http://shop.example.mesh/\r\n" +
		"Cookie: session=0123456789abcdef0123456789abcdef; theme=dark\r\nX-Request-Id: 7b7f2a40-2f6e-4a8e-9f83-5f8f2f9a7d3c\r\n" +
		"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n"

	answer = "HTTP/1.1 200 OK\r\nDate: Mon, 30 Nov 2026 06:00:00 GMT\r\nServer: nginx/1.29.3\r\nContent-Type: application/json; charset=utf-8\r\n" +
		"Content-Length: 128\r\nConnection: keep-alive\r\nETag: \"0123456789abcdef\"\r\nCache-Control: max-age=60, public\r\n" +
		"Vary: Accept-Encoding\r\nX-Request-Id: 7b7f2a40-2f6e-4a8e-9f83-5f8f2f9a7d3c\r\nHeadroom-Load: rif=1\r\n\r\n"

	chunks = "5\r\nhello\r\n6\r\n world\r\n0\r\nX-Sum: 11\r\nGrpc-Status: 0\r\n\r\n"
)

// TestAllocations wants a connection's memory to serve for all of its messages.
func TestAllocations(t *testing.T) {
	var r Request
	var resp Response
	var d Decoder
	out := make([]byte, 0, 4<<10)
	get := []byte("GET")
	for _, test := range []struct {
		name, bytes string
		read        func(b []byte)
	}{
		{"curl", curl, func(b []byte) { r.Parse(b); out = r.Append(out[:0]) }},
		{"browser", browser, func(b []byte) { r.Parse(b); out = r.Append(out[:0]) }},
		{"named by Connection", "GET http://a/ HTTP/1.1\r\nHost: b\r\nConnection: x, y, upgrade\r\nX: 1\r\nUpgrade: websocket\r\nTE: a, trailers\r\n\r\n", func(b []byte) {
			r.Parse(b)
			out = r.Append(out[:0])
		}},
		{"announced trailers", "POST / HTTP/1.1\r\nHost: b\r\nTrailer: X-Sum, Headroom-Load\r\nTransfer-Encoding: chunked\r\n\r\n", func(b []byte) {
			r.Parse(b)
			out = r.Append(out[:0])
		}},
		{"response", answer, func(b []byte) { resp.Parse(b, get); out = resp.Append(out[:0], resp.Framing) }},
		{"chunked", chunks, func(b []byte) {
			d.Reset()
			all := b
			for done, n := false, 0; !done; b = b[n:] {
				_, n, done, _ = d.Next(b)
			}
			out = d.AppendEnd(AppendChunk(out[:0], all))
		}},
	} {
		b := []byte(test.bytes)
		if n := testing.AllocsPerRun(100, func() { test.read(b) }); n != 0 {
			t.Errorf("%s: %v allocations", test.name, n)
		}
	}
}

func TestField(t *testing.T) {
	var r Request
	if _, err := r.Parse([]byte("GET / HTTP/1.1\r\nHost: a\r\nX-A: 1\r\nx-a: 2\r\nX-B:\r\nHeadroom-Load: b\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name, want string
		ok         bool
	}{{"x-a", ">1", true}, {"x-b", ">", true}, {"x-", ">", false}, {"x-c", ">", false}, {"headroom-load", ">b", true}, {"host", ">a", true}} {
		if got, ok := r.Field([]byte(">"), test.name); string(got) != test.want || ok != test.ok {
			t.Errorf("%s: got %q, %v", test.name, got, ok)
		}
	}
	r.Drop("x-a")
	r.Drop("host") // which can't be dropped
	if got, want := string(r.Append(nil)), "GET / HTTP/1.1\r\nHost: a\r\nX-B: \r\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestTrailersLast wants the trailers to stay until the decoder is used again, and then to be gone.
func TestTrailersLast(t *testing.T) {
	var d Decoder
	for range 2 {
		read := []byte(chunks)
		for b, done, n := read, false, 0; !done; b = b[n:] {
			_, n, done, _ = d.Next(b)
		}
		clear(read) // as a buffer that serves for something else
		if got, ok := d.Field(nil, "x-sum"); string(got) != "11" || !ok || len(d.Trailers()) != 2 {
			t.Errorf("got %q, %v, %d trailers", got, ok, len(d.Trailers()))
		}
		d.Reset()
		if len(d.Trailers()) != 0 {
			t.Errorf("%d trailers are left over", len(d.Trailers()))
		}
	}
}

func BenchmarkRequest(b *testing.B) {
	for _, bench := range []struct{ name, bytes string }{
		{"curl", curl},
		{"browser", browser},
		{"longest", "GET / HTTP/1.1\r\nHost: a\r\n" + strings.Repeat("X-Field-Number: "+strings.Repeat("v", 236)+"\r\n", 254) + "\r\n"},
	} {
		b.Run(bench.name, func(b *testing.B) {
			var r Request
			in := []byte(bench.bytes)
			b.SetBytes(int64(len(in)))
			b.ReportAllocs()
			for b.Loop() {
				if n, err := r.Parse(in); n != len(in) {
					b.Fatal(n, err)
				}
			}
		})
	}
}

func BenchmarkAppend(b *testing.B) {
	var r Request
	if _, err := r.Parse([]byte(browser)); err != nil {
		b.Fatal(err)
	}
	out := make([]byte, 0, 4<<10)
	b.ReportAllocs()
	for b.Loop() {
		out = r.Append(out[:0])
	}
}

func BenchmarkResponse(b *testing.B) {
	var r Response
	in, method := []byte(answer), []byte("GET")
	b.ReportAllocs()
	for b.Loop() {
		if n, err := r.Parse(in, method); n != len(in) {
			b.Fatal(n, err)
		}
	}
}

func BenchmarkChunked(b *testing.B) {
	var d Decoder
	whole := []byte(chunks)
	b.ReportAllocs()
	for b.Loop() {
		d.Reset()
		for in, done, n := whole, false, 0; !done; in = in[n:] {
			_, n, done, _ = d.Next(in)
		}
	}
}
