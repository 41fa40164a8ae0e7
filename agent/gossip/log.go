package gossip

import (
	"context"
	"errors"
	"log"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"time"
)

// newLibraryLog returns the logger that memberlist is given: it writes lines such as "[WARN] memberlist: ...".
func newLibraryLog(to *slog.Logger, m *metrics) *log.Logger {
	return log.New(&libraryLog{to: to, metrics: m, quiet: newLimiter(time.Minute)}, "", 0)
}

type libraryLog struct {
	to      *slog.Logger
	metrics *metrics

	mu    sync.Mutex
	quiet *limiter // guarded by mu
}

// Write takes one line.
func (l *libraryLog) Write(line []byte) (int, error) {
	level, text := parseLine(string(line))
	if refused(text) {
		l.refuse(text)
		return len(line), nil
	}
	l.to.Log(context.Background(), level, "gossip", "reason", text)
	return len(line), nil
}

// refuse reports each peer with another key than ours, or none, once a minute.
func (l *libraryLog) refuse(text string) {
	l.metrics.refused.Inc()
	peer := sender(text)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.quiet.allow(peer, time.Now()) {
		l.to.Warn("gossip message refused: wrong gossip key?", "peer", peer, "reason", text)
	}
}

func parseLine(line string) (slog.Level, string) {
	line = strings.TrimSpace(line)
	tag, text, ok := strings.Cut(line, "] ")
	if !ok || !strings.HasPrefix(tag, "[") {
		return slog.LevelInfo, line
	}
	text = strings.TrimPrefix(text, "memberlist: ")
	return levelOf(tag[1:], text), text
}

// levelOf maps the levels of memberlist to ours. Its errors are troubles with one peer, which heal or end in a member's
// death: warnings, in our terms.
func levelOf(tag, text string) slog.Level {
	for _, known := range []string{"Conflicting address", "Refuting", "Got ping for unexpected node"} {
		if strings.HasPrefix(text, known) {
			return slog.LevelDebug // reported by us, or no trouble at all
		}
	}
	switch tag {
	case "DEBUG":
		return slog.LevelDebug
	case "WARN", "ERR", "ERROR":
		return slog.LevelWarn
	}
	return slog.LevelInfo
}

// refused reports whether a line tells of a message that was encrypted with another key, or not as it should be.
func refused(text string) bool {
	for _, sign := range []string{
		"could decrypt the message",
		"Decrypt packet failed",
		"remote state is encrypted and encryption is not configured",
		"encryption is configured but remote state is not encrypted",
		"Failed to decode indirect ping request", // what encrypted packets look like without a key
	} {
		if strings.Contains(text, sign) {
			return true
		}
	}
	return false
}

// sender finds the address in "... from=1.2.3.4:5", without its port: that differs from stream to stream.
func sender(text string) string {
	_, from, ok := strings.Cut(text, "from=")
	if !ok {
		return ""
	}
	from, _, _ = strings.Cut(from, " ")
	if a, err := netip.ParseAddrPort(from); err == nil {
		return a.Addr().String()
	}
	return from
}

// explain makes one line of an error of memberlist's Join.
func explain(err error) error {
	var list interface{ WrappedErrors() []error }
	if errors.As(err, &list) && len(list.WrappedErrors()) > 0 {
		err = list.WrappedErrors()[0]
	}
	text := strings.TrimPrefix(err.Error(), "failed to ")
	if refused(text) {
		text += " (wrong gossip key?)"
	}
	return errors.New(text)
}

// limiter lets one event of each key pass in a period.
type limiter struct {
	period time.Duration
	last   map[string]time.Time
}

// maxLimited bounds the keys a limiter remembers. Beyond that it lets nothing new pass.
const maxLimited = 256

func newLimiter(period time.Duration) *limiter {
	return &limiter{period: period, last: map[string]time.Time{}}
}

func (l *limiter) allow(key string, now time.Time) bool {
	for k, t := range l.last {
		if now.Sub(t) >= l.period {
			delete(l.last, k)
		}
	}
	if _, ok := l.last[key]; ok || len(l.last) >= maxLimited {
		return false
	}
	l.last[key] = now
	return true
}
