// Package buse has the API of BUSE's library of the same name (github.com/asch/buse/lib/go/buse),
// on Sawmill: programs written for the BUSE kernel module, such as BS3, build against it with one
// replace line and work on kernels without that module. README.md lists what differs and why.
//
// Invariants: BusePreRun comes before the first request, BusePostRemove after the last; a chunk has
// the layout and the numbers of the original; bytes of a read that the callback leaves alone are
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

// BuseReadWriter is what a driver does. Callbacks run side by side.
type BuseReadWriter interface {
	// BuseRead fills chunk with length blocks from block sector on; both count in
	// Options.BlockSize.
	BuseRead(sector, length int64, chunk []byte) error
	// BuseWrite stores the writes of a chunk. chunk has WriteChunkSize bytes: records of 32 bytes
	// each (docs/format/write_chunk.md), from WriteChunkSize/BlockSize*32 on the data.
	// It may be written to.
	BuseWrite(writes int64, chunk []byte) error
	// BusePreRun is called by Run before any request.
	BusePreRun()
	// BusePostRemove is called by RemoveDevice when the device is gone.
	BusePostRemove()
}

// Buse is a device. Copies of it are the same device.
type Buse struct {
	ReadWriter BuseReadWriter
	Options    Options
	device     *device
}

// device is what copies share.
type device struct {
	host    *driver.Host // nil where somebody else started it
	session *driver.Session
	mu      sync.Mutex
	ran     bool
	gone    chan struct{} // closed when nothing comes any more; then what follows is so
	ended   bool          // in order: the host ends by itself
}

// New checks the options and makes the device, which has the name buse and the number of
// Options.Major. Requests wait until Run. A device of that name whose driver died, and whose host
// waits, is taken up again.
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
	outcome, err := b.device.session.Serve(context.Background(), work)
	if err != nil {
		log.Printf("buse%d: %v", b.Options.Major, err)
	}
	b.device.ended = outcome == driver.Ended
}

// begin tells whether nobody has run the device before.
func (d *device) begin() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	first := !d.ran
	d.ran = true
	return first
}

// do fulfils one command.
func (b *Buse) do(_ context.Context, command driver.Command) error {
	switch command.Kind {
	case driver.Read:
		// What a driver has no bytes for would else be bytes of another read.
		for i := range command.Data {
			command.Data[i] = 0
		}
		block := b.Options.BlockSize
		return b.ReadWriter.BuseRead(command.Address/block, command.Length/block, command.Data)
	case driver.WriteChunk:
		return b.ReadWriter.BuseWrite(command.Records, command.Data)
	case driver.Flush:
		return nil // the chunks before it have been waited for; without Durable none comes
	}
	return fmt.Errorf("a command that buse has no callback for: %v", command.Kind)
}

// StopDevice ends the device: what was accepted is done first, then Run returns.
func (b *Buse) StopDevice() error { return b.device.session.Leave(nil) }

// RemoveDevice ends the host of a device that has stopped or was never run,
// and calls BusePostRemove.
func (b *Buse) RemoveDevice() error {
	if b.device.begin() {
		_ = b.device.session.Leave(errors.New("it was removed before it ran"))
		b.device.session.Close()
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
