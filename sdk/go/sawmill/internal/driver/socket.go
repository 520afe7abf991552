// Packets with descriptors over Unix sockets, and mapped memory. Invariant: no descriptor of a
// refused packet stays open. Not here: what packets mean (control.go, command.go).

package driver

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
)

const packetBytesMax, descriptorsMax = 65536, 4

// dial connects to a packet socket.
func dial(path string) (*net.UnixConn, error) {
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		return nil, fmt.Errorf("cannot connect to the host at %s: %w", path, err)
	}
	return conn, nil
}

// receive takes one packet with its open files; io.EOF when the peer has gone.
func receive(conn *net.UnixConn, buffer []byte) ([]byte, []*os.File, error) {
	beside := make([]byte, syscall.CmsgSpace(4*descriptorsMax))
	n, besides, flags, _, err := conn.ReadMsgUnix(buffer, beside)
	if err == nil && n == 0 && besides == 0 {
		err = io.EOF
	}
	if errors.Is(err, syscall.ECONNRESET) {
		err = io.EOF
	}
	if err != nil {
		return nil, nil, err
	}
	files, err := filesOf(beside[:besides])
	if err == nil && flags&(syscall.MSG_TRUNC|syscall.MSG_CTRUNC) != 0 {
		err = fmt.Errorf("a packet of more than %d bytes or %d descriptors",
			packetBytesMax, descriptorsMax)
	}
	if err != nil {
		closeAll(files)
		return nil, nil, err
	}
	return buffer[:n], files, nil
}

func filesOf(beside []byte) ([]*os.File, error) {
	if len(beside) == 0 {
		return nil, nil
	}
	messages, err := syscall.ParseSocketControlMessage(beside)
	if err != nil {
		return nil, fmt.Errorf("descriptors of a packet: %w", err)
	}
	var files []*os.File
	for i := range messages {
		numbers, err := syscall.ParseUnixRights(&messages[i])
		if err != nil {
			continue // not descriptors
		}
		for _, number := range numbers {
			files = append(files, os.NewFile(uintptr(number), "from the host"))
		}
	}
	return files, nil
}

func closeAll(files []*os.File) {
	for _, file := range files {
		file.Close()
	}
}

// socketOf makes a connection from an open file, which it closes.
func socketOf(file *os.File) (*net.UnixConn, error) {
	defer file.Close()
	conn, err := net.FileConn(file)
	if err != nil {
		return nil, fmt.Errorf("the descriptor of a queue is not a socket: %w", err)
	}
	unix, ok := conn.(*net.UnixConn)
	if !ok {
		conn.Close()
		return nil, errors.New("the descriptor of a queue is not a Unix socket")
	}
	return unix, nil
}

// mapMemory maps shared memory, and closes its file.
func mapMemory(file *os.File, bytes int64) ([]byte, error) {
	defer file.Close()
	if info, err := file.Stat(); err != nil || info.Size() < bytes {
		return nil, fmt.Errorf("the memory is shorter than the %d bytes declared", bytes)
	}
	memory, err := syscall.Mmap(int(file.Fd()), 0, int(bytes),
		syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("cannot map %d bytes of shared memory: %w", bytes, err)
	}
	return memory, nil
}
