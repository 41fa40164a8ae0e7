//go:build linux

package conformance

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// curl is the command of that name, with the flags of one version of HTTP.
type curl struct {
	t     *testing.T
	at    target
	base  string   // URL of the service web
	flags []string // for every call
	dir   string
}

// transfer is what curl tells of one of its transfers.
type transfer struct {
	Code     int     `json:"http_code"`
	Version  string  `json:"http_version"`
	Connects int     `json:"num_connects"`
	Seconds  float64 `json:"time_total"`
	Exit     int     `json:"exitcode"`
	Error    string  `json:"errormsg"`
}

func newCurl(t *testing.T, at target, base string, flags ...string) *curl {
	return &curl{t: t, at: at, base: base, flags: flags, dir: t.TempDir()}
}

// do calls curl and returns what it tells of its transfers, with the head and the body of the last.
func (c *curl) do(args ...string) (all []transfer, head, body string) {
	c.t.Helper()
	headFile, bodyFile := filepath.Join(c.dir, "head"), filepath.Join(c.dir, "body")
	os.Remove(bodyFile) // curl makes none for an empty body
	args = slices.Concat([]string{"-q", "-sS", "-D", headFile, "-w", "%{json}\n", "--max-time", "20"}, c.flags, args)
	if !slices.Contains(args, "-o") {
		args = append(args, "-o", bodyFile)
	}
	stdout, stderr, code := c.at.run(c.t, nil, "curl", args...)
	for line := range strings.Lines(stdout) {
		var one transfer
		if err := json.Unmarshal([]byte(line), &one); err != nil {
			c.t.Fatalf("curl %s: %q: %v", strings.Join(args, " "), line, err)
		}
		all = append(all, one)
	}
	if code != 0 {
		c.t.Logf("curl %s: exit code %d: %s", strings.Join(args, " "), code, stderr)
	}
	return all, read(headFile), read(bodyFile)
}

func read(file string) string {
	b, err := os.ReadFile(file)
	if err != nil {
		return ""
	}
	return string(b)
}

// want calls curl for one path and wants a status.
func (c *curl) want(code int, path string, args ...string) (head, body string) {
	c.t.Helper()
	all, head, body := c.do(append(args, c.base+path)...)
	if len(all) != 1 || all[0].Code != code || all[0].Exit != 0 {
		c.t.Errorf("curl %v %s: got %+v, want code %d and no error\n%s\n%.300s", args, path, all, code, head, body)
	}
	return head, body
}

// wantBody wants a response of 200 with a body.
func (c *curl) wantBody(body, path string, args ...string) {
	c.t.Helper()
	if _, got := c.want(http.StatusOK, path, args...); got != body {
		c.t.Errorf("curl %v %s: got %s, want %s", args, path, sketch(got), sketch(body))
	}
}

func sketch(body string) string {
	if len(body) < 100 {
		return fmt.Sprintf("%q", body)
	}
	return sumOf(strings.NewReader(body))
}

func (c *curl) describe(path string, args ...string) (d description) {
	c.t.Helper()
	_, body := c.want(http.StatusOK, path, args...)
	if err := json.Unmarshal([]byte(body), &d); err != nil {
		c.t.Errorf("curl %v: %v: %q", args, err, body)
	}
	return d
}

// file returns the name of a file of so many bytes.
func (c *curl) file(n int64) string {
	name := filepath.Join(c.dir, fmt.Sprint(n))
	if err := os.WriteFile(name, bodyOf(0, n), 0o600); err != nil {
		c.t.Fatal(err)
	}
	return name
}

// priorKnowledge is the flag for HTTP/2 from the first byte. Some versions of curl (7.88) can't use such a connection twice,
// nor end a body that is not wanted: they see errors of framing where there are none.
const priorKnowledge = "--http2-prior-knowledge"

func testCurl(t *testing.T, at target) {
	for _, version := range []string{"--http1.0", "--http1.1", "--http2", priorKnowledge} {
		t.Run(version, func(t *testing.T) {
			c := newCurl(t, at, at.url(serviceWeb, ""), version)
			c.wantBody("hello\n", "/")
			c.downloads()
			c.uploads(version)
			c.heads()
			c.ranges()
			if version != "--http1.0" {
				c.trailers()
				c.expects(version)
			}
			c.rest(version)
			if version != "--http1.0" && version != priorKnowledge {
				c.again()
			}
		})
	}
}

