package relay

import (
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/fault"
	"github.com/headroom-mesh/headroom/dataplane/h1"
)

// upgrade passes on the change of protocols, and then bytes.
func (x *exchange) upgrade(fields []Field) Ending {
	s := x.session
	out := s.resp.Append(s.out[:0], h1.None)
	out = appendFields(out, fields)
	out = append(out, "Connection: Upgrade\r\n"...)
	out = h1.AppendField(out, "Upgrade", s.resp.Upgrade)
	s.out = append(out, "\r\n"...)
	x.stopUpload()
	if x.flush() != nil {
		return Ending{Reason: fault.Canceled}
	}
	return x.tunnel()
}

// tunnel passes bytes both ways until both ends are done.
func (x *exchange) tunnel() Ending {
	s := x.session
	x.tunneled = true
	s.place.waits(nothing, time.Now())
	x.up.SetDeadline(time.Time{})
	s.conn.SetDeadline(time.Time{})
	var wg sync.WaitGroup
	var upErr, downErr error
	wg.Go(func() {
		upErr = pour(x.up.socket, s.conn, s.in.bytes())
	})
	downErr = pour(s.conn, x.up.socket, s.up.bytes())
	wg.Wait()
	s.in.use(len(s.in.bytes()))
	switch {
	case s.isGone():
		return Ending{Reason: fault.Canceled}
	case upErr != nil || downErr != nil:
		return Ending{Reason: fault.Reset}
	}
	return Ending{}
}

// pour copies all that comes from one connection to another, and then tells the other that there is no more. If that
// fails, both are of no use any more.
func pour(to, from *socket, early []byte) error {
	_, err := to.Write(early)
	if err == nil {
		err = copyRest(to, from)
	}
	if err == nil && to.closeWrite() == nil {
		return nil
	}
	to.Close()
	from.Close()
	return err
}

func copyRest(to, from *socket) error {
	if to.plain != nil && from.plain != nil {
		_, err := to.plain.ReadFrom(from.plain)
		return err
	}
	_, err := io.CopyBuffer(struct{ io.Writer }{to.Conn}, struct{ io.Reader }{from.Conn}, make([]byte, 2*bufferSize))
	return err
}

// connected is the answer of a replica that takes a connection.
type connected struct{}

func (connected) Status() int                               { return http.StatusOK }
func (connected) Field(dst []byte, _ string) ([]byte, bool) { return dst, false }

// connect makes a tunnel for CONNECT.
func (s *session) connect(call Call, hop *Hop) (e Ending, keep bool, failed *fault.Error) {
	if hop.To.target.Agent {
		return s.connectByAgent(call, hop)
	}
	up, failed := s.dial(hop, TCP)
	if failed != nil {
		return e, false, failed
	}
	defer up.drop()
	x := exchange{session: s, call: call, hop: hop, up: up}
	fields, failed := call.Answered(connected{}, time.Now())
	if failed != nil {
		return e, false, failed
	}
	return x.open(fields), false, nil
}

// connectByAgent makes a tunnel through the agent of the replica.
func (s *session) connectByAgent(call Call, hop *Hop) (e Ending, keep bool, failed *fault.Error) {
	up := hop.To.idleConn()
	if up == nil {
		if up, failed = s.dial(hop, TCP); failed != nil {
			return e, false, failed
		}
	}
	if !s.waitsOn(up) {
		up.drop()
		return e, false, fault.New(fault.Canceled, "the caller went away")
	}
	defer up.drop()
	defer s.waitsOn(nil)
	defer s.up.reset()
	x := exchange{session: s, call: call, hop: hop, up: up}
	s.out = s.appendHead(s.out[:0], hop)
	if n, err := up.Write(s.out); err != nil {
		return e, false, x.broken(err, n == 0)
	}
	if failed := x.readHead(); failed != nil {
		return e, false, failed
	}
	fields, failed := call.Answered(&s.resp, time.Now())
	switch {
	case failed != nil:
		return e, false, failed
	case s.resp.Code/100 != 2:
		return e, false, fault.New(fault.MalformedResponse, "the other agent answered CONNECT with %d", s.resp.Code)
	}
	return x.open(fields), false, nil
}

// open tells the caller that the tunnel is there.
func (x *exchange) open(fields []Field) Ending {
	s := x.session
	s.out = append(s.out[:0], "HTTP/1.1 200 OK\r\n"...)
	s.out = append(appendFields(s.out, fields), "\r\n"...)
	if x.flush() != nil {
		return Ending{Reason: fault.Canceled}
	}
	return x.tunnel()
}
