//go:build race

package relay

// raceEnabled reports whether the race detector slows things down, and keeps memory of its own.
func raceEnabled() bool { return true }
