//go:build linux

package conformance

import (
	"regexp"
	"strings"
	"testing"
)

// testNghttp2 uses the client of nghttp2, and its load generator.
func testNghttp2(t *testing.T, at target) {
	c := newCurl(t, at, "")
	file := c.file(200_000)
	out, stderr, code := at.run(t, nil, "nghttp", "--data", file, at.url(serviceWeb, "/echo"))
	if code != 0 || out != string(bodyOf(0, 200_000)) {
		t.Errorf("nghttp: exit code %d, %s %s", code, sketch(out), stderr)
	}
	out, stderr, code = at.run(t, nil, "nghttp", "--expect-continue", "--trailer", "x-last: word", "--data", file, at.url(serviceWeb, "/describe"))
	if code != 0 || !strings.Contains(out, `"X-Last":["word"]`) {
		t.Errorf("nghttp: exit code %d, %s %s", code, out, stderr)
	}
	for name, args := range map[string][]string{
		"h2":         {"-n", "10000", "-c", "10", "-m", "20", at.url(serviceWeb, "/")},
		"h2 bodies":  {"-n", "200", "-c", "5", "-m", "10", "-d", file, at.url(serviceWeb, "/echo")},
		"h2 windows": {"-n", "100", "-c", "2", "-m", "10", "-w", "16", "-W", "16", at.url(serviceWeb, "/stream/300000")},
		"h1":         {"--h1", "-n", "10000", "-c", "50", at.url(serviceWeb, "/")},
		"h1 bodies":  {"--h1", "-n", "200", "-c", "20", "-d", file, at.url(serviceWeb, "/echo")},
		"pipelined":  {"--h1", "-n", "1000", "-c", "5", "-m", "8", at.url(serviceWeb, "/bytes/1000")},
	} {
		t.Run(name, func(t *testing.T) {
			out, stderr, code := at.run(t, nil, "h2load", args...)
			counts := regexp.MustCompile(`(?m)^requests: .*`).FindString(out)
			statuses := regexp.MustCompile(`(?m)^status codes: .*`).FindString(out)
			if code != 0 || !strings.Contains(counts, " "+args[wanted(args)]+" succeeded, 0 failed, 0 errored, 0 timeout") ||
				!strings.Contains(statuses, "0 3xx, 0 4xx, 0 5xx") {
				t.Errorf("exit code %d: %s; %s\n%s", code, counts, statuses, stderr)
			}
		})
	}
}

// wanted returns where the number of requests is.
func wanted(args []string) int {
	for i, a := range args {
		if a == "-n" {
			return i + 1
		}
	}
	return 0
}
