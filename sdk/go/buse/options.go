// The options of BUSE: their defaults, the messages of buse-go where they do not go together, and
// the options of Sawmill that they become. Not here: the callbacks (buse.go).

package buse

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"syscall"

	"github.com/asch/buse/lib/go/buse/internal/driver"
)

// Options of a device. Sizes are bytes.
type Options struct {
	Durable        bool  // a flush waits for the chunks before it
	WriteChunkSize int64 // a multiple of 4096
	BlockSize      int64 // 512 or 4096
	IOMin          int64 // 0: BlockSize
	IOOpt          int64 // 0: BlockSize
	Threads        int   // queues; 0 or more than the number of CPUs: one for each CPU
	Major          int64 // number of the device
	WriteShmSize   int64 // of each queue: a multiple of WriteChunkSize
	ReadShmSize    int64 // of each queue
	Size           int64
	CollisionArea  int64 // writes are numbered in areas of this size; a multiple of BlockSize
	QueueDepth     int64 // concurrent reads of a queue
	Scheduler      bool  // not used: the kernel has no request queue of ours to schedule
	CPUsPerNode    int   // checked but not used: memory is near the CPU that touches it first
}

// checked returns the options with defaults, or what is wrong with them. The checks have the order
// and the messages of the original.
func (o Options) checked() (Options, error) {
	if cpus := runtime.NumCPU(); true {
		if o.Threads <= 0 || o.Threads > cpus {
			o.Threads = cpus
		}
		if o.CPUsPerNode <= 0 || o.CPUsPerNode > cpus {
			o.CPUsPerNode = cpus
		}
	}
	if o.IOMin == 0 {
		o.IOMin = o.BlockSize
	}
	if o.IOOpt == 0 {
		o.IOOpt = o.BlockSize
	}
	powerOfTwo := func(n int64) bool { return n >= o.BlockSize && n&(n-1) == 0 }
	switch {
	case o.WriteShmSize < 0 || o.ReadShmSize < 0 ||
		tooMuch(int64(o.Threads), o.WriteShmSize, o.ReadShmSize):
		return o, errors.New("Not enough memory!")
	case o.WriteChunkSize <= 0 || o.WriteShmSize%o.WriteChunkSize != 0:
		return o, errors.New("Write buffer size has to be a multiple of chunk size!")
	case o.BlockSize != 512 && o.BlockSize != 4096:
		return o, errors.New("Block size has to 512 or 4096!")
	case !powerOfTwo(o.IOMin):
		return o, errors.New("Minimal IO has to be at least a block size and a power of 2!")
	case !powerOfTwo(o.IOOpt):
		return o, errors.New("Optimal IO has to be at least a block size and a power of 2!")
	case o.Major < 0:
		return o, fmt.Errorf("Major has to be a number of a device, not %d!", o.Major)
	}
	if o.QueueDepth == 0 {
		o.QueueDepth = 64
	}
	return o, nil
}

// tooMuch reports whether the shared memory of all queues exceeds that of the machine.
func tooMuch(queues, write, read int64) bool {
	var machine syscall.Sysinfo_t
	if syscall.Sysinfo(&machine) != nil {
		return false
	}
	memory := float64(machine.Totalram) * float64(machine.Unit)
	return float64(queues)*(float64(write)+float64(read)) > memory
}

// facts returns the options as facts of the protocol. Those that are zero are left out.
func (o Options) facts() driver.ControlFacts {
	facts := driver.ControlFacts{}.With("mode", "batch")
	if !o.Durable {
		facts = facts.With("weak_flush", "1")
	}
	// As in the original: chunks are never delivered because of their age.
	facts = facts.With("chunk_age_max_ms", "0")
	for _, option := range []struct {
		name  string
		value int64
	}{
		{"size", o.Size}, {"blocksize", o.BlockSize}, {"io_min", o.IOMin}, {"io_opt", o.IOOpt},
		{"hw_queues", int64(o.Threads)}, {"queue_depth", o.QueueDepth},
		{"write_chunk_size", o.WriteChunkSize}, {"write_shm_size", o.WriteShmSize},
		{"read_shm_size", o.ReadShmSize}, {"collision_area_size", o.CollisionArea},
	} {
		if option.value != 0 {
			facts = facts.With(option.name, strconv.FormatInt(option.value, 10))
		}
	}
	return facts
}

// attach finds the host, or starts one, and becomes the driver of its device.
func attach(o Options) (*device, error) {
	made := &device{gone: make(chan struct{})}
	name, socket := fmt.Sprintf("buse%d", o.Major), os.Getenv("SAWMILL_DRIVER")
	if socket == "" {
		socket, _ = driver.SocketOf(context.Background(), name)
	}
	if socket == "" {
		host, err := driver.StartHost(context.Background(), name, doors(o.Major))
		if err != nil {
			return nil, err
		}
		made.host, socket = host, host.Socket
	}
	connection, err := driver.Attach(context.Background(), socket, false, o.facts())
	if err != nil {
		if made.host != nil {
			made.host.Stop()
		}
		if errors.Is(err, syscall.EBUSY) {
			return nil, fmt.Errorf("Device %s already exists!", name)
		}
		return nil, err
	}
	made.connection = connection
	return made, nil
}

// doors are those of SAWMILL_DOORS, else the disk /dev/ublkb<Major> where ublk is available, else
// an NBD socket.
func doors(major int64) []string {
	doors := driver.DefaultDoors()
	for i, door := range doors {
		if door == "ublk" {
			doors[i] = fmt.Sprintf("ublk=%d", major)
		}
	}
	return doors
}
