//go:build !race

package relay

func raceEnabled() bool { return false }
