//go:build chart

package chart

import (
	"encoding/base64"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// alone starts an agent where it has an address and nothing else, and asks it for all that it knows of, at the socket where the
// kubelet asks whether it is ready.
const alone = `ip link set lo up
ip address add "$IP" dev lo
"$BIN/agent" "$@" 2>"$DIR/log" &
trap 'kill -9 $!' EXIT
timeout 60 sh -c 'until "$BIN/meshctl" "$ASK" members 2>"$DIR/members" | grep alive; do sleep 0.2; done' ||
	{ cat "$DIR/members" "$DIR/log" >&2; exit 1; }`

// TestCommandLine wants an agent to take the command line and the Secrets that the chart makes, also on a node that has an
// IPv6 address only.
func TestCommandLine(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can make network namespaces")
	}
	bin := t.TempDir()
	must(t, "nice", "-n", "19", "go", "-C", root, "build", "-o", bin+"/", "./cmd/agent", "./cmd/meshctl")
	for ip, at := range map[string]string{"10.1.2.3": "10.1.2.3", "fd00::1": "[fd00::1]"} {
		t.Run(ip, func(t *testing.T) {
			dir := t.TempDir()
			t.Setenv("IP", ip)
			t.Setenv("BIN", bin)
			t.Setenv("DIR", dir)
			out := must(t, "unshare", append([]string{"--net", "sh", "-c", alone, "sh"}, commandLine(t, dir, ip)...)...)
			for _, want := range []string{at + ":7946", at + ":15009"} {
				if !strings.Contains(out, want) {
					t.Errorf("got\n%s\nwant %s in it", out, want)
				}
			}
		})
	}
}

// commandLine is that of an agent of the chart, whose files are in a folder, on a node with an address.
func commandLine(t *testing.T, dir, ip string) []string {
	t.Helper()
	out := must(t, "helm", "template", "headroom", chart, "--set", "monitoring.podMonitor=true,ports.mesh=15009,agent.accessLog=true")
	for secret, files := range map[string]string{"gossip": "gossip", "ca": "ca", "etcd-client": "etcd"} {
		unpack(t, out, "headroom-"+secret, filepath.Join(dir, files))
	}
	const nobody = `{"clusters":[{"name":"a","cluster":{"server":"http://127.0.0.1:1"}}],"contexts":[{"name":"a","context":{"cluster":"a"}}],"current-context":"a"}`
	if err := os.WriteFile(filepath.Join(dir, "kubeconfig"), []byte(nobody), 0o600); err != nil {
		t.Fatal(err)
	}
	_, agent, _ := strings.Cut(out, "\nkind: DaemonSet\n")
	agent, _, _ = strings.Cut(agent, "\n---\n")
	here := strings.NewReplacer("$(NODE_NAME)", "node1", "$(HOST_IP)", ip, "/etc/headroom", dir, "/var/lib/headroom", dir+"/data")
	t.Setenv("ASK", here.Replace(regexp.MustCompile(`--agent=unix:[^"]+`).FindString(agent)))
	args := []string{"--kubeconfig=" + dir + "/kubeconfig"}
	for _, m := range regexp.MustCompile(`(?m)^ +- (--\S+)$`).FindAllStringSubmatch(agent, -1) {
		args = append(args, here.Replace(m[1]))
	}
	if len(args) < 20 {
		t.Fatalf("there are few arguments: %q", args)
	}
	return args
}

// unpack writes the files of a Secret.
func unpack(t *testing.T, manifests, secret, dir string) {
	t.Helper()
	_, data, found := strings.Cut(manifests, "\n  name: "+secret+"\n")
	data, _, _ = strings.Cut(data, "\n---\n")
	if !found || os.Mkdir(dir, 0o700) != nil {
		t.Fatalf("no Secret %s", secret)
	}
	for _, m := range regexp.MustCompile(`(?m)^  (key|\w+\.\w+): (\S+)$`).FindAllStringSubmatch(data, -1) {
		content, err := base64.StdEncoding.DecodeString(m[2])
		if err != nil {
			t.Fatalf("%s in %s: %v", m[1], secret, err)
		}
		if err := os.WriteFile(filepath.Join(dir, m[1]), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}
