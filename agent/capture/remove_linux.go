package capture

import (
	"errors"
	"fmt"
)

// Remove removes what an agent that has died has left in a network namespace, given as in Config: the guard, the routes,
// and a capture table without owner. It returns what that was. It changes nothing while an agent captures there.
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
	if left.owner != 0 {
		return nil, fmt.Errorf("%w: the process at netlink port %d, which is mostly its ID: stop it, which removes everything", errBusy, left.owner)
	}
	removed, routesErr := removeRoutes(ns)
	tables, tablesErr := k.removeTables(left)
	return append(removed, tables...), errors.Join(routesErr, tablesErr)
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
	if l.capture {
		k.DelTable(captureTable())
		removed = append(removed, "table inet "+captureTable().Name)
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
