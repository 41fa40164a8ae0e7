package document

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
)

// Problems is everything that is wrong with a document, one problem each: where, what would be right, what is there.
type Problems []string

// Error returns the problems, one a line.
func (p Problems) Error() string { return strings.Join(p, "\n") }

// Err returns the problems as an error, or nil if there are none.
func (p Problems) Err() error {
	if len(p) == 0 {
		return nil
	}
	return p
}

// Add notes a problem at the field that path names.
func (p *Problems) Add(path, format string, args ...any) {
	*p = append(*p, path+": "+fmt.Sprintf(format, args...))
}

// Document is what all documents have in common.
type Document interface {
	GetApiVersion() string
	GetKind() string
	GetMetadata() *meshv1.Metadata
}

// ManagedByKubernetes is the metadata.managedBy of the copy of an object of Kubernetes.
const ManagedByKubernetes = "kubernetes"

// Head checks the fields that all documents have in common.
func (p *Problems) Head(d Document, apiVersion, kind string) {
	p.constant("apiVersion", d.GetApiVersion(), apiVersion)
	p.constant("kind", d.GetKind(), kind)
	if name := d.GetMetadata().GetName(); !IsServiceName(name) {
		p.Add("metadata.name", "want the name of a service, which is "+ServiceNames+", got %s", quote(name))
	}
	if m := d.GetMetadata().GetManagedBy(); m != "" && m != ManagedByKubernetes {
		p.Add("metadata.managedBy", "want %s, or nothing, got %s", ManagedByKubernetes, quote(m))
	}
	if v := d.GetMetadata().GetResourceVersion(); v != "" && !isRevision(v) {
		p.Add("metadata.resourceVersion", "want the revision that was read, a whole number, or nothing, got %s", quote(v))
	}
}

func (p *Problems) constant(path, got, want string) {
	if got != want {
		p.Add(path, "want %s, got %s", want, quote(got))
	}
}

// IsLabel reports whether name is a DNS label. It is asked of thousands of names at once, where a cluster has that many.
func IsLabel(name string) bool {
	for i := range len(name) {
		switch c := name[i]; {
		case 'a' <= c && c <= 'z' || '0' <= c && c <= '9':
		case c != '-' || i == 0 || i == len(name)-1:
			return false
		}
	}
	return 0 < len(name) && len(name) <= 63
}

// ServiceNames says in words what IsServiceName wants.
const ServiceNames = "a DNS label (a-z, 0-9 and '-' inside, 63 characters at most), or up to three with dots between them"

// IsServiceName reports whether a service may have the name. Those of Kubernetes are called NAME.NAMESPACE, and one port of
// them PORT.NAME.NAMESPACE.
func IsServiceName(name string) bool {
	labels := 0
	for l := range strings.SplitSeq(name, ".") {
		if labels++; !IsLabel(l) {
			return false
		}
	}
	return labels <= 3
}

func isRevision(s string) bool {
	n, err := strconv.ParseInt(s, 10, 64)
	return err == nil && n >= 0 && strconv.FormatInt(n, 10) == s
}

// Range bounds a number: from Min, or above it, to Max.
type Range struct {
	Min, Max float64
	Above    bool // Min itself is out of range
	Off      bool // 0 is allowed too
}

func (r Range) contains(x float64) bool {
	return x == 0 && r.Off || x <= r.Max && (x > r.Min || x == r.Min && !r.Above)
}

func (r Range) String() string {
	text := fmt.Sprintf("from %v to %v", r.Min, r.Max)
	if r.Above {
		text = fmt.Sprintf("above %v, to %v", r.Min, r.Max)
	}
	if r.Off {
		text += ", or 0"
	}
	return text
}

// Number returns what x points to, or otherwise if that is nothing or out of range.
func (p *Problems) Number(path string, x *float64, otherwise float64, r Range) float64 {
	if x == nil {
		return otherwise
	}
	if !r.contains(*x) { // nor is NaN contained
		p.Add(path, "want a number %v, got %v", r, *x)
		return otherwise
	}
	return math.Abs(*x) // no range reaches below 0: this turns -0 into 0
}

// Count returns what n points to, or otherwise if that is nothing or out of range.
func (p *Problems) Count(path string, n *uint32, otherwise, least, most int) int {
	if n == nil {
		return otherwise
	}
	if int64(*n) < int64(least) || int64(*n) > int64(most) {
		p.Add(path, "want a whole number from %d to %d, got %d", least, most, *n)
		return otherwise
	}
	return int(*n)
}

// Span bounds a duration.
type Span struct {
	Min, Max time.Duration
	Off      bool // "0s" is allowed too
}

func (s Span) contains(d time.Duration) bool {
	return d == 0 && s.Off || d >= s.Min && d <= s.Max
}

func (s Span) String() string {
	text := fmt.Sprintf("from %s to %s", FormatDuration(s.Min), FormatDuration(s.Max))
	if s.Off {
		return text + `, or "0s"`
	}
	return text
}

// Duration returns the duration that text says, or otherwise if text is empty, no duration or out of bounds.
func (p *Problems) Duration(path, text string, otherwise time.Duration, s Span) time.Duration {
	if text == "" {
		return otherwise
	}
	d, ok := parseDuration(text)
	if !ok {
		if d, err := time.ParseDuration(text); err == nil && !s.contains(d) { // more is wrong than the unit
			p.Add(path, "want a duration %v, got %s", s, quote(text))
			return otherwise
		}
		p.Add(path, `want a duration such as "300ms", "2s" or "1m30s", got %s`, quote(text))
		return otherwise
	}
	if !s.contains(d) {
		p.Add(path, "want a duration %v, got %s", s, quote(text))
		return otherwise
	}
	return d
}

// DurationPattern matches what durations look like.
const DurationPattern = `^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$`

var duration = regexp.MustCompile(DurationPattern)

func parseDuration(text string) (time.Duration, bool) {
	if !duration.MatchString(text) {
		return 0, false
	}
	d, err := time.ParseDuration(text)
	return d, err == nil
}

// FormatDuration writes d, which must not be negative, as documents have it: "1m30s", "2s", "0.5ms".
func FormatDuration(d time.Duration) string {
	if d > 0 && d < time.Millisecond {
		return strconv.FormatFloat(float64(d)/float64(time.Millisecond), 'f', -1, 64) + "ms"
	}
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

// quote shows a value that a user wrote, or a part of it if it is long.
func quote(s string) string {
	const most = 60
	if s == "" {
		return "nothing"
	}
	if runes := []rune(s); len(runes) > most {
		return strconv.Quote(string(runes[:most])) + "..."
	}
	return strconv.Quote(s)
}
