// How a driver attaches: its hello, the queues that the host sends, and what must be true of them.
// Invariant: what was taken before a refusal is closed and unmapped. Not here: what happens after
// (serve.go).

package driver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
)

// lane is a socket that receives commands, with its memory.
type lane struct {
	queue  int
	conn   *net.UnixConn
	memory []byte
}

// HostConnection is one driver's connection to a device.
type HostConnection struct {
	// Facts of the WELCOME: name, generation, all options in effect.
	Facts       ControlFacts
	control     *net.UnixConn
	lanes       []lane
	chunk       int64
	doors       chan []string
	messagesEnd chan struct{} // closed when no more messages come; the fields below are set before
	reason      string        // the reason for END
	violation   error         // the host's violation of the protocol
}

// RefusedError is the reason why the host refused this driver.
type RefusedError struct {
	Errno   syscall.Errno
	Message string
}

func (e *RefusedError) Error() string { return "the host refused this driver: " + e.Message }

// Unwrap returns the errno, so that errors.Is(err, syscall.EBUSY) works.
func (e *RefusedError) Unwrap() error { return e.Errno }

// Attach connects to a host and becomes its driver. With replace, it waits until the current driver
// has answered its commands. Options are sent as given.
func Attach(
	ctx context.Context, path string, replace bool, options ControlFacts,
) (*HostConnection, error) {
	control, err := dial(path)
	if err != nil {
		return nil, err
	}
	// When the context ends, calls that wait on the connection fail.
	attached, gone := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(gone)
		select {
		case <-ctx.Done():
			control.Close()
		case <-attached:
		}
	}()
	connection := &HostConnection{
		control:     control,
		doors:       make(chan []string, 1),
		messagesEnd: make(chan struct{}),
	}
	err = connection.attach(replace, options)
	close(attached)
	<-gone
	if err == nil && ctx.Err() == nil {
		go connection.receiveMessages()
		return connection, nil
	}
	control.Close()
	connection.release()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	return nil, err
}

func (c *HostConnection) attach(replace bool, options ControlFacts) error {
	hello := ControlFacts{}.With("protocol", protocolVersion).With("program", os.Args[0])
	if replace {
		hello = hello.With("replace", "1")
	}
	for _, option := range options {
		hello = hello.With(option.Name, option.Value)
	}
	if _, err := c.control.Write(encodeControl(Hello, hello)); err != nil {
		return fmt.Errorf("the host hung up: %w", err)
	}
	buffer := make([]byte, packetBytesMax)
	for {
		packet, files, err := receive(c.control, buffer)
		if err != nil {
			return fmt.Errorf("the host hung up before the driver was attached: %w", err)
		}
		kind, facts, err := decodeControl(packet)
		if err == nil && kind == Attached {
			closeAll(files)
			return c.complete()
		}
		if err == nil {
			err = c.attaching(kind, facts, files)
		} else {
			closeAll(files)
		}
		if err != nil {
			return err
		}
	}
}

// attaching handles one packet between HELLO and ATTACHED, with its files.
func (c *HostConnection) attaching(kind Kind, facts ControlFacts, files []*os.File) error {
	if kind == QueueHanded {
		return c.takeQueue(facts, files)
	}
	closeAll(files)
	switch kind {
	case Welcome:
		if facts.Get("protocol") != protocolVersion {
			return fmt.Errorf("the host speaks protocol %q, this driver %s",
				facts.Get("protocol"), protocolVersion)
		}
		c.Facts = facts
		if facts.Get("mode") == "batch" {
			chunk, err := facts.Number("write_chunk_size")
			c.chunk = chunk
			return err
		}
	case Refused:
		errno, _ := facts.Number("errno")
		return &RefusedError{syscall.Errno(errno), facts.Get("message")}
	case Doors:
		c.publishDoors(facts)
	default:
		return fmt.Errorf("the host sent a packet of kind %d before ATTACHED", kind)
	}
	return nil
}

func (c *HostConnection) takeQueue(facts ControlFacts, files []*os.File) error {
	names := []string{"memory_bytes"}
	if c.chunk > 0 {
		names = append(names, "read_memory_bytes")
	}
	queue, err := facts.Number("queue")
	if err == nil && c.Facts == nil {
		err = errors.New("the host sent QUEUE before WELCOME")
	}
	if err == nil && len(files) != 2*len(names) {
		err = fmt.Errorf("QUEUE %d came with %d descriptors instead of %d",
			queue, len(files), 2*len(names))
	}
	if err != nil {
		closeAll(files)
		return err
	}
	for i, name := range names {
		conn, err := socketOf(files[2*i])
		if err != nil {
			closeAll(files[2*i+1:])
			return err
		}
		c.lanes = append(c.lanes, lane{queue: int(queue), conn: conn})
		bytes, err := facts.Number(name)
		if err != nil {
			closeAll(files[2*i+1:])
			return err
		}
		memory, err := mapMemory(files[2*i+1], bytes)
		if err != nil {
			closeAll(files[2*i+2:])
			return err
		}
		c.lanes[len(c.lanes)-1].memory = memory
	}
	return nil
}

// complete checks that everything announced has arrived.
func (c *HostConnection) complete() error {
	if c.Facts == nil {
		return errors.New("the host sent ATTACHED before WELCOME")
	}
	queues, err := c.Facts.Number("hw_queues")
	if err != nil {
		return err
	}
	lanes := queues
	if c.chunk > 0 {
		lanes = 2 * queues
	}
	if int64(len(c.lanes)) != lanes || lanes == 0 {
		text := "the host announced hw_queues=%d and sent %d queue sockets"
		return fmt.Errorf(text, queues, len(c.lanes))
	}
	return nil
}

// Close ends a connection that is not being served.
func (c *HostConnection) Close() {
	c.closeSockets()
	<-c.messagesEnd
	c.release()
}

// release frees the sockets and memory of the queues.
func (c *HostConnection) release() {
	for _, lane := range c.lanes {
		lane.conn.Close()
		if lane.memory != nil {
			_ = syscall.Munmap(lane.memory)
		}
	}
	c.lanes = nil
}
