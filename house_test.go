// Package headroom_test holds the rules of the house: what the packages of this module may import and do. It is a
// statement of policy. Change the code to fit the rules; change a rule only with a reason that the next reader will
// find in the design documents.
package headroom_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

const module = "github.com/headroom-mesh/headroom"

// imports says which packages of this module may import which: "a < b" means that b may import a, and so may all that
// may import b. Every package is named.
const imports = `
	NONE                                              < api/mesh/v1, registry/embedded
	NONE                                              < dataplane/fault, dataplane/load, dataplane/memnet, dataplane/sockets

	api/mesh/v1 < policy/document < policy            < policy/budget, policy/localservice
	policy < registry                                 < registry/etcd, registry/registrytest

	dataplane/load, policy                            < dataplane/prequal
	dataplane/prequal, registry                       < dataplane/balancer
	dataplane/load, registry                          < dataplane/probe
	dataplane/fault, dataplane/sockets                < dataplane/h2
	NONE                                              < dataplane/h1, dataplane/sniff
	dataplane/fault, dataplane/h1, dataplane/h2       < dataplane/relay
	dataplane/identity, dataplane/sniff, policy       < dataplane/relay
	registry                                          < dataplane/identity
	dataplane/identity                                < dataplane/identity/ca
	dataplane/identity, dataplane/sockets             < dataplane/transport
	dataplane/probe, dataplane/relay                  < dataplane/inbound
	dataplane/balancer, dataplane/inbound             < dataplane/outbound
	policy/budget                                     < dataplane/outbound
	dataplane/outbound, dataplane/transport           < dataplane
	dataplane/balancer, policy/budget                 < dataplane/sim
	dataplane/sim < dataplane/sim/scenario            < dataplane/sim/chart, dataplane/sim/evidence

	registry                                          < agent/gossip
	registry, policy/localservice                     < agent/local
	registry                                          < agent/names, agent/kube
	dataplane, agent/gossip, agent/local              < agent/admin
	registry/etcd, registry/embedded, agent/admin     < agent
	registry                                          < agent/kube/policies < agent
	dataplane/sockets                                 < agent/capture
	agent/capture, dataplane/identity                 < agent/pods
	agent/pods, agent/names, agent/kube               < agent
	agent/capture, agent/names                        < cmd/meshctl
	dataplane/identity/ca                             < agent, cmd/meshctl
	agent, registry/registrytest, dataplane/memnet    < agent/meshtest
	NONE                                              < agent/conformance, agent/nettest

	agent                                             < cmd/agent
	api/mesh/v1, policy/document, policy/localservice < cmd/meshctl
	dataplane/sim/chart                               < cmd/meshctl
	NONE                                              < cmd/meshctl/cluster < cmd/meshctl
	api/mesh/v1                                       < bench/demo
	NONE                                              < bench/picks, bench/load, bench/certs, bench/capture
	bench/certs                                       < bench/floor
	bench/floor, bench/load                           < bench/proxies
	dataplane/sim/scenario, policy/localservice       < docs/gen
	dataplane/sim/chart, dataplane/sim/evidence       < docs/evidence
	NONE                                              < deploy/image
`

// forTests returns the packages that only tests may import.
func forTests() []string {
	return []string{"registry/registrytest", "dataplane/memnet", "agent/meshtest", "agent/nettest"}
}

