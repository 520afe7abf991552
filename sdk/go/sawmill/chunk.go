// Write chunks: how their bytes are read, and devices that take whole chunks. Invariant: a callback
// gets only a chunk whose entries lie inside it. Not here: which of two writes is newer
// (resolver.go).

package sawmill

import (
	"context"
	"encoding/binary"
	"fmt"
	"iter"

	"sawmill/internal/driver"
)

const entryBytes, sectorBytes = 32, 512

// Chunk is a piece of shared memory full of writes (docs/format/write_chunk.md).
type Chunk struct {
	Bytes         []byte // write_chunk_size of them: entries, then their data in the same order
	MetadataBytes int    // where the data begins
	Count         int    // entries
	Used          int64  // bytes in use
	Queue         int
	Again         bool // a former driver had it
	// For the Resolver: the last ordinal assigned when this chunk was closed, and the ordinal below
	// which all chunks are answered.
	Horizon, Floor uint64
}

// ChunkEntry is one write of a chunk. Address and Length are bytes; of two entries that overlap
// the one with the higher WriteNumber is newer.
type ChunkEntry struct {
	Address, Length int64
	WriteNumber     uint64
}

// Entries iterates over the writes with their data.
func (c Chunk) Entries() iter.Seq2[ChunkEntry, []byte] {
	return func(yield func(ChunkEntry, []byte) bool) {
		data := c.MetadataBytes
		for n := range c.Count {
			entry, _ := c.entry(n)
			end := data + int(entry.Length)
			if !yield(entry, c.Bytes[data:end:end]) {
				return
			}
			data = end
		}
	}
}

func (c Chunk) entry(n int) (ChunkEntry, error) {
	bytes := c.Bytes[n*entryBytes : (n+1)*entryBytes]
	uint64At := func(at int) uint64 { return binary.LittleEndian.Uint64(bytes[at:]) }
	sector, sectors, flag := uint64At(0), uint64At(8), uint64At(24)
	const most = 1 << 54 // sectors of 2^63 bytes
	if flag != 1 || sector >= most || sectors >= most {
		return ChunkEntry{}, fmt.Errorf("entry %d of a chunk: sector %d, sectors %d, flag %d",
			n, sector, sectors, flag)
	}
	return ChunkEntry{int64(sector) * sectorBytes, int64(sectors) * sectorBytes, uint64At(16)}, nil
}

// check verifies that all entries lie in the chunk, so that Entries can iterate over them.
func (c Chunk) check() error {
	if c.MetadataBytes > len(c.Bytes) || c.Count > c.MetadataBytes/entryBytes {
		return fmt.Errorf("a chunk of %d bytes with %d entries in %d",
			len(c.Bytes), c.Count, c.MetadataBytes)
	}
	left := int64(len(c.Bytes) - c.MetadataBytes)
	for n := range c.Count {
		entry, err := c.entry(n)
		if err != nil {
			return err
		}
		if entry.Length > left {
			return fmt.Errorf("entry %d of a chunk is %d bytes long, and %d are left",
				n, entry.Length, left)
		}
		left -= entry.Length
	}
	return nil
}

// ChunkDevice gets writes in chunks, from all queues concurrently: chunks are applied in any order,
// and a Resolver keeps older bytes from replacing newer ones. It may be a Discarder and a Zeroer
// too.
type ChunkDevice interface {
	ReadAt(ctx context.Context, p []byte, off int64) error
	// WriteChunk stores all writes of a chunk. It may use the chunk's bytes until it returns.
	WriteChunk(ctx context.Context, chunk Chunk) error
	// Flush makes durable every chunk for which WriteChunk has returned, including all earlier
	// chunks of its queue.
	Flush(ctx context.Context) error
}

// performChunks executes commands of batch mode.
func performChunks(
	device ChunkDevice, metadataBytes int64,
) func(context.Context, driver.Command) error {
	return func(ctx context.Context, command driver.Command) error {
		switch command.Kind {
		case driver.Read:
			return device.ReadAt(ctx, command.Data, command.Address)
		case driver.WriteChunk:
			chunk := Chunk{
				Bytes: command.Data, MetadataBytes: int(metadataBytes), Count: int(command.Entries),
				Used: command.Length, Queue: command.Queue, Again: command.Flags&driver.Again != 0,
				Horizon: command.Horizon, Floor: command.Floor,
			}
			if err := chunk.check(); err != nil {
				return err
			}
			return device.WriteChunk(ctx, chunk)
		default:
			return rarely(ctx, device, command)
		}
	}
}

// inChunks adapts a device that stores single writes to chunks.
type inChunks struct {
	Device
	resolver *Resolver
}

func (d inChunks) WriteChunk(ctx context.Context, chunk Chunk) error {
	write := func(p []byte, off int64) error { return d.WriteAt(ctx, p, off) }
	return d.resolver.Apply(chunk, write)
}

func (d inChunks) Flush(ctx context.Context) error {
	if flusher, ok := d.Device.(Flusher); ok {
		return flusher.Flush(ctx)
	}
	return nil
}

func (d inChunks) Discard(ctx context.Context, off, length int64) error {
	return rarely(ctx, d.Device, driver.Command{Kind: driver.Discard, Address: off, Length: length})
}

func (d inChunks) WriteZeroes(ctx context.Context, off, length int64, keepSpace bool) error {
	command := driver.Command{Kind: driver.WriteZeroes, Address: off, Length: length}
	if keepSpace {
		command.Flags = driver.NoUnmap
	}
	return rarely(ctx, d.Device, command)
}
