package main

import (
	"errors"
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var rewrite = flag.Bool("rewrite", false, "write docs/reference/agent.md anew")

const page = "../../docs/reference/agent.md"

func TestReference(t *testing.T) {
	c := newCommand()
	want := "# agent\n\n" + c.Long + "\n\n```\n" + c.Example + "\n```\n\n## Flags\n\n```\n" + c.LocalFlags().FlagUsages() + "```\n"
	if *rewrite {
		if err := os.WriteFile(page, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("%s is out of date; run go test ./cmd/agent -run Reference -rewrite (- code, + page):\n%s", page, diff)
	}
}

func TestWrongUsageIsToldAtOnce(t *testing.T) {
	for _, tt := range []struct {
		args string
		want []string // parts of the message
	}{
		{"", []string{"no registry: give --etcd HOST:PORT for an existing etcd, or --etcd-embedded DIR"}},
		{"--etcd h:1 extra", []string{`unexpected argument "extra"`}},
		{"--nodes a", []string{"unknown flag: --nodes"}},
		{"--etcd h:1 --bind nonsense", []string{"--bind"}},
		{"--etcd h:1 --gossip 7946", []string{"--gossip", "want IP:PORT, or :PORT for another port at the usual IP"}},
		{"--etcd h:1 --gossip :70000", []string{"--gossip", "want IP:PORT, or :PORT"}},
		{"--etcd h:1 --log-level loud", []string{`--log-level "loud": want debug, info, warn or error`}},
		{"--etcd h:1 --log-format xml", []string{`--log-format "xml": want text or json`}},
		{"--etcd h:1 --admin 10.0.0.1:1 --bind 0.0.0.0 --drain-timeout -1s --etcd-user u", []string{
			"--admin 10.0.0.1:1: want a loopback address",
			"--bind 0.0.0.0: want the one address at which other nodes reach this node",
			"--drain-timeout -1s: want a positive duration",
			"--etcd-user and --etcd-password-file: want both or neither",
		}},
		{"--etcd h:1 --node a/b", []string{`--node: node "a/b": want 1 to 253 printable characters`}},
		{"--etcd h:1,http://i:1 --etcd-ca f", []string{"--etcd-ca, --etcd-cert and --etcd-key: want --etcd members with https://"}},
		{"--etcd h:1 --tls a --ca b --mtls on --trust-domain A/b", []string{
			"--tls and --ca: want one of them",
			`--mtls "on": want off, permissive or strict`,
			`--trust-domain: trust domain "A/b": want a name such as headroom.local`,
		}},
		{"--etcd h:1 --mtls strict", []string{"--mtls strict: want a certificate, too: --tls DIR with its files, or --ca DIR"}},
		{"--etcd h:1 --mtls permissive", []string{"--mtls permissive: want a certificate, too"}},
	} {
		c := newCommand()
		c.SetArgs(strings.Fields(tt.args))
		err := c.Execute()
		if !errors.Is(err, errUsage) {
			t.Errorf("agent %s: got %v, want an error of usage", tt.args, err)
			continue
		}
		for _, part := range tt.want {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("agent %s: got %q, want %q in it", tt.args, err, part)
			}
			if strings.Count(err.Error(), part) > 1 {
				t.Errorf("agent %s: got %q, with %q more than once", tt.args, err, part)
			}
		}
	}
}
