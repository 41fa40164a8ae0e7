package fault

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"net/http/httptest"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// reasons reads the list from the source, so that none is forgotten.
func reasons(t *testing.T) []Reason {
	f, err := parser.ParseFile(token.NewFileSet(), "fault.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var all []Reason
	ast.Inspect(f, func(n ast.Node) bool {
		if v, ok := n.(*ast.ValueSpec); ok {
			if typ, ok := v.Type.(*ast.Ident); ok && typ.Name == "Reason" {
				s, err := strconv.Unquote(v.Values[0].(*ast.BasicLit).Value)
				if err != nil {
					t.Fatal(err)
				}
				all = append(all, Reason(s))
			}
		}
		return true
	})
	return all
}

func TestReasons(t *testing.T) {
	status := map[Reason]int{
		BadRequest: 400, NotMesh: 404, UnknownService: 404, NoRegistry: 503, NoEndpoints: 503, NoneReady: 503, ConnectFailed: 503, UnknownEndpoint: 503,
		RetriesExhausted: 503, Reset: 502, MalformedResponse: 502, Timeout: 504, UnsupportedRequest: 501, Loop: 508, Canceled: 499,
	}
	all := reasons(t)
	if len(all) != len(status)+1 {
		t.Errorf("there are %d reasons, want %d", len(all), len(status)+1)
	}
	for _, r := range all {
		if !r.Known() {
			t.Errorf("%q is not known", r)
		}
		if r == None {
			continue
		}
		w := httptest.NewRecorder()
		New(r, "what happened to %q", "x\r\ny").Write(w)
		if w.Code != status[r] || w.Header().Get(Header) != string(r) || w.Body.String() != "headroom: what happened to \"x\\r\\ny\"\n" {
			t.Errorf("%s: got %d %v %q", r, w.Code, w.Header(), w.Body)
		}
	}
	if e := (&Error{Reason: BadRequest, Code: 431}); e.Status() != 431 {
		t.Errorf("an error with a status of its own has %d", e.Status())
	}
	if Reason("new").Known() || Reason("new").Unsent() {
		t.Error("a reason that is not on the list is taken for one")
	}
	if e := New(Timeout, "late").Error(); !strings.Contains(e, "timeout") || !strings.Contains(e, "late") {
		t.Errorf("got %q", e)
	}
}

// TestReference compares docs/reasons.md with the list.
func TestReference(t *testing.T) {
	text, err := os.ReadFile("../../docs/reasons.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := strings.Count(string(text), "\n| `")
	for _, r := range reasons(t) {
		if r == None {
			continue
		}
		rows--
		row := regexp.MustCompile(fmt.Sprintf("(?m)^\\| `%s` \\| %d[0-9, ]* \\| %d \\|", r, r.Status(), r.GRPC()))
		if !row.Match(text) {
			t.Errorf("there is no row of %s, with %d and %d", r, r.Status(), r.GRPC())
		}
	}
	if rows != 0 {
		t.Errorf("%d rows too many", rows)
	}
}
