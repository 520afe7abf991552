package mockhost

import (
	"encoding/binary"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
)

// changesPerSeed is how many changed copies of each file a test gets.
const changesPerSeed = 500

// edges are numbers at the ends of what fields hold.
var edges = []uint64{0, 1, 511, 4096, 1 << 16, 1<<32 - 1, 1 << 54, 1<<63 - 1, 1 << 63, 1<<64 - 1}

// Seeds returns the corpus of a target of crates/fuzz, then more inputs, and changed copies of all
// of them, which are the same in each run.
func Seeds(t testing.TB, target string, more ...[]byte) [][]byte {
	t.Helper()
	corpus := files(t, "crates/fuzz/corpus/"+target, "*")
	var inputs [][]byte
	for _, name := range slices.Sorted(maps.Keys(corpus)) {
		inputs = append(inputs, corpus[name])
	}
	inputs = append(inputs, more...)
	chance := rand.New(rand.NewPCG(1, 2))
	seeds := slices.Clone(inputs)
	for _, input := range inputs {
		for range changesPerSeed {
			bytes := slices.Clone(input)
			for range 1 + chance.IntN(4) {
				bytes = change(bytes, inputs[chance.IntN(len(inputs))], chance)
			}
			seeds = append(seeds, bytes)
		}
	}
	return seeds
}

// change flips a bit, sets a byte or a number, cuts, repeats a stretch, or splices in another
// input.
func change(bytes, other []byte, chance *rand.Rand) []byte {
	if len(bytes) == 0 {
		return slices.Clone(other)
	}
	at := chance.IntN(len(bytes))
	switch chance.IntN(6) {
	case 0:
		bytes[at] ^= 1 << chance.IntN(8)
	case 1:
		bytes[at] = byte(chance.Uint32())
	case 2:
		number := binary.LittleEndian.AppendUint64(nil, edges[chance.IntN(len(edges))])
		copy(bytes[at:], number[:1<<chance.IntN(4)])
	case 3:
		return bytes[:at]
	case 4:
		return slices.Insert(bytes, at, slices.Clone(bytes[at/2:at])...)
	case 5:
		return append(bytes[:at:at], other[min(at, len(other)):]...)
	}
	return bytes
}
