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
	if spec == nil {
		spec = new(meshv1.ServicePolicySpec)
	}
	d := Default()
	p := Policy{
		Balancer:    readBalancer(spec.GetBalancer(), d.Balancer, problems),
		Prequal:     readPrequal(spec.GetPrequal(), d.Prequal, problems),
		PrequalSync: readPrequalSync(spec.GetPrequalSync(), d.PrequalSync, problems),
		WRR:         readWRR(spec.GetWeightedRoundRobin(), d.WRR, problems),
		YARP:        readYARP(spec.GetYarp(), d.YARP, problems),
		Linear:      readLinear(spec.GetLinear(), d.Linear, problems),
		C3:          readC3(spec.GetC3(), d.C3, problems),
		PeakEWMA:    readPeakEWMA(spec.GetPeakEwma(), d.PeakEWMA, problems),
		Hash:        readHash(spec.GetConsistentHash(), d.Hash, problems),
		LateBinding: readLateBinding(spec.GetLateBinding(), d.LateBinding, problems),
		Slots:       problems.Count("spec.slots", spec.Slots, d.Slots, 1, 10_000),
		Scope:       readScope(spec.GetScope(), d.Scope, problems),
		Timeout:     problems.Duration("spec.timeout", spec.GetTimeout(), d.Timeout, document.Span{Min: time.Millisecond, Max: 24 * time.Hour, Off: true}),
		RetryBudget: readRetryBudget(spec.GetRetryBudget(), d.RetryBudget, problems),

		WaitForReady:   problems.Duration("spec.waitForReady", spec.GetWaitForReady(), d.WaitForReady, document.Span{Min: time.Millisecond, Max: 5 * time.Minute, Off: true}),
		Forwarded:      readForwarded(spec.GetForwarded(), d.Forwarded, problems),
		ProxyProtocol:  spec.GetProxyProtocol(),
		CaptureReal:    spec.GetCaptureReal(),
		CaptureInbound: spec.GetCaptureInbound(),
		DetectTimeout:  problems.Duration("spec.detectTimeout", spec.GetDetectTimeout(), d.DetectTimeout, document.Span{Min: time.Millisecond, Max: time.Minute, Off: true}),
	}
	if p.Balancer.NeedsKey() && spec.GetConsistentHash().GetKey() == nil {
		problems.Add("spec.consistentHash.key",
			"required by balancer %s: set one of header, cookie, path and source", p.Balancer)
	}
	return p
}

func readForwarded(how string, otherwise Forwarded, problems *document.Problems) Forwarded {
	switch f := Forwarded(how); f {
	case "":
		return otherwise
	case ForwardedNone, ForwardedXFF, ForwardedRFC:
		return f
	}
	problems.Add("spec.forwarded", "want %s, %s or %s, got %q", ForwardedNone, ForwardedXFF, ForwardedRFC, how)
	return otherwise
}

// Balancers returns all balancing rules.
func Balancers() []Balancer {
	return []Balancer{
		BalancerPrequal, BalancerPrequalSync,
		BalancerRandom, BalancerRoundRobin, BalancerWeightedRoundRobin,
		BalancerLeastLoaded, BalancerP2C, BalancerYARP,
		BalancerLinear, BalancerC3, BalancerPeakEWMA,
		BalancerRingHash, BalancerMaglev,
		BalancerLateBinding, BalancerJoinIdleQueue,
	}
}

// NeedsKey reports whether the rule can't do without a hash key.
func (b Balancer) NeedsKey() bool { return b == BalancerRingHash || b == BalancerMaglev }

func readBalancer(name string, otherwise Balancer, problems *document.Problems) Balancer {
	if name == "" {
		return otherwise
	}
	if b := Balancer(name); slices.Contains(Balancers(), b) {
		return b
	}
	problems.Add("spec.balancer", "want %s, got %q", BalancerNames(), name)
	return otherwise
}

