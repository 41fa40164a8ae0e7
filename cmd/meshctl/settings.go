package main

import (
	"fmt"
	"strconv"
	"strings"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
)

// setting is one field of a policy that a flag can set. The word "default" takes the field out of the document.
type setting struct {
	name, value, usage string
	set                func(spec *meshv1.ServicePolicySpec, text string) error

	text  string
	given bool
}

// settings returns all fields of a policy.
func settings() []*setting {
	return []*setting{
		{name: "balancer", value: "RULE",
			usage: "rule that picks a replica: prequal, round_robin, random, least_loaded, p2c or ring_hash",
			set:   words(func(s *meshv1.ServicePolicySpec) *string { return &s.Balancer })},
		{name: "timeout", value: "DURATION",
			usage: "time allowed for a whole request, retries included, 1ms to 24h; 0s: no limit",
			set:   words(func(s *meshv1.ServicePolicySpec) *string { return &s.Timeout })},
		{name: "pool-size", value: "N",
			usage: "prequal: probes kept, 2 to 256",
			set:   count(func(s *meshv1.ServicePolicySpec) **uint32 { return &prequal(s).PoolSize })},
		{name: "probes-per-request", value: "NUMBER",
			usage: "prequal: probes sent for each request, 0 to 16",
			set:   number(func(s *meshv1.ServicePolicySpec) **float64 { return &prequal(s).ProbesPerRequest })},
		{name: "removals-per-request", value: "NUMBER",
			usage: "prequal: probes removed for each request, 0 to 16",
			set:   number(func(s *meshv1.ServicePolicySpec) **float64 { return &prequal(s).RemovalsPerRequest })},
		{name: "delta", value: "NUMBER",
			usage: "prequal: net growth of the pool, above 0, to 100",
			set:   number(func(s *meshv1.ServicePolicySpec) **float64 { return &prequal(s).Delta })},
		{name: "max-age", value: "DURATION",
			usage: "prequal: age at which a probe leaves the pool, 10ms to 1m",
			set:   words(func(s *meshv1.ServicePolicySpec) *string { return &prequal(s).MaxAge })},
		{name: "probe-timeout", value: "DURATION",
			usage: "prequal: time after which a probe counts as lost, 1ms to 10s",
			set:   words(func(s *meshv1.ServicePolicySpec) *string { return &prequal(s).ProbeTimeout })},
		{name: "q-rif", value: "NUMBER",
			usage: "prequal: quantile of RIF above which a replica is hot, 0 (all hot) to 1 (none hot)",
			set:   number(func(s *meshv1.ServicePolicySpec) **float64 { return &prequal(s).QRif })},
		{name: "idle-probe-interval", value: "DURATION",
			usage: "prequal: longest time without a probe while the service is in use, 10ms to 1m; 0s: off",
			set:   words(func(s *meshv1.ServicePolicySpec) *string { return &prequal(s).IdleProbeInterval })},
		{name: "retry-budget", value: "SHARE",
			usage: "retries allowed as a share of requests, 0 to 1 or 0% to 100%",
			set:   share(func(s *meshv1.ServicePolicySpec) **float64 { return &retryBudget(s).Ratio })},
		{name: "retry-min-per-second", value: "NUMBER",
			usage: "retries a second allowed in any case, 0 to 1000",
			set:   number(func(s *meshv1.ServicePolicySpec) **float64 { return &retryBudget(s).MinPerSecond })},
		{name: "retry-window", value: "DURATION",
			usage: "how long a request counts toward the retry budget, 1s to 1m",
			set:   words(func(s *meshv1.ServicePolicySpec) *string { return &retryBudget(s).Window })},
		{name: "hash-header", value: "NAME",
			usage: "ring_hash: hash this request header",
			set:   hashKey(func(name string) *meshv1.HashKey { return &meshv1.HashKey{Header: name} })},
		{name: "hash-cookie", value: "NAME",
			usage: "ring_hash: hash this cookie",
			set:   hashKey(func(name string) *meshv1.HashKey { return &meshv1.HashKey{Cookie: name} })},
		{name: "hash-path", value: "bool",
			usage: "ring_hash: hash the path of the request",
			set:   hashPart((*meshv1.HashKey).GetPath, &meshv1.HashKey{Path: true})},
		{name: "hash-source", value: "bool",
			usage: "ring_hash: hash the address of the caller",
			set:   hashPart((*meshv1.HashKey).GetSource, &meshv1.HashKey{Source: true})},
		{name: "load-factor", value: "NUMBER",
			usage: "ring_hash: bound on a replica's load, as a multiple of the average, above 1, to 100",
			set:   number(func(s *meshv1.ServicePolicySpec) **float64 { return &hash(s).LoadFactor })},
	}
}

