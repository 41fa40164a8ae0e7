package registrytest

import "testing"

func TestMemory(t *testing.T) {
	TestRegistry(t, func(*testing.T) Store { return NewMemory() })
}
