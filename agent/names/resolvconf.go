package names

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"
)

// ours starts a line before the one that the agent puts into resolv.conf.
const ours = "# headroom agent:"

// putFirst makes addr the first resolver in the file, in place of what an earlier agent left there. The rest stays.
func putFirst(path string, addr netip.Addr) (changed bool, err error) {
	return edit(path, func(content []byte) []byte {
		line := fmt.Sprintf("%s the next line is there while the agent runs\nnameserver %s\n", ours, addr)
		return append([]byte(line), without(content)...)
	})
}

// Restore takes out of a resolv.conf what an agent put there that could not do so itself, because it was killed. All
// else stays as it is, byte for byte. Without such lines, or without the file, it changes nothing.
func Restore(resolvConf string) (changed bool, err error) {
	if _, err := os.Stat(resolvConf); os.IsNotExist(err) {
		return false, nil
	}
	return edit(resolvConf, without)
}

// without returns the content of a file without the lines of agents.
func without(content []byte) []byte {
	kept := make([]byte, 0, len(content))
	next := false // whether the line after one of ours comes now
	for line := range bytes.Lines(content) {
		mark := bytes.HasPrefix(line, []byte(ours))
		if !mark && !(next && bytes.HasPrefix(line, []byte("nameserver "))) {
			kept = append(kept, line...)
		}
		next = mark
	}
	return kept
}

func edit(path string, change func([]byte) []byte) (changed bool, err error) {
	path, err = filepath.EvalSymlinks(path)
	if err != nil {
		return false, fmt.Errorf("change the resolvers of this node: %w", err)
	}
	content, err := os.ReadFile(path)
	if err != nil {
		return false, fmt.Errorf("change the resolvers of this node: %w", err)
	}
	wanted := change(content)
	if bytes.Equal(wanted, content) {
		return false, nil
	}
	if replace(path, wanted) == nil {
		return true, nil
	}
	// A file that is mounted can't be replaced, but be written.
	if err := overwrite(path, wanted); err != nil {
		return false, fmt.Errorf("change the resolvers of this node: %w: make the file writable for the agent, or choose "+
			"another mode: %s, if clients are configured to ask the agent; %s, if their queries are redirected to it; "+
			"%s, if systemd-resolved answers them", err, Listen, Redirect, Resolved)
	}
	return true, nil
}

// replace puts a new file in the place of an old one, at once for all who read it, with the same owner and mode.
func replace(path string, content []byte) error {
	old, err := os.Stat(path)
	if err != nil {
		return err
	}
	temporary, err := os.CreateTemp(filepath.Dir(path), ".headroom-*")
	if err != nil {
		return err
	}
	defer os.Remove(temporary.Name()) // fails once it is renamed
	defer temporary.Close()
	if _, err := temporary.Write(content); err != nil {
		return err
	}
	if err := temporary.Chmod(old.Mode().Perm()); err != nil {
		return err
	}
	if owner, ok := old.Sys().(*syscall.Stat_t); ok {
		if err := temporary.Chown(int(owner.Uid), int(owner.Gid)); err != nil {
			return err
		}
	}
	if err := temporary.Sync(); err != nil {
		return err
	}
	return os.Rename(temporary.Name(), path)
}

func overwrite(path string, content []byte) error {
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer file.Close()
	if _, err := file.Write(content); err != nil {
		return err
	}
	if err := file.Truncate(int64(len(content))); err != nil {
		return err
	}
	return file.Close()
}
