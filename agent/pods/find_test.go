package pods

import (
	"strings"
	"testing"
)

func TestPodUID(t *testing.T) {
	const uid = "0b5e8a7c-1111-4222-8333-944445555666"
	underscored := strings.ReplaceAll(uid, "-", "_")
	for group, want := range map[string]string{
		"pod" + uid:                                                uid,
		"kubepods-pod" + underscored + ".slice":                    uid,
		"kubepods-burstable-pod" + underscored + ".slice":          uid,
		"kubelet-kubepods-besteffort-pod" + underscored + ".slice": uid,
		"pod8d3e1f6a9c":                                            "8d3e1f6a9c", // a static pod's
		"kubepods-burstable-pod8d3e1f6a9c.slice":                   "8d3e1f6a9c",
		"kubepods":                                                 "",
		"kubepods-burstable.slice":                                 "",
		"cri-containerd-0123.scope":                                "",
		"system.slice":                                             "",
		"":                                                         "",
	} {
		got, ok := podUID(group)
		if !ok {
			got = ""
		}
		if got != want {
			t.Errorf("control group %q is of pod %q, want %q", group, got, want)
		}
	}
}

func TestCountConnections(t *testing.T) {
	const table = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:3A9E 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1
   1: 0100007F:3A9E 0200F40A:C001 01 00000000:00000000 00:00000000 00000000     0        0 2
   2: 0100007F:3A9E 0200F40A:C002 08 00000000:00000000 00:00000000 00000000     0        0 3
   3: 0100007F:3A9E 0200F40A:C003 06 00000000:00000000 00:00000000 00000000     0        0 0
   4: 0200F40A:C001 0A00600A:3A9E 01 00000000:00000000 00:00000000 00000000     0        0 4
`
	if n := countConnections(table, 15006); n != 2 {
		t.Errorf("%d connections, want 2: one that is established and one of which the other end is closed", n)
	}
}
