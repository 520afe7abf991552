package sawmill

import (
	"context"
	"encoding/binary"
	"fmt"
	"iter"

	"sawmill/internal/driver"
)

const recordBytes, sectorBytes = 32, 512

// Chunk is a piece of shared memory full of writes (docs/format/write_chunk.md).
type Chunk struct {
	Bytes         []byte // write_chunk_size of them: records, then their data in the same order
	MetadataBytes int    // where the data begins
	Count         int    // records
	Used          int64  // bytes in use
	Queue         int
	Again         bool // a former driver had it
	// For the Resolver: the last ordinal assigned when this chunk was closed, and the ordinal below
	// which all chunks are answered.
	Horizon, Floor uint64
}

// Record is one write of a chunk. Address and Length are bytes; of two records that overlap the one
// with the higher Sequence is newer.
type Record struct {
	Address, Length int64
	Sequence        uint64
}

// Records iterates over the writes with their data.
func (c Chunk) Records() iter.Seq2[Record, []byte] {
	return func(yield func(Record, []byte) bool) {
		data := c.MetadataBytes
		for n := range c.Count {
			record, _ := c.record(n)
			end := data + int(record.Length)
			if !yield(record, c.Bytes[data:end:end]) {
				return
			}
			data = end
		}
	}
}

func (c Chunk) record(n int) (Record, error) {
	bytes := c.Bytes[n*recordBytes : (n+1)*recordBytes]
	word := func(at int) uint64 { return binary.LittleEndian.Uint64(bytes[at:]) }
	sector, sectors, flag := word(0), word(8), word(24)
	const most = 1 << 54 // sectors of 2^63 bytes
	if flag != 1 || sector >= most || sectors >= most {
		return Record{}, fmt.Errorf("record %d of a chunk: sector %d, sectors %d, flag %d",
			n, sector, sectors, flag)
	}
	return Record{int64(sector) * sectorBytes, int64(sectors) * sectorBytes, word(16)}, nil
}

// check verifies that all records lie in the chunk, so that Records can iterate over them.
func (c Chunk) check() error {
	if c.MetadataBytes > len(c.Bytes) || c.Count > c.MetadataBytes/recordBytes {
		return fmt.Errorf("a chunk of %d bytes with %d records in %d",
			len(c.Bytes), c.Count, c.MetadataBytes)
	}
	left := int64(len(c.Bytes) - c.MetadataBytes)
	for n := range c.Count {
		record, err := c.record(n)
		if err != nil {
			return err
		}
		if record.Length > left {
			return fmt.Errorf("record %d of a chunk is %d bytes long, and %d are left",
				n, record.Length, left)
		}
		left -= record.Length
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
				Bytes: command.Data, MetadataBytes: int(metadataBytes), Count: int(command.Records),
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
