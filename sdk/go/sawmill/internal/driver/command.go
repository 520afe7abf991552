// Commands and answers as bytes. Invariant: a decoded command lies inside the memory of its queue.
// Not here: control packets (control.go).

package driver

import (
	"encoding/binary"
	"fmt"
)

// CommandKind is the kind of a command.
type CommandKind uint32

// Kinds of commands.
const (
	Read CommandKind = iota + 1
	Write
	Flush
	Discard
	WriteZeroes
	WriteChunk
	End
)

func (k CommandKind) String() string {
	names := [...]string{"?", "READ", "WRITE", "FLUSH", "DISCARD", "WRITE_ZEROES", "CHUNK", "END"}
	if k < Read || k > End {
		return fmt.Sprintf("command %d", uint32(k))
	}
	return names[k]
}

// Flags of a command.
const (
	FUA     = 1 // the write is durable when it is answered
	NoUnmap = 2 // zeroes keep their space
	Again   = 4 // a former driver had it
)

const commandBytes, answerBytes = 64, 16

// Command is a command for the driver. Addresses and lengths are bytes.
type Command struct {
	Kind           CommandKind
	Flags          uint32
	Number         uint64
	Address        int64
	Length         int64
	Entries        int64 // of a chunk
	Horizon, Floor uint64
	// Data is the command's part of the shared memory: the bytes to write, the buffer of a read, or
	// all bytes of a write chunk. The driver may use it until it answers.
	Data []byte
	// Queue is the number of the command's queue.
	Queue int
}

// decodeCommand decodes a command; chunk is the size of a write chunk, 0 in plain mode.
func decodeCommand(bytes, memory []byte, chunk int64) (Command, error) {
	wide := func(at int) uint64 { return binary.LittleEndian.Uint64(bytes[at:]) }
	command := Command{
		Kind:    CommandKind(binary.LittleEndian.Uint32(bytes)),
		Flags:   binary.LittleEndian.Uint32(bytes[4:]),
		Number:  wide(8),
		Address: int64(wide(16)),
		Length:  int64(wide(24)),
		Entries: int64(wide(40)),
		Horizon: wide(48),
		Floor:   wide(56),
	}
	offset, room := int64(wide(32)), command.Length
	if command.Address < 0 || command.Length < 0 || offset < 0 || command.Entries < 0 {
		return command, fmt.Errorf("%v %d has a number beyond 2^63", command.Kind, command.Number)
	}
	switch command.Kind {
	case Flush, Discard, WriteZeroes, End:
		return command, nil
	case WriteChunk:
		if room > chunk {
			text := "CHUNK %d announces %d bytes of %d"
			return command, fmt.Errorf(text, command.Number, room, chunk)
		}
		room = chunk
	case Read, Write:
	default:
		return command, fmt.Errorf("a command of unknown kind %d", uint32(command.Kind))
	}
	if size := int64(len(memory)); offset > size || room > size-offset {
		return command, fmt.Errorf("%v %d lies at %d+%d, outside the %d bytes of shared memory",
			command.Kind, command.Number, offset, room, size)
	}
	command.Data = memory[offset : offset+room : offset+room]
	return command, nil
}

func encodeAnswer(number uint64, errno int32) []byte {
	answer := make([]byte, answerBytes)
	binary.LittleEndian.PutUint64(answer, number)
	binary.LittleEndian.PutUint32(answer[8:], uint32(errno))
	return answer
}
