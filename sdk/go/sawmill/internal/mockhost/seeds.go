// Inputs for fuzz targets: the corpus of crates/fuzz and changed copies, the same in each run. Not
// here: what a target does with them.

package mockhost

import (
	"encoding/binary"
	"math/rand"
	"sort"
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
	var names []string
	for name := range corpus {
		names = append(names, name)
	}
	sort.Strings(names)
	var inputs [][]byte
	for _, name := range names {
		inputs = append(inputs, corpus[name])
	}
	inputs = append(inputs, more...)
	chance := rand.New(rand.NewSource(1))
	seeds := append([][]byte(nil), inputs...)
	for _, input := range inputs {
		for n := 0; n < changesPerSeed; n++ {
			bytes := append([]byte(nil), input...)
			for left := 1 + chance.Intn(4); left > 0; left-- {
				bytes = change(bytes, inputs[chance.Intn(len(inputs))], chance)
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
		return append(bytes, other...)
	}
	at := chance.Intn(len(bytes))
	switch chance.Intn(6) {
	case 0:
		bytes[at] ^= 1 << uint(chance.Intn(8))
	case 1:
		bytes[at] = byte(chance.Intn(256))
	case 2:
		var number [8]byte
		binary.LittleEndian.PutUint64(number[:], edges[chance.Intn(len(edges))])
		copy(bytes[at:], number[:1<<uint(chance.Intn(4))])
	case 3:
		return bytes[:at]
	case 4:
		repeated := append([]byte(nil), bytes[at/2:]...)
		return append(bytes[:at:at], repeated...)
	case 5:
		if at < len(other) {
			return append(bytes[:at:at], other[at:]...)
		}
	}
	return bytes
}
