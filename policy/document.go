package policy

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy/document"
	"google.golang.org/protobuf/proto"
)

// Parse reads one ServicePolicy in YAML or JSON. Its error tells all that is wrong, one problem a line.
func Parse(data []byte) (*meshv1.ServicePolicy, error) {
	doc := new(meshv1.ServicePolicy)
	if err := document.Decode(data, doc); err != nil {
		return nil, err
	}
	if err := Validate(doc); err != nil {
		return nil, err
	}
	return doc, nil
}

// ParseAll reads any number of them, each about another service, separated by lines of "---".
func ParseAll(data []byte) ([]*meshv1.ServicePolicy, error) {
	docs, err := document.DecodeAll(data, func() *meshv1.ServicePolicy { return new(meshv1.ServicePolicy) })
	if err != nil {
		return nil, err
	}
	if err := document.ValidateAll(docs, Validate); err != nil {
		return nil, err
	}
	if err := distinct(docs); err != nil {
		return nil, err
	}
	return docs, nil
}

// distinct refuses documents of which one would replace another.
func distinct(docs []*meshv1.ServicePolicy) error {
	var problems document.Problems
	first := map[string]int{}
	for i, doc := range docs {
		name := doc.Metadata.Name
		if earlier, found := first[name]; found {
			problems.Add(fmt.Sprintf("document %d: metadata.name", i+1), "document %d is about %s already", earlier+1, name)
			continue
		}
		first[name] = i
	}
	return problems.Err()
}

// Validate reports all that is wrong with a document, as a document.Problems.
func Validate(doc *meshv1.ServicePolicy) error {
	_, err := Compile(doc)
	return err
}

// Compile returns what a document means. It fails where Validate does.
func Compile(doc *meshv1.ServicePolicy) (Policy, error) {
	var problems document.Problems
	problems.Head(doc, APIVersion, Kind)
	p := read(doc.GetSpec(), &problems)
	if err := problems.Err(); err != nil {
		return Policy{}, err
	}
	return p, nil
}

// Effective returns doc with every default written out. A field with a value that Validate refuses counts as left out.
func Effective(doc *meshv1.ServicePolicy) *meshv1.ServicePolicy {
	metadata, _ := proto.Clone(doc.GetMetadata()).(*meshv1.Metadata)
	return &meshv1.ServicePolicy{
		ApiVersion: APIVersion,
		Kind:       Kind,
		Metadata:   metadata,
		Spec:       read(doc.GetSpec(), new(document.Problems)).spec(),
	}
}

func read(spec *meshv1.ServicePolicySpec, problems *document.Problems) Policy {
	d := Default()
	p := Policy{
		Balancer:    readBalancer(spec.GetBalancer(), d.Balancer, problems),
		Prequal:     readPrequal(spec.GetPrequal(), d.Prequal, problems),
		Timeout:     problems.Duration("spec.timeout", spec.GetTimeout(), d.Timeout, document.Span{Min: time.Millisecond, Max: 24 * time.Hour, Off: true}),
		RetryBudget: readRetryBudget(spec.GetRetryBudget(), d.RetryBudget, problems),
		Hash:        readHash(spec.GetConsistentHash(), d.Hash, problems),
	}
	if p.Balancer == BalancerRingHash && spec.GetConsistentHash().GetKey() == nil {
		problems.Add("spec.consistentHash.key",
			"required by balancer ring_hash: set one of header, cookie, path and source")
	}
	return p
}

// Balancers returns all balancing rules.
func Balancers() []Balancer {
	return []Balancer{
		BalancerPrequal, BalancerRoundRobin, BalancerRandom, BalancerLeastLoaded, BalancerP2C, BalancerRingHash,
	}
}

func readBalancer(name string, otherwise Balancer, problems *document.Problems) Balancer {
	if name == "" {
		return otherwise
	}
	if b := Balancer(name); slices.Contains(Balancers(), b) {
		return b
	}
	problems.Add("spec.balancer", "want %s, got %q", oneOf(Balancers()), name)
	return otherwise
}

func oneOf(balancers []Balancer) string {
	var names []string
	for _, b := range balancers {
		names = append(names, string(b))
	}
	last := len(names) - 1
	return strings.Join(names[:last], ", ") + " or " + names[last]
}

func readPrequal(s *meshv1.PrequalSpec, d Prequal, problems *document.Problems) Prequal {
	if s == nil {
		return d
	}
	const at = "spec.prequal."
	rate := document.Range{Max: 16}
	age := document.Span{Min: 10 * time.Millisecond, Max: time.Minute}
	idle := document.Span{Min: 10 * time.Millisecond, Max: time.Minute, Off: true}
	probe := document.Span{Min: time.Millisecond, Max: 10 * time.Second}
	return Prequal{
		PoolSize:           problems.Count(at+"poolSize", s.PoolSize, d.PoolSize, 2, 256),
		ProbesPerRequest:   problems.Number(at+"probesPerRequest", s.ProbesPerRequest, d.ProbesPerRequest, rate),
		RemovalsPerRequest: problems.Number(at+"removalsPerRequest", s.RemovalsPerRequest, d.RemovalsPerRequest, rate),
		Delta:              problems.Number(at+"delta", s.Delta, d.Delta, document.Range{Max: 100, Above: true}),
		MaxAge:             problems.Duration(at+"maxAge", s.MaxAge, d.MaxAge, age),
		ProbeTimeout:       problems.Duration(at+"probeTimeout", s.ProbeTimeout, d.ProbeTimeout, probe),
		QRIF:               problems.Number(at+"qRIF", s.QRif, d.QRIF, document.Range{Max: 1}),
		IdleProbeInterval:  problems.Duration(at+"idleProbeInterval", s.IdleProbeInterval, d.IdleProbeInterval, idle),
	}
}

