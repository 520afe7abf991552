// The options of a device, and the facts of the protocol that they become. Invariant: an option
// that is not given is not sent, so that the host's default holds. Not here: the abilities of a
// device (device.go).

package sawmill

import (
	"log/slog"
	"strconv"
	"time"

	"sawmill/internal/driver"
)

// Options are those of docs/format/driver.md. A zero option is not sent, so its default, or the
// host's own option, is in effect.
type Options struct {
	// Name of the device, if this program starts its host. Empty: the program's name with its
	// process id.
	Name string
	// Doors of a host that is started here, such as "nbd=unix:/run/disk.sock", "ublk", "fuse=/mnt".
	// Empty: those of $SAWMILL_DOORS (separated by spaces), else ublk where it is available, else
	// an NBD socket.
	Doors []string
	// Replace takes over from the current driver when that has finished.
	Replace bool
	// Logger gets errors that users see as EIO, and panics. Nil: slog.Default().
	Logger *slog.Logger

	Size            int64 // size, bytes
	BlockSize       int64 // blocksize: 512 or 4096
	ByteGranular    bool  // byte_granular: commands begin and end at any byte
	Queues          int   // hw_queues
	QueueDepth      int   // queue_depth: concurrent callbacks of a queue
	RequestBytesMax int64 // request_bytes_max
	ReadOnly        bool  // read_only
	IOMin, IOOpt    int64 // io_min, io_opt, bytes

	NotRecoverable bool          // recoverable=0: the device fails with its driver
	FailOnDeath    bool          // on_death=fail: requests fail while there is no driver
	DeathTimeout   time.Duration // death_timeout_s
	RequestTimeout time.Duration // request_timeout_s

	// Batch, if given, makes writes arrive in chunks.
	Batch *Batch
}

// Batch are the options of mode=batch, in bytes; zero: the default.
type Batch struct {
	CollisionArea int64         // collision_area_size
	WriteChunk    int64         // write_chunk_size
	WriteMemory   int64         // write_shm_size
	ReadMemory    int64         // read_shm_size
	WeakFlush     bool          // weak_flush: a flush closes chunks and does not wait
	ChunkAgeMax   time.Duration // chunk_age_max_ms; less than 0: chunks do not age
}

// facts returns the device's abilities, followed by the options that were given.
func (o Options) facts(facts driver.ControlFacts) driver.ControlFacts {
	number := func(name string, value int64) {
		if value != 0 {
			facts = facts.With(name, strconv.FormatInt(value, 10))
		}
	}
	text := func(is bool, name, value string) {
		if is {
			facts = facts.With(name, value)
		}
	}
	seconds := func(duration time.Duration) string {
		return strconv.FormatFloat(duration.Seconds(), 'f', -1, 64)
	}
	number("size", o.Size)
	number("blocksize", o.BlockSize)
	text(o.ByteGranular, "byte_granular", "1")
	number("hw_queues", int64(o.Queues))
	number("queue_depth", int64(o.QueueDepth))
	number("request_bytes_max", o.RequestBytesMax)
	text(o.ReadOnly, "read_only", "1")
	number("io_min", o.IOMin)
	number("io_opt", o.IOOpt)
	text(o.NotRecoverable, "recoverable", "0")
	text(o.FailOnDeath, "on_death", "fail")
	text(o.DeathTimeout != 0, "death_timeout_s", seconds(o.DeathTimeout))
	text(o.RequestTimeout != 0, "request_timeout_s", seconds(o.RequestTimeout))
	if o.Batch == nil {
		return facts
	}
	facts = facts.With("mode", "batch")
	number("collision_area_size", o.Batch.CollisionArea)
	number("write_chunk_size", o.Batch.WriteChunk)
	number("write_shm_size", o.Batch.WriteMemory)
	number("read_shm_size", o.Batch.ReadMemory)
	text(o.Batch.WeakFlush, "weak_flush", "1")
	age := max(o.Batch.ChunkAgeMax.Milliseconds(), 0)
	text(o.Batch.ChunkAgeMax != 0, "chunk_age_max_ms", strconv.FormatInt(age, 10))
	return facts
}
