package names

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

const firstLines = "# headroom agent: the next line is there while the agent runs\nnameserver 127.0.0.1\n"

// write puts a file into the file system of a test.
func write(t *testing.T, root, name, content string) string {
	t.Helper()
	path := filepath.Join(root, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func wantContent(t *testing.T, path, want string) {
	t.Helper()
	got, err := os.ReadFile(path)
	if err != nil {
		t.Error(err)
	} else if string(got) != want {
		t.Errorf("%s: got\n%s\nwant\n%s", path, got, want)
	}
}

func upstreamsOf(s *Server) string {
	var all []string
	for _, at := range *s.forwarder.upstreams.Load() {
		all = append(all, at.String())
	}
	return strings.Join(all, " ")
}

// newResolvConf returns a server that listens nowhere, and its resolv.conf.
func newResolvConf(t *testing.T, content string) (*Server, string) {
	root := t.TempDir()
	path := write(t, root, "etc/resolv.conf", content)
	s, err := New(Config{Mode: ResolvConf, Root: root, Lookup: lookup})
	if err != nil {
		t.Fatal(err)
	}
	s.addrs = s.cfg.Addrs
	return s, path
}

func TestModeResolvConf(t *testing.T) {
	const content = "# by hand\nsearch example.com\nnameserver 192.0.2.53\nnameserver fe80::1%eth0\noptions ndots:2" // and no line end
	root := t.TempDir()
	path := write(t, root, "etc/resolv.conf", content)
	if err := os.Chmod(path, 0o640); err != nil {
		t.Fatal(err)
	}
	s, stop := start(t, Config{Mode: ResolvConf, Root: root})
	wantContent(t, path, firstLines+content)
	if got, want := upstreamsOf(s), "192.0.2.53:53 [fe80::1%eth0]:53"; got != want {
		t.Errorf("forwards to %s, want %s", got, want)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	wantContent(t, path, content)
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("got %v, %v, want the mode that the file had", info.Mode(), err)
	}
	if entries, _ := os.ReadDir(filepath.Dir(path)); len(entries) != 1 {
		t.Errorf("there is more than the file: %v", entries)
	}
}

// TestLeftovers wants what a killed agent left to be undone, by the next one and without.
func TestLeftovers(t *testing.T) {
	const content = "nameserver 192.0.2.53\n"
	left := strings.ReplaceAll(firstLines, "127.0.0.1", "127.0.0.9") + content
	s, path := newResolvConf(t, left)
	if err := s.begin(); err != nil {
		t.Fatal(err)
	}
	wantContent(t, path, firstLines+content)
	s.readResolvers()
	if got := upstreamsOf(s); got != "192.0.2.53:53" {
		t.Errorf("forwards to %s", got)
	}
	for _, want := range []bool{true, false} {
		changed, err := Restore(path)
		if err != nil || changed != want {
			t.Errorf("got %t, %v, want %t", changed, err, want)
		}
		wantContent(t, path, content)
	}
	if changed, err := Restore(path + ".nowhere"); changed || err != nil {
		t.Errorf("got %t, %v for a file that isn't there", changed, err)
	}
}

// TestUndo wants an agent of any mode to take back what one left that was killed in another mode, and not what one needs that
// answers.
func TestUndo(t *testing.T) {
	const resolvers, at = "nameserver 192.0.2.53\n", "127.0.0.9"
	l, err := net.Listen("tcp", at+":53")
	if err != nil {
		t.Fatalf("%v (it takes root)", err)
	}
	defer l.Close()
	own := netip.MustParseAddrPort(at + ":53")
	for _, tt := range []struct {
		name    string
		mode    Mode
		address string
		own     []netip.AddrPort
		kept    bool
	}{
		{"killed", Redirect, "127.0.0.8", nil, false},
		{"killed, and no names are answered any more", "", "127.0.0.8", nil, false},
		{"killed, and its address is ours now", Listen, at, []netip.AddrPort{own}, false},
		{"alive", Redirect, at, nil, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			root := t.TempDir()
			left := strings.ReplaceAll(firstLines, "127.0.0.1", tt.address)
			file := write(t, root, "etc/resolv.conf", left+resolvers)
			dropIn := write(t, root, "etc/systemd/resolved.conf.d/headroom.conf", "# by an agent\n[Resolve]\nDNS="+tt.address+":53\nDomains=~mesh\n")
			Undo(Config{Mode: tt.mode, Root: root}, tt.own...)
			want := resolvers
			if tt.kept {
				want = left + resolvers
			}
			wantContent(t, file, want)
			if _, err := os.Stat(dropIn); os.IsNotExist(err) == tt.kept {
				t.Errorf("the file for systemd-resolved: %v", err)
			}
		})
	}
}

func TestSomebodyWritesResolvConfAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const renewed = "# from DHCP\nnameserver 192.0.2.2\n"
		s, path := newResolvConf(t, "nameserver 192.0.2.1\n")
		s.readResolvers()
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := s.divert(ctx); err != nil {
				t.Error(err)
			}
		})
		<-s.Ready()
		wantContent(t, path, firstLines+"nameserver 192.0.2.1\n")

		write(t, "", path, renewed)
		time.Sleep(5 * pollEvery / 2)
		wantContent(t, path, firstLines+renewed)
		if got := upstreamsOf(s); got != "192.0.2.2:53" {
			t.Errorf("forwards to %s, want the new resolver", got)
		}

		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * pollEvery / 2)
		if got := upstreamsOf(s); got != "192.0.2.2:53" {
			t.Errorf("forwards to %q while the file is missing, want the resolver that it had", got)
		}

		write(t, "", path, renewed)
		time.Sleep(5 * pollEvery / 2)
		cancel()
		wg.Wait()
		wantContent(t, path, renewed)
	})
}

