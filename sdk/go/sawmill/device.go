// What a device can do, as interfaces: reads and writes, and optionally flushes, discards, zeroes
// and FUA. Invariant: a device is called only through interfaces that it has. Not here: devices
// that take chunks (chunk.go).

package sawmill

import (
	"context"
	"errors"
	"io"
	"syscall"

	"sawmill/internal/driver"
)

// Device is the interface of a driver. Callbacks run concurrently, on goroutines of their own;
// offsets are bytes and, like lengths, multiples of the block unless Options.ByteGranular. The
// context ends when the host is gone.
type Device interface {
	// ReadAt fills all of p with the bytes at off.
	ReadAt(ctx context.Context, p []byte, off int64) error
	// WriteAt stores p at off. It need not be durable before a flush.
	WriteAt(ctx context.Context, p []byte, off int64) error
}

// Flusher is a device with a cache. Without Flush, a write must be durable when WriteAt returns.
type Flusher interface {
	// Flush makes durable every write that was answered before the call.
	Flush(ctx context.Context) error
}

// Discarder is a device that can release ranges.
type Discarder interface {
	// Discard releases the range; its bytes may be lost.
	Discard(ctx context.Context, off, length int64) error
}

// Zeroer is a device that writes zeroes faster than other bytes.
type Zeroer interface {
	// WriteZeroes makes the bytes zeroes; keepSpace: they will be written again soon.
	WriteZeroes(ctx context.Context, off, length int64, keepSpace bool) error
}

// FUA is a device that can make a single write durable. It does not apply in batch mode.
type FUA interface {
	// WriteFUA stores p at off durably.
	WriteFUA(ctx context.Context, p []byte, off int64) error
}

// abilities returns what a device supports. Every device gets flushes; for devices without a cache,
// perform answers them.
func abilities(device any) driver.ControlFacts {
	facts := driver.ControlFacts{}
	if _, ok := device.(FUA); ok {
		facts = facts.With("can_fua", "1")
	}
	if _, ok := device.(Discarder); ok {
		facts = facts.With("can_discard", "1")
	}
	if _, ok := device.(Zeroer); ok {
		facts = facts.With("can_write_zeroes", "1")
	}
	return facts
}

// perform executes commands of plain mode.
func perform(device Device) func(context.Context, driver.Command) error {
	return func(ctx context.Context, command driver.Command) error {
		switch command.Kind {
		case driver.Read:
			return device.ReadAt(ctx, command.Data, command.Address)
		case driver.Write:
			if durable, ok := device.(FUA); ok && command.Flags&driver.FUA != 0 {
				return durable.WriteFUA(ctx, command.Data, command.Address)
			}
			if command.Flags&driver.FUA != 0 {
				return syscall.EOPNOTSUPP
			}
			return device.WriteAt(ctx, command.Data, command.Address)
		default:
			return rarely(ctx, device, command)
		}
	}
}

// rarely executes the commands that not every device supports, in either mode.
func rarely(ctx context.Context, device any, command driver.Command) error {
	switch command.Kind {
	case driver.Flush:
		if flusher, ok := device.(Flusher); ok {
			return flusher.Flush(ctx)
		}
		return nil
	case driver.Discard:
		if discarder, ok := device.(Discarder); ok {
			return discarder.Discard(ctx, command.Address, command.Length)
		}
		return nil // releasing is optional
	case driver.WriteZeroes:
		if zeroer, ok := device.(Zeroer); ok {
			keepSpace := command.Flags&driver.NoUnmap != 0
			return zeroer.WriteZeroes(ctx, command.Address, command.Length, keepSpace)
		}
	}
	return syscall.EOPNOTSUPP
}

// FromReaderWriterAt makes a device from the interfaces of package io. Bytes past the end of r are
// zeroes. If w has a method Sync() error, as files have, it is the flush. Without w the device is
// read-only: say so in Options.ReadOnly too.
func FromReaderWriterAt(r io.ReaderAt, w io.WriterAt) Device {
	device := ioDevice{r, w}
	if syncer, ok := w.(interface{ Sync() error }); ok {
		return syncedDevice{device, syncer}
	}
	return device
}

type ioDevice struct {
	r io.ReaderAt
	w io.WriterAt
}

func (d ioDevice) ReadAt(_ context.Context, p []byte, off int64) error {
	n, err := d.r.ReadAt(p, off)
	if errors.Is(err, io.EOF) || n == len(p) {
		clear(p[n:])
		return nil
	}
	return err
}

func (d ioDevice) WriteAt(_ context.Context, p []byte, off int64) error {
	if d.w == nil {
		return syscall.EROFS
	}
	_, err := d.w.WriteAt(p, off)
	return err
}

type syncedDevice struct {
	ioDevice
	syncer interface{ Sync() error }
}

func (d syncedDevice) Flush(context.Context) error { return d.syncer.Sync() }
