package scenario

import (
	"context"
	"fmt"
	"runtime"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/headroom-mesh/headroom/dataplane/sim"
)

// Options say how cases are played.
type Options struct {
	Seed uint64 // of the first run; each further run has the next one
	Runs int    // of each case. 0: 1
	// Progress is told how many of all runs are done, one at a time. May be nil.
	Progress func(done, all int)
}

// Run plays all cases on all processors, and returns a row for each, in their order. The same seed gives the same rows.
// When ctx ends it stops, and returns the cause.
func Run(ctx context.Context, cases []Case, o Options) ([]Row, error) {
	runs := max(o.Runs, 1)
	results := make([][]sim.Result, len(cases))
	counter := progress{all: len(cases) * runs, tell: o.Progress}
	playing, ctx := errgroup.WithContext(ctx)
	playing.SetLimit(runtime.GOMAXPROCS(0))
	for i, c := range cases {
		results[i] = make([]sim.Result, runs)
		for run := range runs {
			playing.Go(func() (err error) {
				if ctx.Err() != nil {
					return fmt.Errorf("simulate: %w", context.Cause(ctx))
				}
				config := c.Config
				config.Seed = o.Seed + uint64(run)
				if results[i][run], err = sim.RunContext(ctx, config); err != nil {
					return fmt.Errorf("simulate %s %s: %w", c.Rule, c.Point, err)
				}
				counter.done()
				return nil
			})
		}
	}
	if err := playing.Wait(); err != nil {
		return nil, err
	}
	rows := make([]Row, 0, len(cases))
	for i, c := range cases {
		rows = append(rows, newRow(c, o.Seed, results[i]))
	}
	return rows, nil
}

// progress counts runs.
type progress struct {
	all  int
	tell func(done, all int)

	mu sync.Mutex
	// mu guards the field below, and lets tell be called once at a time.
	ended int
}

func (p *progress) done() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended++
	if p.tell != nil {
		p.tell(p.ended, p.all)
	}
}
