package names

import (
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// inMountNamespace calls f where it may mount what nobody else sees.
func inMountNamespace(t *testing.T, f func()) {
	t.Helper()
	ended := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with the goroutine, and the namespace with the thread
		err := unix.Unshare(unix.CLONE_NEWNS)
		if err == nil {
			err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
		}
		if err == nil {
			f()
		}
		ended <- err
	}()
	if err := <-ended; err != nil {
		t.Skipf("wants root: %v", err)
	}
}

// TestMountedResolvConf is about containers, where the file is mounted, and so can't be replaced, or not even be written.
func TestMountedResolvConf(t *testing.T) {
	const content = "nameserver 192.0.2.1\noptions timeout:1"
	source := write(t, t.TempDir(), "source", content)
	path := write(t, t.TempDir(), "resolv.conf", "")
	inMountNamespace(t, func() {
		if err := unix.Mount(source, path, "", unix.MS_BIND, ""); err != nil {
			t.Error(err)
			return
		}
		if changed, err := putFirst(path, netip.MustParseAddr("127.0.0.1")); err != nil || !changed {
			t.Errorf("a file that is mounted: got %t, %v", changed, err)
		}
		wantContent(t, source, firstLines+content)
		if err := unix.Mount("", path, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
			t.Error(err)
			return
		}
		_, err := Restore(path)
		for _, want := range []string{path, "read-only", "listen", "redirect", "resolved"} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("a file that is read-only: got %v, want %q in it", err, want)
			}
		}
		wantContent(t, source, firstLines+content)
		if err := unix.Mount("", path, "", unix.MS_BIND|unix.MS_REMOUNT, ""); err != nil {
			t.Error(err)
			return
		}
		if changed, err := Restore(path); err != nil || !changed {
			t.Errorf("got %t, %v", changed, err)
		}
		wantContent(t, source, content)
		if entries, _ := os.ReadDir(filepath.Dir(path)); len(entries) != 1 {
			t.Errorf("there is more than the file: %v", entries)
		}
	})
}
