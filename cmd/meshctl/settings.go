package main

import (
	"fmt"
	"strconv"
	"strings"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
	"github.com/headroom-mesh/headroom/policy"
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
			usage: "rule that picks a replica: " + policy.BalancerNames(),
			set:   words(func(s *meshv1.ServicePolicySpec) *string { return &s.Balancer })},
		{name: "timeout", value: "DURATION",
			usage: "time allowed for a whole request, retries included, 1ms to 24h; 0s: no limit",
			set:   words(func(s *meshv1.ServicePolicySpec) *string { return &s.Timeout })},
		{name: "pool-size", value: "N",
			usage: "prequal: probes kept, 2 to 256",
			set:   count(func(s *meshv1.ServicePolicySpec) **uint32 { return &part(&s.Prequal).PoolSize })},
		{name: "probes-per-request", value: "NUMBER",
			usage: "prequal: probes sent for each request, 0 to 16",
			set:   number(func(s *meshv1.ServicePolicySpec) **float64 { return &part(&s.Prequal).ProbesPerRequest })},
		{name: "removals-per-request", value: "NUMBER",
			usage: "prequal: probes removed for each request, 0 to 16",
			set:   number(func(s *meshv1.ServicePolicySpec) **float64 { return &part(&s.Prequal).RemovalsPerRequest })},
		{name: "delta", value: "NUMBER",
			usage: "prequal: net growth of the pool, above 0, to 100",
			set:   number(func(s *meshv1.ServicePolicySpec) **float64 { return &part(&s.Prequal).Delta })},
		{name: "max-age", value: "DURATION",
			usage: "prequal: age at which a probe leaves the pool, 10ms to 1m",
			set:   words(func(s *meshv1.ServicePolicySpec) *string { return &part(&s.Prequal).MaxAge })},
		{name: "probe-timeout", value: "DURATION",
			usage: "prequal: time after which a probe counts as lost, 1ms to 10s",
			set:   words(func(s *meshv1.ServicePolicySpec) *string { return &part(&s.Prequal).ProbeTimeout })},
		{name: "q-rif", value: "NUMBER",
			usage: "prequal: quantile of RIF above which a replica is hot, 0 (all hot) to 1 (none hot)",
			set:   number(func(s *meshv1.ServicePolicySpec) **float64 { return &part(&s.Prequal).QRif })},
		{name: "idle-probe-interval", value: "DURATION",
			usage: "prequal: longest time without a probe while the service is in use, 10ms to 1m; 0s: off",
			set:   words(func(s *meshv1.ServicePolicySpec) *string { return &part(&s.Prequal).IdleProbeInterval })},
		{name: "latency", value: "mean|median",
			usage: "prequal: what replicas say of their latency: mean (by Little's law) or median (of recent requests)",
			set:   words(func(s *meshv1.ServicePolicySpec) *string { return &part(&s.Prequal).Latency })},
		{name: "probe-targets", value: "better_of_two|random",
			usage: "prequal: whom probes go to: better_of_two (of two random replicas, the one last heard to be faster) or random",
			set:   words(func(s *meshv1.ServicePolicySpec) *string { return &part(&s.Prequal).ProbeTargets })},
		{name: "retry-budget", value: "SHARE",
			usage: "retries allowed as a share of requests, 0 to 1 or 0% to 100%",
			set:   share(func(s *meshv1.ServicePolicySpec) **float64 { return &part(&s.RetryBudget).Ratio })},
		{name: "retry-min-per-second", value: "NUMBER",
			usage: "retries a second allowed in any case, 0 to 1000",
			set:   number(func(s *meshv1.ServicePolicySpec) **float64 { return &part(&s.RetryBudget).MinPerSecond })},
		{name: "retry-window", value: "DURATION",
			usage: "how long a request counts toward the retry budget, 1s to 1m",
			set:   words(func(s *meshv1.ServicePolicySpec) *string { return &part(&s.RetryBudget).Window })},
		{name: "hash-header", value: "NAME",
			usage: "ring_hash, maglev, prequal_sync: hash this request header",
			set:   hashKey(func(name string) *meshv1.HashKey { return &meshv1.HashKey{Header: name} })},
		{name: "hash-cookie", value: "NAME",
			usage: "ring_hash, maglev, prequal_sync: hash this cookie",
			set:   hashKey(func(name string) *meshv1.HashKey { return &meshv1.HashKey{Cookie: name} })},
		{name: "hash-path", value: "bool",
			usage: "ring_hash, maglev, prequal_sync: hash the path of the request",
			set:   hashPart((*meshv1.HashKey).GetPath, &meshv1.HashKey{Path: true})},
		{name: "hash-source", value: "bool",
			usage: "ring_hash, maglev, prequal_sync: hash the address of the caller",
			set:   hashPart((*meshv1.HashKey).GetSource, &meshv1.HashKey{Source: true})},
		{name: "load-factor", value: "NUMBER",
			usage: "ring_hash, maglev: bound on a replica's load, as a multiple of the average, above 1, to 100; 0: none",
			set:   number(func(s *meshv1.ServicePolicySpec) **float64 { return &part(&s.ConsistentHash).LoadFactor })},
		{name: "prequal-sync-probes", value: "N",
			usage: "prequal_sync: replicas asked about each request, 2 to 16",
			set:   count(func(s *meshv1.ServicePolicySpec) **uint32 { return &part(&s.PrequalSync).Probes })},
		{name: "prequal-sync-hit-scale", value: "NUMBER",
			usage: "prequal_sync: by which a replica that served the key lately scales its load, 0 to 1",
			set:   number(func(s *meshv1.ServicePolicySpec) **float64 { return &part(&s.PrequalSync).HitScale })},
		{name: "prequal-sync-keys", value: "N",
			usage: "prequal_sync: keys that a replica remembers, 1 to 1048576",
			set:   count(func(s *meshv1.ServicePolicySpec) **uint32 { return &part(&s.PrequalSync).Keys })},
		{name: "wrr-blackout", value: "DURATION",
			usage: "weighted_round_robin: time before a replica's reports count, 10ms to 10m; 0s: none",
			set:   words(func(s *meshv1.ServicePolicySpec) *string { return &part(&s.WeightedRoundRobin).Blackout })},
		{name: "wrr-expiry", value: "DURATION",
			usage: "weighted_round_robin: time after which a replica's last report no longer counts, 1s to 24h",
			set:   words(func(s *meshv1.ServicePolicySpec) *string { return &part(&s.WeightedRoundRobin).Expiry })},
		{name: "wrr-update-interval", value: "DURATION",
			usage: "weighted_round_robin: time between two computations of the weights, 100ms to 1m",
			set:   words(func(s *meshv1.ServicePolicySpec) *string { return &part(&s.WeightedRoundRobin).UpdateInterval })},
		{name: "wrr-error-penalty", value: "NUMBER",
			usage: "weighted_round_robin: what a share of errors adds to the utilization, 0 to 1000",
			set:   number(func(s *meshv1.ServicePolicySpec) **float64 { return &part(&s.WeightedRoundRobin).ErrorPenalty })},
		{name: "yarp-poll-interval", value: "DURATION",
			usage: "yarp_p2c: time between two polls of every replica, 10ms to 1m",
			set:   words(func(s *meshv1.ServicePolicySpec) *string { return &part(&s.Yarp).PollInterval })},
		{name: "linear-rif-weight", value: "NUMBER",
			usage: "linear: weight of the requests in flight, 0 (latency alone) to 1 (requests in flight alone)",
			set:   number(func(s *meshv1.ServicePolicySpec) **float64 { return &part(&s.Linear).RifWeight })},
		{name: "linear-alpha", value: "DURATION",
			usage: "linear: what one request in flight counts for, 0.001ms to 1m",
			set:   words(func(s *meshv1.ServicePolicySpec) *string { return &part(&s.Linear).Alpha })},
		{name: "c3-smoothing", value: "NUMBER",
			usage: "c3: share of what was known before in each average, 0 to 0.999",
			set:   number(func(s *meshv1.ServicePolicySpec) **float64 { return &part(&s.C3).Smoothing })},
		{name: "c3-clients", value: "N",
			usage: "c3: agents that send requests to the service, 1 to 100000; 0: estimated",
			set:   count(func(s *meshv1.ServicePolicySpec) **uint32 { return &part(&s.C3).Clients })},
		{name: "peak-ewma-decay", value: "DURATION",
			usage: "peak_ewma: time in which a measurement loses all but 1/e of its weight, 10ms to 10m",
			set:   words(func(s *meshv1.ServicePolicySpec) *string { return &part(&s.PeakEwma).Decay })},
		{name: "peak-ewma-default-latency", value: "DURATION",
			usage: "peak_ewma: latency of a replica that nothing is known of, 0.001ms to 1m",
			set:   words(func(s *meshv1.ServicePolicySpec) *string { return &part(&s.PeakEwma).DefaultLatency })},
		{name: "peak-ewma-failure-penalty", value: "DURATION",
			usage: "peak_ewma: least latency that a failure counts for, 1ms to 5m; 0s: none",
			set:   words(func(s *meshv1.ServicePolicySpec) *string { return &part(&s.PeakEwma).FailurePenalty })},
		{name: "reservations", value: "N",
			usage: "late_binding: replicas at which a request waits, 1 to 16",
			set:   count(func(s *meshv1.ServicePolicySpec) **uint32 { return &part(&s.LateBinding).Reservations })},
		{name: "slots", value: "N",
			usage: "late_binding, join_idle_queue: requests that a replica of weight 1 serves at once, 1 to 10000",
			set:   count(func(s *meshv1.ServicePolicySpec) **uint32 { return &s.Slots })},
		{name: "subset", value: "N",
			usage: "replicas that each agent uses, 1 to 10000; 0: all",
			set:   count(func(s *meshv1.ServicePolicySpec) **uint32 { return &part(&s.Scope).Subset })},
		{name: "zone", value: "any|prefer",
			usage: "whether an agent keeps to the replicas of its own zone while enough of them take requests",
			set:   words(func(s *meshv1.ServicePolicySpec) *string { return &part(&s.Scope).Zone })},
		{name: "wait-for-ready", value: "DURATION",
			usage: "how long requests wait for a replica after the service has lost its last, 1ms to 5m; 0s: not at all",
			set:   words(func(s *meshv1.ServicePolicySpec) *string { return &s.WaitForReady })},
		{name: "forwarded", value: "none|x_forwarded_for|forwarded",
			usage: "how replicas learn where a request comes from",
			set:   words(func(s *meshv1.ServicePolicySpec) *string { return &s.Forwarded })},
		{name: "proxy-protocol", value: "bool",
			usage: "begin connections to replicas over TCP with a header of the PROXY protocol",
			set:   truth(func(s *meshv1.ServicePolicySpec) **bool { return &s.ProxyProtocol })},
		{name: "detect-timeout", value: "DURATION",
			usage: "how long a caller's connection to one service may be silent before a replica may speak first, 1ms to 1m; 0s: not at all",
			set:   words(func(s *meshv1.ServicePolicySpec) *string { return &s.DetectTimeout })},
		{name: "capture-real", value: "bool",
			usage: "capture connections to the addresses of replicas, too, where agents capture",
			set:   truth(func(s *meshv1.ServicePolicySpec) **bool { return &s.CaptureReal })},
		{name: "capture-inbound", value: "bool",
			usage: "count connections to replicas that come from outside the mesh, where agents capture",
			set:   truth(func(s *meshv1.ServicePolicySpec) **bool { return &s.CaptureInbound })},
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

