package names

import (
	"encoding/hex"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/miekg/dns"

	"github.com/headroom-mesh/headroom/registry"
)

const (
	ttl = 5
	// negativeTTL is short: a service that is just being started may be asked for too early.
	negativeTTL = 1
	// udpSize is what we take in one datagram, and what passes everywhere in one piece.
	udpSize = 1232
)

// zone is what the mesh answers itself.
type zone struct {
	suffixes   []string // in lower case, with the dot at the end
	lookup     func(registry.ServiceName) (ipv4, ipv6 netip.Addr, found bool)
	lookupAddr func(netip.Addr) (registry.ServiceName, bool)
}

func newZone(c Config) zone {
	z := zone{lookup: c.Lookup, lookupAddr: c.LookupAddr}
	for _, suffix := range c.Suffixes {
		z.suffixes = append(z.suffixes, dns.Fqdn(strings.ToLower(suffix)))
	}
	return z
}

// verdict says what becomes of a query.
type verdict int

const (
	answered  verdict = iota // the answer is the mesh's
	refused                  // the answer only says why there is none; nil: not even that
	elsewhere                // the query is to be forwarded
)

// answer answers a query as it came, if it is for the mesh to do so.
func (z zone) answer(query []byte, network string) ([]byte, verdict) {
	if len(query) < headerSize || header(query).isAnswer() {
		return nil, refused // to answer answers might go on for ever
	}
	if header(query).opcode() != dns.OpcodeQuery {
		return refusal(query, dns.RcodeNotImplemented), refused
	}
	q, err := readQuestion(query)
	switch {
	case err != nil:
		return refusal(query, dns.RcodeFormatError), refused
	case q.Qclass != dns.ClassINET, q.Qtype == dns.TypeAXFR, q.Qtype == dns.TypeIXFR:
		return refusal(query, dns.RcodeRefused), refused
	}
	return z.answerQuestion(query, q, network)
}

func (z zone) answerQuestion(query []byte, q dns.Question, network string) ([]byte, verdict) {
	out, options, err := replyTo(query, dns.RcodeSuccess)
	switch {
	case !z.fill(out, q):
		return nil, elsewhere
	case err != nil:
		return refusal(query, dns.RcodeFormatError), refused
	case options != nil && options.Version() != 0:
		return refusal(query, dns.RcodeBadVers), refused
	}
	out.Truncate(maxSize(network, options))
	out.Compress = true
	return pack(out), answered
}

// maxSize is what the client takes in one message.
func maxSize(network string, options *dns.OPT) int {
	switch {
	case network == "tcp":
		return dns.MaxMsgSize
	case options != nil:
		return int(options.UDPSize())
	}
	return dns.MinMsgSize
}

// fill answers a question about a name of the mesh. False means that it is about another one.
func (z zone) fill(out *dns.Msg, q dns.Question) bool {
	suffix := ""
	for _, s := range z.suffixes {
		if len(s) > len(suffix) && dns.IsSubDomain(s, q.Name) {
			suffix = s
		}
	}
	if suffix != "" {
		z.fillName(out, q, suffix)
		return true
	}
	return z.fillAddress(out, q)
}

func (z zone) fillName(out *dns.Msg, q dns.Question, suffix string) {
	out.Authoritative = true
	labels := dns.SplitDomainName(q.Name)
	labels = labels[:len(labels)-dns.CountLabel(suffix)]
	if found := z.fillRecords(out, q, labels); !found {
		out.Rcode = dns.RcodeNameError
	}
	if len(labels) == 0 && q.Qtype == dns.TypeSOA {
		out.Answer = []dns.RR{soa(suffix)}
	}
	if len(out.Answer) == 0 {
		out.Ns = []dns.RR{soa(suffix)}
	}
}

// fillRecords answers a question about the name with these labels before the suffix. False: there is no such name.
func (z zone) fillRecords(out *dns.Msg, q dns.Question, labels []string) bool {
	if len(labels) == 0 {
		return true
	}
	first := max(slices.IndexFunc(labels, isPlain), 0)
	before := labels[:first]
	service := registry.ServiceName(strings.ToLower(strings.Join(labels[first:], ".")))
	if service.Validate() != nil || len(before) > 2 {
		return false
	}
	ipv4, ipv6, found := z.lookup(service)
	switch {
	case !found:
		return false
	case len(before) == 0:
		out.Answer = hostRecords(q.Name, q.Qtype, ipv4, ipv6)
	case len(before) == 2 && q.Qtype == dns.TypeSRV && strings.EqualFold(before[1], "_tcp"):
		target := q.Name[len(before[0])+len(before[1])+2:]
		if out.Answer = srvRecords(q.Name, target, before[0]); out.Answer != nil {
			out.Extra = append(addressRecords(target, ipv4, ipv6), out.Extra...)
		}
	}
	return true
}

