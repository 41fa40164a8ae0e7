//go:build linux

package load

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

const (
	frameHead   = 9
	largeWindow = 1 << 30
	minWindow   = 16 << 10 // enough for the messages of any stream
)

// streams is what the two ends of an HTTP/2 connection have to take in, beyond what h2 does.
type streams interface {
	fields(stream uint32, end bool) error // h2.decoded has them
	data(stream uint32, n int, end bool) error
	reset(stream uint32, code http2.ErrCode) error
}

// h2 is an end of an HTTP/2 connection, for short messages.
type h2 struct {
	conn    *conn
	streams streams
	rest    []byte // of a frame that has not come whole
	preface string // what is to come before frames

	encoder *hpack.Encoder
	encoded bytes.Buffer
	decoder *hpack.Decoder
	decoded []hpack.HeaderField

	window int // what may be sent
	held   []heldData
	credit int // of what has been received, not yet given back
}

// heldData waits until the window opens.
type heldData struct {
	stream uint32
	n      int
	end    bool
}

func newH2(c *conn, s streams) *h2 {
	h := &h2{conn: c, streams: s, window: 65535}
	h.encoder = hpack.NewEncoder(&h.encoded)
	h.decoder = hpack.NewDecoder(4096, func(f hpack.HeaderField) { h.decoded = append(h.decoded, f) })
	return h
}

// open sends this end's settings: windows that are never in the way.
func (h *h2) open() {
	h.frame(http2.FrameSettings, 0, 0, 12)
	h.setting(http2.SettingMaxConcurrentStreams, 1000)
	h.setting(http2.SettingInitialWindowSize, largeWindow)
	h.update(largeWindow)
}

func (h *h2) setting(id http2.SettingID, value uint32) {
	h.conn.out = binary.BigEndian.AppendUint16(h.conn.out, uint16(id))
	h.conn.out = binary.BigEndian.AppendUint32(h.conn.out, value)
}

func (h *h2) update(n int) {
	h.frame(http2.FrameWindowUpdate, 0, 0, 4)
	h.conn.out = binary.BigEndian.AppendUint32(h.conn.out, uint32(n))
}

// frame appends the head of a frame.
func (h *h2) frame(t http2.FrameType, flags http2.Flags, stream uint32, length int) {
	h.conn.out = append(h.conn.out, byte(length>>16), byte(length>>8), byte(length), byte(t), byte(flags))
	h.conn.out = binary.BigEndian.AppendUint32(h.conn.out, stream)
}

func (h *h2) sendFields(stream uint32, fields []hpack.HeaderField, end bool) {
	h.encoded.Reset()
	for _, f := range fields {
		_ = h.encoder.WriteField(f) // a bytes.Buffer takes everything
	}
	flags := http2.FlagHeadersEndHeaders
	if end {
		flags |= http2.FlagHeadersEndStream
	}
	h.frame(http2.FrameHeaders, flags, stream, h.encoded.Len())
	h.conn.out = append(h.conn.out, h.encoded.Bytes()...)
}

// sendMessage sends a message of gRPC.
func (h *h2) sendMessage(stream uint32, end bool) {
	if h.window < messageSize || len(h.held) > 0 {
		h.held = append(h.held, heldData{stream, messageSize, end})
		return
	}
	h.window -= messageSize
	var flags http2.Flags
	if end {
		flags = http2.FlagDataEndStream
	}
	h.frame(http2.FrameData, flags, stream, messageSize)
	h.conn.out = append(h.conn.out, 0, 0, 0, 0, messageSize-5)
	h.conn.out = append(h.conn.out, h.conn.loop.filler[:messageSize-5]...)
}

// sendHeld sends what has waited. It must not be cut in pieces, as the other end counts messages by their bytes.
func (h *h2) sendHeld() {
	held := h.held
	h.held = nil
	for i, d := range held {
		if h.window < d.n {
			h.held = append(h.held, held[i:]...)
			return
		}
		h.sendMessage(d.stream, d.end)
	}
}

