// Tests of chunks: their golden bytes, chunks that make no sense, and chunks applied in any order,
// beside a model. Not here: mutated chunks (fuzz_test.go).

package sawmill

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math/rand"
	"slices"
	"strings"
	"sync"
	"testing"

	"sawmill/internal/mockhost"
)

// chunkOf lays out entries and their data; all bytes of an entry have the same value.
func chunkOf(metadata, size int, entries []ChunkEntry, values []byte) Chunk {
	chunk := Chunk{Bytes: make([]byte, size), MetadataBytes: metadata, Count: len(entries)}
	data := metadata
	for n, entry := range entries {
		address, length := uint64(entry.Address/512), uint64(entry.Length/512)
		fields := []uint64{address, length, entry.WriteNumber, 1}
		for i, field := range fields {
			binary.LittleEndian.PutUint64(chunk.Bytes[n*32+8*i:], field)
		}
		copy(chunk.Bytes[data:], bytes.Repeat(values[n:n+1], int(entry.Length)))
		data += int(entry.Length)
	}
	return chunk
}

// Chunks of random writes are applied in random order by several goroutines; the original sequence
// of writes determines the result. Horizon and floor are those of a host that gives the driver this
// many chunks at a time.
func Test_every_byte_ends_with_what_was_written_last(t *testing.T) {
	for seed := int64(1); seed <= 60; seed++ {
		if got, expected := shuffled(seed, 4096); !bytes.Equal(got, expected) {
			t.Fatalf("seed %d: bytes differ", seed)
		}
	}
}

func Test_without_numbers_the_model_finds_late_writes(t *testing.T) {
	for seed := int64(1); seed <= 60; seed++ {
		// Similar random writes, applied without a check which is newer.
		chance := rand.New(rand.NewSource(seed))
		disk, expected := make([]byte, 4096), make([]byte, 4096)
		command := chance.Perm(32)
		for n := range 32 {
			copy(expected[n%4*512:], bytes.Repeat([]byte{byte(n + 1)}, 1024))
		}
		for _, n := range command {
			copy(disk[n%4*512:], bytes.Repeat([]byte{byte(n + 1)}, 1024))
		}
		if !bytes.Equal(disk, expected) {
			return
		}
	}
	t.Fatal("random order never mattered: the other test proves nothing")
}

func shuffled(seed, areaBytes int64) (got, expected []byte) {
	const size, window = 64 << 10, 12
	chance := rand.New(rand.NewSource(seed))
	expected, got = make([]byte, size), make([]byte, size)
	numbers := make([]uint64, size/areaBytes)
	resolver := NewResolver(areaBytes)
	write := func(p []byte, off int64) error { copy(got[off:], p); return nil }
	floor := uint64(1)
	for range 20 {
		// The driver has all chunks of one window together: all are open before any is answered.
		chunks := make([]Chunk, window)
		last := floor + window - 1
		for n := range chunks {
			var entries []ChunkEntry
			var values []byte
			for range 1 + chance.Intn(8) {
				address := chance.Int63n(size/512) * 512
				length := min(512*(1+chance.Int63n(6)), areaBytes-address%areaBytes)
				numbers[address/areaBytes]++
				entries = append(entries, ChunkEntry{address, length, numbers[address/areaBytes]})
				values = append(values, byte(1+chance.Intn(255)))
				copy(expected[address:], bytes.Repeat(values[len(values)-1:], int(length)))
			}
			chunks[n] = chunkOf(512, 64<<10, entries, values)
			chunks[n].Horizon, chunks[n].Floor = last, floor
		}
		chance.Shuffle(window, func(i, j int) { chunks[i], chunks[j] = chunks[j], chunks[i] })
		var all sync.WaitGroup
		for part := range slices.Chunk(chunks, 3) {
			all.Add(1)
			go func() {
				defer all.Done()
				for _, chunk := range part {
					_ = resolver.Apply(chunk, write)
				}
			}()
		}
		all.Wait()
		floor = last + 1
	}
	return got, expected
}

func Test_what_nothing_older_can_come_for_is_forgotten(t *testing.T) {
	resolver := NewResolver(4096)
	write := func([]byte, int64) error { return nil }
	for ordinal := uint64(1); ordinal <= 1000; ordinal++ {
		entry := ChunkEntry{int64(ordinal%64) * 4096, 512, ordinal}
		chunk := chunkOf(512, 4096, []ChunkEntry{entry}, []byte{1})
		chunk.Horizon, chunk.Floor = ordinal, ordinal-1
		if err := resolver.Apply(chunk, write); err != nil {
			t.Fatal(err)
		}
	}
	if len(resolver.areas) > 3 || len(resolver.chunks) > 3 {
		t.Fatalf("%d areas, %d chunks are remembered", len(resolver.areas), len(resolver.chunks))
	}
}

func Test_an_entry_that_failed_counts_as_not_applied(t *testing.T) {
	resolver := NewResolver(4096)
	disk := make([]byte, 4096)
	newer := chunkOf(512, 4096, []ChunkEntry{{0, 512, 2}}, []byte{2})
	if resolver.Apply(newer, func([]byte, int64) error { return errors.New("no") }) == nil {
		t.Fatal("the error is lost")
	}
	older := chunkOf(512, 4096, []ChunkEntry{{0, 512, 1}}, []byte{1})
	_ = resolver.Apply(older, func(p []byte, off int64) error { copy(disk[off:], p); return nil })
	if disk[0] != 1 {
		t.Fatal("the older write was ignored for one that never came to be")
	}
}

