package capture

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

// Remove removes what an agent that has died has left in a network namespace, given as in Config: the guard, the routes,
// and capture tables without owner. It returns what that was. It changes nothing while an agent captures there.
func Remove(netns string) (removed []string, err error) {
	ns, err := openNamespace(netns)
	if err != nil {
		return nil, err
	}
	defer ns.close()
	k, err := dialKernel(ns)
	if err != nil {
		return nil, err
	}
	defer k.close()
	left, err := k.left()
	if err != nil {
		return nil, err
	}
	if owners := left.owners(); len(owners) > 0 {
		return nil, fmt.Errorf("%w: the process at netlink port %d, which is mostly its ID: stop it, which removes everything", errBusy, owners[0].owner)
	}
	removed, routesErr := removeRoutes(ns)
	tables, tablesErr := k.removeTables(left)
	return append(removed, tables...), errors.Join(routesErr, tablesErr)
}

// RemoveAll does so in the network namespaces of all processes that are seen in proc, as in /proc, and in this process's own.
// Where an agent captures nothing is changed.
func RemoveAll(proc string) (removed []string, err error) {
	removed, err = Remove("")
	problems := []error{err}
	for _, path := range otherNamespaces(proc) {
		there, err := Remove(path)
		if errors.Is(err, errBusy) || errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			err = fmt.Errorf("%s: %w", path, err)
		}
		problems = append(problems, err)
		for _, what := range there {
			removed = append(removed, what+" in "+path)
		}
	}
	return removed, errors.Join(problems...)
}

// otherNamespaces returns a path of each network namespace but this process's own, of those that have processes.
func otherNamespaces(proc string) []string {
	var seen []fs.FileInfo
	if own, err := os.Stat("/proc/thread-self/ns/net"); err == nil {
		seen = append(seen, own)
	}
	var others []string
	all, _ := filepath.Glob(filepath.Join(proc, "[0-9]*", "ns", "net"))
	for _, path := range all {
		info, err := os.Stat(path)
		if err != nil || slices.ContainsFunc(seen, func(s fs.FileInfo) bool { return os.SameFile(s, info) }) {
			continue // it has ended, or it is known
		}
		seen = append(seen, info)
		others = append(others, path)
	}
	return others
}

func removeRoutes(ns namespace) ([]string, error) {
	r, err := openRouter(ns)
	if err != nil {
		return nil, err
	}
	defer r.close()
	ranges, err := r.remove()
	var removed []string
	for _, p := range ranges {
		removed = append(removed, fmt.Sprintf("route local %v dev lo", p))
	}
	return removed, err
}

func (k *kernel) removeTables(l left) ([]string, error) {
	var removed []string
	for _, t := range l.capture {
		k.DelTable(table(t.name))
		removed = append(removed, "table inet "+t.name)
	}
	if l.guard {
		k.DelTable(guardTable())
		removed = append(removed, "table inet "+guardTable().Name)
	}
	if err := k.flush(); err != nil {
		return nil, fmt.Errorf("remove nftables tables: %w", err)
	}
	return removed, nil
}
