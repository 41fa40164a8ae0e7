//go:build race

package agent

// raceEnabled reports whether the race detector slows things down.
func raceEnabled() bool { return true }
