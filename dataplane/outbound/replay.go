package outbound

import (
	"errors"
	"io"
	"net/http"
	"sync"
)

// replayLimit is how much of a request's body is kept for another try. A body that went further can't be sent again.
const replayLimit = 64 << 10

// replayBody is the body of a request that may be tried more than once. It remembers what was read of it, up to
// replayLimit, and hands that out again to the next try.
type replayBody struct {
	reads  sync.Mutex // held during a read: a transport may still be at it when its try has already failed
	source io.Reader

	mu sync.Mutex
	// mu guards the fields below.

	kept  []byte
	spilt bool // more was read than is kept
	try   int
}

// replayable returns the request's body as one that can be sent again, nil if it has none.
func replayable(r *http.Request) *replayBody {
	if r.Body == nil || r.Body == http.NoBody {
		return nil
	}
	return &replayBody{source: r.Body}
}

// next returns the body for the next try, and ends the one of the try before. It returns false if the body can't be sent
// (again), as too much of it is gone.
func (b *replayBody) next() (io.ReadCloser, bool) {
	if b == nil {
		return http.NoBody, true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.try++
	return &tryBody{body: b, try: b.try}, !b.spilt
}

// tryBody is the body as one try sees it. Closing it leaves the caller's body open for the next try; net/http closes
// that at the end of the request.
type tryBody struct {
	body *replayBody
	try  int
	at   int // next byte of kept to hand out
}

var errTryOver = errors.New("the request is being tried elsewhere")

func (t *tryBody) Read(p []byte) (int, error) {
	if n, err := t.again(p); n > 0 || err != nil {
		return n, err
	}
	b := t.body
	b.reads.Lock()
	defer b.reads.Unlock()
	if n, err := t.again(p); n > 0 || err != nil { // what the try before was waiting for
		return n, err
	}
	n, err := b.source.Read(p)
	if !t.keep(p[:n]) {
		return 0, errTryOver
	}
	return n, err
}

// again hands out what was read before.
func (t *tryBody) again(p []byte) (int, error) {
	b := t.body
	b.mu.Lock()
	defer b.mu.Unlock()
	if t.try != b.try {
		return 0, errTryOver
	}
	n := copy(p, b.kept[min(t.at, len(b.kept)):])
	t.at += n
	return n, nil
}

// keep takes in what was just read. It returns false if the try ended meanwhile: then the next one needs all of it.
func (t *tryBody) keep(p []byte) bool {
	b := t.body
	b.mu.Lock()
	defer b.mu.Unlock()
	over := t.try != b.try
	b.spilt = b.spilt || !over && len(b.kept)+len(p) > replayLimit
	if !b.spilt {
		b.kept = append(b.kept, p...)
	}
	t.at += len(p)
	return !over
}

func (t *tryBody) Close() error { return nil }
