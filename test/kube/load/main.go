// Command load is both ends of a steady load:
//
//	load serve ADDRESS polite|abrupt
//	load send RATE URL...
//
// serve answers each request after a moment of work. At SIGTERM it ends as good servers do, with what it has, or at once.
// send sends RATE requests a second to each URL in each of several ways. It prints a line for each that fails, and for
// each second one for each series with what became of its requests.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	work    = 5 * time.Millisecond
	patient = 30 * time.Second // with each request
)

func main() {
	if len(os.Args) < 4 {
		fail("usage: load serve ADDRESS polite|abrupt | load send RATE URL...")
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	switch os.Args[1] {
	case "serve":
		serve(ctx, os.Args[2], os.Args[3] == "polite")
	case "send":
		rate, err := strconv.Atoi(os.Args[2])
		if err != nil || rate < 1 {
			fail("rate " + os.Args[2] + ": want requests a second")
		}
		send(ctx, rate, os.Args[3:])
	default:
		fail("there is no command " + os.Args[1] + ": it is serve or send")
	}
}

func serve(ctx context.Context, address string, polite bool) {
	name, _ := os.Hostname()
	s := &http.Server{Addr: address, Protocols: new(http.Protocols), Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(work)
		fmt.Fprintln(w, name)
	})}
	s.Protocols.SetHTTP1(true)
	s.Protocols.SetUnencryptedHTTP2(true)
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := s.ListenAndServe(); err != http.ErrServerClosed {
			fail(err)
		}
	})
	<-ctx.Done()
	if polite {
		_ = s.Shutdown(context.Background())
		serving.Wait()
	}
}

// ways are how requests are sent.
func ways() map[string]*http.Transport {
	fresh := &http.Transport{DisableKeepAlives: true}
	kept := &http.Transport{MaxIdleConnsPerHost: 16}
	multiplexed := &http.Transport{Protocols: new(http.Protocols)}
	multiplexed.Protocols.SetUnencryptedHTTP2(true)
	return map[string]*http.Transport{"fresh": fresh, "kept": kept, "http2": multiplexed}
}

func send(ctx context.Context, rate int, urls []string) {
	var all sync.WaitGroup
	out := json.NewEncoder(os.Stdout)
	name, _ := os.Hostname()
	report := &reporter{out: out, name: name, series: map[string]*counts{}}
	for _, url := range urls {
		for way, transport := range ways() {
			all.Go(func() { sendTo(ctx, rate, way, url, transport, report) })
		}
	}
	all.Go(func() { report.run(ctx) })
	all.Wait()
}

func sendTo(ctx context.Context, rate int, way, url string, transport *http.Transport, report *reporter) {
	client := http.Client{Transport: transport, Timeout: patient}
	tick := time.NewTicker(time.Second / time.Duration(rate))
	defer tick.Stop()
	var sent sync.WaitGroup
	defer sent.Wait()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		sent.Go(func() {
			began := time.Now()
			err := once(client, url)
			report.done(url+" "+way, began, err)
		})
	}
}

// once sends a request that clients don't repeat on their own, unless they know that nobody has seen it.
func once(client http.Client, url string) error {
	response, err := client.Post(url, "text/plain", strings.NewReader("what is it?"))
	if err != nil {
		return err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", response.Status, strings.TrimSpace(string(answer)))
	}
	return nil
}

// Line is what send prints, as JSON.
type Line struct {
	Time   time.Time // when the request, or the second, began
	From   string    // the sender
	Series string    // URL and way
	OK     int       `json:",omitempty"`
	Failed int       `json:",omitempty"`
	Took   float64   // milliseconds: of the one that failed, or the longest
	Error  string    `json:",omitempty"`
}

type counts struct {
	ok, failed int
	longest    time.Duration
}

type reporter struct {
	name   string
	mu     sync.Mutex
	out    *json.Encoder      // guarded by mu
	series map[string]*counts // guarded by mu
}

func (r *reporter) done(series string, began time.Time, err error) {
	took := time.Since(began)
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.series[series]
	if c == nil {
		c = new(counts)
		r.series[series] = c
	}
	c.longest = max(c.longest, took)
	if err == nil {
		c.ok++
		return
	}
	c.failed++
	r.print(Line{Time: began, Series: series, Took: milliseconds(took), Error: err.Error()})
}

func (r *reporter) run(ctx context.Context) {
	second := time.NewTicker(time.Second)
	defer second.Stop()
	for ctx.Err() == nil {
		began := time.Now()
		select {
		case <-ctx.Done():
		case <-second.C:
		}
		r.sum(began)
	}
}

func (r *reporter) sum(began time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for series, c := range r.series {
		r.print(Line{Time: began, Series: series, OK: c.ok, Failed: c.failed, Took: milliseconds(c.longest)})
	}
	clear(r.series)
}

func (r *reporter) print(l Line) {
	l.From = r.name
	if err := r.out.Encode(l); err != nil {
		fail(err)
	}
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func fail(why any) {
	fmt.Fprintln(os.Stderr, "load:", why)
	os.Exit(1)
}
