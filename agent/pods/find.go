package pods

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// finder finds the network namespaces of pods by the control groups of their processes.
type finder struct {
	proc string // as in /proc
}

// process is a process of a pod.
type process struct {
	id    int
	began uint64 // later ones have more
}

// found is the network namespace of a pod.
type found struct {
	process
	namespace *os.File
	info      fs.FileInfo
}

// find opens the network namespaces of pods, given by their UIDs, of those that have one. All processes are looked at.
func (f finder) find(uids map[string]bool) (map[string]found, error) {
	own, err := os.Stat("/proc/thread-self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("look at the agent's own network namespace: %w", err)
	}
	processes, err := f.processes(uids)
	if err != nil {
		return nil, err
	}
	all := map[string]found{}
	for uid, candidates := range processes {
		for _, p := range candidates {
			if at, ok := f.open(uid, p, own); ok {
				all[uid] = at
				break
			}
		}
	}
	return all, nil
}

// processes returns those of each pod, but for what ends meanwhile. The oldest is the first.
func (f finder) processes(uids map[string]bool) (map[string][]process, error) {
	dir, err := os.Open(f.proc)
	if err != nil {
		return nil, fmt.Errorf("look for the processes of pods: %w", err)
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, fmt.Errorf("look for the processes of pods: %w", err)
	}
	all := map[string][]process{}
	for _, name := range names {
		id, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if uid, ok := f.podOf(id, uids); ok {
			all[uid] = append(all[uid], process{id, f.began(id)})
		}
	}
	for _, processes := range all {
		slices.SortFunc(processes, func(a, b process) int { return cmp.Or(cmp.Compare(a.began, b.began), cmp.Compare(a.id, b.id)) })
	}
	return all, nil
}

func (f finder) path(id int, file string) string {
	return filepath.Join(f.proc, strconv.Itoa(id), file)
}

// podOf returns which of the pods a process is of.
func (f finder) podOf(id int, uids map[string]bool) (string, bool) {
	groups, err := os.ReadFile(f.path(id, "cgroup"))
	if err != nil {
		return "", false
	}
	for segment := range strings.FieldsFuncSeq(string(groups), func(r rune) bool { return r == '/' || r == '\n' }) {
		if uid, ok := podUID(segment); ok && uids[uid] {
			return uid, true
		}
	}
	return "", false
}

// podUID returns the UID of the pod that a control group is for: podUID, or kubepods-burstable-podUID.slice, where systemd
// makes them, in which each dash of the UID has become an underscore.
func podUID(segment string) (string, bool) {
	if slice, ok := strings.CutSuffix(segment, ".slice"); ok {
		segment = strings.ReplaceAll(slice[strings.LastIndexByte(slice, '-')+1:], "_", "-")
	}
	return strings.CutPrefix(segment, "pod")
}

// began returns when a process began, in the kernel's measure; what can't be read began last.
func (f finder) began(id int) uint64 {
	stat, err := os.ReadFile(f.path(id, "stat"))
	if err != nil {
		return math.MaxUint64
	}
	const startTime = 22 - 3 // of the fields that follow the name, which may have anything in it
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if len(fields) <= startTime {
		return math.MaxUint64
	}
	began, err := strconv.ParseUint(fields[startTime], 10, 64)
	if err != nil {
		return math.MaxUint64
	}
	return began
}

// open opens the network namespace of a process, unless it is the agent's own: a container that is only just being made may
// still be there.
func (f finder) open(uid string, p process, own fs.FileInfo) (found, bool) {
	file, err := os.Open(f.path(p.id, "ns/net"))
	if err != nil {
		return found{}, false
	}
	info, err := file.Stat()
	_, still := f.podOf(p.id, map[string]bool{uid: true}) // or another process has its number now
	if err != nil || !still || os.SameFile(info, own) {
		_ = file.Close()
		return found{}, false
	}
	return found{p, file, info}, true
}

// lives reports whether the process by which a namespace was found is still in it.
func (f finder) lives(at found) bool {
	info, err := os.Stat(f.path(at.id, "ns/net"))
	return err == nil && os.SameFile(info, at.info)
}

func sameNamespace(a, b found) bool { return os.SameFile(a.info, b.info) }

// connections counts the connections of a process's network namespace to a local port that are not over.
func (f finder) connections(id int, port uint16) (int, error) {
	total := 0
	for _, file := range []string{"net/tcp", "net/tcp6"} {
		table, err := os.ReadFile(f.path(id, file))
		if errors.Is(err, fs.ErrNotExist) && file == "net/tcp6" {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("count connections: %w", err)
		}
		total += countConnections(string(table), port)
	}
	return total, nil
}

// countConnections counts the lines of a table that are of connections at a local port, established or ending.
func countConnections(table string, port uint16) int {
	local := fmt.Sprintf(":%04X", port)
	const timeWait, closed, listen = "06", "07", "0A"
	total := 0
	for line := range strings.Lines(table) {
		fields := strings.Fields(line)
		if len(fields) < 4 || !strings.HasSuffix(fields[1], local) {
			continue
		}
		if state := fields[3]; state != timeWait && state != closed && state != listen {
			total++
		}
	}
	return total
}
