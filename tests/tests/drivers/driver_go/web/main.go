// web FILE PORT: serves one file on a free port of the loopback, whose address it writes into PORT.
package main

import (
	"log"
	"net"
	"net/http"
	"os"
)

func main() {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	// Renamed into its place: whoever finds it finds it whole.
	if err := os.WriteFile(os.Args[2]+".new", []byte(listener.Addr().String()), 0o600); err != nil {
		log.Fatal(err)
	}
	if err := os.Rename(os.Args[2]+".new", os.Args[2]); err != nil {
		log.Fatal(err)
	}
	log.Fatal(http.Serve(listener, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.ServeFile(w, r, os.Args[1])
	})))
}
