// Package mockhost is a host for tests: it sends what a test wants, valid or not. It has its own
// encoder, so that it cannot repeat a mistake of the driver's code.
package mockhost

import (
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// Kinds of control packets and commands, as in docs/format/driver.md.
const (
	Hello, Welcome, Queue, Attached, Refused, Doors, Finish, Leave = 1, 2, 3, 4, 5, 6, 7, 8

	Read, Write, Flush, Discard, WriteZeroes, Chunk, End = 1, 2, 3, 4, 5, 6, 7
)

// Host waits for drivers.
type Host struct {
	Path     string
	t        testing.TB
	listener *net.UnixListener
}

// Driver is a driver that has connected.
type Driver struct {
	Control *net.UnixConn
	// Lanes are the sockets of the queues, in the order in which they were sent; Memory is their
	// memory.
	Lanes  []*net.UnixConn
	Memory [][]byte
	t      testing.TB
}

// Command is a command on the wire.
type Command struct {
	Kind, Flags                                              uint32
	Number, Address, Length, Offset, Entries, Horizon, Floor uint64
}

// New listens in a folder of its own.
func New(t testing.TB) *Host {
	t.Helper()
	path := filepath.Join(t.TempDir(), "host.sock")
	listener, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	return &Host{path, t, listener}
}

// Accept accepts a driver and returns its first packet.
func (h *Host) Accept() (*Driver, string) {
	conn, err := h.listener.AcceptUnix()
	if err != nil {
		h.t.Error(err)
		return nil, ""
	}
	h.t.Cleanup(func() { conn.Close() })
	driver := &Driver{Control: conn, t: h.t}
	_, text := driver.Receive()
	return driver, text
}

// Receive receives a control packet; kind 0: there are no more.
func (d *Driver) Receive() (kind uint32, text string) {
	buffer := make([]byte, 65536)
	n, err := d.Control.Read(buffer)
	if err != nil || n < 4 {
		return 0, ""
	}
	return binary.LittleEndian.Uint32(buffer), string(buffer[4:n])
}

// Send sends a control packet to the driver.
func (d *Driver) Send(kind uint32, text string, files ...int) {
	packet := append(make([]byte, 4), text...)
	binary.LittleEndian.PutUint32(packet, kind)
	var beside []byte
	if len(files) > 0 {
		beside = syscall.UnixRights(files...)
	}
	// Some tests need a driver that has hung up.
	_, _, _ = d.Control.WriteMsgUnix(packet, beside, nil)
}

// Welcome sends WELCOME with these options, one queue, and ATTACHED.
func (d *Driver) Welcome(options string) {
	d.Send(Welcome, "protocol=1\nname=mock\ngeneration=1\nhw_queues=1\nqueue_depth=8\n"+options)
	lanes, text := 1, "queue=0\nmemory_bytes=1048576\n"
	if strings.Contains(options, "mode=batch") {
		lanes, text = 2, text+"read_memory_bytes=1048576\n"
	}
	var files []int
	for i := 0; i < lanes; i++ {
		files = append(files, d.lane()...)
	}
	d.Send(Queue, text, files...)
	for _, file := range files {
		syscall.Close(file)
	}
	d.Send(Attached, "")
}

// lane makes a socket with memory, and returns the driver's two files.
func (d *Driver) lane() []int {
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		panic(err)
	}
	file := os.NewFile(uintptr(pair[0]), "lane")
	conn, err := net.FileConn(file)
	file.Close()
	if err != nil {
		panic(err)
	}
	memory, err := os.CreateTemp(d.t.TempDir(), "memory")
	if err != nil {
		panic(err)
	}
	if err := memory.Truncate(1 << 20); err != nil {
		panic(err)
	}
	mapped, err := syscall.Mmap(int(memory.Fd()), 0, 1<<20,
		syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		panic(err)
	}
	theirs, err := syscall.Dup(int(memory.Fd()))
	memory.Close()
	if err != nil {
		panic(err)
	}
	d.Lanes = append(d.Lanes, conn.(*net.UnixConn))
	d.Memory = append(d.Memory, mapped)
	return []int{pair[1], theirs}
}

// Bytes are those of the command on the wire.
func (c Command) Bytes() []byte {
	bytes := make([]byte, 64)
	binary.LittleEndian.PutUint32(bytes, c.Kind)
	binary.LittleEndian.PutUint32(bytes[4:], c.Flags)
	for i, field := range []uint64{
		c.Number, c.Address, c.Length, c.Offset, c.Entries, c.Horizon, c.Floor,
	} {
		binary.LittleEndian.PutUint64(bytes[8+8*i:], field)
	}
	return bytes
}

// Command sends commands in one packet.
func (d *Driver) Command(lane int, commands ...Command) {
	var packet []byte
	for _, command := range commands {
		packet = append(packet, command.Bytes()...)
	}
	d.Raw(lane, packet)
}

// Raw sends arbitrary bytes in place of commands.
func (d *Driver) Raw(lane int, packet []byte) {
	if _, err := d.Lanes[lane].Write(packet); err != nil {
		d.t.Error(err)
	}
}

// Answer receives one answer.
func (d *Driver) Answer(lane int) (number uint64, errno int32, err error) {
	answer := make([]byte, 64)
	n, err := d.Lanes[lane].Read(answer)
	if err == nil && n != 16 {
		err = fmt.Errorf("an answer of %d bytes", n)
	}
	if err != nil {
		return 0, 0, err
	}
	return binary.LittleEndian.Uint64(answer), int32(binary.LittleEndian.Uint32(answer[8:])), nil
}

// End sends END on every socket, waits until the driver has closed them all, and hangs up.
func (d *Driver) End(reason string) {
	d.Send(Finish, "reason="+reason+"\n")
	for lane := range d.Lanes {
		d.Command(lane, Command{Kind: End})
	}
	for lane := range d.Lanes {
		if _, _, err := d.Answer(lane); err == nil {
			d.t.Error("an answer that nobody waits for")
		}
	}
	d.Control.Close()
}
