// Command web is what the pods of the tests do: "web serve ADDRESS [DELAY]" answers requests, "web get URL" sends one, and
// "web load" and "web calls" send many and tell what came of them.
package main

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"time"
)

const usage = `usage: web serve ADDRESS [DELAY]   answer with the name of this pod and the fields of the request, DELAY later on average
       web get URL                  print what is answered
       web load URL RATE DURATION   send RATE requests a second, and print what came of them
       web calls URL RATE new|kept  do so without an end, over new connections or one, and print what came of each second's`

func main() {
	args := os.Args[1:]
	var err error
	switch {
	case len(args) == 2 && args[0] == "serve":
		err = serve(args[1], "0s")
	case len(args) == 3 && args[0] == "serve":
		err = serve(args[1], args[2])
	case len(args) == 2 && args[0] == "get":
		err = get(args[1])
	case len(args) == 4 && args[0] == "load":
		err = load(args[1], args[2], args[3])
	case len(args) == 4 && args[0] == "calls":
		err = calls(args[1], args[2], args[3])
	default:
		err = fmt.Errorf("%q: %s", args, usage)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "web:", err)
		os.Exit(1)
	}
}

func serve(address, delay string) error {
	mean, err := time.ParseDuration(delay)
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(time.Duration((0.5 + rand.Float64()) * float64(mean)))
		answer(w, r)
	})
	return http.ListenAndServe(address, mux)
}

func answer(w http.ResponseWriter, r *http.Request) {
	name, _ := os.Hostname()
	w.Header().Set(replicaField, name)
	w.Header().Set(sawField, r.Header.Get("Via"))
	fmt.Fprintf(w, "%s answers %s\n", name, r.RemoteAddr)
	_ = r.Header.Write(w) // who asked may be gone
}

func get(url string) error {
	client := http.Client{Timeout: 5 * time.Second}
	response, err := client.Get(url)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if _, err := io.Copy(os.Stdout, response.Body); err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s %s", response.Status, response.Header.Get("Headroom-Reason"))
	}
	return nil
}
