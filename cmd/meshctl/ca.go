package main

import (
	"cmp"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/headroom-mesh/headroom/dataplane/identity"
	"github.com/headroom-mesh/headroom/dataplane/identity/ca"
	"github.com/headroom-mesh/headroom/registry"
	"github.com/spf13/cobra"
)

// defaultNamespace is that of services whose name is given without one.
const defaultNamespace = "default"

func (a *app) ca() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ca",
		Short: "Make a CA and certificates for agents, as files",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return misused("want one of: ca init, ca issue, ca show")
		},
	}
	cmd.AddCommand(a.caInit(), a.caIssue(), a.caShow())
	return cmd
}

func (a *app) caInit() *cobra.Command {
	var dir, domain string
	var life time.Duration
	var force bool
	cmd := &cobra.Command{
		Use:   "init",
		Short: "Make a CA",
		Long: `Make a CA: a folder with ca.crt, which all agents get to see, and ca.key, which is to be kept from everybody.
Whoever has the key can pass for any agent of the mesh.`,
		Example: `  meshctl ca init --out ca --trust-domain prod.example.com`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			d, err := identity.ParseDomain(domain)
			if err != nil {
				return misused("--trust-domain: %v", err)
			}
			if life < time.Hour {
				return misused("--ttl %s: want an hour at least", life)
			}
			made, err := ca.Init(dir, ca.Options{Domain: d, Life: life, Force: force}, time.Now())
			if errors.Is(err, fs.ErrExist) {
				return fmt.Errorf("%w; choose another folder with --out, or replace it with --force: then no certificate that it issued is worth anything", err)
			}
			if err != nil {
				return err
			}
			cmd.PrintErrf("made the CA %q in %s, valid until %s\n", made.Certificate.Subject.CommonName, dir, day(made.Certificate.NotAfter))
			return nil
		},
	}
	cmd.Flags().StringVar(&dir, "out", "ca", "`DIR` to make the CA in")
	cmd.Flags().StringVar(&domain, "trust-domain", identity.DefaultDomain, "`NAME` that starts the IDs of all agents of the mesh")
	cmd.Flags().DurationVar(&life, "ttl", ca.Life, "how long the CA is valid")
	cmd.Flags().BoolVar(&force, "force", false, "replace the CA that is in the folder")
	return cmd
}

// subject is what a certificate is for, as the user gave it.
type subject struct{ node, service string }

func (s subject) check() error {
	if (s.node == "") == (s.service == "") {
		return misused("want either --node NAME or --service [NAMESPACE/]NAME")
	}
	return nil
}

// id returns the SPIFFE ID, and the name of the folder for its certificate.
func (s subject) id(d identity.Domain) (id identity.ID, folder string, err error) {
	if s.node != "" {
		if err = registry.NodeName(s.node).Validate(); err == nil {
			id, err = identity.NodeID(d, registry.NodeName(s.node))
		}
		return id, s.node, err
	}
	namespace, name, found := strings.Cut(s.service, "/")
	if !found {
		namespace, name = defaultNamespace, s.service
	}
	if err = registry.ServiceName(name).Validate(); err == nil {
		id, err = identity.ServiceID(d, namespace, registry.ServiceName(name))
	}
	return id, name, err
}

func (a *app) caIssue() *cobra.Command {
	var s subject
	var dir, out string
	var life time.Duration
	cmd := &cobra.Command{
		Use:   "issue",
		Short: "Issue a certificate for an agent",
		Long: `Issue a certificate for an agent, as a folder for its flag --tls: tls.crt, tls.key and ca.crt. A certificate is that of a
node, or that of the only service on its agent's node. What is in the folder is replaced, and an agent that runs takes
the new certificate without a restart.`,
		Example: `  meshctl ca issue --node web-1 --out web-1
  meshctl ca issue --service checkout --ca ca --out checkout --ttl 720h`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := s.check(); err != nil {
				return err
			}
			if life < time.Minute {
				return misused("--ttl %s: want a minute at least", life)
			}
			authority, err := ca.Open(dir)
			if errors.Is(err, ca.ErrNone) {
				return fmt.Errorf("%w: make one with 'meshctl ca init --out %s', or say with --ca where it is", err, dir)
			}
			if err != nil {
				return err
			}
			id, folder, err := s.id(authority.Domain)
			if err != nil {
				return usageError(err.Error())
			}
			return issue(cmd, authority, id, cmp.Or(out, folder), life)
		},
	}
	cmd.Flags().StringVar(&s.node, "node", "", "`NAME` of the agent's node")
	cmd.Flags().StringVar(&s.service, "service", "", "`[NAMESPACE/]NAME` of the only service of the agent's node; the namespace is "+defaultNamespace+" if not given")
	cmd.Flags().StringVar(&dir, "ca", "ca", "`DIR` of the CA")
	cmd.Flags().StringVar(&out, "out", "", "`DIR` for the files (default: the name of the node or service)")
	cmd.Flags().DurationVar(&life, "ttl", ca.FileLife, "how long the certificate is valid; it never outlives the CA")
	return cmd
}

