// Control packets as bytes: a kind, and facts with names. Not here: which facts a kind needs
// (attach.go).

package driver

import (
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Kind is the kind of a control packet; docs/format/driver.md describes each.
type Kind uint32

// Kinds of control packets.
const (
	Hello Kind = iota + 1
	Welcome
	QueueHanded
	Attached
	Refused
	Doors
	Finish
	Leave
	Ask
	Answer
)

// The version of the protocol in this package.
const protocolVersion = "1"

// Fact is one line of a control packet.
type Fact struct{ Name, Value string }

// ControlFacts are the lines of a control packet, in order; a name may come more than once.
type ControlFacts []Fact

var oneLine = strings.NewReplacer("\n", " ", "\x00", " ")

// With adds a line. Line feeds in the value become spaces.
func (f ControlFacts) With(name, value string) ControlFacts {
	return append(f, Fact{name, oneLine.Replace(value)})
}

// Get returns the first value of this name, or "".
func (f ControlFacts) Get(name string) string {
	for _, fact := range f {
		if fact.Name == name {
			return fact.Value
		}
	}
	return ""
}

// All values of this name.
func (f ControlFacts) All(name string) []string {
	var values []string
	for _, fact := range f {
		if fact.Name == name {
			values = append(values, fact.Value)
		}
	}
	return values
}

// Number returns the first value of this name, which must be a number of 0 or more.
func (f ControlFacts) Number(name string) (int64, error) {
	number, err := strconv.ParseInt(f.Get(name), 10, 64)
	if err != nil || number < 0 {
		return 0, fmt.Errorf("a control packet of the host has %s=%q, which is not a number",
			name, f.Get(name))
	}
	return number, nil
}

func encodeControl(kind Kind, facts ControlFacts) []byte {
	packet := make([]byte, 4, 256)
	binary.LittleEndian.PutUint32(packet, uint32(kind))
	for _, fact := range facts {
		packet = append(packet, fact.Name+"="+fact.Value+"\n"...)
	}
	return packet
}

func decodeControl(packet []byte) (Kind, ControlFacts, error) {
	if len(packet) < 4 {
		return 0, nil, fmt.Errorf("a control packet of %d bytes", len(packet))
	}
	kind, text := Kind(binary.LittleEndian.Uint32(packet)), string(packet[4:])
	if kind < Hello || kind > Answer {
		return 0, nil, fmt.Errorf("a control packet of unknown kind %d", kind)
	}
	if !utf8.ValidString(text) {
		return 0, nil, fmt.Errorf("a control packet of kind %d that is not text", kind)
	}
	var facts ControlFacts
	for _, line := range strings.Split(strings.TrimSuffix(text, "\n"), "\n") {
		if line == "" {
			continue
		}
		equals := strings.IndexByte(line, '=')
		if equals < 0 {
			return 0, nil, fmt.Errorf("a control packet of kind %d with the line %q", kind, line)
		}
		facts = append(facts, Fact{line[:equals], line[equals+1:]})
	}
	return kind, facts, nil
}
