// ram [SIZE]: a disk in memory. What it holds is gone with this process.
package main

import (
	"context"
	"log"
	"os"

	"sawmill"
)

// Requests that overlap may come in any order, as on any disk: nothing is locked.
type ram []byte

func (r ram) ReadAt(_ context.Context, p []byte, off int64) error {
	copy(p, r[off:])
	return nil
}

func (r ram) WriteAt(_ context.Context, p []byte, off int64) error {
	copy(r[off:], p)
	return nil
}

func (r ram) Discard(ctx context.Context, off, length int64) error {
	return r.WriteZeroes(ctx, off, length, false)
}

func (r ram) WriteZeroes(_ context.Context, off, length int64, _ bool) error {
	clear(r[off : off+length])
	return nil
}

func main() {
	options := sawmill.Options{Size: 64 << 20}
	if len(os.Args) > 1 {
		size, err := sawmill.ParseSize(os.Args[1])
		if err != nil {
			log.Fatal(err)
		}
		options.Size = size
	}
	sawmill.Main(make(ram, options.Size), options)
}