func issue(cmd *cobra.Command, authority *ca.CA, id identity.ID, out string, life time.Duration) error {
	if other, err := certifiedIn(out); err == nil && other != id.String() {
		return fmt.Errorf("%s has a certificate of %s: choose another folder with --out, or remove it", out, other)
	}
	files, err := authority.Issue(id, life, time.Now())
	if err != nil {
		return err
	}
	if err := files.Write(out); err != nil {
		return err
	}
	leaf, err := ca.ParseCertificates(files.Certificate)
	if err != nil {
		return err
	}
	cmd.PrintErrf("issued a certificate of %s in %s, valid until %s\n", id, out, day(leaf[0].NotAfter))
	return nil
}

// certifiedIn returns whose certificate is in a folder.
func certifiedIn(dir string) (string, error) {
	all, err := readCertificates(filepath.Join(dir, identity.CertificateFile))
	if err != nil {
		return "", err
	}
	return spiffeID(all[0]), nil
}

func day(t time.Time) string { return t.UTC().Format(time.RFC3339) }

func readCertificates(file string) ([]*x509.Certificate, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	all, err := ca.ParseCertificates(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return all, nil
}

func spiffeID(c *x509.Certificate) string {
	if len(c.URIs) != 1 || c.URIs[0].Scheme != "spiffe" {
		return ""
	}
	return c.URIs[0].String()
}

func (a *app) caShow() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "show FILE...",
		Short: "Show what certificates say",
		Long: `Show whose the certificates in PEM files are, who issued them, and when they are valid. The exit code is 0 for those that
have expired, too: see their state, which is valid, expired or early.`,
		Example: `  meshctl ca show web-1/tls.crt ca/ca.crt`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return misused("want at least one argument, a file with certificates")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			shown, problems := describeFiles(args, time.Now())
			var err error
			if a.output == "json" {
				err = writeShown(cmd, shown)
			} else if len(shown) > 0 {
				err = writeTable(cmd.OutOrStdout(), "FILE ID KIND ISSUER FROM UNTIL STATE", certificateRows(shown))
			}
			return errors.Join(problems, err)
		},
	}
	a.outputFlag(cmd, "table", "json")
	return cmd
}

// certificate is what is shown of one.
type certificate struct {
	File      string `json:"file"`
	ID        string `json:"id"` // empty if it has no SPIFFE ID
	Kind      string `json:"kind"`
	Subject   string `json:"subject"`
	Issuer    string `json:"issuer"`
	Serial    string `json:"serial"`
	NotBefore string `json:"notBefore"`
	NotAfter  string `json:"notAfter"`
	State     string `json:"state"`
}

// describeFiles describes what can be read, and says what can't.
func describeFiles(files []string, now time.Time) (shown []certificate, problems error) {
	shown = []certificate{} // not null in JSON
	for _, file := range files {
		all, err := readCertificates(file)
		problems = errors.Join(problems, err)
		for _, c := range all {
			shown = append(shown, describeCertificate(file, c, now))
		}
	}
	return shown, problems
}

func describeCertificate(file string, c *x509.Certificate, now time.Time) certificate {
	d := certificate{
		File: file, ID: spiffeID(c), Kind: "leaf", Subject: c.Subject.String(), Issuer: c.Issuer.String(), Serial: c.SerialNumber.Text(16),
		NotBefore: day(c.NotBefore), NotAfter: day(c.NotAfter), State: "valid",
	}
	if c.IsCA {
		d.Kind = "ca"
	}
	if now.Before(c.NotBefore) {
		d.State = "early"
	} else if now.After(c.NotAfter) {
		d.State = "expired"
	}
	return d
}

func certificateRows(shown []certificate) (rows [][]string) {
	for _, c := range shown {
		rows = append(rows, []string{c.File, c.ID, c.Kind, c.Issuer, c.NotBefore, c.NotAfter, c.State})
	}
	return rows
}

func writeShown(cmd *cobra.Command, shown []certificate) error {
	text, err := json.Marshal(map[string]any{"certificates": shown})
	if err != nil {
		return fmt.Errorf("write as JSON: %w", err)
	}
	return indentJSON(cmd.OutOrStdout(), text)
}
