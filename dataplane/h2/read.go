package h2

import (
	"errors"
	"io"
	"math"
	"slices"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// read reads frames until the connection fails, or is not needed any more.
func (c *Conn) read() error {
	c.net.SetReadDeadline(time.Now().Add(prefaceTimeout))
	c.Flush()
	if c.server {
		if err := c.readPreface(); err != nil {
			return err
		}
	}
	for {
		err := c.readFrame()
		if e, ok := errors.AsType[http2.StreamError](err); ok {
			err = c.streamError(e)
		}
		if err != nil {
			return err
		}
	}
}

func (c *Conn) readPreface() error {
	var got [len(http2.ClientPreface)]byte
	if _, err := io.ReadFull(&c.input, got[:]); err != nil {
		return err
	}
	if string(got[:]) != http2.ClientPreface {
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	return nil
}

func (c *Conn) readFrame() error {
	header, err := c.reader.ReadFrameHeader()
	if err != nil {
		return err
	}
	if !c.greeted && header.Type != http2.FrameSettings {
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	f, err := c.reader.ReadFrameForHeader(header)
	if err == nil {
		return c.take(f)
	}
	if e, ok := errors.AsType[http2.StreamError](err); ok && header.Type == http2.FrameHeaders {
		return http2.ConnectionError(e.Code) // the tables of fields can't be kept in step
	}
	return err
}

// streamError resets a stream on which the other end broke the rules.
func (c *Conn) streamError(e http2.StreamError) error {
	c.mu.Lock()
	s := c.streams[e.StreamID]
	if s == nil && c.idleLocked(e.StreamID) {
		if !c.server || e.StreamID%2 == 0 {
			c.mu.Unlock()
			return http2.ConnectionError(http2.ErrCodeProtocol)
		}
		c.last = e.StreamID // a frame that could not be read opened it nevertheless
	}
	c.resetLocked(s, e.StreamID, e.Code)
	err := c.spendLocked()
	c.mu.Unlock()
	if s != nil {
		c.handler.Reset(s, e.Code, Malformed)
	}
	return err
}

// spendLocked counts a stream that was reset.
func (c *Conn) spendLocked() error {
	if !c.trusted && c.server && !c.spent.spend(time.Now(), mostResets, resetsPerSecond) {
		return http2.ConnectionError(http2.ErrCodeEnhanceYourCalm)
	}
	return nil
}

// idleLocked reports whether a stream was never opened.
func (c *Conn) idleLocked(id uint32) bool {
	if ours := id%2 == 1; ours != c.server {
		return id >= c.next
	}
	return id > c.last
}

func (c *Conn) take(f http2.Frame) error {
	switch f := f.(type) {
	case *http2.DataFrame:
		return c.data(f)
	case *http2.HeadersFrame:
		return c.headers(f)
	case *http2.WindowUpdateFrame:
		return c.windowUpdate(f)
	case *http2.RSTStreamFrame:
		return c.rst(f)
	case *http2.SettingsFrame:
		return c.settings(f)
	case *http2.PingFrame:
		return c.ping(f)
	case *http2.GoAwayFrame:
		return c.goAway(f)
	case *http2.PriorityFrame:
		if f.StreamDep == f.StreamID {
			return http2.StreamError{StreamID: f.StreamID, Code: http2.ErrCodeProtocol}
		}
	case *http2.PushPromiseFrame:
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.idledLocked()
}

// idledLocked counts a frame that makes work and carries nothing.
func (c *Conn) idledLocked() error {
	if c.idled++; c.idled > mostIdle {
		return http2.ConnectionError(http2.ErrCodeEnhanceYourCalm)
	}
	return c.backlogLocked()
}

// carriedLocked makes up for some.
func (c *Conn) carriedLocked() { c.idled = max(0, c.idled-10) }

// backlogLocked is an error if the other end does not read what it is sent.
func (c *Conn) backlogLocked() error {
	if c.pendingLocked() > mostBacklog {
		return http2.ConnectionError(http2.ErrCodeEnhanceYourCalm)
	}
	return nil
}

func (c *Conn) data(f *http2.DataFrame) error {
	data, end := f.Data(), f.StreamEnded()
	s, err := c.takeData(f, len(data), end)
	if s == nil {
		return err
	}
	c.handler.Data(s, data, end)
	if end {
		c.ended(s)
	}
	return nil
}

// takeData accounts for a part of a body. It returns the stream that it is for, if any.
func (c *Conn) takeData(f *http2.DataFrame, n int, end bool) (*Stream, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s, size := c.streams[f.StreamID], int64(f.Length)
	if s == nil && c.idleLocked(f.StreamID) {
		return nil, http2.ConnectionError(http2.ErrCodeProtocol)
	}
	if c.received -= size; c.received < 0 {
		return nil, http2.ConnectionError(http2.ErrCodeFlowControl)
	}
	c.owed += size
	c.giveBackLocked()
	if s == nil && (!c.server || c.ours.has(f.StreamID)) {
		return nil, c.backlogLocked() // it was under way when the stream was reset
	}
	if s == nil || s.ended || !s.headed {
		return nil, http2.StreamError{StreamID: f.StreamID, Code: http2.ErrCodeStreamClosed}
	}
	if s.received -= size; s.received < 0 {
		return nil, http2.StreamError{StreamID: f.StreamID, Code: http2.ErrCodeFlowControl}
	}
	if s.declared >= 0 {
		if s.declared -= int64(n); s.declared < 0 || end && s.declared != 0 {
			return nil, http2.StreamError{StreamID: f.StreamID, Code: http2.ErrCodeProtocol}
		}
	}
	s.owed += size - int64(n) // padding is nobody's
	s.giveBackLocked()
	if n == 0 && !end {
		return nil, c.idledLocked()
	}
	s.queued += int64(n)
	c.queued += int64(n)
	c.carriedLocked()
	return s, nil
}

// ended notes that all of a message has come, once the handler knows.
func (c *Conn) ended(s *Stream) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.spent.giveBack()
	s.endLocked()
}

// giveBackLocked lets the other end send more, on any stream.
func (c *Conn) giveBackLocked() {
	if c.owed >= connWindow/4 && c.queued < mostQueued {
		c.framer.WriteWindowUpdate(0, uint32(c.owed))
		c.received += c.owed
		c.owed = 0
	}
}

func (c *Conn) dequeuedLocked(n int64) {
	c.queued -= n
	c.giveBackLocked()
}

func (c *Conn) headers(f *http2.HeadersFrame) error {
	id, end := f.StreamID, f.StreamEnded()
	circular := f.HasPriority() && f.Priority.StreamDep == id
	if err := c.readFields(f); err != nil {
		return err
	}
	c.mu.Lock()
	c.carriedLocked()
	s := c.streams[id]
	err := c.placeLocked(s, id)
	if err == nil {
		err = c.backlogLocked()
	}
	c.mu.Unlock()
	switch {
	case err == errIgnored:
		return nil
	case err != nil:
		return err
	case circular:
		return http2.StreamError{StreamID: id, Code: http2.ErrCodeProtocol}
	case s == nil:
		return c.newRequest(id, end)
	case c.server || s.headed:
		return c.trailers(s, end)
	}
	return c.response(s, end)
}

// errIgnored means that nobody waits for a frame any more.
var errIgnored = errors.New("the stream was reset")

// placeLocked says what is wrong with fields for a stream, which is nil if there is none (any more).
func (c *Conn) placeLocked(s *Stream, id uint32) error {
	idle := c.idleLocked(id)
	switch {
	case s != nil && s.ended:
		return http2.StreamError{StreamID: id, Code: http2.ErrCodeStreamClosed}
	case s != nil:
		return nil
	case !c.server && idle || c.server && id%2 == 0:
		return http2.ConnectionError(http2.ErrCodeProtocol)
	case !c.server || c.ours.has(id):
		return errIgnored
	case !idle:
		return http2.ConnectionError(http2.ErrCodeStreamClosed)
	}
	c.last = id
	if len(c.streams) >= MaxStreams || c.leaving {
		return http2.StreamError{StreamID: id, Code: http2.ErrCodeRefusedStream}
	}
	return nil
}

// newRequest takes in the head of a request.
func (c *Conn) newRequest(id uint32, end bool) error {
	r, ok := readRequest(c.list.fields)
	if c.list.tooLarge {
		return c.refuseLarge(id, end)
	}
	if c.list.malformed || !ok || end && r.length > 0 {
		return http2.StreamError{StreamID: id, Code: http2.ErrCodeProtocol}
	}
	c.mu.Lock()
	s := c.newStreamLocked(id)
	s.headed, s.declared = true, r.length
	c.mu.Unlock()
	c.handler.Headers(s, c.list.fields, end)
	if end {
		c.ended(s)
	}
	return nil
}

// refuseLarge answers a request whose head is too large (RFC 6585, 5).
func (c *Conn) refuseLarge(id uint32, end bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.writeHeadersLocked(id, []hpack.HeaderField{
		{Name: ":status", Value: "431"}, {Name: "headroom-reason", Value: string(fault.BadRequest)},
	}, nil, true)
	if !end {
		c.resetLocked(nil, id, http2.ErrCodeNo)
	}
	return c.spendLocked()
}

func (c *Conn) trailers(s *Stream, end bool) error {
	fields := c.list.fields
	_, _, ok := readRegular(fields)
	if !end || !ok || c.list.malformed || c.list.tooLarge || len(fields) > 0 && fields[0].IsPseudo() || s.incomplete() {
		return http2.StreamError{StreamID: s.id, Code: http2.ErrCodeProtocol}
	}
	c.handler.Trailers(s, fields)
	c.ended(s)
	return nil
}

// incomplete reports whether less of a body has come than was declared.
func (s *Stream) incomplete() bool {
	s.conn.mu.Lock()
	defer s.conn.mu.Unlock()
	return s.declared > 0
}

func (c *Conn) response(s *Stream, end bool) error {
	status, length, ok := readResponse(c.list.fields)
	final := status >= 200
	if !ok || c.list.malformed || c.list.tooLarge || !final && end || final && !s.begun(status, length, end) {
		return http2.StreamError{StreamID: s.id, Code: http2.ErrCodeProtocol}
	}
	c.handler.Headers(s, c.list.fields, end)
	if end {
		c.ended(s)
	}
	return nil
}

// begun notes that a response has begun. It returns false if that has already ended before it should.
func (s *Stream) begun(status int, length int64, end bool) bool {
	s.conn.mu.Lock()
	defer s.conn.mu.Unlock()
	s.headed = true
	if s.bodiless || status == 204 || status == 304 {
		length = 0 // of what would be there
	}
	s.declared = length
	return !end || length <= 0
}

func (c *Conn) windowUpdate(f *http2.WindowUpdateFrame) error {
	err := c.widen(f.StreamID, int64(f.Increment))
	if err == nil {
		c.unblock()
	}
	return err
}

func (c *Conn) widen(id uint32, more int64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.streams[id]
	switch {
	case id == 0:
		if c.window += more; c.window > math.MaxInt32 {
			return http2.ConnectionError(http2.ErrCodeFlowControl)
		}
	case s != nil:
		if s.window += more; s.window > math.MaxInt32 {
			return http2.StreamError{StreamID: id, Code: http2.ErrCodeFlowControl}
		}
		s.queueLocked()
	case c.idleLocked(id):
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	return nil
}

func (c *Conn) rst(f *http2.RSTStreamFrame) error {
	c.mu.Lock()
	s := c.streams[f.StreamID]
	idle := c.idleLocked(f.StreamID)
	var err error
	if s != nil {
		c.removeLocked(s)
		err = c.spendLocked()
	}
	c.mu.Unlock()
	switch {
	case idle:
		return http2.ConnectionError(http2.ErrCodeProtocol)
	case s != nil && f.ErrCode == http2.ErrCodeRefusedStream && !c.server:
		c.handler.Reset(s, f.ErrCode, Unseen)
	case s != nil:
		c.handler.Reset(s, f.ErrCode, ByPeer)
	}
	return err
}

func (c *Conn) settings(f *http2.SettingsFrame) error {
	err := c.takeSettings(f)
	if err == nil {
		c.unblock()
	}
	return err
}

func (c *Conn) takeSettings(f *http2.SettingsFrame) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f.IsAck() {
		if !c.greeted {
			return http2.ConnectionError(http2.ErrCodeProtocol)
		}
		return c.idledLocked()
	}
	if !c.greeted {
		c.greetedLocked()
	}
	if err := f.ForeachSetting(c.settingLocked); err != nil {
		return err
	}
	c.framer.WriteSettingsAck()
	return c.idledLocked()
}

// greetedLocked notes that the other end has begun to speak.
func (c *Conn) greetedLocked() {
	c.greeted = true
	close(c.ready)
	if !c.draining {
		c.net.SetReadDeadline(time.Time{})
		if !c.server {
			c.allowed.Store(math.MaxInt32) // unless it says otherwise
		}
	}
}

func (c *Conn) settingLocked(s http2.Setting) error {
	if err := s.Valid(); err != nil {
		return err
	}
	switch s.ID {
	case http2.SettingInitialWindowSize:
		return c.widenAllLocked(int64(s.Val))
	case http2.SettingMaxConcurrentStreams:
		if !c.server && !c.draining {
			c.allowed.Store(int32(min(s.Val, math.MaxInt32)))
		}
	case http2.SettingHeaderTableSize:
		c.encoder.SetMaxDynamicTableSize(min(s.Val, tableSize))
	}
	return nil
}

// widenAllLocked changes the windows of all streams (RFC 9113, 6.9.2).
func (c *Conn) widenAllLocked(initial int64) error {
	more := initial - c.initial
	c.initial = initial
	for _, s := range c.streams {
		if s.window += more; s.window > math.MaxInt32 {
			return http2.ConnectionError(http2.ErrCodeFlowControl)
		}
		s.queueLocked()
	}
	return nil
}

func (c *Conn) ping(f *http2.PingFrame) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case !f.IsAck():
		c.framer.WritePing(true, f.Data)
	case c.draining && !c.leaving && f.Data == drainPing():
		c.net.SetReadDeadline(time.Time{})
		c.leaveLocked()
	}
	return c.idledLocked()
}

// goAway opens no more streams to the other end, which has not seen those beyond the last that it names. At the server's
// end the client says that it will go: what it has opened is still served.
func (c *Conn) goAway(f *http2.GoAwayFrame) error {
	c.mu.Lock()
	if c.server {
		c.drainLocked()
		c.mu.Unlock()
		return nil
	}
	c.draining, c.leaving = true, true
	c.allowed.Store(0)
	var unseen []*Stream
	for id, s := range c.streams {
		if id > f.LastStreamID {
			unseen = append(unseen, s)
		}
	}
	for _, s := range unseen {
		c.removeLocked(s)
	}
	if len(c.streams) == 0 {
		c.closeSoonLocked()
	}
	c.mu.Unlock()
	slices.SortFunc(unseen, older)
	for _, s := range unseen {
		c.handler.Reset(s, http2.ErrCodeRefusedStream, Unseen)
	}
	return nil
}