func readRetryBudget(s *meshv1.RetryBudget, d RetryBudget, problems *document.Problems) RetryBudget {
	if s == nil {
		return d
	}
	const at = "spec.retryBudget."
	return RetryBudget{
		Ratio:        problems.Number(at+"ratio", s.Ratio, d.Ratio, document.Range{Max: 1}),
		MinPerSecond: problems.Number(at+"minPerSecond", s.MinPerSecond, d.MinPerSecond, document.Range{Max: 1000}),
		Window:       problems.Duration(at+"window", s.Window, d.Window, document.Span{Min: time.Second, Max: time.Minute}),
	}
}

func readHash(s *meshv1.ConsistentHash, d Hash, problems *document.Problems) Hash {
	if s == nil {
		return d
	}
	factor := document.Range{Min: 1, Max: 100, Above: true}
	return Hash{
		Key:        readKey(s.GetKey(), problems),
		LoadFactor: problems.Number("spec.consistentHash.loadFactor", s.LoadFactor, d.LoadFactor, factor),
	}
}

func readKey(k *meshv1.HashKey, problems *document.Problems) HashKey {
	if k == nil {
		return HashKey{}
	}
	var set []string
	var key HashKey
	choose := func(name string, isSet bool, value HashKey) {
		if isSet {
			set, key = append(set, name), value
		}
	}
	choose("header", k.Header != "", HashKey{Source: KeyHeader, Name: k.Header})
	choose("cookie", k.Cookie != "", HashKey{Source: KeyCookie, Name: k.Cookie})
	choose("path", k.Path, HashKey{Source: KeyPath})
	choose("source", k.Source, HashKey{Source: KeySourceAddress})
	if len(set) != 1 {
		got := "nothing"
		if len(set) > 1 {
			got = strings.Join(set, " and ")
		}
		problems.Add("spec.consistentHash.key", "want exactly one of header, cookie, path and source, got %s", got)
		return HashKey{}
	}
	if key.Name != "" && !token.MatchString(key.Name) {
		problems.Add("spec.consistentHash.key."+set[0], "want the name of a %s, got %q", set[0], key.Name)
		return HashKey{}
	}
	return key
}

// token is what HTTP allows in the name of a header or a cookie.
var token = regexp.MustCompile("^[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}$")

// spec writes p as a document does.
func (p Policy) spec() *meshv1.ServicePolicySpec {
	return &meshv1.ServicePolicySpec{
		Balancer: string(p.Balancer),
		Prequal: &meshv1.PrequalSpec{
			PoolSize:           new(uint32(p.Prequal.PoolSize)),
			ProbesPerRequest:   new(p.Prequal.ProbesPerRequest),
			RemovalsPerRequest: new(p.Prequal.RemovalsPerRequest),
			Delta:              new(p.Prequal.Delta),
			MaxAge:             document.FormatDuration(p.Prequal.MaxAge),
			ProbeTimeout:       document.FormatDuration(p.Prequal.ProbeTimeout),
			QRif:               new(p.Prequal.QRIF),
			IdleProbeInterval:  document.FormatDuration(p.Prequal.IdleProbeInterval),
		},
		Timeout: document.FormatDuration(p.Timeout),
		RetryBudget: &meshv1.RetryBudget{
			Ratio:        new(p.RetryBudget.Ratio),
			MinPerSecond: new(p.RetryBudget.MinPerSecond),
			Window:       document.FormatDuration(p.RetryBudget.Window),
		},
		ConsistentHash: &meshv1.ConsistentHash{
			Key:        p.Hash.Key.proto(),
			LoadFactor: new(p.Hash.LoadFactor),
		},
	}
}

func (k HashKey) proto() *meshv1.HashKey {
	switch k.Source {
	case KeyHeader:
		return &meshv1.HashKey{Header: k.Name}
	case KeyCookie:
		return &meshv1.HashKey{Cookie: k.Name}
	case KeyPath:
		return &meshv1.HashKey{Path: true}
	case KeySourceAddress:
		return &meshv1.HashKey{Source: true}
	}
	return nil
}

// String names the key as a table or a message does.
func (k HashKey) String() string {
	switch k.Source {
	case KeyHeader:
		return fmt.Sprintf("header %s", k.Name)
	case KeyCookie:
		return fmt.Sprintf("cookie %s", k.Name)
	case KeyPath:
		return "path"
	case KeySourceAddress:
		return "source"
	}
	return "none"
}
