package h2

import (
	"sync"

	"github.com/headroom-mesh/headroom/dataplane/sockets"
)

// Buffers lends connections memory to read into, while there is something to read.
type Buffers struct{ pool sync.Pool }

// readSize is what is read at once.
const readSize = 32 << 10

func (b *Buffers) take() []byte {
	if p, ok := b.pool.Get().(*[readSize]byte); ok {
		return p[:]
	}
	return make([]byte, readSize)
}

func (b *Buffers) put(p []byte) {
	if cap(p) == readSize {
		b.pool.Put((*[readSize]byte)(p[:readSize]))
	}
}

// input reads a connection. While it waits it holds no buffer.
type input struct {
	conn    *Conn
	buffers *Buffers
	b       []byte // nil if nothing is left to read in it
	r, w    int

	wire   *sockets.Wire // nil if the connection can't be read without waiting
	try    func() bool
	tryErr error
}

func (i *input) init(c *Conn, cfg Config) {
	i.conn, i.buffers = c, cfg.Buffers
	i.b, i.w = cfg.Begun, len(cfg.Begun)
	i.wire = sockets.WireOf(c.net)
	i.try = i.tryRead
}

// Read reads what is there; if nothing is, it waits.
func (i *input) Read(p []byte) (int, error) {
	for i.r == i.w {
		if err := i.fill(); err != nil {
			return 0, err
		}
	}
	n := copy(p, i.b[i.r:i.w])
	i.r += n
	return n, nil
}

// fill waits for more. What was gathered meanwhile is flushed first.
func (i *input) fill() error {
	i.conn.flushLater()
	for {
		err := i.wait()
		if i.w > 0 {
			i.conn.heard.Store(true)
			return nil
		}
		if err = i.conn.timedOut(err); err != nil {
			return err
		}
		i.conn.Flush()
	}
}

func (i *input) wait() (err error) {
	i.r, i.w = 0, 0
	if i.wire != nil {
		i.release()
		if err = i.wire.Attend(i.try); err == nil {
			err = i.tryErr
		}
		return err
	}
	i.acquire()
	i.w, err = i.conn.net.Read(i.b)
	return err
}

func (i *input) acquire() {
	if len(i.b) < readSize {
		i.b = i.buffers.take()
	}
}

func (i *input) release() {
	if i.b != nil {
		i.buffers.put(i.b)
		i.b = nil
	}
}

// tryRead reads without waiting. It returns false if there is nothing yet.
func (i *input) tryRead() bool {
	i.acquire()
	i.w, i.tryErr = i.wire.ReadThrough(i.conn.net, i.b)
	if i.tryErr == sockets.ErrNothing {
		i.release()
		return false
	}
	return true
}
