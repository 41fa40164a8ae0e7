//go:build !race

package agent

func raceEnabled() bool { return false }
