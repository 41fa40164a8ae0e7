// Package localservice holds what an agent is told of the replicas on its own node: LocalService documents as users
// write them, and their meaning. The fields, their bounds and their defaults are explained in api/mesh/v1/service.proto.
package localservice

import (
	"fmt"
	"net/netip"
	"net/url"
	"path"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy"
	"github.com/headroom-mesh/headroom/policy/document"
)

// Kind is what these documents state as their kind.
const Kind = "LocalService"

// LocalService is what a document means, with every default filled in.
type LocalService struct {
	Service   string
	Protocol  policy.Protocol
	Endpoints []Endpoint   // at least one, no two at the same address
	Check     *HealthCheck // nil: the replicas always count as healthy
}

// Endpoint is one replica.
type Endpoint struct {
	Address Address
	Weight  int // how much it can bear, compared with others
}

// Address is where a replica listens: a port, or a Unix socket. The zero value is nowhere.
type Address struct {
	Port   netip.AddrPort // invalid if it is a socket
	Socket string         // its path
}

// String returns IP:PORT, or unix:/PATH.
func (a Address) String() string {
	if a.Socket != "" {
		return unixPrefix + a.Socket
	}
	return a.Port.String()
}

// MarshalText writes the address as String does, for logs.
func (a Address) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// Network returns what is to be dialed.
func (a Address) Network() (network, address string) {
	if a.Socket != "" {
		return "unix", a.Socket
	}
	return "tcp", a.Port.String()
}

const (
	unixPrefix = "unix:"
	// maxSocket is the length of the longest path that every system takes.
	maxSocket = 103
)

// HealthCheck says how to tell whether a replica is healthy.
type HealthCheck struct {
	Kind     CheckKind
	Target   string // HTTP: the path, with its query; GRPC: the service, "" for the whole server
	Interval time.Duration
	Timeout  time.Duration
	Rise     int
	Fall     int
}

// CheckKind is the protocol of a health check.
type CheckKind int

const (
	HTTP CheckKind = iota
	TCP
	GRPC
)

// String returns the field of a document that asks for such a check.
func (k CheckKind) String() string {
	switch k {
	case HTTP:
		return "http"
	case TCP:
		return "tcp"
	case GRPC:
		return "grpc"
	}
	return "unknown"
}

// Parse reads one LocalService in YAML or JSON. Its error tells all that is wrong, one problem a line.
func Parse(data []byte) (*meshv1.LocalService, error) {
	doc := new(meshv1.LocalService)
	if err := document.Decode(data, doc); err != nil {
		return nil, err
	}
	if err := Validate(doc); err != nil {
		return nil, err
	}
	return doc, nil
}

// ParseAll reads any number of them, separated by lines of "---".
func ParseAll(data []byte) ([]*meshv1.LocalService, error) {
	docs, err := document.DecodeAll(data, func() *meshv1.LocalService { return new(meshv1.LocalService) })
	if err != nil {
		return nil, err
	}
	if err := document.ValidateAll(docs, Validate); err != nil {
		return nil, err
	}
	return docs, nil
}

// Encode writes a document in YAML.
func Encode(doc *meshv1.LocalService) ([]byte, error) { return document.EncodeYAML(doc) }

// Validate reports all that is wrong with a document, as a document.Problems.
func Validate(doc *meshv1.LocalService) error {
	_, err := Compile(doc)
	return err
}

// Compile returns what a document means. It fails where Validate does.
func Compile(doc *meshv1.LocalService) (LocalService, error) {
	var problems document.Problems
	problems.Head(doc, policy.APIVersion, Kind)
	s := LocalService{
		Service:   doc.GetMetadata().GetName(),
		Protocol:  readProtocol(doc.GetSpec().GetProtocol(), &problems),
		Endpoints: readEndpoints(doc.GetSpec().GetEndpoints(), &problems),
		Check:     readCheck(doc.GetSpec().GetCheck(), &problems),
	}
	if err := problems.Err(); err != nil {
		return LocalService{}, err
	}
	return s, nil
}

func readProtocol(name string, problems *document.Problems) policy.Protocol {
	p, err := policy.ParseProtocol(name)
	if err != nil {
		problems.Add("spec.protocol", "%v", err)
	}
	return p
}