// BalancerNames lists all balancing rules, as a message to users does.
func BalancerNames() string {
	var names []string
	for _, b := range Balancers() {
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
		Latency:            oneOf(problems, at+"latency", s.Latency, d.Latency, LatencyMean, LatencyMedian),
		ProbeTargets:       oneOf(problems, at+"probeTargets", s.ProbeTargets, d.ProbeTargets, ProbeBetterOfTwo, ProbeRandom),
	}
}

// oneOf reads a name that can be one of two.
func oneOf[Name ~string](problems *document.Problems, path, got string, otherwise, a, b Name) Name {
	switch name := Name(got); name {
	case a, b:
		return name
	case "":
	default:
		problems.Add(path, "want %s or %s, got %q", a, b, got)
	}
	return otherwise
}

func readPrequalSync(s *meshv1.PrequalSyncSpec, d PrequalSync, problems *document.Problems) PrequalSync {
	if s == nil {
		return d
	}
	const at = "spec.prequalSync."
	return PrequalSync{
		Probes:   problems.Count(at+"probes", s.Probes, d.Probes, 2, 16),
		HitScale: problems.Number(at+"hitScale", s.HitScale, d.HitScale, document.Range{Max: 1}),
		Keys:     problems.Count(at+"keys", s.Keys, d.Keys, 1, 1<<20),
	}
}

func readWRR(s *meshv1.WeightedRoundRobinSpec, d WeightedRoundRobin, problems *document.Problems) WeightedRoundRobin {
	if s == nil {
		return d
	}
	const at = "spec.weightedRoundRobin."
	blackout := document.Span{Min: 10 * time.Millisecond, Max: 10 * time.Minute, Off: true}
	expiry := document.Span{Min: time.Second, Max: 24 * time.Hour}
	update := document.Span{Min: 100 * time.Millisecond, Max: time.Minute}
	return WeightedRoundRobin{
		Blackout:       problems.Duration(at+"blackout", s.Blackout, d.Blackout, blackout),
		Expiry:         problems.Duration(at+"expiry", s.Expiry, d.Expiry, expiry),
		UpdateInterval: problems.Duration(at+"updateInterval", s.UpdateInterval, d.UpdateInterval, update),
		ErrorPenalty:   problems.Number(at+"errorPenalty", s.ErrorPenalty, d.ErrorPenalty, document.Range{Max: 1000}),
	}
}

func readYARP(s *meshv1.YARPSpec, d YARP, problems *document.Problems) YARP {
	if s == nil {
		return d
	}
	poll := document.Span{Min: 10 * time.Millisecond, Max: time.Minute}
	return YARP{PollInterval: problems.Duration("spec.yarp.pollInterval", s.PollInterval, d.PollInterval, poll)}
}

func readLinear(s *meshv1.LinearSpec, d Linear, problems *document.Problems) Linear {
	if s == nil {
		return d
	}
	alpha := document.Span{Min: time.Microsecond, Max: time.Minute}
	return Linear{
		RIFWeight: problems.Number("spec.linear.rifWeight", s.RifWeight, d.RIFWeight, document.Range{Max: 1}),
		Alpha:     problems.Duration("spec.linear.alpha", s.Alpha, d.Alpha, alpha),
	}
}

func readC3(s *meshv1.C3Spec, d C3, problems *document.Problems) C3 {
	if s == nil {
		return d
	}
	return C3{
		Smoothing: problems.Number("spec.c3.smoothing", s.Smoothing, d.Smoothing, document.Range{Max: 0.999}),
		Clients:   problems.Count("spec.c3.clients", s.Clients, d.Clients, 0, 100_000),
	}
}

func readPeakEWMA(s *meshv1.PeakEWMASpec, d PeakEWMA, problems *document.Problems) PeakEWMA {
	if s == nil {
		return d
	}
	const at = "spec.peakEWMA."
	decay := document.Span{Min: 10 * time.Millisecond, Max: 10 * time.Minute}
	latency := document.Span{Min: time.Microsecond, Max: time.Minute}
	penalty := document.Span{Min: time.Millisecond, Max: 5 * time.Minute, Off: true}
	return PeakEWMA{
		Decay:          problems.Duration(at+"decay", s.Decay, d.Decay, decay),
		DefaultLatency: problems.Duration(at+"defaultLatency", s.DefaultLatency, d.DefaultLatency, latency),
		FailurePenalty: problems.Duration(at+"failurePenalty", s.FailurePenalty, d.FailurePenalty, penalty),
	}
}

