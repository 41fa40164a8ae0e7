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
	source io.Reader

	mu sync.Mutex
	// mu guards the fields below: a transport may still read when its try has already failed.
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
// (again): too much of it is gone, or the try before is still waiting for the caller to send more.
func (b *replayBody) next() (io.ReadCloser, bool) {
	if b == nil {
		return http.NoBody, true
	}
	if !b.mu.TryLock() {
		return nil, false
	}
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
	b := t.body
	b.mu.Lock()
	defer b.mu.Unlock()
	if t.try != b.try {
		return 0, errTryOver
	}
	if t.at < len(b.kept) {
		n := copy(p, b.kept[t.at:])
		t.at += n
		return n, nil
	}
	n, err := b.source.Read(p)
	b.spilt = b.spilt || len(b.kept)+n > replayLimit
	if !b.spilt {
		b.kept = append(b.kept, p[:n]...)
		t.at = len(b.kept)
	}
	return n, err
}

func (t *tryBody) Close() error { return nil }
