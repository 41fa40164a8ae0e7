package transport

// LimitHandshakes lets fewer handshakes go on at once than usual.
func (m *Mux) LimitHandshakes(n int) { m.atOnce = n }
