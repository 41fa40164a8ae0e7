package capture

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// cgroup is a control group as the kernel knows it.
type cgroup struct {
	path  string
	id    uint64
	level uint32 // below the root
}

func findCgroups(paths []string) ([]cgroup, error) {
	if len(paths) == 0 {
		return nil, nil
	}
	root, err := cgroupRoot("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var groups []cgroup
	for _, path := range paths {
		path = strings.Trim(path, "/")
		info, err := os.Stat(filepath.Join(root, path))
		if err != nil {
			return nil, fmt.Errorf("exempt control group %q: %w: it must be there when capture starts", path, err)
		}
		level := uint32(strings.Count(path, "/") + 1)
		groups = append(groups, cgroup{path, info.Sys().(*syscall.Stat_t).Ino, level})
	}
	return groups, nil
}

// cgroupRoot returns where the hierarchy of version 2 is mounted.
func cgroupRoot(mountinfo string) (string, error) {
	f, err := os.Open(mountinfo)
	if err != nil {
		return "", fmt.Errorf("look for control groups: %w", err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		mount, kind, ok := strings.Cut(lines.Text(), " - ")
		if fields := strings.Fields(mount); ok && len(fields) > 4 && strings.HasPrefix(kind, "cgroup2 ") {
			return fields[4], nil
		}
	}
	if err := lines.Err(); err != nil {
		return "", fmt.Errorf("look for control groups: %w", err)
	}
	return "", errors.New("exempt control groups: no hierarchy of version 2 is mounted here (mount -t cgroup2 none /sys/fs/cgroup)")
}