func truth(field func(*meshv1.ServicePolicySpec) **bool) func(*meshv1.ServicePolicySpec, string) error {
	return func(spec *meshv1.ServicePolicySpec, text string) error {
		switch text {
		case "":
			*field(spec) = nil
		case "true", "false":
			*field(spec) = new(text == "true")
		default:
			return fmt.Errorf(`want true, false or "default"`)
		}
		return nil
	}
}

func hashKey(key func(name string) *meshv1.HashKey) func(*meshv1.ServicePolicySpec, string) error {
	return func(spec *meshv1.ServicePolicySpec, text string) error {
		if text == "" {
			part(&spec.ConsistentHash).Key = nil
			return nil
		}
		part(&spec.ConsistentHash).Key = key(text)
		return nil
	}
}

// hashPart makes the key what a request has anyway. "false" takes away only this key, and no other.
func hashPart(isSet func(*meshv1.HashKey) bool, key *meshv1.HashKey) func(*meshv1.ServicePolicySpec, string) error {
	return func(spec *meshv1.ServicePolicySpec, text string) error {
		switch text {
		case "true":
			part(&spec.ConsistentHash).Key = proto.CloneOf(key)
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

// part returns a part of a policy that may not be there yet.
func part[Part any](p **Part) *Part {
	if *p == nil {
		*p = new(Part)
	}
	return *p
}
