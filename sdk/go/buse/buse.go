// Package buse has the API of BUSE's library of the same name (github.com/asch/buse/lib/go/buse),
// on Sawmill: programs written for the BUSE kernel module, such as BS3, build against it with one
// replace line and work on kernels without that module. README.md lists what differs and why.
//
// Invariants: BusePreRun comes before the first request, BusePostRemove after the last; a chunk has
// the layout and the numbers of the original; bytes of a read that the callback does not fill are
// zeroes.
//
// Not here: the protocol and starting a host (internal/driver), option checks (options.go).
package buse

import (
	"context"
	"errors"
	"fmt"
	"log"
	"sync"

	"github.com/asch/buse/lib/go/buse/internal/driver"
)

// BuseReadWriter is the interface of a driver. Callbacks run concurrently.
type BuseReadWriter interface {
	// BuseRead fills chunk with length blocks, starting at block sector; blocks have
	// Options.BlockSize bytes.
	BuseRead(sector, length int64, chunk []byte) error
	// BuseWrite stores the writes of a chunk. chunk has WriteChunkSize bytes: entries of 32 bytes
	// each (docs/format/write_chunk.md), then, from WriteChunkSize/BlockSize*32 on, the data. The
	// callback may change it.
	BuseWrite(writes int64, chunk []byte) error
	// BusePreRun is called by Run before any request.
	BusePreRun()
	// BusePostRemove is called by RemoveDevice when the device is gone.
	BusePostRemove()
}

// Buse is a device. Copies refer to the same device.
type Buse struct {
	ReadWriter BuseReadWriter
	Options    Options
	device     *device
}

// device is the state that copies share.
type device struct {
	host       *driver.Host // nil if it was started elsewhere
	connection *driver.HostConnection
	mu         sync.Mutex
	ran        bool
	gone       chan struct{} // closed when Run is over; the fields below are valid then
	ended      bool          // in order: the host ends by itself
}

// New checks the options and makes the device, which has the name buse and the number of
// Options.Major. Requests wait until Run. If a device of that name waits in its host because its
// driver died, New takes it over.
func New(rw BuseReadWriter, o Options) (Buse, error) {
	o, err := o.checked()
	if err != nil {
		return Buse{}, err
	}
	device, err := attach(o)
	if err != nil {
		return Buse{}, err
	}
	return Buse{rw, o, device}, nil
}

// Run calls BusePreRun and lets the callbacks work until the device has stopped.
func (b *Buse) Run() {
	if !b.device.begin() {
		return
	}
	defer close(b.device.gone)
	b.ReadWriter.BusePreRun()
	work := driver.Work{
		Do: b.do, Depth: int(b.Options.QueueDepth), Log: func(text string) { log.Print(text) },
	}
	outcome, err := b.device.connection.Serve(context.Background(), work)
	if err != nil {
		log.Printf("buse%d: %v", b.Options.Major, err)
	}
	b.device.ended = outcome == driver.Ended
}

// begin reports whether this is the first run of the device.
func (d *device) begin() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	first := !d.ran
	d.ran = true
	return first
}

// do executes one command.
func (b *Buse) do(_ context.Context, command driver.Command) error {
	switch command.Kind {
	case driver.Read:
		// Bytes that the driver does not fill would otherwise be those of another read.
		for i := range command.Data {
			command.Data[i] = 0
		}
		block := b.Options.BlockSize
		return b.ReadWriter.BuseRead(command.Address/block, command.Length/block, command.Data)
	case driver.WriteChunk:
		return b.ReadWriter.BuseWrite(command.Entries, command.Data)
	case driver.Flush:
		return nil // the chunks before it are done; without Durable there are no flushes
	}
	return fmt.Errorf("a command that buse has no callback for: %v", command.Kind)
}

// StopDevice ends the device: accepted requests are done first, then Run returns.
func (b *Buse) StopDevice() error { return b.device.connection.Leave(nil) }

// RemoveDevice ends the host of a device that has stopped or was never run,
// and calls BusePostRemove.
func (b *Buse) RemoveDevice() error {
	if b.device.begin() {
		_ = b.device.connection.Leave(errors.New("it was removed before it ran"))
		b.device.connection.Close()
		close(b.device.gone)
	}
	select {
	case <-b.device.gone:
	default:
		return fmt.Errorf("Device buse%d runs, stop it first!", b.Options.Major)
	}
	if host := b.device.host; host != nil && b.device.ended {
		host.Wait()
	} else if host != nil {
		host.Stop()
	}
	b.ReadWriter.BusePostRemove()
	return nil
}