// exclusive names modules that only some packages may import.
func exclusive() []exclusiveImport {
	return []exclusiveImport{
		{"go.etcd.io/etcd/client/v3", []string{"registry/etcd"}, "the store is reached through the registry.Registry interface"},
		{"go.etcd.io/etcd/server/v3", []string{"registry/embedded"}, "the server brings half of the module's dependencies"},
		{"github.com/hashicorp/memberlist", []string{"agent/gossip"}, "gossip carries membership and nothing else"},
		{"github.com/miekg/dns", []string{"agent/names"}, "names are answered in one place"},
		{"github.com/fsnotify/fsnotify", []string{"agent/local"}, "only the folder of local services is watched"},
		{"github.com/google/nftables", []string{"agent/capture"}, "only capture changes what the kernel does with packets"},
		{"github.com/vishvananda/netlink", []string{"agent/capture"}, "only capture changes routes"},
		{"github.com/spf13/cobra", []string{"cmd/agent", "cmd/meshctl"}, "only programs have flags"},
		{"k8s.io/client-go", []string{"agent/kube", "agent/kube/policies", "cmd/meshctl/cluster"}, "Kubernetes is asked by agents, and by meshctl"},
		{"charm.land/bubbletea/v2", []string{"cmd/meshctl"}, "only meshctl draws"},
		{"charm.land/lipgloss/v2", []string{"cmd/meshctl"}, "only meshctl draws"},
		{"github.com/spiffe/go-spiffe/v2", []string{"dataplane/identity", "dataplane/identity/ca"}, "only identities are SPIFFE's"},
		{"gonum.org/v1/plot", []string{"dataplane/sim/chart", "bench/proxies"}, "only simulations and measurements are drawn"},
		{"sigs.k8s.io/yaml", []string{"policy/document", "cmd/meshctl", "agent", "docs/gen"}, "documents are decoded in one place, strictly"},
	}
}

type exclusiveImport struct {
	module string
	users  []string
	why    string
}

// pure reports whether a package computes only: time and randomness are given to it, and it does no I/O.
func pure(pkg string) bool {
	return pkg == "policy" || strings.HasPrefix(pkg, "policy/") ||
		slices.Contains([]string{"dataplane/load", "dataplane/prequal", "dataplane/balancer", "dataplane/sim", "dataplane/h1"}, pkg)
}

// source is a Go file of this module.
type source struct {
	name string // as in "dataplane/probe/wire.go"
	pkg  string // as in "dataplane/probe"
	test bool
	*ast.File
}

func (s source) generated() bool { return ast.IsGenerated(s.File) }

func (s source) hasTests() bool {
	return slices.ContainsFunc(s.Decls, func(d ast.Decl) bool {
		f, ok := d.(*ast.FuncDecl)
		return ok && f.Recv == nil && strings.HasPrefix(f.Name.Name, "Test")
	})
}

// imported returns the paths that the file imports.
func (s source) imported() []string {
	var paths []string
	for _, i := range s.Imports {
		p, _ := strconv.Unquote(i.Path.Value)
		paths = append(paths, p)
	}
	return paths
}

// uses returns the names that the file uses of an imported package.
func (s source) uses(importPath string) map[string]bool {
	name := path.Base(importPath)
	for _, i := range s.Imports {
		if p, _ := strconv.Unquote(i.Path.Value); p == importPath && i.Name != nil {
			name = i.Name.Name
		}
	}
	used := make(map[string]bool)
	if !slices.Contains(s.imported(), importPath) {
		return used
	}
	ast.Inspect(s.File, func(n ast.Node) bool {
		if sel, ok := n.(*ast.SelectorExpr); ok {
			if x, ok := sel.X.(*ast.Ident); ok && x.Name == name {
				used[sel.Sel.Name] = true
			}
		}
		return true
	})
	return used
}

