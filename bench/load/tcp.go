//go:build linux

package load

// tcpQuestion is what a caller sends to be sent a stream of bytes. Its size is all that the origin looks at.
const tcpQuestion = "question"

// tcpCaller asks for one stream of bytes after the other.
type tcpCaller struct {
	conn *conn
	want int
	left int
	call *call
}

func newTCPCaller(c *conn, k Kind, _ string) caller {
	h := &tcpCaller{conn: c, want: k.down}
	h.call = newCall(c, h.start)
	return h
}

func (h *tcpCaller) calls() []*call { return []*call{h.call} }

func (h *tcpCaller) start() {
	h.left = h.want
	h.conn.out = append(h.conn.out, tcpQuestion...)
}

func (h *tcpCaller) received(p []byte) error {
	if len(p) > h.left {
		return errTooMuch
	}
	h.left -= len(p)
	if h.left == 0 {
		h.call.done(nil)
	}
	return nil
}

func (h *tcpCaller) closed(err error) { h.call.fail(err) }

// tcpOrigin sends a stream for each question.
type tcpOrigin struct {
	conn *conn
	got  int
}

func newTCPOrigin(c *conn) handler { return &tcpOrigin{conn: c} }

func (h *tcpOrigin) received(p []byte) error {
	h.got += len(p)
	h.conn.filler += h.got / len(tcpQuestion) * bulk
	h.got %= len(tcpQuestion)
	return nil
}

func (h *tcpOrigin) closed(error) {}
