package identity_test

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/identity"
	"github.com/headroom-mesh/headroom/dataplane/identity/ca"
	"github.com/headroom-mesh/headroom/registry"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// authority makes a CA that is as old as may be.
func authority(t *testing.T, name string) *ca.CA {
	t.Helper()
	d, err := identity.ParseDomain(name)
	if err != nil {
		t.Fatal(err)
	}
	c, err := ca.Init(t.TempDir(), ca.Options{Domain: d}, time.Now().Add(-24*time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func issue(t *testing.T, c *ca.CA, node string, life time.Duration, from time.Time) ca.Files {
	t.Helper()
	id, err := identity.NodeID(c.Domain, registry.NodeName(node))
	if err != nil {
		t.Fatal(err)
	}
	files, err := c.Issue(id, life, from)
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func write(t *testing.T, dir string, files ca.Files) {
	t.Helper()
	if err := files.Write(dir); err != nil {
		t.Fatal(err)
	}
}

// running is a Source on a folder whose Run goes on in a bubble.
type running struct {
	*identity.Source
	dir     string
	log     journal
	metrics *prometheus.Registry
	stop    func()
}

// journal is what was logged.
type journal struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (j *journal) Write(b []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(b)
}

// take returns what was logged since it was last called.
func (j *journal) take() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	defer j.text.Reset()
	return j.text.String()
}

func start(t *testing.T, dir string) *running {
	t.Helper()
	r := &running{dir: dir, metrics: prometheus.NewRegistry()}
	var err error
	r.Source, err = identity.New(identity.Config{Load: identity.Folder(dir), Log: slog.New(slog.NewTextHandler(&r.log, nil)), Metrics: r.metrics})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var run sync.WaitGroup
	run.Go(func() {
		if err := r.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	r.stop = func() {
		cancel()
		run.Wait()
	}
	return r
}

// logged lets a while pass and returns what was logged in it.
func (r *running) logged(d time.Duration) string {
	time.Sleep(d)
	synctest.Wait()
	return r.log.take()
}

func TestReload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := authority(t, "headroom.local")
		dir := t.TempDir()
		write(t, dir, issue(t, c, "a", 24*time.Hour, time.Now()))
		r := start(t, dir)
		defer r.stop()
		first := r.Current()
		wantLog(t, r.logged(time.Minute))
		if r.Current() != first {
			t.Error("loaded again, though nothing changed")
		}

		write(t, dir, issue(t, c, "a", 24*time.Hour, time.Now()))
		wantLog(t, r.logged(10*time.Second), "level=INFO", "new certificate in force", "spiffe://headroom.local/node/a")
		second := r.Current()
		if second == first {
			t.Fatal("not loaded")
		}

		// What is wrong is told once, and what was there stays.
		good := issue(t, c, "a", 24*time.Hour, time.Now())
		write(t, dir, good)
		r.logged(10 * time.Second)
		second = r.Current()
		for name, bad := range map[string]ca.Files{
			"half written":         {Roots: good.Roots, Certificate: good.Certificate[:100], Key: good.Key},
			"another's key":        {Roots: good.Roots, Certificate: good.Certificate, Key: issue(t, c, "a", time.Hour, time.Now()).Key},
			"empty":                {Roots: good.Roots, Certificate: nil, Key: good.Key},
			"no roots":             {Roots: []byte("\n"), Certificate: good.Certificate, Key: good.Key},
			"other roots":          {Roots: authority(t, "headroom.local").Roots, Certificate: good.Certificate, Key: good.Key},
			"expired":              issue(t, c, "a", time.Hour, time.Now().Add(-3*time.Hour)),
			"of another domain":    issue(t, authority(t, "elsewhere"), "a", time.Hour, time.Now()),
			"that of an authority": {Roots: c.Roots, Certificate: c.Roots, Key: good.Key},
		} {
			write(t, dir, bad)
			log := r.logged(10 * time.Second)
			wantLog(t, log, "level=ERROR", "new certificate refused; the one in force stays")
			if r.Current() != second {
				t.Errorf("%s: loaded", name)
			}
			write(t, dir, good)
			r.logged(10 * time.Second)
			if got := r.Current(); !got.Leaf().Equal(second.Leaf()) {
				t.Errorf("%s: another certificate than before is in force", name)
			}
			second = r.Current()
		}

		// A folder that is gone is like a bad one.
		if err := os.Rename(dir, dir+"-away"); err != nil {
			t.Fatal(err)
		}
		wantLog(t, r.logged(time.Minute), "refused", "no such file")
		if problems, err := testutil.GatherAndLint(r.metrics); err != nil || len(problems) > 0 {
			t.Errorf("metrics: %v, %v", problems, err)
		}
	})
}

// wantLog wants one line with all these words, or none.
func wantLog(t *testing.T, log string, words ...string) {
	t.Helper()
	want := 1
	if len(words) == 0 {
		want = 0
	}
	if n := strings.Count(log, "\n"); n != want {
		t.Errorf("%d lines logged, want %d:\n%s", n, want, log)
	}
	for _, word := range words {
		if !strings.Contains(log, word) {
			t.Errorf("logged %q, want %q in it", log, word)
		}
	}
}

// TestLinks changes a folder as Kubernetes does: each file is a link through ..data, which is put in place of another.
func TestLinks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := authority(t, "headroom.local")
		dir := t.TempDir()
		publish := func(version string) {
			write(t, filepath.Join(dir, version), issue(t, c, "a", time.Hour, time.Now()))
			link := filepath.Join(dir, "..tmp")
			if err := os.Symlink(version, link); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(link, filepath.Join(dir, "..data")); err != nil {
				t.Fatal(err)
			}
		}
		publish("..1")
		for _, name := range []string{"ca.crt", "tls.crt", "tls.key"} {
			if err := os.Symlink(filepath.Join("..data", name), filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
		r := start(t, dir)
		defer r.stop()
		first := r.Current()
		publish("..2")
		wantLog(t, r.logged(10*time.Second), "new certificate in force")
		if r.Current() == first {
			t.Error("not loaded")
		}
	})
}

func TestExpiryIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := authority(t, "headroom.local")
		dir := t.TempDir()
		write(t, dir, issue(t, c, "a", 10*time.Hour, time.Now()))
		r := start(t, dir)
		defer r.stop()
		wantLog(t, r.logged(8*time.Hour))
		if note, err := r.Ready(time.Now()); err != nil || !strings.Contains(note, "spiffe://headroom.local/node/a until 2") {
			t.Errorf("ready: %q, %v", note, err)
		}
		if log := r.logged(2*time.Hour - time.Minute); !strings.Contains(log, "level=WARN") || strings.Count(log, "about to expire") > 8 {
			t.Errorf("before it expires:\n%s", log)
		}
		log := r.logged(30 * time.Minute)
		if n := strings.Count(log, "level=ERROR"); n < 2 || n > 4 || !strings.Contains(log, "has expired: other agents refuse it") {
			t.Errorf("after it expired:\n%s", log)
		}
		if _, err := r.Ready(time.Now()); err == nil || !strings.Contains(err.Error(), "expired at") {
			t.Errorf("ready: %v", err)
		}
		want := "# HELP headroom_identity_expiry_seconds Time until this agent's certificate expires; negative once it has, and other agents refuse it.\n" +
			"# TYPE headroom_identity_expiry_seconds gauge\nheadroom_identity_expiry_seconds -1740\n"
		if err := testutil.GatherAndCompare(r.metrics, strings.NewReader(want), "headroom_identity_expiry_seconds"); err != nil {
			t.Error(err)
		}
		// An agent that starts with an expired certificate starts, as what is in the folder may be mended.
		again := start(t, dir)
		wantLog(t, again.logged(time.Second), "level=ERROR", "has expired")
		again.stop()
		write(t, dir, issue(t, c, "a", 10*time.Hour, time.Now()))
		wantLog(t, r.logged(10*time.Second), "in force")
		if _, err := r.Ready(time.Now()); err != nil {
			t.Error(err)
		}
	})
}