func readEndpoints(endpoints []*meshv1.LocalEndpoint, problems *document.Problems) []Endpoint {
	if len(endpoints) == 0 {
		problems.Add("spec.endpoints", `want at least one, such as "address: 127.0.0.1:8080"`)
	}
	var all []Endpoint
	first := map[Address]int{}
	for i, e := range endpoints {
		at := fmt.Sprintf("spec.endpoints[%d].", i)
		weight := problems.Count(at+"weight", e.Weight, 1, 1, 100)
		address, err := ParseAddress(e.GetAddress())
		if err != nil {
			problems.Add(at+"address", "%v", err)
			continue
		}
		if earlier, found := first[address]; found {
			problems.Add(at+"address", "%s is endpoint %d already", address, earlier)
			continue
		}
		first[address] = i
		all = append(all, Endpoint{address, weight})
	}
	return all
}

// ParseAddress reads the address of a replica. Its error says what would be right.
func ParseAddress(text string) (Address, error) {
	if socket, ok := strings.CutPrefix(text, unixPrefix); ok {
		return parseSocket(socket)
	}
	a, err := netip.ParseAddrPort(text)
	if err != nil || a.Port() == 0 || a.Addr().Zone() != "" {
		return Address{}, fmt.Errorf("want IP:PORT, such as 127.0.0.1:8080 or [::1]:8080, or unix:/PATH, got %q", text)
	}
	a = netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
	if a.Addr().IsUnspecified() || a.Addr().IsMulticast() {
		return Address{}, fmt.Errorf("want an address that the agent can connect to, such as 127.0.0.1:%d, got %q",
			a.Port(), text)
	}
	return Address{Port: a}, nil
}

// parseSocket reads the path of a Unix socket. It is part of the name of the replica: there is one way to write it.
func parseSocket(name string) (Address, error) {
	if !path.IsAbs(name) || path.Clean(name) != name || name == "/" || strings.ContainsFunc(name, unfit) || !utf8.ValidString(name) {
		return Address{}, fmt.Errorf("want unix: and the absolute path of a socket, without spaces, such as unix:/run/app.sock, got %q", unixPrefix+name)
	}
	if len(name) > maxSocket {
		return Address{}, fmt.Errorf("want the path of a socket to have %d bytes at most, as systems do, got %d: %q", maxSocket, len(name), unixPrefix+name)
	}
	return Address{Socket: name}, nil
}

func unfit(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) }

func readCheck(c *meshv1.HealthCheck, problems *document.Problems) *HealthCheck {
	if c == nil {
		return nil
	}
	const at = "spec.check."
	kind, target := readTarget(c, problems)
	interval := document.Span{Min: 10 * time.Millisecond, Max: time.Hour}
	timeout := document.Span{Min: time.Millisecond, Max: time.Minute}
	return &HealthCheck{
		Kind:     kind,
		Target:   target,
		Interval: problems.Duration(at+"interval", c.Interval, 2*time.Second, interval),
		Timeout:  problems.Duration(at+"timeout", c.Timeout, time.Second, timeout),
		Rise:     problems.Count(at+"rise", unlessZero(c.Rise), 2, 1, 100),
		Fall:     problems.Count(at+"fall", unlessZero(c.Fall), 3, 1, 100),
	}
}

func unlessZero(n uint32) *uint32 {
	if n == 0 {
		return nil
	}
	return &n
}

func readTarget(c *meshv1.HealthCheck, problems *document.Problems) (kind CheckKind, target string) {
	var set []string
	if c.Http != "" {
		kind, target, set = HTTP, c.Http, append(set, "http")
		if !isPath(target) {
			problems.Add("spec.check.http", "want a path such as /healthz, got %q", target)
		}
	}
	if c.Tcp {
		kind, target, set = TCP, "", append(set, "tcp")
	}
	if c.Grpc != "" {
		kind, target, set = GRPC, strings.TrimPrefix(c.Grpc, "*"), append(set, "grpc")
		if strings.ContainsAny(target, "* \t\r\n") {
			problems.Add("spec.check.grpc", `want the name of a service, or "*" for the whole server, got %q`, c.Grpc)
		}
	}
	if len(set) != 1 {
		problems.Add("spec.check", "want exactly one of http, tcp and grpc, got %s", orNothing(set))
	}
	return kind, target
}

func orNothing(set []string) string {
	if len(set) == 0 {
		return "none"
	}
	return strings.Join(set, " and ")
}

func isPath(s string) bool {
	_, err := url.ParseRequestURI(s)
	return err == nil && strings.HasPrefix(s, "/") && !strings.ContainsAny(s, " #")
}
