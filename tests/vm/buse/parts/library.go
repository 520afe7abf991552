// A disk in a file on BUSE's original Go library, to show that it runs on our module unchanged.
//
//	library IMAGE INDEX
//
// SIGTERM stops and removes the device. Invariant: nothing here knows our module. Not here: the
// library (tests/vm/drivers.py takes it from a checkout of BUSE).
package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"syscall"

	"github.com/asch/buse/lib/go/buse"
)

const sectorBytes = 512

// disk applies writes to a file, the newest of each sector.
type disk struct {
	file      *os.File
	options   buse.Options
	mu        sync.Mutex
	sequences map[uint64]uint64
}

func (d *disk) BuseRead(sector, length int64, chunk []byte) error {
	block := d.options.BlockSize
	_, err := d.file.ReadAt(chunk[:length*block], sector*block)
	return err
}

func (d *disk) BuseWrite(writes int64, chunk []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	data := chunk[d.options.WriteChunkSize/d.options.BlockSize*32:]
	for i := int64(0); i < writes; i++ {
		record := chunk[i*32:]
		first, count := binary.LittleEndian.Uint64(record), binary.LittleEndian.Uint64(record[8:])
		sequence := binary.LittleEndian.Uint64(record[16:])
		for sector := first; sector < first+count; sector++ {
			if d.sequences[sector] < sequence {
				at := int64(sector) * sectorBytes
				if _, err := d.file.WriteAt(data[:sectorBytes], at); err != nil {
					return err
				}
				d.sequences[sector] = sequence
			}
			data = data[sectorBytes:]
		}
	}
	return nil
}

func (d *disk) BusePreRun()     { fmt.Println("BusePreRun") }
func (d *disk) BusePostRemove() { fmt.Println("BusePostRemove") }

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func main() {
	index, err := strconv.ParseInt(os.Args[2], 10, 64)
	check(err)
	options := buse.Options{
		Durable: true, WriteChunkSize: 1 << 20, BlockSize: 4096, Threads: 2, Major: index,
		WriteShmSize: 8 << 20, ReadShmSize: 8 << 20, Size: 64 << 20, CollisionArea: 1 << 20,
		QueueDepth: 64,
	}
	file, err := os.OpenFile(os.Args[1], os.O_RDWR|os.O_CREATE, 0o600)
	check(err)
	check(file.Truncate(options.Size))
	device, err := buse.New(
		&disk{file: file, options: options, sequences: map[uint64]uint64{}}, options)
	check(err)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM)
	stopped := make(chan error)
	go func() {
		<-signals
		stopped <- device.StopDevice()
	}()
	device.Run()
	check(<-stopped)
	check(device.RemoveDevice())
}