func Test_a_chunk_that_makes_no_sense_is_refused(t *testing.T) {
	long := chunkOf(512, 2048, []ChunkEntry{{0, 1024, 1}}, []byte{1})
	binary.LittleEndian.PutUint64(long.Bytes[8:], 5)
	flagged := chunkOf(512, 2048, []ChunkEntry{{0, 512, 1}}, []byte{1})
	flagged.Bytes[24] = 9
	many := chunkOf(512, 2048, nil, nil)
	many.Count = 17
	for expected, chunk := range map[string]Chunk{
		"2560 bytes long": long, "flag 9": flagged, "17 entries": many,
	} {
		if err := chunk.check(); err == nil || !strings.Contains(err.Error(), expected) {
			t.Errorf("%v, expected %q", err, expected)
		}
	}
}

func Test_a_write_chunk_is_the_golden_one(t *testing.T) {
	const metadata, size, border = 256, 4096, 0x10203040000 // between two collision areas
	entries := []ChunkEntry{
		{border - 512, 512, 0x0102030405060708},
		{border, 1024, 0x1112131415161718},
		{border + 512, 512, 0x111213141516171a},
	}
	values := []byte{0xa1, 0xb2, 0xc3}
	chunk := chunkOf(metadata, size, entries, values)
	rests := [][]byte{chunk.Bytes[3*entryBytes : metadata], chunk.Bytes[metadata+2048:]}
	for _, rest := range rests {
		copy(rest, bytes.Repeat([]byte{0xee}, len(rest)))
	}
	golden := mockhost.Vectors(t, "write_chunk")
	if len(golden) != 1 || !bytes.Equal(golden["v1-overlap"], chunk.Bytes) {
		t.Error("the golden chunk has other bytes")
	}
	chunk.Bytes = golden["v1-overlap"]
	if err := chunk.check(); err != nil {
		t.Fatal(err)
	}
	n := 0
	for entry, data := range chunk.Entries() {
		expected := bytes.Repeat(values[n:n+1], int(entries[n].Length))
		if entry != entries[n] || !bytes.Equal(data, expected) {
			t.Errorf("entry %d is %+v with %x", n, entry, data)
		}
		n++
	}
	if n != len(entries) {
		t.Errorf("%d entries", n)
	}
}

func Test_an_ordinary_device_takes_chunks_where_the_host_batches(t *testing.T) {
	var mu sync.Mutex
	bytesOf := make([]byte, 1<<20)
	device := disk{
		read: func(p []byte, off int64) error {
			mu.Lock() // answers order the accesses, which the race detector cannot see
			defer mu.Unlock()
			copy(p, bytesOf[off:])
			return nil
		},
		write: func(p []byte, off int64) error {
			mu.Lock()
			defer mu.Unlock()
			copy(bytesOf[off:], p)
			return nil
		},
	}
	driver, handle, _ := attached(t, device, Options{},
		"mode=batch\nwrite_chunk_size=65536\nmetadata_bytes=4096\ncollision_area_size=4096\n")
	newer := chunkOf(4096, 65536, []ChunkEntry{{512, 512, 2}}, []byte{2})
	older := chunkOf(4096, 65536, []ChunkEntry{{0, 2048, 1}}, []byte{1})
	copy(driver.Memory[0], newer.Bytes)
	copy(driver.Memory[0][65536:], older.Bytes)
	command := mockhost.Command{
		Kind: mockhost.Chunk, Number: 1, Length: 4608, Entries: 1, Horizon: 2, Floor: 1,
	}
	driver.Command(0, command)
	expect(t, driver, 0, 1, 0)
	command.Number, command.Offset, command.Length = 2, 65536, 6144
	driver.Command(0, command)
	expect(t, driver, 0, 2, 0)
	driver.Command(1, mockhost.Command{Kind: mockhost.Read, Number: 3, Length: 2048})
	expect(t, driver, 1, 3, 0)
	read := driver.Memory[1]
	if read[0] != 1 || read[512] != 2 || read[1024] != 1 {
		t.Fatal(read[0], read[512], read[1024])
	}
	driver.End("ended")
	if err := handle.Wait(); err != nil {
		t.Fatal(err)
	}
}

// chunky blocks its chunks until it may go on.
type chunky struct{ goOn, flushed chan struct{} }

func (chunky) ReadAt(context.Context, []byte, int64) error { return nil }
func (c chunky) WriteChunk(context.Context, Chunk) error   { <-c.goOn; return nil }
func (c chunky) Flush(context.Context) error               { close(c.flushed); return nil }

func Test_a_flush_waits_for_the_chunks_before_it(t *testing.T) {
	host := mockhost.New(t)
	t.Setenv("SAWMILL_DRIVER", host.Path)
	came := make(chan *mockhost.Driver, 1)
	go func() {
		driver, _ := host.Accept()
		driver.Welcome("mode=batch\nwrite_chunk_size=65536\nmetadata_bytes=4096\n" +
			"collision_area_size=4096\n")
		came <- driver
	}()
	device := chunky{make(chan struct{}), make(chan struct{})}
	handle, err := StartChunks(context.Background(), device, Options{Logger: silent})
	if err != nil {
		t.Fatal(err)
	}
	driver := <-came
	driver.Command(0,
		mockhost.Command{Kind: mockhost.Chunk, Number: 1},
		mockhost.Command{Kind: mockhost.Flush, Number: 2},
		mockhost.Command{Kind: mockhost.Flush, Number: 3, Flags: 4})
	select {
	case <-device.flushed:
		t.Fatal("flushed before the chunk was stored")
	case device.goOn <- struct{}{}:
	}
	expect(t, driver, 0, 1, 0)
	expect(t, driver, 0, 2, 0)
	_, _, _ = driver.Answer(0) // closing twice panics, which is the answer to the third
	driver.End("ended")
	_ = handle.Wait()
}
