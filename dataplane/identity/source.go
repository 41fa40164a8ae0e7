package identity

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// The files of a folder with a certificate, as Kubernetes names those of a Secret for TLS.
const (
	RootsFile       = "ca.crt"
	CertificateFile = "tls.crt"
	KeyFile         = "tls.key"
)

const (
	pollEvery = 2 * time.Second
	// remindEvery is how often it is said again that the certificate is about to expire, or has expired.
	remindEvery = 10 * time.Minute
)

// Loader returns the Set to use from now on: the same one as before, if nothing has changed. It is called by one
// goroutine at a time.
type Loader func(now time.Time) (*Set, error)

// Config configures a Source.
type Config struct {
	Load Loader
	// Poll is how often to look for changes. Default 2s.
	Poll    time.Duration
	Log     *slog.Logger          // nil: no logs
	Metrics prometheus.Registerer // nil: not exported
}

// Source has the identity of this agent, always the latest. It is safe for concurrent use.
type Source struct {
	load    Loader
	poll    time.Duration
	log     *slog.Logger
	metrics *metrics
	current atomic.Pointer[Set]

	// The fields below are those of the goroutine of Run.

	refused  string    // what was last said to be wrong
	reminded time.Time // of the age of the certificate
}

// New returns a Source that has an identity already. A certificate that has expired is taken, as it may be renewed.
func New(cfg Config) (*Source, error) {
	set, err := cfg.Load(time.Now())
	if err != nil {
		return nil, err
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	s := &Source{load: cfg.Load, poll: cmp.Or(cfg.Poll, pollEvery), log: cfg.Log}
	s.current.Store(set)
	s.metrics = newMetrics(cfg.Metrics, func() float64 { return time.Until(s.Current().Expires).Seconds() })
	return s, nil
}

// Current returns the identity to use for a new connection.
func (s *Source) Current() *Set { return s.current.Load() }

// Ready is an error if other agents refuse the certificate for its age.
func (s *Source) Ready(now time.Time) (note string, err error) {
	set := s.Current()
	if set.Expired(now) {
		return "", fmt.Errorf("the certificate of %s expired at %s: other agents refuse it", set.ID, stamp(set.Expires))
	}
	return fmt.Sprintf("%s until %s", set.ID, stamp(set.Expires)), nil
}

// Run looks for changes until ctx ends.
func (s *Source) Run(ctx context.Context) error {
	tick := time.NewTicker(s.poll)
	defer tick.Stop()
	s.remind(time.Now())
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			s.reload(time.Now())
			s.remind(time.Now())
		}
	}
}

// reload takes what is new, unless it is worse than what is in force. Connections stay as they are.
func (s *Source) reload(now time.Time) {
	old := s.Current()
	set, err := s.load(now)
	switch {
	case err != nil:
		s.refuse(err)
		return
	case set == old:
		s.refused = ""
		return
	case set.Expired(now):
		s.refuse(fmt.Errorf("the certificate of %s expired at %s", set.ID, stamp(set.Expires)))
		return
	case set.ID.TrustDomain() != old.ID.TrustDomain():
		s.refuse(fmt.Errorf("the certificate of %s is from another trust domain than %s: that takes a restart", set.ID, old.ID))
		return
	}
	s.current.Store(set)
	s.refused, s.reminded = "", time.Time{}
	s.metrics.loaded()
	s.log.Info("new certificate in force", "identity", set.ID, "issuer", set.Issuer, "until", stamp(set.Expires), "roots", set.rootNames())
}

// refuse tells once what is wrong, not at every look.
func (s *Source) refuse(err error) {
	if err.Error() == s.refused {
		return
	}
	s.refused = err.Error()
	s.metrics.refused()
	s.log.Error("new certificate refused; the one in force stays", "until", stamp(s.Current().Expires), "err", err)
}

// remind tells of a certificate that nobody renewed though less than a tenth of its life is left.
func (s *Source) remind(now time.Time) {
	set := s.Current()
	left := set.Expires.Sub(now)
	if left > set.Expires.Sub(set.Begins)/10 || now.Sub(s.reminded) < remindEvery {
		return
	}
	s.reminded = now
	if left < 0 {
		s.log.Error("this agent's certificate has expired: other agents refuse it; put a new one in its place, it is taken without a restart",
			"identity", set.ID, "until", stamp(set.Expires))
		return
	}
	s.log.Warn("this agent's certificate is about to expire; put a new one in its place, it is taken without a restart",
		"identity", set.ID, "until", stamp(set.Expires))
}

// Folder returns a Loader of the files ca.crt, tls.crt and tls.key of a folder. It compares their content, so that it
// does not matter how they came there: written over, renamed, or by a link that leads elsewhere now.
func Folder(dir string) Loader {
	var last [3][]byte
	var set *Set
	return func(now time.Time) (*Set, error) {
		var files [3][]byte
		var problems []error
		for i, name := range []string{RootsFile, CertificateFile, KeyFile} {
			var err error
			files[i], err = os.ReadFile(filepath.Join(dir, name))
			problems = append(problems, err)
		}
		if err := errors.Join(problems...); err != nil {
			return nil, err
		}
		same := func(i int) bool { return bytes.Equal(files[i], last[i]) }
		if set != nil && same(0) && same(1) && same(2) {
			return set, nil
		}
		changed, err := Parse(files[0], files[1], files[2], now)
		if err != nil {
			return nil, fmt.Errorf("%s, %s and %s in %s: %w", RootsFile, CertificateFile, KeyFile, dir, err)
		}
		last, set = files, changed
		return set, nil
	}
}
