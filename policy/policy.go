// Package policy holds what an operator may decide for one service: documents as users write them, and their meaning.
package policy

import "time"

// The names that documents of this project carry.
const (
	APIVersion = "headroom.dev/v1"
	Kind       = "ServicePolicy"
)

// Policy is what a ServicePolicy document means, with every default filled in. It is a value: copy it freely.
// The fields, their bounds and their defaults are explained in api/mesh/v1/policy.proto.
type Policy struct {
	Balancer    Balancer
	Prequal     Prequal
	PrequalSync PrequalSync
	Hash        Hash
	WRR         WeightedRoundRobin
	YARP        YARP
	Linear      Linear
	C3          C3
	PeakEWMA    PeakEWMA
	LateBinding LateBinding
	// Slots is how many requests a replica serves at once, where late_binding and join_idle_queue need to know.
	Slots int
	Scope Scope

	Timeout     time.Duration // 0: none
	RetryBudget RetryBudget
	// WaitForReady is how long after a service has lost its last replica requests wait for another. 0: not at all.
	WaitForReady time.Duration

	// Forwarded is how replicas learn where a request's caller is; ProxyProtocol, whether those of TCP do by a PROXY header.
	Forwarded     Forwarded
	ProxyProtocol bool
	// DetectTimeout is how long a connection may keep silent before it may be one whose server speaks first. 0: no time.
	DetectTimeout time.Duration

	CaptureReal    bool // connections to the addresses of replicas are captured, and balanced
	CaptureInbound bool // connections to replicas that come from outside the mesh are captured, and counted
}

// Balancer names a balancing rule.
type Balancer string

const (
	BalancerPrequal            Balancer = "prequal"
	BalancerPrequalSync        Balancer = "prequal_sync"
	BalancerRandom             Balancer = "random"
	BalancerRoundRobin         Balancer = "round_robin"
	BalancerWeightedRoundRobin Balancer = "weighted_round_robin"
	BalancerLeastLoaded        Balancer = "least_loaded"
	BalancerP2C                Balancer = "p2c"
	BalancerYARP               Balancer = "yarp_p2c"
	BalancerLinear             Balancer = "linear"
	BalancerC3                 Balancer = "c3"
	BalancerPeakEWMA           Balancer = "peak_ewma"
	BalancerRingHash           Balancer = "ring_hash"
	BalancerMaglev             Balancer = "maglev"
	BalancerLateBinding        Balancer = "late_binding"
	BalancerJoinIdleQueue      Balancer = "join_idle_queue"
)

// Scope says which of a service's replicas an agent uses, whatever the rule.
type Scope struct {
	Subset int  // how many, 0: all
	Zone   Zone // whether its own zone comes first
}

// Zone says what an agent makes of the zones of replicas.
type Zone string

const (
	ZoneAny    Zone = "any"    // nothing
	ZonePrefer Zone = "prefer" // it keeps to its own zone while enough replicas are ready there
)

// Forwarded says how replicas learn where a request's caller is.
type Forwarded string

const (
	ForwardedNone Forwarded = "none"            // not; what callers themselves say is passed on
	ForwardedXFF  Forwarded = "x_forwarded_for" // X-Forwarded-For, -Proto and -Host, and -Client-Cert
	ForwardedRFC  Forwarded = "forwarded"       // Forwarded (RFC 7239), and X-Forwarded-Client-Cert
)

// Tells reports whether replicas learn it at all.
func (f Forwarded) Tells() bool { return f == ForwardedXFF || f == ForwardedRFC }

// PrequalSync holds the parameters of the prequal_sync balancer, apart from those that it shares with prequal.
type PrequalSync struct {
	Probes   int     // asked about each request; one answer less is enough
	HitScale float64 // by which a replica that served the request's key lately scales its load in its answer
	Keys     int     // that a replica remembers
}

// WeightedRoundRobin holds the parameters of the weighted_round_robin balancer.
type WeightedRoundRobin struct {
	Blackout       time.Duration // before the reports of a replica count
	Expiry         time.Duration // after which the last one no longer does
	UpdateInterval time.Duration // of the weights
	ErrorPenalty   float64
}

// YARP holds the parameters of the yarp_p2c balancer.
type YARP struct {
	PollInterval time.Duration
}