func TestMissingFilesAreAllNamed(t *testing.T) {
	_, err := identity.New(identity.Config{Load: identity.Folder(t.TempDir())})
	for _, name := range []string{"ca.crt", "tls.crt", "tls.key"} {
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("error %v, want %s in it", err, name)
		}
	}
}

func TestCheck(t *testing.T) {
	c := authority(t, "headroom.local")
	service, err := identity.ServiceID(c.Domain, "default", "web")
	if err != nil {
		t.Fatal(err)
	}
	node, err := identity.NodeID(c.Domain, "a")
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range []identity.ID{service, node} {
		if err := identity.Check(id, "a"); err != nil {
			t.Error(err)
		}
	}
	if err := identity.Check(node, "b"); err == nil || !strings.Contains(err.Error(), "want spiffe://headroom.local/node/b, or spiffe://headroom.local/ns/") {
		t.Errorf("error %v", err)
	}
	workload, err := identity.WorkloadID(c.Domain, identity.Workload{Namespace: "shop", ServiceAccount: "cart"})
	if err != nil {
		t.Fatal(err)
	}
	if err := identity.Check(workload, "a"); err == nil {
		t.Error("an agent may go by the ID of a workload")
	}
	for _, bad := range []registry.NodeName{"a:b", "ä", "a b", "..", ""} {
		if id, err := identity.NodeID(c.Domain, bad); err == nil {
			t.Errorf("%q: %s", bad, id)
		}
	}
}