// received cuts p in frames.
func (h *h2) received(p []byte) error {
	if len(h.rest) > 0 {
		h.rest = append(h.rest, p...)
		p = h.rest
	}
	if len(p) >= len(h.preface) {
		if !bytes.HasPrefix(p, []byte(h.preface)) {
			return fmt.Errorf("not HTTP/2: %q", p[:min(len(p), 100)])
		}
		p = p[len(h.preface):]
		h.preface = ""
	}
	for h.preface == "" && len(p) >= frameHead {
		length := int(p[0])<<16 | int(p[1])<<8 | int(p[2])
		if length > maxHead && !bytes.HasPrefix(p, []byte("HTTP")) {
			return fmt.Errorf("a frame of %d bytes", length)
		}
		if bytes.HasPrefix(p, []byte("HTTP")) {
			return fmt.Errorf("an answer in HTTP/1: %q", p[:min(len(p), 100)])
		}
		if len(p) < frameHead+length {
			break
		}
		stream := binary.BigEndian.Uint32(p[5:]) & (1<<31 - 1)
		if err := h.take(http2.FrameType(p[3]), http2.Flags(p[4]), stream, p[frameHead:frameHead+length]); err != nil {
			return err
		}
		p = p[frameHead+length:]
	}
	h.rest = append(h.rest[:0], p...)
	return nil
}

func (h *h2) take(t http2.FrameType, flags http2.Flags, stream uint32, p []byte) error {
	switch t {
	case http2.FrameHeaders:
		return h.takeFields(flags, stream, p)
	case http2.FrameData:
		return h.takeData(flags, stream, p)
	case http2.FrameSettings:
		if flags.Has(http2.FlagSettingsAck) {
			return nil
		}
		return h.takeSettings(p)
	case http2.FramePing:
		if !flags.Has(http2.FlagPingAck) {
			h.frame(http2.FramePing, http2.FlagPingAck, 0, len(p))
			h.conn.out = append(h.conn.out, p...)
		}
	case http2.FrameWindowUpdate:
		if stream == 0 {
			h.window += int(binary.BigEndian.Uint32(p))
			h.sendHeld()
		}
	case http2.FrameRSTStream:
		return h.streams.reset(stream, http2.ErrCode(binary.BigEndian.Uint32(p)))
	case http2.FrameGoAway:
		return fmt.Errorf("the other end goes away: %s %q", http2.ErrCode(binary.BigEndian.Uint32(p[4:])), p[8:])
	case http2.FrameContinuation:
		return errors.New("fields in more than one frame")
	}
	return nil
}

func (h *h2) takeFields(flags http2.Flags, stream uint32, p []byte) error {
	if !flags.Has(http2.FlagHeadersEndHeaders) || flags.Has(http2.FlagHeadersPadded) {
		return errors.New("fields in more than one frame, or padded")
	}
	if flags.Has(http2.FlagHeadersPriority) {
		p = p[5:]
	}
	h.decoded = h.decoded[:0]
	if _, err := h.decoder.Write(p); err != nil {
		return err
	}
	if err := h.decoder.Close(); err != nil {
		return err
	}
	return h.streams.fields(stream, flags.Has(http2.FlagHeadersEndStream))
}

func (h *h2) takeData(flags http2.Flags, stream uint32, p []byte) error {
	if flags.Has(http2.FlagDataPadded) {
		return errors.New("padded data")
	}
	if h.credit += len(p); h.credit > largeWindow/2 {
		h.update(h.credit)
		h.credit = 0
	}
	return h.streams.data(stream, len(p), flags.Has(http2.FlagDataEndStream))
}

func (h *h2) takeSettings(p []byte) error {
	for ; len(p) >= 6; p = p[6:] {
		value := binary.BigEndian.Uint32(p[2:])
		switch http2.SettingID(binary.BigEndian.Uint16(p)) {
		case http2.SettingHeaderTableSize:
			h.encoder.SetMaxDynamicTableSize(min(value, 4096))
		case http2.SettingInitialWindowSize:
			if value < minWindow {
				return fmt.Errorf("a window of %d bytes for streams, want at least %d", value, minWindow)
			}
		}
	}
	h.frame(http2.FrameSettings, http2.FlagSettingsAck, 0, 0)
	return nil
}

// field returns one of those that were decoded.
func (h *h2) field(name string) string {
	for _, f := range h.decoded {
		if f.Name == name {
			return f.Value
		}
	}
	return ""
}
