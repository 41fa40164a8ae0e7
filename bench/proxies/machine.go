//go:build linux

package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// cores say what runs where, as taskset understands it.
type cores struct {
	proxies, load string
	all           unix.CPUSet
}

// pin puts this process on the last core, and gives the first one to the proxies.
func pin() (c cores, err error) {
	if err := unix.SchedGetaffinity(0, &c.all); err != nil {
		return c, fmt.Errorf("see which cores there are: %w", err)
	}
	var all []int
	for i := range 1024 {
		if c.all.IsSet(i) {
			all = append(all, i)
		}
	}
	if len(all) < 2 {
		return c, errors.New("want two cores: one for the proxies, and one for callers and origin")
	}
	first, last := all[0], all[len(all)-1]
	c.proxies, c.load = strconv.Itoa(first), strconv.Itoa(last)
	var mine unix.CPUSet
	mine.Set(last)
	return c, stayOn(mine)
}

// unpin undoes it.
func (c cores) unpin() {
	if c.all.Count() > 0 {
		_ = stayOn(c.all)
	}
}

// stayOn keeps all threads of this process on some cores, and those that they start.
func stayOn(set unix.CPUSet) error {
	threads, err := filepath.Glob("/proc/self/task/*")
	if err != nil {
		return err
	}
	for _, t := range threads {
		id, _ := strconv.Atoi(filepath.Base(t))
		if err := unix.SchedSetaffinity(id, &set); err != nil && err != unix.ESRCH {
			return fmt.Errorf("choose the core: %w", err)
		}
	}
	return nil
}

// allowFiles lets this process, and those that it starts, have as many files open as 10,000 connections through a relay
// take, or as may be.
func allowFiles(n uint64) {
	var limit syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit) != nil || limit.Cur >= n {
		return
	}
	if syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: n, Max: max(n, limit.Max)}) != nil {
		_ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: limit.Max, Max: limit.Max}) // better than nothing
	}
}

// family returns the processes and their children.
func family(processes []*process) []int {
	var pids []int
	for _, p := range processes {
		pids = append(pids, p.command.Process.Pid)
	}
	for i := 0; i < len(pids); i++ {
		files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pids[i]))
		for _, f := range files {
			children, _ := os.ReadFile(f)
			for child := range strings.FieldsSeq(string(children)) {
				pid, _ := strconv.Atoi(child)
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// cpuTime returns the user and system time of processes, with all threads that they ever had, to the nanosecond.
func cpuTime(pids []int) time.Duration {
	total := time.Duration(0)
	for _, pid := range pids {
		var t unix.Timespec
		// See clock_getcpuclockid(3).
		if unix.ClockGettime(int32(^pid<<3|2), &t) == nil {
			total += time.Duration(t.Nano())
		}
	}
	return total
}

// memory returns the resident memory of processes, in bytes.
func memory(pids []int) int {
	total := 0
	for _, pid := range pids {
		status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		total += residentIn(status)
	}
	return total
}

func residentIn(status []byte) int {
	for line := range bytes.Lines(status) {
		if size, ok := bytes.CutPrefix(line, []byte("VmRSS:")); ok {
			kib, _ := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(string(size)), " kB"))
			return kib << 10
		}
	}
	return 0
}

// jiffies is what the machine's processors have done since it started.
type jiffies struct{ busy, stolen, total int }

func readJiffies() jiffies {
	stat, _ := os.ReadFile("/proc/stat")
	return jiffiesIn(stat)
}

// jiffiesIn reads the first line of /proc/stat.
func jiffiesIn(stat []byte) jiffies {
	line, _, _ := bytes.Cut(stat, []byte("\n"))
	var n [8]int // user, nice, system, idle, iowait, irq, softirq, steal
	for i, field := range strings.Fields(strings.TrimPrefix(string(line), "cpu ")) {
		if i < len(n) {
			n[i], _ = strconv.Atoi(field)
		}
	}
	busy := n[0] + n[1] + n[2] + n[5] + n[6]
	return jiffies{busy, n[7], busy + n[3] + n[4] + n[7]}
}

// noise is what disturbed the measurements of a cell.
type noise struct {
	steal  float64 // share of the machine's time that other machines got
	others float64 // share of the machine's time that other processes took
}

// watchNoise returns a function that tells how noisy it was since. Its argument is the CPU time that the proxies took.
func watchNoise() func(proxies time.Duration) noise {
	before, self := readJiffies(), selfTime()
	return func(proxies time.Duration) noise {
		after := readJiffies()
		total := float64(max(after.total-before.total, 1))
		const perSecond = 100 // USER_HZ
		ours := (proxies + selfTime() - self).Seconds() * perSecond
		return noise{
			steal:  float64(after.stolen-before.stolen) / total,
			others: max(0, (float64(after.busy-before.busy)-ours)/total),
		}
	}
}

func selfTime() time.Duration { return cpuTime([]int{os.Getpid()}) }

// describeMachine says what the figures were measured on.
func describeMachine() string {
	model, file := "unknown processor", "/proc/cpuinfo"
	if info, err := os.Open(file); err == nil {
		defer info.Close()
		for lines := bufio.NewScanner(info); lines.Scan(); {
			if name, value, _ := strings.Cut(lines.Text(), ":"); strings.TrimSpace(name) == "model name" {
				model = strings.TrimSpace(value)
				break
			}
		}
	}
	var name unix.Utsname
	_ = unix.Uname(&name)
	return fmt.Sprintf("%d × %s, Linux %s, %s", runtime.NumCPU(), model, unix.ByteSliceToString(name.Release[:]), runtime.Version())
}
