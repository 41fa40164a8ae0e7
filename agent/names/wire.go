package names

import (
	"encoding/binary"
	"errors"
	"io"
	"strings"

	"github.com/miekg/dns"
)

const headerSize = 12

// errMalformed means that a message has no question that could be answered.
var errMalformed = errors.New("malformed message")

// header reads the fields of a message that say what to do with it. The message has at least headerSize bytes.
type header []byte

func (h header) id() uint16      { return binary.BigEndian.Uint16(h) }
func (h header) setID(id uint16) { binary.BigEndian.PutUint16(h, id) }
func (h header) isAnswer() bool  { return h[2]&0x80 != 0 }
func (h header) opcode() int     { return int(h[2]>>3) & 0xf }
func (h header) desired() bool   { return h[2]&1 != 0 }    // recursion
func (h header) unchecked() bool { return h[3]&0x10 != 0 } // by DNSSEC
func (h header) rcode() int      { return int(h[3]) & 0xf }
func (h header) questions() int  { return int(binary.BigEndian.Uint16(h[4:])) }

// readQuestion returns the one question of a message. Whatever follows it is not looked at.
func readQuestion(msg []byte) (dns.Question, error) {
	if len(msg) < headerSize || header(msg).questions() != 1 {
		return dns.Question{}, errMalformed
	}
	name, end, err := dns.UnpackDomainName(msg, headerSize)
	if err != nil || end+4 > len(msg) {
		return dns.Question{}, errMalformed
	}
	return dns.Question{Name: name, Qtype: binary.BigEndian.Uint16(msg[end:]), Qclass: binary.BigEndian.Uint16(msg[end+2:])}, nil
}

// isAnswerTo reports whether msg answers query: it has its ID and its question. Servers that fail may leave the
// question out; some change the case of its letters.
func isAnswerTo(msg, query []byte) bool {
	if len(msg) < headerSize {
		return false
	}
	m, q := header(msg), header(query)
	if m.id() != q.id() || !m.isAnswer() || m.opcode() != q.opcode() {
		return false
	}
	if m.questions() == 0 {
		return m.rcode() != dns.RcodeSuccess && m.rcode() != dns.RcodeNameError
	}
	got, err := readQuestion(msg)
	want, err2 := readQuestion(query)
	return err == nil && err2 == nil && got.Qtype == want.Qtype && got.Qclass == want.Qclass && strings.EqualFold(got.Name, want.Name)
}

// replyTo starts the answer to a query of at least a header, with as much of its question as can be read. If it has EDNS
// options, so has the answer, and the query's are returned, too. The error says that something can't be read.
func replyTo(query []byte, rcode int) (*dns.Msg, *dns.OPT, error) {
	h := header(query)
	out := &dns.Msg{MsgHdr: dns.MsgHdr{
		Id: h.id(), Response: true, Opcode: h.opcode(), Rcode: rcode,
		RecursionDesired: h.desired(), RecursionAvailable: true, CheckingDisabled: h.unchecked(),
	}}
	if q, err := readQuestion(query); err == nil {
		out.Question = []dns.Question{q}
	}
	var in dns.Msg
	if err := in.Unpack(query); err != nil {
		return out, nil, errMalformed
	}
	opt := in.IsEdns0()
	if opt != nil {
		out.SetEdns0(udpSize, opt.Do())
	}
	return out, opt, nil
}

// refusal is an answer that only says why there is none.
func refusal(query []byte, rcode int) []byte {
	out, _, _ := replyTo(query, rcode)
	return pack(out)
}

// pack returns nil only if not even the header can be written.
func pack(m *dns.Msg) []byte {
	packed, err := m.Pack()
	if err == nil {
		return packed
	}
	bare := dns.Msg{MsgHdr: m.MsgHdr}
	bare.Rcode = dns.RcodeServerFailure
	packed, _ = bare.Pack()
	return packed
}

// readFrame reads a message from a TCP connection, where its length stands before it.
func readFrame(r io.Reader) ([]byte, error) {
	var length [2]byte
	if _, err := io.ReadFull(r, length[:]); err != nil {
		return nil, err
	}
	msg := make([]byte, binary.BigEndian.Uint16(length[:]))
	_, err := io.ReadFull(r, msg)
	return msg, err
}

func writeFrame(w io.Writer, msg []byte) error {
	framed := binary.BigEndian.AppendUint16(make([]byte, 0, 2+len(msg)), uint16(len(msg)))
	_, err := w.Write(append(framed, msg...))
	return err
}
