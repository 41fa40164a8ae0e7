package h1

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

// TestWire reads each line of the blocks in testdata/wire as the beginning of what comes on a connection: as requests, as
// responses to a METHOD, or as a chunked body, and tells what it means and how it is sent on, or why it is refused.
// "|" stands for CR LF, "{a*9}" for aaaaaaaaa, "{}" for nothing, and escapes are those of Go.
//
// Rewrite the results after a change with: go test ./dataplane/h1 -run TestWire -rewrite
func TestWire(t *testing.T) {
	datadriven.Walk(t, "testdata/wire", func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			var out strings.Builder
			for line := range strings.Lines(d.Input) {
				line = strings.TrimSuffix(line, "\n")
				fmt.Fprintf(&out, "%s\n    %s\n", line, tell(t, d, wire(t, line)))
			}
			return out.String()
		})
	})
}

func tell(t *testing.T, d *datadriven.TestData, b []byte) string {
	switch d.Cmd {
	case "requests":
		return tellRequest(b)
	case "responses":
		method := "GET"
		for _, arg := range d.CmdArgs {
			method = arg.Key
		}
		return tellResponse(b, method)
	case "bodies":
		return tellBody(b)
	}
	t.Fatalf("%s: unknown command %q", d.Pos, d.Cmd)
	return ""
}

// wire returns the bytes that a line stands for.
func wire(t testing.TB, line string) []byte {
	repeated := regexp.MustCompile(`\{([^*{}]+)\*(\d+)\}`)
	line = repeated.ReplaceAllStringFunc(line, func(s string) string {
		m := repeated.FindStringSubmatch(s)
		n, _ := strconv.Atoi(m[2])
		return strings.Repeat(m[1], n)
	})
	line = strings.NewReplacer("{}", "", "|", `\r\n`, `"`, `\"`).Replace(line)
	s, err := strconv.Unquote(`"` + line + `"`)
	if err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	return []byte(s)
}

// plainly returns bytes as they stand in the files.
func plainly(b []byte) string {
	s := strconv.QuoteToASCII(string(b))
	s = strings.NewReplacer(`\r\n`, "|", `\"`, `"`).Replace(s[1 : len(s)-1])
	long := regexp.MustCompile(`[a-z]{80,}`)
	return long.ReplaceAllStringFunc(s, func(s string) string { return fmt.Sprintf("{%c*%d}", s[0], len(s)) })
}

func refusal(err error) string {
	e := err.(*Error)
	return fmt.Sprintf("%d %s", e.Status, e.Detail)
}

func tellRequest(b []byte) string {
	var r Request
	n, err := r.Parse(b)
	switch {
	case err != nil:
		return refusal(err)
	case n == 0:
		return "needs more"
	}
	return fmt.Sprintf("for %q, %s", r.Authority, tellHead(&r.head)) + tellRest(b[n:]) + "\n    => " + plainly(r.Append(nil))
}

func tellResponse(b []byte, method string) string {
	var r Response
	n, err := r.Parse(b, []byte(method))
	switch {
	case err != nil:
		return refusal(err)
	case n == 0:
		return "needs more"
	}
	out := fmt.Sprintf("status %d, %s", r.Status(), tellHead(&r.head))
	return out + tellRest(b[n:]) + "\n    => " + plainly(r.Append(nil, r.Framing))
}

func tellHead(h *head) string {
	out := []string{"no body", fmt.Sprintf("body of %d", h.Length), "body in chunks", "body until the end"}[h.Framing]
	if !h.KeepAlive {
		out += ", then closes"
	}
	if h.Upgrade != nil {
		out += fmt.Sprintf(", upgrade to %q", h.Upgrade)
	}
	if h.TakesTrailers {
		out += ", takes trailers"
	}
	return out
}

func tellRest(b []byte) string {
	if len(b) == 0 {
		return ""
	}
	return ", followed by " + plainly(b)
}

func tellBody(b []byte) string {
	var d Decoder
	var body []byte
	for {
		data, n, done, err := d.Next(b)
		b = b[n:]
		body = append(body, data...)
		switch {
		case err != nil:
			return fmt.Sprintf("body '%s'; %s", plainly(body), refusal(err))
		case done:
			return fmt.Sprintf("body '%s'%s\n    => %s", plainly(body), tellRest(b), plainly(d.AppendEnd(nil)))
		case n == 0:
			return fmt.Sprintf("body '%s'; needs more", plainly(body))
		}
	}
}

// examples returns all that the blocks for a command in testdata/wire have in them.
func examples(f testing.TB, command string) (all [][]byte) {
	files, err := filepath.Glob("testdata/wire/*")
	if err != nil {
		f.Fatal(err)
	}
	for _, name := range files {
		content, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		for block := range strings.SplitSeq(string(content), "\n\n") {
			in := false
			for line := range strings.Lines(block) {
				line = strings.TrimSuffix(line, "\n")
				switch {
				case line == "----":
					in = false
				case in:
					all = append(all, wire(f, line))
				case strings.HasPrefix(line, command):
					in = true
				}
			}
		}
	}
	if len(all) == 0 {
		f.Fatalf("no examples for %s", command)
	}
	return all
}
