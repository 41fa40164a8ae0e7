package localservice_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/headroom-mesh/headroom/policy/localservice"
	"google.golang.org/protobuf/proto"
)

// TestDocuments shows what each document in testdata means, or all that is wrong with it.
func TestDocuments(t *testing.T) {
	datadriven.RunTest(t, "testdata/documents", func(t *testing.T, d *datadriven.TestData) string {
		docs, err := localservice.ParseAll([]byte(d.Input))
		if err != nil {
			return err.Error() + "\n"
		}
		var out strings.Builder
		for _, doc := range docs {
			s, err := localservice.Compile(doc)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintln(&out, s.Service, s.Endpoints)
			if s.Protocol != "" {
				fmt.Fprintln(&out, "speaks", s.Protocol)
			}
			if c := s.Check; c != nil {
				fmt.Fprintf(&out, "check %v %q every %v, timeout %v, rise %d, fall %d\n",
					c.Kind, c.Target, c.Interval, c.Timeout, c.Rise, c.Fall)
			}
		}
		return out.String()
	})
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("apiVersion: headroom.dev/v1\nkind: LocalService\nmetadata: {name: a}\n" +
		"spec:\n  endpoints:\n  - address: 127.0.0.1:80\n  - address: '[::1]:80'\n  check: {http: /healthz, interval: 1s}\n"))
	f.Add([]byte("apiVersion: headroom.dev/v1\nkind: LocalService\nmetadata: {name: a}\nspec: {protocol: grpc, endpoints: [{address: 'unix:/run/a.sock'}]}\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		doc, err := localservice.Parse(data)
		if err != nil {
			return
		}
		text, err := localservice.Encode(doc)
		if err != nil {
			t.Fatal(err)
		}
		again, err := localservice.Parse(text)
		if err != nil || !proto.Equal(doc, again) {
			t.Fatalf("written as\n%s\nit reads as %v, %v; want %v", text, again, err, doc)
		}
	})
}
