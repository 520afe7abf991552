// A disk of 1 MiB with faults: a write to 4096 finds no space, a read of 8192 panics.
package main

import (
	"context"
	"fmt"
	"syscall"

	"sawmill"
)

type faulty []byte

func (f faulty) ReadAt(_ context.Context, p []byte, off int64) error {
	if off == 8192 {
		panic("as the test has asked")
	}
	copy(p, f[off:])
	return nil
}

func (f faulty) WriteAt(_ context.Context, p []byte, off int64) error {
	if off == 4096 {
		return fmt.Errorf("a full disk: %w", syscall.ENOSPC)
	}
	copy(f[off:], p)
	return nil
}

func main() { sawmill.Main(make(faulty, 1<<20), sawmill.Options{Size: 1 << 20}) }