func (c *curl) downloads() {
	c.t.Helper()
	for _, n := range []int64{0, 1, 16 << 10, 1<<20 + 1, 16 << 20} {
		want := string(bodyOf(0, n))
		c.wantBody(want, fmt.Sprintf("/bytes/%d", n))
		c.wantBody(want, fmt.Sprintf("/stream/%d", n))
	}
	c.wantBody(string(bodyOf(0, 3<<20)), fmt.Sprintf("/bytes/%d", 3<<20), "--limit-rate", "30M") // back-pressure
}

func (c *curl) uploads(version string) {
	c.t.Helper()
	for _, n := range []int64{0, 1, 64 << 10, 1<<20 + 1, 8 << 20} {
		file := c.file(n)
		if d := c.describe("/describe", "-T", file); d.Method != "PUT" || d.Sum != sumOf(body(n)) || d.Length != n {
			c.t.Errorf("upload of %d bytes: got %s %s, length %d", n, d.Method, d.Sum, d.Length)
		}
		if version == "--http1.0" || n == 0 {
			continue // the one can't send what has no length, and curl stalls over the other
		}
		if d := c.describe("/describe", "-H", "Transfer-Encoding: chunked", "-T", file); d.Sum != sumOf(body(n)) || d.Length != -1 {
			c.t.Errorf("upload of %d bytes without a length: got %s, length %d", n, d.Sum, d.Length)
		}
	}
	file := c.file(300 << 10)
	want := fmt.Sprintf("a %s\nb %s\n", sumOf(body(300<<10)), sumOf(strings.NewReader("text")))
	c.wantBody(want, "/form", "-F", "a=@"+file, "-F", "b=text")
	c.wantBody(read(file), "/echo", "--data-binary", "@"+file)
}

func (c *curl) heads() {
	c.t.Helper()
	head, body := c.want(http.StatusOK, "/bytes/123456", "-I")
	if !strings.Contains(strings.ToLower(head), "content-length: 123456\r\n") || body != "" && body != head {
		c.t.Errorf("HEAD: got %q, %q", head, body)
	}
	for _, code := range []int{http.StatusNoContent, http.StatusNotModified} {
		if _, body := c.want(code, fmt.Sprintf("/status/%d", code)); body != "" {
			c.t.Errorf("status %d with a body: %q", code, body)
		}
	}
	c.want(http.StatusNotModified, "/bytes/5", "-H", `If-None-Match: "5"`)
}

func (c *curl) ranges() {
	c.t.Helper()
	for _, r := range []struct {
		asked    string
		first, n int64
	}{{"0-0", 0, 1}, {"100-70000", 100, 69901}, {"-500", 99500, 500}, {"99999-", 99999, 1}} {
		head, got := c.want(http.StatusPartialContent, "/bytes/100000", "-r", r.asked)
		if want := string(bodyOf(r.first, r.n)); got != want || !strings.Contains(strings.ToLower(head), "content-range: bytes ") {
			c.t.Errorf("range %s: got %s, want %s", r.asked, sketch(got), sketch(want))
		}
	}
	c.want(http.StatusRequestedRangeNotSatisfiable, "/bytes/10", "-r", "20-30")
}

// again uses connections more than once.
func (c *curl) again() {
	c.t.Helper()
	var args []string
	for _, path := range []string{"/", "/bytes/100000", "/stream/100000", "/status/204", "/"} {
		args = append(args, "-o", os.DevNull, c.base+path)
	}
	all, _, _ := c.do(args...)
	for i, one := range all {
		if one.Exit != 0 || (one.Connects != 0) != (i == 0) {
			c.t.Errorf("transfer %d of one connection: %+v", i, one)
		}
	}
	if len(all) != 5 {
		c.t.Errorf("%d transfers, want 5", len(all))
	}
	all, _, _ = c.do("-Z", "--parallel-max", "20", c.base+"/bytes/[10000-10049]", "-o", filepath.Join(c.dir, "part-#1"))
	for _, one := range all {
		if one.Exit != 0 || one.Code != http.StatusOK {
			c.t.Errorf("transfer beside others: %+v", one)
		}
	}
	for n := int64(10000); n < 10050; n++ {
		if got := read(filepath.Join(c.dir, fmt.Sprintf("part-%d", n))); got != string(bodyOf(0, n)) {
			c.t.Errorf("of %d bytes beside others came %s", n, sketch(got))
		}
	}
}

