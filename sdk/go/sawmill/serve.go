// How a program serves a device: it starts or finds a host, attaches, and waits for the end. Not
// here: the protocol (internal/driver).

package sawmill

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"sawmill/internal/driver"
)

// RefusedError is the reason why a host refused a driver; errors.Is matches its errno.
type RefusedError = driver.RefusedError

// Handle is a running driver.
type Handle struct {
	connection *driver.HostConnection
	started    *driver.Host
	opened     chan struct{} // closed when doors are there
	doors      []string
	done       chan struct{} // closed when the outcome is there
	outcome    driver.Outcome
	err        error
}

// Serve drives a device until it has ended, another driver has replaced this one (both nil), or
// something went wrong. When ctx ends, the device ends too: its doors close, and everything is
// answered and flushed before Serve returns nil.
func Serve(ctx context.Context, device Device, options Options) error {
	handle, err := Start(ctx, device, options)
	if err != nil {
		return err
	}
	return handle.Wait()
}

// ServeChunks is Serve for a device that takes chunks.
func ServeChunks(ctx context.Context, device ChunkDevice, options Options) error {
	handle, err := StartChunks(ctx, device, options)
	if err != nil {
		return err
	}
	return handle.Wait()
}

// Start is like Serve but returns as soon as the driver runs. The host is that of $SAWMILL_DRIVER;
// without it, Start starts one.
func Start(ctx context.Context, device Device, options Options) (*Handle, error) {
	return start(ctx, "", plain(device), options)
}

// StartChunks is Start for a device that takes chunks; Options.Batch may be nil.
func StartChunks(ctx context.Context, device ChunkDevice, options Options) (*Handle, error) {
	if options.Batch == nil {
		options.Batch = new(Batch)
	}
	return start(ctx, "", chunked(device), options)
}

// Rerun becomes the driver of the running device of that name; the current driver, if any, first
// finishes its commands. Given options must equal those in effect.
func Rerun(ctx context.Context, name string, device Device, options Options) (*Handle, error) {
	socket, err := driver.SocketOf(ctx, name)
	if err != nil {
		return nil, err
	}
	options.Name, options.Replace = name, true
	return start(ctx, socket, plain(device), options)
}

// Wait waits until the driver has finished; see Serve.
func (h *Handle) Wait() error {
	<-h.done
	return h.err
}

// Done returns a channel that is closed when Wait would return.
func (h *Handle) Done() <-chan struct{} { return h.done }

// Replaced reports, after Wait, whether another driver took over.
func (h *Handle) Replaced() bool {
	<-h.done
	return h.outcome == driver.Replaced
}

// Doors waits until the device can be used and returns where: lines of a kind and an address.
func (h *Handle) Doors(ctx context.Context) ([]string, error) {
	select {
	case <-h.opened:
		return h.doors, nil
	case <-h.done:
		return nil, fmt.Errorf("the device ended before its doors were open: %w", h.err)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Option returns the value of an option in effect, by its name in docs/format/driver.md, or "".
func (h *Handle) Option(name string) string { return h.connection.Facts.Get(name) }

// Started reports whether this program started the host.
func (h *Handle) Started() bool { return h.started != nil }

// Name returns the name of the device.
func (h *Handle) Name() string { return h.Option("name") }

// End ends the device cleanly; Wait returns when it has ended.
func (h *Handle) End() error { return h.connection.Leave(nil) }

// Fail ends the device immediately: waiting requests fail, unflushed data may be lost.
func (h *Handle) Fail(reason error) error { return h.connection.Leave(reason) }

// work executes one command.
type work = func(context.Context, driver.Command) error

// adapter delivers commands to a device.
type adapter struct {
	abilities driver.ControlFacts
	perform   func(*driver.HostConnection) (work, error)
}

// plain is the adapter of a Device: the host decides whether writes arrive in chunks.
func plain(device Device) adapter {
	return adapter{abilities(device), func(connection *driver.HostConnection) (work, error) {
		if connection.Facts.Get("mode") != "batch" {
			return perform(device), nil
		}
		area, err := connection.Facts.Number("collision_area_size")
		if err == nil && area == 0 {
			err = errors.New("the host sent collision_area_size=0")
		}
		if err != nil {
			return nil, err
		}
		return chunked(inChunks{device, NewResolver(area)}).perform(connection)
	}}
}

func chunked(device ChunkDevice) adapter {
	return adapter{abilities(device), func(connection *driver.HostConnection) (work, error) {
		if connection.Facts.Get("mode") != "batch" {
			return nil, errors.New("a device that takes chunks needs a host with mode=batch")
		}
		bytes, err := connection.Facts.Number("metadata_bytes")
		return performChunks(device, bytes), err
	}}
}

// start attaches a driver and runs it. An empty socket: that of $SAWMILL_DRIVER, else of a new
// host.
func start(ctx context.Context, socket string, adapter adapter, options Options) (*Handle, error) {
	handle := &Handle{opened: make(chan struct{}), done: make(chan struct{})}
	if socket == "" {
		socket = os.Getenv("SAWMILL_DRIVER")
	}
	if socket == "" {
		doors := options.Doors
		if len(doors) == 0 {
			doors = driver.DefaultDoors()
		}
		host, err := driver.StartHost(ctx, nameOf(options), doors)
		if err != nil {
			return nil, err
		}
		handle.started, socket = host, host.Socket
	}
	connection, err := driver.Attach(ctx, socket, options.Replace, options.facts(adapter.abilities))
	if err != nil {
		handle.giveUp()
		return nil, err
	}
	handle.connection = connection
	do, err := adapter.perform(connection)
	if err != nil {
		connection.Close()
		handle.giveUp()
		return nil, err
	}
	logger := options.Logger
	if logger == nil {
		logger = slog.Default()
	}
	depth, err := connection.Facts.Number("queue_depth")
	if err != nil || depth == 0 {
		depth = 64
	}
	commands := driver.Work{Do: do, Depth: int(depth), Log: func(text string) {
		logger.Error(text, "device", connection.Facts.Get("name"))
	}}
	go handle.work(context.WithoutCancel(ctx), commands)
	go handle.listen()
	go handle.endWith(ctx)
	return handle, nil
}

// giveUp ends a host that refused the driver for which it was started.
func (h *Handle) giveUp() {
	if h.started != nil {
		h.started.Stop()
	}
}

func (h *Handle) work(ctx context.Context, commands driver.Work) {
	h.outcome, h.err = h.connection.Serve(ctx, commands)
	if h.started != nil && h.outcome == driver.Ended {
		// Its name is free again once this host has ended.
		h.started.Wait()
	}
	close(h.done)
}

func (h *Handle) listen() {
	select {
	case h.doors = <-h.connection.Doors():
		close(h.opened)
	case <-h.done:
	}
}

// endWith ends the device when the context ends.
func (h *Handle) endWith(ctx context.Context) {
	select {
	case <-ctx.Done():
		// If the message cannot be sent, the host is gone, and the connection detects that.
		_ = h.End()
	case <-h.done:
	}
}

func nameOf(options Options) string {
	if options.Name != "" {
		return options.Name
	}
	program := strings.TrimSuffix(filepath.Base(os.Args[0]), ".test")
	return fmt.Sprintf("%s-%d", program, os.Getpid())
}
