// Command web is both ends of a conversation between pods: "web serve ADDRESS" answers with the name of its pod, and
// "web get URL" prints what is answered.
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"time"
)

func main() {
	if len(os.Args) != 3 {
		fail("usage: web serve ADDRESS | web get URL")
	}
	switch os.Args[1] {
	case "serve":
		fail(http.ListenAndServe(os.Args[2], http.HandlerFunc(answer)))
	case "get":
		get(os.Args[2])
	default:
		fail("there is no command " + os.Args[1] + ": it is serve or get")
	}
}

func answer(w http.ResponseWriter, r *http.Request) {
	name, _ := os.Hostname()
	fmt.Fprintf(w, "%s answers %s\n", name, r.RemoteAddr)
}

func get(url string) {
	client := http.Client{Timeout: 5 * time.Second}
	response, err := client.Get(url)
	if err != nil {
		fail(err)
	}
	defer response.Body.Close()
	if _, err := io.Copy(os.Stdout, response.Body); err != nil {
		fail(err)
	}
	if response.StatusCode != http.StatusOK {
		fail(response.Status)
	}
}

func fail(why any) {
	fmt.Fprintln(os.Stderr, "web:", why)
	os.Exit(1)
}