// isPlain reports whether a label is none of those, such as _tcp, that stand before the name of a service.
func isPlain(label string) bool { return !strings.HasPrefix(label, "_") }

// hostRecords returns the records of one type of a service.
func hostRecords(name string, qtype uint16, ipv4, ipv6 netip.Addr) []dns.RR {
	switch qtype {
	case dns.TypeA:
		return addressRecords(name, ipv4, netip.Addr{})
	case dns.TypeAAAA:
		return addressRecords(name, netip.Addr{}, ipv6)
	case dns.TypeANY: // answered as little as RFC 8482 allows
		return []dns.RR{&dns.HINFO{Hdr: head(name, dns.TypeHINFO, ttl), Cpu: "RFC8482"}}
	}
	return nil
}

func addressRecords(name string, ipv4, ipv6 netip.Addr) []dns.RR {
	var records []dns.RR
	if ipv4 = ipv4.Unmap(); ipv4.Is4() {
		records = append(records, &dns.A{Hdr: head(name, dns.TypeA, ttl), A: net.IP(ipv4.AsSlice())})
	}
	if ipv6.Is6() {
		records = append(records, &dns.AAAA{Hdr: head(name, dns.TypeAAAA, ttl), AAAA: net.IP(ipv6.AsSlice())})
	}
	return records
}

func srvRecords(name, target, protocol string) []dns.RR {
	var port uint16
	switch strings.ToLower(protocol) {
	case "_http":
		port = 80
	case "_https":
		port = 443
	default:
		return nil
	}
	return []dns.RR{&dns.SRV{Hdr: head(name, dns.TypeSRV, ttl), Port: port, Target: target}}
}

func head(name string, rrtype uint16, ttl uint32) dns.RR_Header {
	return dns.RR_Header{Name: name, Rrtype: rrtype, Class: dns.ClassINET, Ttl: ttl}
}

// soa is what negative answers carry, for its last field: how long they hold.
func soa(zone string) dns.RR {
	return &dns.SOA{
		Hdr: head(zone, dns.TypeSOA, negativeTTL), Ns: zone, Mbox: "hostmaster." + zone,
		Serial: 1, Refresh: 60, Retry: 10, Expire: 600, Minttl: negativeTTL,
	}
}

// fillAddress answers for the addresses of services, and for no others.
func (z zone) fillAddress(out *dns.Msg, q dns.Question) bool {
	if z.lookupAddr == nil {
		return false
	}
	addr, ok := addressOf(q.Name)
	if !ok {
		return false
	}
	service, found := z.lookupAddr(addr)
	if !found {
		return false
	}
	out.Authoritative = true
	if q.Qtype == dns.TypePTR {
		out.Answer = []dns.RR{&dns.PTR{Hdr: head(q.Name, dns.TypePTR, ttl), Ptr: string(service) + "." + z.suffixes[0]}}
	} else {
		out.Ns = []dns.RR{soa(q.Name)}
	}
	return true
}

// addressOf reads a name below in-addr.arpa or ip6.arpa that stands for one address.
func addressOf(name string) (netip.Addr, bool) {
	labels := dns.SplitDomainName(strings.ToLower(name))
	slices.Reverse(labels)
	switch {
	case len(labels) == 6 && labels[0] == "arpa" && labels[1] == "in-addr":
		addr, err := netip.ParseAddr(strings.Join(labels[2:], "."))
		return addr, err == nil && addr.Is4()
	case len(labels) == 34 && labels[0] == "arpa" && labels[1] == "ip6":
		raw, err := hex.DecodeString(strings.Join(labels[2:], ""))
		if err != nil || len(raw) != 16 {
			return netip.Addr{}, false
		}
		return netip.AddrFrom16([16]byte(raw)), true
	}
	return netip.Addr{}, false
}