func readHash(s *meshv1.ConsistentHash, d Hash, problems *document.Problems) Hash {
	if s == nil {
		return d
	}
	factor := document.Range{Min: 1, Max: 100, Above: true, Off: true}
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

// KeyNamePattern matches what HTTP allows in the name of a header or a cookie.
const KeyNamePattern = "^[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}$"

var token = regexp.MustCompile(KeyNamePattern)

func readLateBinding(s *meshv1.LateBindingSpec, d LateBinding, problems *document.Problems) LateBinding {
	if s == nil {
		return d
	}
	return LateBinding{Reservations: problems.Count("spec.lateBinding.reservations", s.Reservations, d.Reservations, 1, 16)}
}

func readScope(s *meshv1.ScopeSpec, d Scope, problems *document.Problems) Scope {
	if s == nil {
		return d
	}
	return Scope{
		Subset: problems.Count("spec.scope.subset", s.Subset, d.Subset, 0, 10_000),
		Zone:   oneOf(problems, "spec.scope.zone", s.Zone, d.Zone, ZoneAny, ZonePrefer),
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
			Latency:            string(p.Prequal.Latency),
			ProbeTargets:       string(p.Prequal.ProbeTargets),
		},
		PrequalSync: &meshv1.PrequalSyncSpec{
			Probes:   new(uint32(p.PrequalSync.Probes)),
			HitScale: new(p.PrequalSync.HitScale),
			Keys:     new(uint32(p.PrequalSync.Keys)),
		},
		WeightedRoundRobin: &meshv1.WeightedRoundRobinSpec{
			Blackout:       document.FormatDuration(p.WRR.Blackout),
			Expiry:         document.FormatDuration(p.WRR.Expiry),
			UpdateInterval: document.FormatDuration(p.WRR.UpdateInterval),
			ErrorPenalty:   new(p.WRR.ErrorPenalty),
		},
		Yarp: &meshv1.YARPSpec{PollInterval: document.FormatDuration(p.YARP.PollInterval)},
		Linear: &meshv1.LinearSpec{
			RifWeight: new(p.Linear.RIFWeight),
			Alpha:     document.FormatDuration(p.Linear.Alpha),
		},
		C3: &meshv1.C3Spec{
			Smoothing: new(p.C3.Smoothing),
			Clients:   new(uint32(p.C3.Clients)),
		},
		PeakEwma: &meshv1.PeakEWMASpec{
			Decay:          document.FormatDuration(p.PeakEWMA.Decay),
			DefaultLatency: document.FormatDuration(p.PeakEWMA.DefaultLatency),
			FailurePenalty: document.FormatDuration(p.PeakEWMA.FailurePenalty),
		},
		ConsistentHash: &meshv1.ConsistentHash{
			Key:        p.Hash.Key.proto(),
			LoadFactor: new(p.Hash.LoadFactor),
		},
		LateBinding: &meshv1.LateBindingSpec{Reservations: new(uint32(p.LateBinding.Reservations))},
		Slots:       new(uint32(p.Slots)),
		Scope: &meshv1.ScopeSpec{
			Subset: new(uint32(p.Scope.Subset)),
			Zone:   string(p.Scope.Zone),
		},
		Timeout:      document.FormatDuration(p.Timeout),
		WaitForReady: document.FormatDuration(p.WaitForReady),
		RetryBudget: &meshv1.RetryBudget{
			Ratio:        new(p.RetryBudget.Ratio),
			MinPerSecond: new(p.RetryBudget.MinPerSecond),
			Window:       document.FormatDuration(p.RetryBudget.Window),
		},
		Forwarded:      string(p.Forwarded),
		ProxyProtocol:  new(p.ProxyProtocol),
		CaptureReal:    new(p.CaptureReal),
		CaptureInbound: new(p.CaptureInbound),
		DetectTimeout:  document.FormatDuration(p.DetectTimeout),
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
