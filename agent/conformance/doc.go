// Package conformance holds a mesh against suites, programs and libraries that others wrote: what they find between a
// caller and a server must stay the same with agents in between. It has tests only. They want what package meshtest
// wants, and the commands curl, nghttp and h2load.
package conformance
