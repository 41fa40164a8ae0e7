package ca

import (
	"bytes"
	"fmt"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/identity"
)

// Loader returns an identity.Loader of certificates that the CA in a folder issues for id, each when two thirds of the
// life of the one before are over, or when the CA or the roots beside it change. With it come those for workloads.
func Loader(dir string, id identity.ID) identity.Loader {
	var l loader
	return func(now time.Time) (*identity.Set, error) { return l.load(dir, id, now) }
}

type loader struct {
	roots, key []byte // as they were read
	set        *identity.Set
}

func (l *loader) load(dir string, id identity.ID, now time.Time) (*identity.Set, error) {
	roots, key, err := readFolder(dir)
	if err != nil {
		return nil, err
	}
	if l.set != nil && bytes.Equal(roots, l.roots) && bytes.Equal(key, l.key) && now.Before(l.set.Renewal()) {
		return l.set, nil
	}
	ca, err := parse(roots, key, id.TrustDomain())
	if err != nil {
		return nil, fmt.Errorf("the CA in %s: %w", dir, err)
	}
	set, err := ca.set(id, OwnLife, now)
	if err != nil {
		return nil, fmt.Errorf("the CA in %s: %w", dir, err)
	}
	set.IssuedBy(func(id identity.ID, now time.Time) (*identity.Set, error) { return ca.set(id, WorkloadLife, now) })
	l.roots, l.key, l.set = roots, key, set
	return set, nil
}

// set issues a certificate that is used right away.
func (ca *CA) set(id identity.ID, life time.Duration, now time.Time) (*identity.Set, error) {
	files, err := ca.Issue(id, life, now)
	if err != nil {
		return nil, err
	}
	return identity.Parse(files.Roots, files.Certificate, files.Key, now)
}
