// Package meshtest runs whole meshes for tests: each node is a network namespace with a real agent, and all of them are
// on one bridge, from which each can be cut off. It wants Linux, root, and the command ip. With HEADROOM_RACE=1 in the
// environment the programs under test are built with the race detector.
package meshtest
