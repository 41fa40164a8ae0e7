package h2

import (
	"errors"
	"io"
	"math"
	"os"
	"strconv"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// read reads frames until the connection fails, or is not needed any more.
func (c *Conn) read() error {
	c.net.SetReadDeadline(time.Now().Add(prefaceTimeout))
	if c.server {
		if err := c.readPreface(); err != nil {
			return err
		}
	}
	first := true
	for {
		f, err := c.reader.ReadFrame()
		if err == nil {
			if _, ok := f.(*http2.SettingsFrame); first && !ok {
				return http2.ConnectionError(http2.ErrCodeProtocol)
			}
			if first {
				first = false
				c.net.SetReadDeadline(time.Time{})
			}
			err = c.take(f)
		}
		if se, ok := errors.AsType[http2.StreamError](err); ok {
			if err = c.streamError(se); err == nil {
				continue
			}
		}
		if err != nil {
			return c.readError(err)
		}
	}
}

func (c *Conn) readError(err error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if errors.Is(err, os.ErrDeadlineExceeded) && c.draining && len(c.streams) == 0 {
		return errDone
	}
	return err
}

func (c *Conn) readPreface() error {
	var got [len(http2.ClientPreface)]byte
	if _, err := io.ReadFull(c.input, got[:]); err != nil {
		return err
	}
	if string(got[:]) != http2.ClientPreface {
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	return nil
}

// streamError resets a stream on which the other end broke the rules.
func (c *Conn) streamError(e http2.StreamError) error {
	c.mu.Lock()
	s := c.streams[e.StreamID]
	if s == nil && c.idleLocked(e.StreamID) {
		// A head that could not be read opened the stream nevertheless.
		if !c.server || e.StreamID%2 == 0 {
			c.mu.Unlock()
			return http2.ConnectionError(http2.ErrCodeProtocol)
		}
		c.last = e.StreamID
	}
	c.framer.WriteRSTStream(e.StreamID, e.Code)
	c.wakeLocked()
	if s != nil {
		c.removeLocked(s)
	}
	c.resets++
	flood := c.resets > mostResets
	c.mu.Unlock()
	if s != nil && s.State != nil {
		c.handler.Reset(s, e.Code, false)
	}
	if flood {
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
	c.mu.Lock()
	c.heard = time.Now()
	c.asked = false
	c.mu.Unlock()
	switch f := f.(type) {
	case *http2.DataFrame:
		return c.data(f)
	case *http2.MetaHeadersFrame:
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
		return c.carriesNothing()
	case *http2.PushPromiseFrame:
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	return c.carriesNothing()
}

// carriesNothing counts frames that make work and carry nothing.
func (c *Conn) carriesNothing() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.empty++; c.empty > mostEmpty || len(c.out) > 4*mostPending {
		return http2.ConnectionError(http2.ErrCodeEnhanceYourCalm)
	}
	return nil
}

func (c *Conn) data(f *http2.DataFrame) error {
	size := int64(f.Length)
	data := f.Data()
	c.mu.Lock()
	s := c.streams[f.StreamID]
	if s == nil && c.idleLocked(f.StreamID) {
		c.mu.Unlock()
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	if c.received -= size; c.received < 0 {
		c.mu.Unlock()
		return http2.ConnectionError(http2.ErrCodeFlowControl)
	}
	c.owed += size
	c.giveBackLocked()
	if s == nil || s.ended || !s.headed {
		c.mu.Unlock()
		return http2.StreamError{StreamID: f.StreamID, Code: http2.ErrCodeStreamClosed}
	}
	if s.received -= size; s.received < 0 {
		c.mu.Unlock()
		return http2.StreamError{StreamID: f.StreamID, Code: http2.ErrCodeFlowControl}
	}
	s.owed += size - int64(len(data)) // padding is nobody's
	s.queued += int64(len(data))
	c.queued += int64(len(data))
	end := f.StreamEnded()
	if s.declared >= 0 {
		s.declared -= int64(len(data))
		if s.declared < 0 || end && s.declared != 0 {
			c.mu.Unlock()
			return http2.StreamError{StreamID: f.StreamID, Code: http2.ErrCodeProtocol}
		}
	}
	empty := len(data) == 0 && !end
	if !empty {
		c.empty = 0
	}
	c.mu.Unlock()
	if empty {
		return c.carriesNothing()
	}
	c.handler.Data(s, data, end)
	if end {
		c.ended(s)
	}
	return nil
}

// ended notes that all of a message has come, once the handler knows.
func (c *Conn) ended(s *Stream) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.resets > 0 {
		c.resets--
	}
	s.endLocked()
}

// giveBackLocked lets the other end send more, on any stream.
func (c *Conn) giveBackLocked() {
	if c.owed >= connWindow/4 && c.queued < mostQueued {
		c.framer.WriteWindowUpdate(0, uint32(c.owed))
		c.received += c.owed
		c.owed = 0
		c.wakeLocked()
	}
}

func (c *Conn) dequeuedLocked(n int64) {
	c.queued -= n
	c.giveBackLocked()
}

func (c *Conn) headers(f *http2.MetaHeadersFrame) error {
	c.mu.Lock()
	c.empty = 0
	s := c.streams[f.StreamID]
	if f.HasPriority() && f.Priority.StreamDep == f.StreamID {
		if s == nil && c.idleLocked(f.StreamID) {
			c.last = f.StreamID
		}
		c.mu.Unlock()
		return http2.StreamError{StreamID: f.StreamID, Code: http2.ErrCodeProtocol}
	}
	switch {
	case s != nil && s.ended:
		c.mu.Unlock()
		return http2.StreamError{StreamID: f.StreamID, Code: http2.ErrCodeStreamClosed}
	case s != nil:
		c.mu.Unlock()
		return c.laterHeaders(s, f)
	case !c.server && c.idleLocked(f.StreamID) || c.server && f.StreamID%2 == 0:
		c.mu.Unlock()
		return http2.ConnectionError(http2.ErrCodeProtocol)
	case !c.server:
		c.mu.Unlock()
		return nil // of a stream that we have reset
	case !c.idleLocked(f.StreamID):
		c.mu.Unlock()
		return http2.ConnectionError(http2.ErrCodeStreamClosed)
	}
	c.last = f.StreamID
	full := len(c.streams) >= MaxStreams || c.leaving
	if full {
		c.mu.Unlock()
		return http2.StreamError{StreamID: f.StreamID, Code: http2.ErrCodeRefusedStream}
	}
	declared, ok := checkRequest(f.Fields)
	if f.Truncated || !ok || f.StreamEnded() && declared > 0 {
		c.mu.Unlock()
		return http2.StreamError{StreamID: f.StreamID, Code: http2.ErrCodeProtocol}
	}
	s = c.newStreamLocked(f.StreamID)
	s.headed, s.declared = true, declared
	c.mu.Unlock()
	c.handler.Headers(s, f.Fields, f.StreamEnded())
	if f.StreamEnded() {
		c.ended(s)
	}
	return nil
}

// laterHeaders takes in a response, or trailers.
func (c *Conn) laterHeaders(s *Stream, f *http2.MetaHeadersFrame) error {
	wrong := http2.StreamError{StreamID: f.StreamID, Code: http2.ErrCodeProtocol}
	end := f.StreamEnded()
	if f.Truncated {
		return wrong
	}
	if c.server || s.isHeaded() {
		if !end || len(f.PseudoFields()) > 0 || !checkFields(f.Fields) || !c.complete(s) {
			return wrong
		}
		c.handler.Trailers(s, f.Fields)
		c.ended(s)
		return nil
	}
	status, declared, ok := checkResponse(f.Fields)
	if !ok || status < 200 && end {
		return wrong
	}
	if status >= 200 {
		c.mu.Lock()
		s.headed = true
		if status != 204 && status != 304 && !end {
			s.declared = declared
		}
		c.mu.Unlock()
	}
	c.handler.Headers(s, f.Fields, end)
	if end {
		c.ended(s)
	}
	return nil
}

func (s *Stream) isHeaded() bool {
	s.conn.mu.Lock()
	defer s.conn.mu.Unlock()
	return s.headed
}

// complete reports whether as much of the body has come as was declared.
func (c *Conn) complete(s *Stream) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return s.declared <= 0
}

func (c *Conn) windowUpdate(f *http2.WindowUpdateFrame) error {
	more := int64(f.Increment)
	c.mu.Lock()
	var err error
	if f.StreamID == 0 {
		if c.window += more; c.window > math.MaxInt32 {
			err = http2.ConnectionError(http2.ErrCodeFlowControl)
		}
	} else if s := c.streams[f.StreamID]; s != nil {
		if s.window += more; s.window > math.MaxInt32 {
			err = http2.StreamError{StreamID: f.StreamID, Code: http2.ErrCodeFlowControl}
		}
	} else if c.idleLocked(f.StreamID) {
		err = http2.ConnectionError(http2.ErrCodeProtocol)
	}
	c.mu.Unlock()
	if err == nil {
		c.unblock()
	}
	return err
}

func (c *Conn) rst(f *http2.RSTStreamFrame) error {
	c.mu.Lock()
	s := c.streams[f.StreamID]
	idle := c.idleLocked(f.StreamID)
	if s != nil {
		c.removeLocked(s)
		c.resets++
	}
	flood := c.server && c.resets > mostResets
	c.mu.Unlock()
	switch {
	case idle:
		return http2.ConnectionError(http2.ErrCodeProtocol)
	case s != nil:
		c.handler.Reset(s, f.ErrCode, f.ErrCode == http2.ErrCodeRefusedStream)
	}
	if flood {
		return http2.ConnectionError(http2.ErrCodeEnhanceYourCalm)
	}
	return nil
}

func (c *Conn) settings(f *http2.SettingsFrame) error {
	if f.IsAck() {
		return c.carriesNothing()
	}
	c.mu.Lock()
	err := f.ForeachSetting(func(s http2.Setting) error {
		if err := s.Valid(); err != nil {
			return err
		}
		return c.settingLocked(s)
	})
	c.framer.WriteSettingsAck()
	c.wakeLocked()
	c.mu.Unlock()
	if err != nil {
		return err
	}
	c.unblock()
	return c.carriesNothing()
}

func (c *Conn) settingLocked(s http2.Setting) error {
	switch s.ID {
	case http2.SettingInitialWindowSize:
		grown := int64(s.Val) - c.initial
		c.initial = int64(s.Val)
		for _, stream := range c.streams {
			if stream.window += grown; stream.window > math.MaxInt32 {
				return http2.ConnectionError(http2.ErrCodeFlowControl)
			}
		}
	case http2.SettingMaxConcurrentStreams:
		c.most = s.Val
	case http2.SettingHeaderTableSize:
		c.encoder.SetMaxDynamicTableSize(min(s.Val, tableSize))
	}
	return nil
}

func (c *Conn) ping(f *http2.PingFrame) error {
	c.mu.Lock()
	if !f.IsAck() {
		c.framer.WritePing(true, f.Data)
		c.wakeLocked()
	} else if c.draining && !c.leaving && f.Data == drainPing() {
		c.leaving = true
		c.framer.WriteGoAway(c.last, http2.ErrCodeNo, nil)
		c.wakeLocked()
		if len(c.streams) == 0 {
			c.closeSoonLocked()
		}
	}
	c.mu.Unlock()
	return c.carriesNothing()
}

// goAway takes no new streams to the other end, which has not seen those beyond the last that it names.
func (c *Conn) goAway(f *http2.GoAwayFrame) error {
	c.mu.Lock()
	c.draining, c.leaving = true, true
	var unseen []*Stream
	for id, s := range c.streams {
		if !c.server && id > f.LastStreamID {
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
	for _, s := range unseen {
		c.handler.Reset(s, http2.ErrCodeRefusedStream, true)
	}
	return nil
}

// checkRequest reports whether the fields make a request, and the length that it declares, -1 if none.
func checkRequest(fields []hpack.HeaderField) (declared int64, ok bool) {
	var method, scheme, path, authority string
	for _, f := range fields {
		if !f.IsPseudo() {
			break
		}
		switch f.Name {
		case ":method":
			method = f.Value
		case ":scheme":
			scheme = f.Value
		case ":path":
			path = f.Value
		case ":authority":
			authority = f.Value
		default:
			return 0, false
		}
	}
	if method == "CONNECT" {
		ok = authority != "" && scheme == "" && path == ""
	} else {
		ok = method != "" && scheme != "" && path != "" && (path[0] == '/' || path == "*" && method == "OPTIONS")
	}
	declared, valid := lengthOf(fields)
	return declared, ok && valid && checkFields(fields)
}

// checkResponse reports whether the fields make a response, its status, and the length that it declares, -1 if none.
func checkResponse(fields []hpack.HeaderField) (status int, declared int64, ok bool) {
	if len(fields) == 0 || fields[0].Name != ":status" || len(fields[0].Value) != 3 {
		return 0, 0, false
	}
	status, err := strconv.Atoi(fields[0].Value)
	if err != nil || status < 100 || status == 101 {
		return 0, 0, false
	}
	declared, valid := lengthOf(fields)
	return status, declared, valid && checkFields(fields)
}

// checkFields refuses what concerns connections of HTTP/1 (RFC 9113, 8.2.2).
func checkFields(fields []hpack.HeaderField) bool {
	if len(fields) > 256 {
		return false
	}
	for _, f := range fields {
		switch f.Name {
		case "connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade":
			return false
		case "te":
			if f.Value != "trailers" {
				return false
			}
		}
	}
	return true
}

func lengthOf(fields []hpack.HeaderField) (n int64, ok bool) {
	n = -1
	for _, f := range fields {
		if f.Name != "content-length" {
			continue
		}
		v, err := strconv.ParseUint(f.Value, 10, 62)
		if err != nil || n >= 0 && int64(v) != n || f.Value[0] == '+' {
			return 0, false
		}
		n = int64(v)
	}
	return n, true
}