func (c *curl) trailers() {
	c.t.Helper()
	head, _ := c.want(http.StatusOK, "/stream/5000")
	if want := "x-sum: " + sumOf(body(5000)) + "\r\n"; !strings.Contains(strings.ReplaceAll(head, "X-Sum", "x-sum"), want) {
		c.t.Errorf("no trailer %q: %q", want, head)
	}
}

// expects sends bodies that wait for a word.
func (c *curl) expects(version string) {
	c.t.Helper()
	file := c.file(2 << 20)
	expect := []string{"-H", "Expect: 100-continue", "--expect100-timeout", "15", "-T", file}
	all, _, got := c.do(append(expect, c.base+"/describe")...)
	if len(all) != 1 || all[0].Code != http.StatusOK || all[0].Seconds > 10 || !strings.Contains(got, sumOf(body(2<<20))) {
		c.t.Errorf("a body that waits for a word: %+v %s", all, got)
	}
	if version == priorKnowledge {
		return
	}
	all, _, _ = c.do(append(expect, c.base+"/early")...)
	if len(all) != 1 || all[0].Code != http.StatusRequestEntityTooLarge || all[0].Seconds > 10 {
		c.t.Errorf("a body that is not wanted: %+v", all)
	}
}

func (c *curl) rest(version string) {
	c.t.Helper()
	if version != priorKnowledge {
		c.wantBody("hello\n", "/redirect", "-L")
	}
	c.wantBody("hello\n", "/", "-H", "Connection: close")
	c.want(http.StatusNotFound, "/nowhere")
	c.want(http.StatusTeapot, "/status/418", "-X", "DELETE")
	d := c.describe("/describe?a=%20b&c=%2F", "-H", "X-Twice: 1", "-H", "X-Twice: 2", "-H", "X-Empty;", "-b", "k=v", "-A", "tester")
	if d.URI != "/describe?a=%20b&c=%2F" || fmt.Sprint(d.Header["X-Twice"]) != "[1 2]" || fmt.Sprint(d.Header["X-Empty"]) != "[]" ||
		d.Header.Get("Cookie") != "k=v" || d.Header.Get("User-Agent") != "tester" {
		c.t.Errorf("got %+v", d)
	}
	if all, _, _ := c.do("--max-time", "0.1", c.base+"/hang"); len(all) != 1 || all[0].Exit != 28 {
		c.t.Errorf("a caller that gives up: %+v", all)
	}
	if all, _, got := c.do(c.base + "/break"); len(all) != 1 || all[0].Exit == 0 {
		c.t.Errorf("half a body went for a whole one: %+v %q", all, got)
	}
}

// testCurlByProxy names services as applications do that know the agent as their proxy.
func testCurlByProxy(t *testing.T, at target) {
	if at.proxy == "" {
		t.Skip("no agent, no proxy")
	}
	const base = "http://" + serviceWeb + ".mesh"
	tests := map[string]struct {
		base  string
		flags []string
	}{
		"proxy":        {base, []string{"-x", "http://" + at.proxy}},
		"proxy 1.0":    {base, []string{"-x", "http://" + at.proxy, "--http1.0"}},
		"tunnel":       {base + ":80", []string{"-x", "http://" + at.proxy, "--proxytunnel"}},
		"tunnel to h2": {base + ":80", []string{"-x", "http://" + at.proxy, "--proxytunnel", priorKnowledge}},
		"resolve":      {base + ":15001", []string{"--resolve", "web.mesh:15001:" + strings.Split(at.proxy, ":")[0]}},
		"connect-to":   {base, []string{"--connect-to", "::" + at.proxy}},
		"h2":           {base, []string{"--connect-to", "::" + at.proxy, priorKnowledge}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			c := newCurl(t, at, tt.base, tt.flags...)
			c.wantBody("hello\n", "/")
			c.wantBody(string(bodyOf(0, 2<<20)), fmt.Sprintf("/bytes/%d", 2<<20))
			if d := c.describe("/describe", "-T", c.file(1<<20)); d.Sum != sumOf(body(1<<20)) || d.URI != "/describe" {
				t.Errorf("upload: %+v", d)
			}
			if name == "proxy" || name == "connect-to" || name == "tunnel" {
				c.again()
			}
		})
	}
}