// walk calls visit with every file of the tree that belongs to it.
func walk(t *testing.T, visit func(name string, content []byte)) {
	t.Helper()
	err := filepath.WalkDir(".", func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		p = filepath.ToSlash(p)
		if d.IsDir() {
			if slices.Contains([]string{".git", "bin", "data"}, p) {
				return fs.SkipDir
			}
			return nil
		}
		if !d.Type().IsRegular() || p == ".git" { // a file in a worktree
			return nil
		}
		content, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		visit(p, content)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func sources(t *testing.T) []source {
	t.Helper()
	var files []source
	walk(t, func(name string, content []byte) {
		if path.Ext(name) != ".go" || strings.Contains(name, "testdata/") || strings.HasPrefix(name, "test/kube/") { // another module
			return
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, content, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, source{name, path.Dir(name), strings.HasSuffix(name, "_test.go"), f})
	})
	return files
}

// code returns the files that are neither tests nor generated.
func code(t *testing.T) []source {
	return slices.DeleteFunc(sources(t), func(s source) bool { return s.test || s.generated() })
}

// dag maps a package to all that it may import.
type dag map[string]map[string]bool

// parseDAG reads rules in the notation of go/build: lists of names, separated by "<".
func parseDAG(rules string) dag {
	d := make(dag)
	for line := range strings.Lines(rules) {
		var before []string
		for list := range strings.SplitSeq(strings.TrimSpace(line), "<") {
			var names []string
			for name := range strings.SplitSeq(list, ",") {
				if name = strings.TrimSpace(name); name != "" && name != "NONE" {
					names = append(names, name)
				}
			}
			for _, name := range names {
				d.allow(name, before)
			}
			before = names
		}
	}
	d.close()
	return d
}

func (d dag) allow(name string, before []string) {
	if d[name] == nil {
		d[name] = make(map[string]bool)
	}
	for _, b := range before {
		d[name][b] = true
	}
}

// close lets every package import what those import that it may import.
func (d dag) close() {
	for range d { // as many rounds as the longest way may need
		for _, may := range d {
			for b := range maps.Clone(may) {
				maps.Copy(may, d[b])
			}
		}
	}
}

func TestImports(t *testing.T) {
	allowed := parseDAG(imports)
	for name, may := range allowed {
		if may[name] {
			t.Errorf("the rules let %s import itself", name)
		}
	}
	exist := map[string]bool{}
	for _, s := range sources(t) {
		if s.pkg == "." {
			continue
		}
		exist[s.pkg] = exist[s.pkg] || !s.test
		if allowed[s.pkg] == nil {
			t.Errorf("%s: no rule names package %s", s.name, s.pkg)
			continue
		}
		for _, p := range s.imported() {
			p, ours := strings.CutPrefix(p, module+"/")
			switch {
			case !ours || s.test:
			case !allowed[s.pkg][p]:
				t.Errorf("%s: %s must not import %s", s.name, s.pkg, p)
			case slices.Contains(forTests(), p) && !slices.Contains(forTests(), s.pkg):
				t.Errorf("%s: %s is for tests only", s.name, p)
			}
		}
	}
	for name := range allowed {
		if !exist[name] {
			t.Errorf("there are rules for package %s, which doesn't exist", name)
		}
	}
}

func TestExclusiveImports(t *testing.T) {
	mod, err := os.ReadFile("go.mod")
	if err != nil {
		t.Fatal(err)
	}
	files := code(t)
	for _, e := range exclusive() {
		if !strings.Contains(string(mod), "\t"+e.module+" v") {
			t.Errorf("there is a rule for %s, which go.mod does not require", e.module)
		}
		for _, s := range files {
			for _, p := range s.imported() {
				if (p == e.module || strings.HasPrefix(p, e.module+"/")) && !slices.Contains(e.users, s.pkg) {
					t.Errorf("%s: only %s may import %s: %s", s.name, strings.Join(e.users, ", "), p, e.why)
				}
			}
		}
	}
}

// TestArchitecture wants the page on the architecture to name all packages, and no others.
func TestArchitecture(t *testing.T) {
	page, err := os.ReadFile("docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	for pkg := range parseDAG(imports) {
		if !strings.Contains(string(page), "`"+pkg+"`") {
			t.Errorf("docs/architecture.md does not name %s", pkg)
		}
	}
	for _, m := range regexp.MustCompile("`((?:agent|api|bench|cmd|dataplane|policy|registry)/[a-z0-9/]+)`").FindAllStringSubmatch(string(page), -1) {
		if _, err := os.Stat(m[1]); err != nil {
			t.Errorf("docs/architecture.md names %s, which is not there", m[1])
		}
	}
}

// TestMetrics keeps metrics together: other files may only name prometheus.Registerer, for their Config.
func TestMetrics(t *testing.T) {
	const prometheus = "github.com/prometheus/client_golang/prometheus"
	for _, s := range code(t) {
		if path.Base(s.name) == "metrics.go" || s.pkg == "agent" || s.pkg == "agent/admin" {
			continue
		}
		for name := range s.uses(prometheus) {
			if name != "Registerer" {
				t.Errorf("%s: prometheus.%s belongs in metrics.go", s.name, name)
			}
		}
		for _, p := range s.imported() {
			if strings.HasPrefix(p, prometheus+"/") {
				t.Errorf("%s: %s belongs in metrics.go", s.name, p)
			}
		}
	}
}

func TestPurePackages(t *testing.T) {
	impure := []string{"Now", "Since", "Until", "Sleep", "After", "AfterFunc", "NewTimer", "NewTicker", "Tick"}
	for _, s := range code(t) {
		if !pure(s.pkg) {
			continue
		}
		for _, p := range s.imported() {
			if slices.Contains([]string{"net", "net/http", "os", "math/rand"}, p) {
				t.Errorf("%s: imports %s, though %s is pure", s.name, p, s.pkg)
			}
		}
		for name := range s.uses("time") {
			if slices.Contains(impure, name) {
				t.Errorf("%s: uses time.%s, though %s is pure: take the time as an argument", s.name, name, s.pkg)
			}
		}
	}
}

func TestPackageComments(t *testing.T) {
	comments := map[string][]string{}
	for _, s := range sources(t) {
		if s.generated() || s.test && s.pkg != "." {
			continue
		}
		if comments[s.pkg] == nil {
			comments[s.pkg] = []string{}
		}
		if s.Doc != nil {
			comments[s.pkg] = append(comments[s.pkg], s.name)
		}
	}
	for pkg, in := range comments {
		if len(in) != 1 {
			t.Errorf("package %s: %d package comments, want one: %v", pkg, len(in), in)
		}
	}
}

// TestGoroutinesHaveOwners wants goroutines to be started by sync.WaitGroup.Go or errgroup, so that somebody waits.
func TestGoroutinesHaveOwners(t *testing.T) {
	for _, s := range code(t) {
		ast.Inspect(s.File, func(n ast.Node) bool {
			if _, ok := n.(*ast.GoStmt); ok {
				t.Errorf("%s: a go statement: use sync.WaitGroup.Go, and wait", s.name)
			}
			return true
		})
	}
}

// TestNoGlobals wants no state in packages, nor code that runs before main.
func TestNoGlobals(t *testing.T) {
	for _, s := range code(t) {
		for _, d := range s.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if d.Recv == nil && d.Name.Name == "init" {
					t.Errorf("%s: func init", s.name)
				}
			case *ast.GenDecl:
				if d.Tok != token.VAR {
					continue
				}
				for _, spec := range d.Specs {
					if v := spec.(*ast.ValueSpec); !constant(d, v) {
						t.Errorf("%s: package-level var %s", s.name, v.Names[0].Name)
					}
				}
			}
		}
	}
}

