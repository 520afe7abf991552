// The fuzz target of chunks, with the corpus of the targets in Rust. Not here: packets
// (internal/driver/fuzz_test.go).

package sawmill

import (
	"encoding/binary"
	"slices"
	"testing"

	"sawmill/internal/mockhost"
)

// FuzzChunks checks any bytes as a chunk: the first byte is the number of entries, and as many as
// fit are metadata. Whatever they are, the check returns, and what it accepts can be iterated over
// and applied.
func FuzzChunks(f *testing.F) {
	golden := append([]byte{3}, mockhost.Vectors(f, "write_chunk")["v1-overlap"]...)
	for _, seed := range mockhost.Seeds(f, "driver_chunk", golden) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, input []byte) {
		if len(input) == 0 {
			return
		}
		count := int(input[0])
		metadata := min(count*entryBytes, len(input)-1)
		chunk := Chunk{Bytes: slices.Clone(input[1:]), MetadataBytes: metadata, Count: count}
		checkChunk(t, chunk)
		// Flags and lengths such that several entries have data.
		for at := 0; at+entryBytes <= metadata; at += entryBytes {
			sectors := uint64(chunk.Bytes[at+8] % 3)
			binary.LittleEndian.PutUint64(chunk.Bytes[at+8:], sectors)
			binary.LittleEndian.PutUint64(chunk.Bytes[at+24:], 1)
		}
		checkChunk(t, chunk)
	})
}

func checkChunk(t *testing.T, chunk Chunk) {
	if chunk.check() != nil {
		return
	}
	entries, left := 0, len(chunk.Bytes)-chunk.MetadataBytes
	for entry, data := range chunk.Entries() {
		if entry.Address < 0 || entry.Length != int64(len(data)) {
			t.Errorf("%+v has %d bytes", entry, len(data))
		}
		entries, left = entries+1, left-len(data)
	}
	if entries != chunk.Count || left < 0 {
		t.Errorf("%d entries of %d, and %d bytes are left", entries, chunk.Count, left)
	}
	write := func([]byte, int64) error { return nil }
	if err := NewResolver(4096).Apply(chunk, write); err != nil {
		t.Error(err)
	}
}