// negated reports whether the user only takes a hash key away.
func (s *setting) negated() bool {
	return s.value == "bool" && (s.text == "false" || s.text == "default")
}

// String, Set and Type make a setting a flag.

func (s *setting) String() string { return s.text }

func (s *setting) Type() string { return s.value }

func (s *setting) Set(text string) error {
	s.text, s.given = text, true
	return s.apply(new(meshv1.ServicePolicySpec))
}

// apply sets the field in spec. It fails if the text can't be meant for such a field; bounds are checked later.
func (s *setting) apply(spec *meshv1.ServicePolicySpec) error {
	if s.text == "default" {
		return s.set(spec, "")
	}
	if s.text == "" {
		return fmt.Errorf(`want a value, or "default"`)
	}
	return s.set(spec, s.text)
}

func addSettings(cmd *cobra.Command) []*setting {
	all := settings()
	for _, s := range all {
		flag := cmd.Flags().VarPF(s, s.name, "", s.usage)
		if s.value == "bool" {
			flag.NoOptDefVal = "true"
		}
	}
	return all
}

// A setter takes the empty text for "leave the field out".

func words(field func(*meshv1.ServicePolicySpec) *string) func(*meshv1.ServicePolicySpec, string) error {
	return func(spec *meshv1.ServicePolicySpec, text string) error {
		*field(spec) = text
		return nil
	}
}

func number(field func(*meshv1.ServicePolicySpec) **float64) func(*meshv1.ServicePolicySpec, string) error {
	return func(spec *meshv1.ServicePolicySpec, text string) error {
		if text == "" {
			*field(spec) = nil
			return nil
		}
		x, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return fmt.Errorf("want a number")
		}
		*field(spec) = &x
		return nil
	}
}

// share reads a number or a percentage.
func share(field func(*meshv1.ServicePolicySpec) **float64) func(*meshv1.ServicePolicySpec, string) error {
	return func(spec *meshv1.ServicePolicySpec, text string) error {
		percent, isPercent := strings.CutSuffix(text, "%")
		if !isPercent {
			return number(field)(spec, text)
		}
		x, err := strconv.ParseFloat(percent+"e-2", 64) // rounds once, unlike a division
		if err != nil {
			return fmt.Errorf("want a number, or a percentage such as 10%%")
		}
		*field(spec) = &x
		return nil
	}
}

func count(field func(*meshv1.ServicePolicySpec) **uint32) func(*meshv1.ServicePolicySpec, string) error {
	return func(spec *meshv1.ServicePolicySpec, text string) error {
		if text == "" {
			*field(spec) = nil
			return nil
		}
		n, err := strconv.ParseUint(text, 10, 32)
		if err != nil {
			return fmt.Errorf("want a whole number")
		}
		*field(spec) = new(uint32(n))
		return nil
	}
}

func hashKey(key func(name string) *meshv1.HashKey) func(*meshv1.ServicePolicySpec, string) error {
	return func(spec *meshv1.ServicePolicySpec, text string) error {
		if text == "" {
			hash(spec).Key = nil
			return nil
		}
		hash(spec).Key = key(text)
		return nil
	}
}

// hashPart makes the key what a request has anyway. "false" takes away only this key, and no other.
func hashPart(isSet func(*meshv1.HashKey) bool, key *meshv1.HashKey) func(*meshv1.ServicePolicySpec, string) error {
	return func(spec *meshv1.ServicePolicySpec, text string) error {
		switch text {
		case "true":
			hash(spec).Key = proto.CloneOf(key)
		case "", "false":
			if isSet(spec.GetConsistentHash().GetKey()) {
				spec.ConsistentHash.Key = nil
			}
		default:
			return fmt.Errorf(`want true, false or "default"`)
		}
		return nil
	}
}

// Parts of a policy that may not be there yet.

func prequal(s *meshv1.ServicePolicySpec) *meshv1.PrequalSpec {
	if s.Prequal == nil {
		s.Prequal = new(meshv1.PrequalSpec)
	}
	return s.Prequal
}

func retryBudget(s *meshv1.ServicePolicySpec) *meshv1.RetryBudget {
	if s.RetryBudget == nil {
		s.RetryBudget = new(meshv1.RetryBudget)
	}
	return s.RetryBudget
}

func hash(s *meshv1.ServicePolicySpec) *meshv1.ConsistentHash {
	if s.ConsistentHash == nil {
		s.ConsistentHash = new(meshv1.ConsistentHash)
	}
	return s.ConsistentHash
}
