// The life of an attached driver: control messages, and commands that are answered on each queue.
// Invariant: each command is answered once, also if its callback panics. Not here: how it attached
// (attach.go).

package driver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"sync"
	"syscall"
)

// Outcome is how a connection ended without an error.
type Outcome string

// Outcomes.
const (
	Ended    Outcome = "ended"    // the device has ended
	Replaced Outcome = "replaced" // another driver took over
)

// Work executes commands.
type Work struct {
	// Do executes a command on a goroutine of its own. A flush of a batch driver first waits for
	// the chunks before it.
	Do func(context.Context, Command) error
	// Log gets a line for errors that users see as EIO, and for panics.
	Log func(text string)
	// Depth bounds the commands of a socket that run concurrently.
	Depth int
}

// receiveMessages handles the host's messages on the control connection until it ends.
func (c *HostConnection) receiveMessages() {
	defer close(c.messagesEnd)
	buffer := make([]byte, packetBytesMax)
	for {
		packet, files, err := receive(c.control, buffer)
		closeAll(files)
		if err != nil {
			return
		}
		switch kind, facts, err := decodeControl(packet); {
		case err == nil && kind == Doors:
			c.publishDoors(facts)
		case err == nil && kind == Finish:
			c.reason = facts.Get("reason")
		case err == nil:
			err = fmt.Errorf("a packet of kind %d after ATTACHED", kind)
			fallthrough
		default:
			c.violation = fmt.Errorf("the host broke the protocol: %w", err)
			c.closeSockets()
			return
		}
	}
}

func (c *HostConnection) publishDoors(facts ControlFacts) {
	select {
	case c.doors <- facts.All("door"):
	default: // reported once already
	}
}

// Doors returns a channel that gets the addresses of the open doors once, each after its kind.
func (c *HostConnection) Doors() <-chan []string { return c.doors }

// Leave asks for the end of the device: cleanly, or immediately with a reason.
func (c *HostConnection) Leave(failure error) error {
	facts := ControlFacts{}.With("outcome", "ended")
	if failure != nil {
		facts = ControlFacts{}.With("outcome", "failed").With("message", failure.Error())
	}
	if _, err := c.control.Write(encodeControl(Leave, facts)); err != nil {
		return fmt.Errorf("cannot send LEAVE to the host: %w", err)
	}
	return nil
}

// Serve executes commands until the host sends END on every socket, or is gone. Nothing of the
// connection is left then. Callbacks get ctx, which ends when the host is gone.
func (c *HostConnection) Serve(ctx context.Context, work Work) (Outcome, error) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	results := make(chan error, len(c.lanes))
	for _, each := range c.lanes {
		go func(l lane) { results <- l.serve(ctx, c.chunk, work) }(each)
	}
	var failure error
	for range c.lanes {
		if err := <-results; err != nil && failure == nil {
			failure = err
			// The end of one socket ends the connection; the others end with it.
			stop()
			c.closeSockets()
		}
	}
	// Everything is answered: only now may the host see that this driver is gone. The host's last
	// messages are still read.
	_ = c.control.CloseWrite()
	<-c.messagesEnd
	c.closeSockets()
	c.release()
	if c.violation != nil {
		return "", c.violation
	}
	if failure != nil {
		return "", failure
	}
	if c.reason == string(Replaced) {
		return Replaced, nil
	}
	return Ended, nil
}

func (c *HostConnection) closeSockets() {
	c.control.Close()
	for _, lane := range c.lanes {
		lane.conn.Close()
	}
}

// serve executes the commands of one socket until END, for which it returns nil. All of its
// callbacks have returned then.
func (l lane) serve(ctx context.Context, chunk int64, work Work) error {
	var running, chunks sync.WaitGroup
	defer running.Wait()
	slots := make(chan struct{}, work.Depth)
	buffer := make([]byte, packetBytesMax)
	before := &chunks // chunks since the last flush, and all before it
	for {
		packet, files, err := receive(l.conn, buffer)
		closeAll(files)
		if errors.Is(err, io.EOF) {
			return errors.New("the host is gone")
		}
		if err != nil {
			return fmt.Errorf("queue %d: %w", l.queue, err)
		}
		if len(packet)%commandBytes != 0 {
			return fmt.Errorf("queue %d: the host broke the protocol: a packet of %d bytes",
				l.queue, len(packet))
		}
		for ; len(packet) > 0; packet = packet[commandBytes:] {
			command, err := decodeCommand(packet[:commandBytes], l.memory, chunk)
			if err != nil {
				return fmt.Errorf("queue %d: the host broke the protocol: %w", l.queue, err)
			}
			command.Queue = l.queue
			if command.Kind == End {
				running.Wait()
				l.conn.Close()
				return nil
			}
			started := before
			if command.Kind == Flush && chunk > 0 {
				// The flush covers everything before it; later commands wait for neither.
				before = new(sync.WaitGroup)
				before.Add(1)
			} else if command.Kind == WriteChunk {
				started.Add(1)
			}
			slots <- struct{}{}
			running.Add(1)
			go func(now *sync.WaitGroup, next *sync.WaitGroup) {
				defer running.Done()
				defer func() { <-slots }()
				switch {
				case command.Kind == WriteChunk:
					defer now.Done()
				case command.Kind == Flush && chunk > 0:
					now.Wait()
					next.Done()
				}
				l.answer(command, work.errnoOf(ctx, command))
			}(started, before)
		}
	}
}

func (l lane) answer(command Command, errno syscall.Errno) {
	// If the host is gone, the next read detects it.
	_, _ = l.conn.Write(encodeAnswer(command.Number, int32(errno)))
}

// errnoOf executes a command and returns its result as an errno.
func (w Work) errnoOf(ctx context.Context, command Command) syscall.Errno {
	err := w.try(ctx, command)
	var errno syscall.Errno
	switch {
	case err == nil:
		return 0
	case errors.As(err, &errno) && errno != 0:
		return errno
	}
	text := "%v of %d bytes at %d failed: %v"
	w.Log(fmt.Sprintf(text, command.Kind, command.Length, command.Address, err))
	return syscall.EIO
}

// try executes a command; a panic becomes an error.
func (w Work) try(ctx context.Context, command Command) (err error) {
	defer func() {
		if reason := recover(); reason != nil {
			err = fmt.Errorf("panic: %v\n%s", reason, debug.Stack())
		}
	}()
	return w.Do(ctx, command)
}
