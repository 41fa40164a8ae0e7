// Package meshtest runs whole meshes for tests: each node is a network namespace with a real agent, and all of them are
// on one bridge, from which each can be cut off.
package meshtest
