package httpio

import (
	"context"
	"errors"
	"io"
	"sync"
)

// BodyEnd says how the body of a response ended.
type BodyEnd int

const (
	BodyComplete BodyEnd = iota
	BodyBroken           // the other end failed
	BodyAborted          // the reader lost interest, or its context ended
)

// TrackBody returns a body that reads from body and calls ended exactly once, at its end or when it is closed. The body
// of an upgraded connection (101) keeps its Write method.
func TrackBody(ctx context.Context, body io.ReadCloser, ended func(BodyEnd)) io.ReadCloser {
	t := &trackedBody{ReadCloser: body, ctx: ctx, ended: ended}
	if rw, ok := body.(io.ReadWriteCloser); ok {
		return &trackedUpgrade{trackedBody: t, w: rw}
	}
	return t
}

type trackedBody struct {
	io.ReadCloser
	ctx   context.Context
	once  sync.Once
	ended func(BodyEnd)
}

func (t *trackedBody) Read(p []byte) (int, error) {
	n, err := t.ReadCloser.Read(p)
	switch {
	case err == nil:
	case errors.Is(err, io.EOF):
		t.end(BodyComplete)
	case errors.Is(t.ctx.Err(), context.Canceled):
		t.end(BodyAborted)
	default:
		t.end(BodyBroken)
	}
	return n, err
}

func (t *trackedBody) Close() error {
	err := t.ReadCloser.Close()
	t.end(BodyAborted)
	return err
}

func (t *trackedBody) end(how BodyEnd) { t.once.Do(func() { t.ended(how) }) }

// trackedUpgrade is an upgraded connection: closing it is how it ends.
type trackedUpgrade struct {
	*trackedBody
	w io.Writer
}

func (t *trackedUpgrade) Write(p []byte) (int, error) { return t.w.Write(p) }

func (t *trackedUpgrade) Close() error {
	t.end(BodyComplete)
	return t.trackedBody.Close()
}
