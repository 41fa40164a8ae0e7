package main

import (
	"slices"
	"testing"

	meshv1 "github.com/headroom-mesh/headroom/api/mesh/v1"
)

// TestCheckOfAnAgentThatSaysNothingOfNames expects no check of names where the agent doesn't tell how it answers them.
func TestCheckOfAnAgentThatSaysNothingOfNames(t *testing.T) {
	services := &meshv1.ListServicesResponse{Services: []*meshv1.ServiceSummary{{Name: "checkout", Ready: 1, Ipv4: "240.64.1.17"}}}
	for _, dns := range []*meshv1.DNSView{nil, {}, {Mode: "listen"}} {
		found := new(client).checkCaptures(t.Context(), services, dns, []*meshv1.CaptureView{{Active: true}})
		if len(found) == 0 || slices.ContainsFunc(found, func(f finding) bool { return f.Check == "names" }) {
			t.Errorf("with %v: %v", dns, found)
		}
	}
}
