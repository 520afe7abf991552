// The fuzz target of packets, with the corpus of the targets in Rust. Not here: golden packets
// (vectors_test.go).

package driver

import (
	"bytes"
	"maps"
	"slices"
	"testing"

	"sawmill/internal/mockhost"
)

// FuzzPackets decodes any bytes as each kind of packet that a host sends. Whatever they are, the
// decoders return, a control packet is the same after it is encoded again, and the bytes of a
// command lie in the shared memory.
func FuzzPackets(f *testing.F) {
	golden := slices.Collect(maps.Values(mockhost.Vectors(f, "control")))
	golden = slices.AppendSeq(golden, maps.Values(mockhost.Vectors(f, "command")))
	slices.SortFunc(golden, bytes.Compare)
	for _, seed := range mockhost.Seeds(f, "driver_packet", golden...) {
		f.Add(seed)
	}
	memory := make([]byte, 1<<16)
	f.Fuzz(func(t *testing.T, packet []byte) {
		if kind, facts, err := decodeControl(packet); err == nil {
			checkControl(t, kind, facts)
		}
		for ; len(packet) >= commandBytes; packet = packet[commandBytes:] {
			for _, chunk := range []int64{0, 4096} {
				command, err := decodeCommand(packet[:commandBytes], memory, chunk)
				if err == nil {
					checkCommand(t, command, int64(len(memory)))
				}
			}
		}
	})
}

func checkControl(t *testing.T, kind Kind, facts ControlFacts) {
	again, sameFacts, err := decodeControl(encodeControl(kind, facts))
	if err != nil || again != kind || !slices.Equal(sameFacts, facts) {
		t.Errorf("%d %q is %d %q when it is encoded again (%v)", kind, facts, again, sameFacts, err)
	}
	for _, fact := range facts {
		if number, err := facts.Number(fact.Name); err == nil && number < 0 {
			t.Errorf("%s=%s is %d", fact.Name, fact.Value, number)
		}
	}
}

func checkCommand(t *testing.T, command Command, memoryBytes int64) {
	if command.Address < 0 || command.Length < 0 || command.Entries < 0 {
		t.Errorf("%+v has a number below 0", command)
	}
	if room := int64(cap(command.Data)); room > memoryBytes {
		t.Errorf("%v has %d bytes of %d", command.Kind, room, memoryBytes)
	}
	switch command.Kind {
	case Read, Write:
		if int64(len(command.Data)) != command.Length {
			t.Errorf("%v of %d bytes has %d", command.Kind, command.Length, len(command.Data))
		}
	}
}
