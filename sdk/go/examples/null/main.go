// null [SIZE]: a disk of zeroes that forgets what is written to it.
package main

import (
	"context"
	"log"
	"os"

	"sawmill"
)

type null struct{}

func (null) ReadAt(_ context.Context, p []byte, _ int64) error {
	clear(p) // it is shared memory, with bytes of another request
	return nil
}

func (null) WriteAt(context.Context, []byte, int64) error { return nil }

func main() {
	options := sawmill.Options{Size: 1 << 30}
	if len(os.Args) > 1 {
		size, err := sawmill.ParseSize(os.Args[1])
		if err != nil {
			log.Fatal(err)
		}
		options.Size = size
	}
	sawmill.Main(null{}, options)
}
