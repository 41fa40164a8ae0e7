package relay

import "net/http"

// Failed reports whether a response says that the replica failed: by its status or, for gRPC, by that in the head or in the
// trailers. Codes that blame the caller, or the order of things, don't count. It reads into scratch.
func Failed(status int, f Fields, scratch []byte) bool {
	if status >= http.StatusInternalServerError {
		return true
	}
	if f == nil {
		return false
	}
	code, _ := f.Field(scratch[:0], "grpc-status")
	switch string(code) {
	case "2", "4", "8", "13", "14", "15": // unknown, deadline exceeded, resource exhausted, internal, unavailable, data loss
		return true
	}
	return false
}