// constant reports whether a variable is one only because Go has no constants of its type: an error, a compiled regular
// expression, an embedded file, or the assertion that a type implements an interface.
func constant(d *ast.GenDecl, v *ast.ValueSpec) bool {
	if v.Names[0].Name == "_" || embedded(d.Doc) || embedded(v.Doc) {
		return true
	}
	if len(v.Values) != len(v.Names) {
		return false
	}
	for _, value := range v.Values {
		call, ok := value.(*ast.CallExpr)
		if !ok {
			return false
		}
		f, ok := call.Fun.(*ast.SelectorExpr)
		if !ok {
			return false
		}
		x, ok := f.X.(*ast.Ident)
		if !ok || !slices.Contains([]string{"errors.New", "fmt.Errorf", "regexp.MustCompile"}, x.Name+"."+f.Sel.Name) {
			return false
		}
	}
	return true
}

func embedded(doc *ast.CommentGroup) bool {
	return doc != nil && slices.ContainsFunc(doc.List, func(c *ast.Comment) bool {
		return strings.HasPrefix(c.Text, "//go:embed ")
	})
}

// TestNoSleepingTests lets tests sleep only where time is not real. Files without tests may serve those that are in a
// bubble.
func TestNoSleepingTests(t *testing.T) {
	for _, s := range sources(t) {
		if s.test && s.hasTests() && s.uses("time")["Sleep"] && !slices.Contains(s.imported(), "testing/synctest") {
			t.Errorf("%s: time.Sleep outside a testing/synctest bubble: wait for what is to happen", s.name)
		}
	}
}

// TestForbiddenWords looks at all of the tree, not only at Go.
func TestForbiddenWords(t *testing.T) {
	words := []string{"TO" + "DO", "FIX" + "ME"}
	walk(t, func(name string, content []byte) {
		if !utf8.Valid(content) || path.Base(name) == "go.sum" {
			return
		}
		for _, w := range words {
			if strings.Contains(string(content), w) {
				t.Errorf("%s: has %q in it", name, w)
			}
		}
	})
}