// Linear holds the parameters of the linear balancer.
type Linear struct {
	RIFWeight float64       // λ: 0 goes by latency alone, 1 by RIF alone
	Alpha     time.Duration // α: what one request in flight weighs
}

// C3 holds the parameters of the c3 balancer.
type C3 struct {
	Smoothing float64 // of the EWMAs: the weight of what was known before
	Clients   int     // n: 0: estimated
}

// PeakEWMA holds the parameters of the peak_ewma balancer.
type PeakEWMA struct {
	Decay          time.Duration // τ
	DefaultLatency time.Duration // of a replica that nothing is known of
	FailurePenalty time.Duration // the least that a failure counts for
}

// LateBinding holds the parameters of the late_binding balancer.
type LateBinding struct {
	Reservations int // d: replicas at whose line a request waits
}

// Prequal holds the parameters of the prequal balancer.
type Prequal struct {
	PoolSize           int
	ProbesPerRequest   float64
	RemovalsPerRequest float64
	Delta              float64
	MaxAge             time.Duration
	ProbeTimeout       time.Duration
	QRIF               float64
	IdleProbeInterval  time.Duration // 0: off
	Latency            LatencyEstimate
	ProbeTargets       ProbeTargets
}

// LatencyEstimate names what replicas say of their latency.
type LatencyEstimate string

const (
	LatencyMean   LatencyEstimate = "mean"   // by Little's law
	LatencyMedian LatencyEstimate = "median" // of recent requests at the present RIF (§4 of the paper)
)

// ProbeTargets names whom probes go to.
type ProbeTargets string

const (
	ProbeBetterOfTwo ProbeTargets = "better_of_two" // by the latency that the agent last heard of
	ProbeRandom      ProbeTargets = "random"        // (§4 of the paper)
)

// RetryBudget bounds the retries of one agent to one service.
type RetryBudget struct {
	Ratio        float64
	MinPerSecond float64
	Window       time.Duration
}

// Hash holds the parameters of the ring_hash and maglev balancers, and the key that prequal_sync sends along.
type Hash struct {
	Key        HashKey
	LoadFactor float64 // c: how much more than its share a replica may bear; 0: no bound
}

// HashKey names the part of a request that is hashed.
type HashKey struct {
	Source KeySource
	Name   string // of the header or cookie
}

// KeySource is where in a request a hash key is found.
type KeySource int

const (
	KeyNone KeySource = iota
	KeyHeader
	KeyCookie
	KeyPath
	KeySourceAddress
)

// Default returns the policy of a service that has no document.
func Default() Policy {
	return Policy{
		Balancer: BalancerPrequal,
		Prequal: Prequal{
			PoolSize:           16,
			ProbesPerRequest:   1,
			RemovalsPerRequest: 0.25,
			Delta:              1,
			MaxAge:             time.Second,
			ProbeTimeout:       100 * time.Millisecond,
			QRIF:               0.99,
			IdleProbeInterval:  500 * time.Millisecond,
			Latency:            LatencyMean,
			ProbeTargets:       ProbeBetterOfTwo,
		},
		PrequalSync: PrequalSync{Probes: 3, HitScale: 0.1, Keys: 1024},
		Hash:        Hash{LoadFactor: 1.25},
		WRR:         WeightedRoundRobin{Blackout: 10 * time.Second, Expiry: 3 * time.Minute, UpdateInterval: time.Second, ErrorPenalty: 1},
		YARP:        YARP{PollInterval: 500 * time.Millisecond},
		Linear:      Linear{RIFWeight: 0.5, Alpha: 75 * time.Millisecond},
		C3:          C3{Smoothing: 0.9},
		PeakEWMA:    PeakEWMA{Decay: 10 * time.Second, DefaultLatency: 30 * time.Millisecond, FailurePenalty: 5 * time.Second},
		LateBinding: LateBinding{Reservations: 2},
		Slots:       1,
		Scope:       Scope{Zone: ZoneAny},
		RetryBudget: RetryBudget{Ratio: 0.2, MinPerSecond: 10, Window: 10 * time.Second},

		WaitForReady:  10 * time.Second,
		Forwarded:     ForwardedNone,
		DetectTimeout: 50 * time.Millisecond,
	}
}
