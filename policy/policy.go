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
	Timeout     time.Duration // 0: none
	RetryBudget RetryBudget
	Hash        Hash
}

// Balancer names a balancing rule.
type Balancer string

const (
	BalancerPrequal     Balancer = "prequal"
	BalancerRoundRobin  Balancer = "round_robin"
	BalancerRandom      Balancer = "random"
	BalancerLeastLoaded Balancer = "least_loaded"
	BalancerP2C         Balancer = "p2c"
	BalancerRingHash    Balancer = "ring_hash"
)

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
}

// RetryBudget bounds the retries of one agent to one service.
type RetryBudget struct {
	Ratio        float64
	MinPerSecond float64
	Window       time.Duration
}

// Hash holds the parameters of the ring_hash balancer.
type Hash struct {
	Key        HashKey
	LoadFactor float64
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
			ProbesPerRequest:   3,
			RemovalsPerRequest: 1,
			Delta:              1,
			MaxAge:             time.Second,
			ProbeTimeout:       100 * time.Millisecond,
			QRIF:               0.84,
			IdleProbeInterval:  500 * time.Millisecond,
		},
		RetryBudget: RetryBudget{Ratio: 0.2, MinPerSecond: 10, Window: 10 * time.Second},
		Hash:        Hash{LoadFactor: 1.25},
	}
}
