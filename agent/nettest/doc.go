// Package nettest gives tests network namespaces of their own. It wants Linux, root, and the commands that tests run in them.
package nettest
