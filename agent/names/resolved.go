package names

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
)

// dropIn is the file that tells systemd-resolved of the agent. Only the agent writes it.
func dropIn(root string) string {
	return filepath.Join(cmp.Or(root, "/"), "etc/systemd/resolved.conf.d/headroom.conf")
}

// writeDropIn makes systemd-resolved ask at addrs for names below suffixes, once it is told to read its files.
func writeDropIn(root string, addrs []netip.AddrPort, suffixes []string) (changed bool, err error) {
	path := dropIn(root)
	var content bytes.Buffer
	fmt.Fprintln(&content, "# The Headroom agent writes this file when it begins, and removes it when it ends.\n[Resolve]")
	fmt.Fprint(&content, "DNS=")
	for i, at := range addrs {
		if i > 0 {
			fmt.Fprint(&content, " ")
		}
		fmt.Fprint(&content, at)
	}
	fmt.Fprintf(&content, "\nDomains=~%s\n", strings.Join(suffixes, " ~"))
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, content.Bytes()) {
		return false, nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return false, fmt.Errorf("tell systemd-resolved of the mesh: %w", err)
	}
	if err := os.WriteFile(path, content.Bytes(), 0o644); err != nil {
		return false, fmt.Errorf("tell systemd-resolved of the mesh: %w", err)
	}
	return true, nil
}

// RestoreResolved removes what an agent told systemd-resolved, if it could not do so itself. Root is the folder in which
// the system's files are, as in Config.
func RestoreResolved(root string) (changed bool, err error) {
	err = os.Remove(dropIn(root))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("take the mesh out of systemd-resolved: %w", err)
	}
	return true, nil
}
