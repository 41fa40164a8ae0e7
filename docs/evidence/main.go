// Evidence plays all built-in scenarios and writes docs/evidence.md, with a picture of each: what the sources say, beside
// what the simulator shows. Run it from the root of the repository: go run ./docs/evidence
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"

	"github.com/headroom-mesh/headroom/dataplane/sim/chart"
	"github.com/headroom-mesh/headroom/dataplane/sim/evidence"
	"github.com/headroom-mesh/headroom/dataplane/sim/scenario"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := write(ctx, "docs"); err != nil {
		fmt.Fprintf(os.Stderr, "evidence: %v\n", err)
		os.Exit(1)
	}
}

// seed is that of all runs: whoever plays a scenario with it sees the same figures.
const seed = 1

// write writes the page and its pictures into dir.
func write(ctx context.Context, dir string) error {
	var sections []section
	for _, e := range evidence.All() {
		fmt.Fprintln(os.Stderr, e.Scenario)
		rows, err := e.Play(ctx, nil, scenario.Options{Seed: seed})
		if err != nil {
			return err
		}
		s, err := newSection(e, rows)
		if err != nil {
			return err
		}
		sections = append(sections, s)
		if err := save(filepath.Join(dir, "evidence", e.Scenario+".svg"), rows); err != nil {
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "evidence.md"), []byte(page(sections)), 0o666); err != nil {
		return fmt.Errorf("write the page: %w", err)
	}
	return nil
}

func save(file string, rows evidence.Rows) error {
	var picture bytes.Buffer
	err := chart.Draw(&picture, "svg", rows)
	if err == nil {
		err = os.WriteFile(file, picture.Bytes(), 0o666)
	}
	if err != nil {
		return fmt.Errorf("write the picture %s: %w", file, err)
	}
	return nil
}

// section is what the page says of a scenario.
type section struct {
	evidence.Evidence
	description, source, choices string
	claims                       []claim
}

// claim is a claim and what was measured.
type claim struct {
	evidence.Claim
	got float64
}

func newSection(e evidence.Evidence, rows evidence.Rows) (section, error) {
	doc, err := scenario.Builtin(e.Scenario)
	if err != nil {
		return section{}, err
	}
	text, err := scenario.Text(e.Scenario)
	s := section{Evidence: e, description: doc.Description(), source: doc.Source(), choices: leadingComment(string(text))}
	for _, c := range e.Claims {
		got, err2 := c.Value(rows)
		if err2 != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", c.What(), err2))
		}
		s.claims = append(s.claims, claim{c, got})
	}
	return s, err
}

// leadingComment returns the comment that a document begins with.
func leadingComment(text string) string {
	var comment strings.Builder
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "#") {
			break
		}
		comment.WriteString(strings.TrimPrefix(strings.TrimPrefix(line, "#"), " "))
	}
	return comment.String()
}