func TestLinkStaysLink(t *testing.T) {
	s, path := newResolvConf(t, "")
	target := write(t, t.TempDir(), "resolv.conf", "nameserver 192.0.2.1\n")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(target, path); err != nil {
		t.Fatal(err)
	}
	if err := s.begin(); err != nil {
		t.Fatal(err)
	}
	wantContent(t, target, firstLines+"nameserver 192.0.2.1\n")
	if err := s.end(); err != nil {
		t.Fatal(err)
	}
	wantContent(t, target, "nameserver 192.0.2.1\n")
	if to, err := os.Readlink(path); err != nil || to != target {
		t.Errorf("got %s, %v, want the link", to, err)
	}
}

func TestMissingResolvConf(t *testing.T) {
	s, path := newResolvConf(t, "")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := s.begin(); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("got %v, want the name of the file", err)
	}
}

// TestRoundTrip wants any file back as it was.
func TestRoundTrip(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		line := rapid.OneOf(rapid.SampledFrom([]string{"nameserver 192.0.2.1\n", "nameserver 127.0.0.1\r\n", "#\n", "\n", "options x"}), rapid.StringN(0, 20, -1))
		content := []byte(strings.Join(rapid.SliceOf(line).Draw(t, "lines"), ""))
		if bytes.Contains(content, []byte(ours)) {
			t.Skip()
		}
		path := filepath.Join(dir, "resolv.conf")
		if err := os.WriteFile(path, content, 0o644); err != nil {
			t.Fatal(err)
		}
		for range 2 { // the second time it is the leftover of the first
			if _, err := putFirst(path, netip.MustParseAddr("127.0.0.1")); err != nil {
				t.Fatal(err)
			}
		}
		if got, _ := os.ReadFile(path); string(got) != firstLines+string(content) {
			t.Fatalf("while it runs: got %q", got)
		}
		if _, err := Restore(path); err != nil {
			t.Fatal(err)
		}
		if got, _ := os.ReadFile(path); !bytes.Equal(got, content) {
			t.Fatalf("got %q back, want %q", got, content)
		}
	})
}

