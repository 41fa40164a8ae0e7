//go:build linux

package conformance

import (
	"encoding/xml"
	"net"
	"os"
	"path/filepath"
	"testing"
)

// report is what h2spec writes in JUnit's form.
type report struct {
	Suites []struct {
		Name  string `xml:"name,attr"`
		Cases []struct {
			Section string    `xml:"package,attr"`
			Name    string    `xml:"classname,attr"`
			Failure string    `xml:"failure"`
			Error   string    `xml:"error"`
			Skipped *struct{} `xml:"skipped"`
		} `xml:"testcase"`
	} `xml:"testsuite"`
}

// testH2spec wants every case of h2spec to pass, the strict ones too. It is held against agents alone: the server of
// net/http takes some liberties. The service is declared to speak HTTP/2: where first bytes tell the protocol, those that
// are not the preface of HTTP/2 are those of another one.
func testH2spec(t *testing.T, at target) {
	if at.proxy == "" {
		t.Skip("there is no agent")
	}
	host, port, err := net.SplitHostPort(at.services[serviceHTTP2])
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "report.xml")
	out, _, _ := at.run(t, nil, filepath.Join(filepath.Dir(at.programs.Agent), h2specProgram),
		"--strict", "--timeout", "2", "--junit-report", file, "--host", host, "--port", port, "--path", "/bytes/1000")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var r report
	if err := xml.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}
	passed := 0
	for _, s := range r.Suites {
		for _, c := range s.Cases {
			switch {
			case c.Failure != "" || c.Error != "" || c.Skipped != nil:
				t.Errorf("%s %s: %s%s", c.Section, c.Name, c.Failure, c.Error)
			default:
				passed++
			}
		}
	}
	const all = 146
	if passed != all {
		t.Errorf("%d cases passed, want %d", passed, all)
	}
}
