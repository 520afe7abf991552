// Tests with the golden packets of crates/driver/vectors, which the tests in Rust read too. Not
// here: mutated packets (fuzz_test.go).

package driver

import (
	"bytes"
	"reflect"
	"slices"
	"testing"

	"sawmill/internal/mockhost"
)

// The values of the golden packets (crates/driver/tests/vectors/samples.rs has the same values).

type controlPacket struct {
	kind  Kind
	facts ControlFacts
}

var controls = map[string]controlPacket{
	"v1-hello": {Hello, ControlFacts{}.With("protocol", "1").With("program", "/usr/local/bin/wörk").
		With("replace", "1").With("mode", "batch").With("size", "4398046511104").
		With("hw_queues", "2")},
	"v1-welcome": {Welcome, ControlFacts{}.With("protocol", "1").With("name", "disk1").
		With("generation", "2").With("again", "1").With("mode", "batch").
		With("size", "4398046511104").With("blocksize", "512").With("hw_queues", "2").
		With("collision_area_size", "4096").With("write_chunk_size", "4096").
		With("metadata_bytes", "256")},
	"v1-queue": {QueueHanded, ControlFacts{}.With("queue", "1").With("memory_bytes", "33554432").
		With("read_memory_bytes", "16777216")},
	"v1-attached": {Attached, nil},
	"v1-doors": {Doors, ControlFacts{}.
		With("door", "nbd nbd+unix:///disk1?socket=/run/sawmill/disk1.sock").
		With("door", "ublk /dev/ublkb0")},
	"v1-refused": {Refused, ControlFacts{}.With("errno", "16").
		With("message", "disk1 has a driver")},
	"v1-finish":      {Finish, ControlFacts{}.With("reason", "replaced")},
	"v1-leave-ended": {Leave, ControlFacts{}.With("outcome", "ended")},
	"v1-leave-failed": {Leave, ControlFacts{}.With("outcome", "failed").
		With("message", "no backup:\nthe disk\x00is full")},
	"v1-ask": {Ask, ControlFacts{}.With("ask", "status")},
	"v1-answer": {Answer, ControlFacts{}.With("errno", "0").With("message", "").
		With("name", "disk1").With("state", "running")},
}

var (
	read = mockhost.Command{
		Kind: mockhost.Read, Number: 0x0102030405060708, Address: 0x0a0b0c0d0e00, Length: 0x1200,
		Offset: 0x21000,
	}
	write = mockhost.Command{
		Kind: mockhost.Write, Number: 0x1112131415161718, Address: 0x1a1b1c1d1e00, Length: 0x600,
		Offset: 0x3000,
	}
	flush   = mockhost.Command{Kind: mockhost.Flush, Number: 0xf1f2f3f4f5f6f7f8}
	discard = mockhost.Command{
		Kind: mockhost.Discard, Number: 0x2122232425262728, Address: 0x2a2b2c2d2e00,
		Length: 0x304050600,
	}
	zeroes = mockhost.Command{
		Kind: mockhost.WriteZeroes, Number: 0x3132333435363738, Address: 0x2a2b2c2d2e00,
		Length: 0x304050600,
	}
	chunk = mockhost.Command{
		Kind: mockhost.Chunk, Number: 0x4142434445464748, Length: 2304, Offset: 0x2000, Entries: 3,
		Horizon: 0x5152535455565758, Floor: 0x6162636465666768,
	}
)

func flagged(command mockhost.Command, flags uint32) mockhost.Command {
	command.Flags = flags
	return command
}

var commands = map[string][]mockhost.Command{
	"v1-read":         {read},
	"v1-write-fua":    {flagged(write, FUA)},
	"v1-flush":        {flush},
	"v1-discard":      {discard},
	"v1-write-zeroes": {zeroes},
	"v1-keep-space":   {flagged(zeroes, NoUnmap)},
	"v1-chunk-again":  {flagged(chunk, Again)},
	"v1-end":          {{Kind: mockhost.End}},
	"v1-two":          {flagged(write, Again), flush},
}

type answer struct {
	number uint64
	errno  int32
}

var answers = map[string][]answer{
	"v1-done":     {{0x0102030405060708, 0}},
	"v1-no-space": {{0x1112131415161718, 28}},
	"v1-two":      {{0x0102030405060708, 0}, {0xf1f2f3f4f5f6f7f8, 110}},
}

// eachVector calls check with each value and its golden packet. It fails if one lacks the other.
func eachVector[V any](
	t *testing.T, folder string, values map[string]V, check func(t *testing.T, v V, packet []byte),
) {
	packets := mockhost.Vectors(t, folder)
	for name := range packets {
		if _, ok := values[name]; !ok {
			t.Errorf("%s/%s.bin has no value here", folder, name)
		}
	}
	for name, value := range values {
		t.Run(name, func(t *testing.T) {
			packet, ok := packets[name]
			if !ok {
				t.Fatal("there is no such golden packet")
			}
			check(t, value, packet)
		})
	}
}

func Test_control_packets_are_the_golden_ones(t *testing.T) {
	eachVector(t, "control", controls, func(t *testing.T, value controlPacket, packet []byte) {
		if encoded := encodeControl(value.kind, value.facts); !bytes.Equal(encoded, packet) {
			t.Errorf("encoded as %q, golden is %q", encoded, packet)
		}
		kind, facts, err := decodeControl(packet)
		if err != nil || kind != value.kind || !slices.Equal(facts, value.facts) {
			t.Errorf("decoded as %v %v (%v)", kind, facts, err)
		}
	})
}

func Test_commands_are_the_golden_ones(t *testing.T) {
	const chunkBytes = 4096
	memory := make([]byte, 1<<20)
	compare := func(t *testing.T, values []mockhost.Command, packet []byte) {
		for _, value := range values {
			if len(packet) < commandBytes || !bytes.Equal(value.Bytes(), packet[:commandBytes]) {
				t.Fatalf("%+v is not the golden %x", value, packet)
			}
			command, err := decodeCommand(packet[:commandBytes], memory, chunkBytes)
			if err != nil {
				t.Fatal(err)
			}
			expected := Command{
				Kind: CommandKind(value.Kind), Flags: value.Flags, Number: value.Number,
				Address: int64(value.Address), Length: int64(value.Length),
				Entries: int64(value.Entries), Horizon: value.Horizon, Floor: value.Floor,
			}
			switch command.Kind {
			case Read, Write:
				expected.Data = memory[value.Offset:][:value.Length]
			case WriteChunk:
				expected.Data = memory[value.Offset:][:chunkBytes]
			}
			same := len(command.Data) == len(expected.Data) &&
				(len(command.Data) == 0 || &command.Data[0] == &expected.Data[0])
			if !same {
				t.Errorf("%v has %d bytes elsewhere than at %d", command.Kind, len(command.Data),
					value.Offset)
			}
			command.Data, expected.Data = nil, nil
			if !reflect.DeepEqual(command, expected) {
				t.Errorf("decoded as %+v, expected %+v", command, expected)
			}
			packet = packet[commandBytes:]
		}
		if len(packet) != 0 {
			t.Errorf("%d bytes follow", len(packet))
		}
	}
	eachVector(t, "command", commands, compare)
}

func Test_answers_are_the_golden_ones(t *testing.T) {
	eachVector(t, "answer", answers, func(t *testing.T, values []answer, packet []byte) {
		var encoded []byte
		for _, value := range values {
			encoded = append(encoded, encodeAnswer(value.number, value.errno)...)
		}
		if !bytes.Equal(encoded, packet) {
			t.Errorf("encoded as %x, golden is %x", encoded, packet)
		}
	})
}
