//go:build linux

package load

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
)

// messages cuts HTTP/1.1 messages out of the bytes of a connection. It knows bodies with a Content-Length, no others.
type messages struct {
	begun func(head []byte) error // called with each head
	ended func() error            // called when a message has come whole
	head  []byte                  // of which the end has not come yet
	body  int                     // bytes of the body that are to come
	open  bool                    // between head and end
}

const maxHead = 16 << 10

func (m *messages) received(p []byte) error {
	for len(p) > 0 {
		if !m.open {
			n, err := m.begin(p)
			if err != nil {
				return err
			}
			p = p[n:]
		}
		n := min(m.body, len(p))
		m.body -= n
		p = p[n:]
		if m.open && m.body == 0 {
			m.open = false
			if err := m.ended(); err != nil {
				return err
			}
		}
	}
	return nil
}

// begin takes in as much of p as belongs to the head, which mostly comes whole.
func (m *messages) begin(p []byte) (n int, err error) {
	head, known := p, len(m.head)
	if known > 0 {
		m.head = append(m.head, p...)
		head = m.head
	}
	end := bytes.Index(head, []byte("\r\n\r\n"))
	if end < 0 {
		if len(head) > maxHead {
			return 0, errors.New("a head without an end")
		}
		if known == 0 {
			m.head = append(m.head, p...)
		}
		return len(p), nil
	}
	end += len("\r\n\r\n")
	if m.body, err = contentLength(head[:end]); err != nil {
		return 0, err
	}
	m.open, m.head = true, m.head[:0]
	return end - known, m.begun(head[:end])
}

func contentLength(head []byte) (int, error) {
	for line := range bytes.SplitSeq(head, []byte("\r\n")) {
		name, value, _ := bytes.Cut(line, []byte(":"))
		switch {
		case len(name) == len("content-length") && bytes.EqualFold(name, []byte("content-length")):
			return strconv.Atoi(string(bytes.TrimSpace(value)))
		case len(name) == len("transfer-encoding") && bytes.EqualFold(name, []byte("transfer-encoding")):
			return 0, fmt.Errorf("a body with %s, though its length was given at first", line)
		}
	}
	return 0, nil
}

// h1Caller makes one call at a time.
type h1Caller struct {
	messages
	conn    *conn
	request []byte
	upload  int // bytes of the body
	want    int // bytes of the body of the response
	call    *call
}

func newH1Caller(c *conn, k Kind, authority string) caller {
	h := &h1Caller{conn: c, upload: k.up, want: k.down}
	method, length := "GET", ""
	if k.up > 0 {
		method, length = "POST", fmt.Sprintf("Content-Length: %d\r\n", k.up)
	}
	h.request = fmt.Appendf(nil, "%s /%d HTTP/1.1\r\nHost: %s\r\nUser-Agent: bench/1.0\r\nAccept: */*\r\n%s\r\n", method, k.down, authority, length)
	h.begun, h.ended = h.check, func() error { h.call.done(nil); return nil }
	h.call = newCall(c, h.start)
	return h
}

func (h *h1Caller) calls() []*call { return []*call{h.call} }

func (h *h1Caller) start() {
	h.conn.out = append(h.conn.out, h.request...)
	h.conn.filler = h.upload
}

func (h *h1Caller) check(head []byte) error {
	if !h.call.active {
		return fmt.Errorf("a response that nobody asked for: %q", head)
	}
	if !bytes.HasPrefix(head, []byte("HTTP/1.1 200")) {
		return fmt.Errorf("the answer: %s", oneLine(head))
	}
	if bytes.Contains(head, []byte("onnection: close\r\n")) {
		return fmt.Errorf("the answer ends the connection, which was to stay open: %s", oneLine(head))
	}
	if h.body != h.want {
		return fmt.Errorf("a body of %d bytes, want %d", h.body, h.want)
	}
	return nil
}

func oneLine(head []byte) []byte {
	return bytes.ReplaceAll(bytes.TrimSpace(head), []byte("\r\n"), []byte(", "))
}

func (h *h1Caller) closed(err error) { h.call.fail(err) }

// h1Origin answers with as many bytes as the path says, once the request has come whole.
type h1Origin struct {
	messages
	conn *conn
	size int
}

func newH1Origin(c *conn) handler {
	h := &h1Origin{conn: c}
	h.begun, h.ended = h.readPath, h.answer
	return h
}

func (h *h1Origin) readPath(head []byte) (err error) {
	fields := bytes.SplitN(head, []byte(" "), 3)
	if len(fields) < 3 || !bytes.HasPrefix(fields[1], []byte("/")) {
		return fmt.Errorf("not a request: %q", head)
	}
	h.size, err = strconv.Atoi(string(fields[1][1:]))
	return err
}

func (h *h1Origin) answer() error {
	out := append(h.conn.out, "HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: "...)
	out = strconv.AppendInt(out, int64(h.size), 10)
	h.conn.out = append(out, "\r\n\r\n"...)
	if h.size <= smallBody {
		h.conn.out = append(h.conn.out, h.conn.loop.filler[:h.size]...)
		return nil
	}
	h.conn.filler = h.size
	return nil
}

// smallBody is sent together with the head; more is not copied.
const smallBody = 1 << 10

func (h *h1Origin) closed(error) {}