func FuzzResolvConf(f *testing.F) {
	f.Add([]byte("nameserver 192.0.2.1\n"))
	f.Add([]byte(firstLines + firstLines + "nameserver ::1"))
	f.Add([]byte(ours))
	f.Fuzz(func(t *testing.T, content []byte) {
		kept := without(content)
		if !bytes.Equal(without(append([]byte(firstLines), kept...)), without(kept)) {
			t.Errorf("%q: two lines before it change it", kept)
		}
		for _, at := range nameservers(content) {
			if !at.IsValid() || at.Port() != 53 {
				t.Errorf("%q: got resolver %s", content, at)
			}
		}
	})
}

func TestNameservers(t *testing.T) {
	got := nameservers([]byte("nameserver 192.0.2.1 # the first\n#nameserver 192.0.2.2\n; nameserver 192.0.2.3\n\tnameserver\t2001:db8::1;x\r\n" +
		"nameserver\nnameserver localhost\nnameservers 192.0.2.4\nnameserver ::ffff:192.0.2.5\nnameserver 192.0.2.6"))
	var text []string
	for _, at := range got {
		text = append(text, at.Addr().String())
	}
	if diff := cmp.Diff([]string{"192.0.2.1", "2001:db8::1", "192.0.2.5", "192.0.2.6"}, text); diff != "" {
		t.Error(diff)
	}
}

func TestModeResolved(t *testing.T) {
	root := t.TempDir()
	write(t, root, "etc/resolv.conf", "nameserver 127.0.0.53\n")
	write(t, root, "run/systemd/resolve/resolv.conf", "nameserver 192.0.2.9\n")
	var log bytes.Buffer
	s, stop := start(t, Config{
		Mode: Resolved, Root: root, Suffixes: []string{"mesh", "prod.example.com"}, Log: slog.New(slog.NewTextHandler(&log, nil)),
		Addrs: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0"), netip.MustParseAddrPort("0.0.0.0:0")},
	})
	path := filepath.Join(root, "etc/systemd/resolved.conf.d/headroom.conf")
	wantContent(t, path, "# The Headroom agent writes this file when it begins, and removes it when it ends.\n[Resolve]\nDNS="+
		s.Addrs()[0].String()+" "+strings.Replace(s.Addrs()[1].String(), "0.0.0.0", "127.0.0.1", 1)+"\nDomains=~mesh ~prod.example.com\n")
	if got := upstreamsOf(s); got != "192.0.2.9:53" {
		t.Errorf("forwards to %s, want the resolver behind systemd-resolved, which would ask the agent again", got)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("%s is still there: %v", path, err)
	}
	if n := strings.Count(log.String(), "systemctl reload-or-restart systemd-resolved"); n != 2 {
		t.Errorf("the log says %d times what to do, want 2:\n%s", n, &log)
	}
	write(t, "", path, "left behind")
	for _, want := range []bool{true, false} {
		if changed, err := RestoreResolved(root); err != nil || changed != want {
			t.Errorf("got %t, %v, want %t", changed, err, want)
		}
	}
}

func TestStubIsAskedWhereItCantAskBack(t *testing.T) {
	root := t.TempDir()
	write(t, root, "etc/resolv.conf", "nameserver 127.0.0.53\n")
	behind := write(t, root, "run/systemd/resolve/resolv.conf", "nameserver 192.0.2.9\n")
	for mode, want := range map[Mode]string{Listen: "127.0.0.53:53", Redirect: "192.0.2.9:53", Resolved: "192.0.2.9:53"} {
		got, err := Config{Mode: mode, Root: root}.withDefaults().upstreams()
		if err != nil || len(got) != 1 || got[0].String() != want {
			t.Errorf("mode %s: got %v, %v, want %s", mode, got, err, want)
		}
	}
	if err := os.Remove(behind); err != nil {
		t.Fatal(err)
	}
	got, err := Config{Mode: Redirect, Root: root}.withDefaults().upstreams()
	if err != nil || len(got) != 1 || got[0].String() != "127.0.0.53:53" {
		t.Errorf("got %v, %v, want the only resolver that there is", got, err)
	}
}
