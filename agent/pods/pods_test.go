package pods

import (
	"errors"
	"testing"
	"time"
)

// TestLookout has a pod that is never found while much changes in the cluster: a look costs as much as the node has processes.
func TestLookout(t *testing.T) {
	var l lookout
	begin := time.Now()
	var looks []time.Duration
	for at := time.Duration(0); at <= 10*time.Second; at += 10 * time.Millisecond {
		if hinted := at < 5*time.Second; l.due(begin.Add(at), hinted) {
			looks = append(looks, at)
		}
	}
	if looks[0] != 0 {
		t.Errorf("the first look is after %v, want it at once", looks[0])
	}
	for i, at := range looks[1:] {
		gap := at - looks[i]
		if gap < firstTry {
			t.Fatalf("looks at %v and %v", looks[i], at)
		}
		if at < 5*time.Second && gap > firstTry {
			t.Errorf("no look between %v and %v, though something may be there", looks[i], at)
		}
	}
	if late := looks[len(looks)-1] - looks[len(looks)-2]; late < 4*firstTry {
		t.Errorf("without hints there is still a look after %v", late)
	}
}

// TestStatusOfAllThatAreWanted asks when a pod could not be captured, before Run has taken note.
func TestStatusOfAllThatAreWanted(t *testing.T) {
	p := New(Config{})
	why := errors.New("no room")
	in := &inside{pod: Pod{UID: "a", Namespace: "shop", Name: "a"}, over: make(chan struct{}), err: why}
	close(in.over)
	p.inside["a"] = in
	p.Set([]Pod{in.pod, {UID: "b", Namespace: "shop", Name: "b"}})
	all := p.Status()
	if len(all) != 2 || all[0].Err != why || all[1].Err != errNotFound {
		t.Errorf("got %+v, want two: %v, %v", all, why, errNotFound)
	}
}
