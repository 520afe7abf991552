// Tests of a served device against a mock host: payloads, errors, the end, refusals and breaches.
// Not here: chunks (chunk_test.go).

package sawmill

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"syscall"
	"testing"

	"sawmill/internal/mockhost"
)

// disk is a device whose callbacks are provided by a test.
type disk struct {
	read, write func(p []byte, off int64) error
}

func (d disk) ReadAt(_ context.Context, p []byte, off int64) error  { return d.read(p, off) }
func (d disk) WriteAt(_ context.Context, p []byte, off int64) error { return d.write(p, off) }

var silent = slog.New(slog.NewTextHandler(io.Discard, nil))

// attached is a device on a mock host, with its HELLO.
func attached(
	t *testing.T, device Device, options Options, effect string,
) (*mockhost.Driver, *Handle, string) {
	t.Helper()
	host := mockhost.New(t)
	t.Setenv("SAWMILL_DRIVER", host.Path)
	type came struct {
		driver *mockhost.Driver
		hello  string
	}
	accepted := make(chan came, 1)
	go func() {
		driver, hello := host.Accept()
		driver.Welcome(effect)
		accepted <- came{driver, hello}
	}()
	options.Logger = silent
	handle, err := Start(context.Background(), device, options)
	if err != nil {
		t.Fatal(err)
	}
	got := <-accepted
	return got.driver, handle, got.hello
}

func expect(t *testing.T, driver *mockhost.Driver, lane int, number uint64, errno syscall.Errno) {
	t.Helper()
	n, e, err := driver.Answer(lane)
	if err != nil || n != number || e != int32(errno) {
		t.Fatalf("answer %d errno %d (%v), expected %d errno %d", n, e, err, number, errno)
	}
}

func Test_payloads_are_slices_of_the_shared_memory(t *testing.T) {
	payload := ""
	device := disk{
		read: func(p []byte, off int64) error {
			copy(p, fmt.Sprintf("%d@%d", len(p), off))
			return nil
		},
		write: func(p []byte, off int64) error { payload = string(p); return nil },
	}
	driver, handle, _ := attached(t, device, Options{}, "mode=plain\n")
	copy(driver.Memory[0][4096:], "written")
	driver.Command(0, mockhost.Command{
		Kind: mockhost.Write, Number: 7, Address: 512, Length: 7, Offset: 4096,
	})
	expect(t, driver, 0, 7, 0)
	driver.Command(0, mockhost.Command{
		Kind: mockhost.Read, Number: 8, Address: 1024, Length: 8, Offset: 8192,
	})
	expect(t, driver, 0, 8, 0)
	if got := string(driver.Memory[0][8192:8200]); payload != "written" || got != "8@1024\x00\x00" {
		t.Fatalf("wrote %q, read %q", payload, got)
	}
	driver.End("ended")
	if err := handle.Wait(); err != nil || handle.Replaced() {
		t.Fatal(err)
	}
}

func Test_an_errno_is_that_errno_and_anything_else_is_eio(t *testing.T) {
	outcomes := map[int64]func() error{
		0:    func() error { return fmt.Errorf("full: %w", syscall.ENOSPC) },
		512:  func() error { return errors.New("no number") },
		1024: func() error { panic("a bug") },
	}
	device := disk{read: func(_ []byte, off int64) error { return outcomes[off]() }}
	driver, handle, _ := attached(t, device, Options{}, "mode=plain\n")
	for off, errno := range map[uint64]syscall.Errno{
		0: syscall.ENOSPC, 512: syscall.EIO, 1024: syscall.EIO,
	} {
		read := mockhost.Command{Kind: mockhost.Read, Number: off, Address: off, Length: 512}
		driver.Command(0, read)
		expect(t, driver, 0, off, errno)
	}
	driver.End("replaced")
	if err := handle.Wait(); err != nil || !handle.Replaced() {
		t.Fatal("the connection goes on after errors, and ends in order:", err)
	}
}

func Test_commands_run_side_by_side_and_end_waits_for_them(t *testing.T) {
	met := make(chan struct{})
	device := disk{
		read:  func([]byte, int64) error { met <- struct{}{}; return nil },
		write: func([]byte, int64) error { <-met; return nil },
	}
	driver, handle, _ := attached(t, device, Options{}, "mode=plain\n")
	driver.Command(0,
		mockhost.Command{Kind: mockhost.Write, Number: 1, Length: 512},
		mockhost.Command{Kind: mockhost.Read, Number: 2, Length: 512},
		mockhost.Command{Kind: mockhost.End})
	for range 2 {
		if _, errno, err := driver.Answer(0); errno != 0 || err != nil {
			t.Fatal(errno, err)
		}
	}
	if _, _, err := driver.Answer(0); err == nil {
		t.Fatal("END is answered by closing alone")
	}
	driver.Control.Close()
	if err := handle.Wait(); err != nil {
		t.Fatal(err)
	}
}

func Test_an_option_that_is_not_given_is_not_in_hello(t *testing.T) {
	options := Options{Size: 4096, FailOnDeath: true}
	driver, handle, hello := attached(t, disk{}, options, "mode=plain\n")
	for _, line := range strings.Split(strings.TrimSpace(hello), "\n") {
		name, _, _ := strings.Cut(line, "=")
		if !strings.Contains("protocol program size on_death", name) {
			t.Errorf("HELLO has %s", line)
		}
	}
	driver.End("ended")
	_ = handle.Wait()
}

func Test_a_breach_by_the_host_is_named(t *testing.T) {
	for expected, command := range map[string]mockhost.Command{
		"outside":      {Kind: mockhost.Read, Length: 4096, Offset: 1<<20 - 512},
		"unknown kind": {Kind: 99},
		"beyond 2^63":  {Kind: mockhost.Write, Address: 1 << 63},
	} {
		driver, handle, _ := attached(t, disk{}, Options{}, "mode=plain\n")
		driver.Command(0, command)
		if err := handle.Wait(); err == nil || !strings.Contains(err.Error(), expected) {
			t.Errorf("%v, expected %q", err, expected)
		}
	}
	driver, handle, _ := attached(t, disk{}, Options{}, "mode=plain\n")
	driver.Raw(0, make([]byte, 65))
	if err := handle.Wait(); err == nil || !strings.Contains(err.Error(), "a packet of 65 bytes") {
		t.Error(err)
	}
	driver, handle, _ = attached(t, disk{}, Options{}, "mode=plain\n")
	driver.Send(77, "")
	if err := handle.Wait(); err == nil || !strings.Contains(err.Error(), "unknown kind 77") {
		t.Error(err)
	}
}

func Test_a_host_that_dies_is_an_error(t *testing.T) {
	driver, handle, _ := attached(t, disk{}, Options{}, "mode=plain\n")
	driver.Lanes[0].Close()
	driver.Control.Close()
	if err := handle.Wait(); err == nil || !strings.Contains(err.Error(), "the host is gone") {
		t.Fatal(err)
	}
}

func Test_a_refused_driver_receives_the_reason(t *testing.T) {
	for expected, script := range map[string]func(d *mockhost.Driver){
		"busy as can be": func(d *mockhost.Driver) {
			d.Send(mockhost.Refused, "errno=16\nmessage=busy as can be\n")
		},
		"speaks protocol": func(d *mockhost.Driver) { d.Send(mockhost.Welcome, "protocol=2\n") },
		"before WELCOME":  func(d *mockhost.Driver) { d.Send(mockhost.Attached, "") },
		"0 descriptors": func(d *mockhost.Driver) {
			d.Send(2, "protocol=1\n")
			d.Send(3, "queue=0\nmemory_bytes=1\n")
		},
		"sent 0 queue": func(d *mockhost.Driver) {
			d.Send(2, "protocol=1\nhw_queues=2\n")
			d.Send(4, "")
		},
		"with the line":      func(d *mockhost.Driver) { d.Send(mockhost.Welcome, "nonsense\n") },
		"the host hung up":   func(d *mockhost.Driver) { d.Control.Close() },
		"kind 7 before ATTA": func(d *mockhost.Driver) { d.Send(mockhost.Finish, "") },
	} {
		host := mockhost.New(t)
		t.Setenv("SAWMILL_DRIVER", host.Path)
		go func() {
			driver, _ := host.Accept()
			script(driver)
		}()
		_, err := Start(context.Background(), disk{}, Options{})
		if err == nil || !strings.Contains(err.Error(), expected) {
			t.Errorf("%v, expected %q", err, expected)
		}
		if strings.Contains(expected, "busy") && !errors.Is(err, syscall.EBUSY) {
			t.Errorf("%v is not EBUSY", err)
		}
	}
}

func Test_a_context_that_ends_takes_leave_and_drains(t *testing.T) {
	host := mockhost.New(t)
	t.Setenv("SAWMILL_DRIVER", host.Path)
	left := make(chan string, 1)
	go func() {
		driver, _ := host.Accept()
		driver.Welcome("mode=plain\n")
		driver.Send(mockhost.Doors, "door=nbd somewhere\n")
		_, text := driver.Receive()
		left <- text
		driver.Command(0, mockhost.Command{Kind: mockhost.Read, Number: 1, Length: 512})
		if _, errno, err := driver.Answer(0); errno != 0 || err != nil {
			t.Error("what comes before END is still done:", errno, err)
		}
		driver.End("ended")
	}()
	ctx, cancel := context.WithCancel(context.Background())
	device := FromReaderWriterAt(strings.NewReader("short"), nil)
	handle, err := Start(ctx, device, Options{Logger: silent})
	if err != nil {
		t.Fatal(err)
	}
	if doors, err := handle.Doors(ctx); err != nil || doors[0] != "nbd somewhere" {
		t.Fatal(doors, err)
	}
	cancel()
	if err := handle.Wait(); err != nil || <-left != "outcome=ended\n" {
		t.Fatal(err)
	}
}

func Test_sizes_are_read_as_people_write_them(t *testing.T) {
	for text, size := range map[string]int64{"512": 512, "64M": 64 << 20, "1T": 1 << 40} {
		if got, err := ParseSize(text); got != size || err != nil {
			t.Errorf("%s: %d %v", text, got, err)
		}
	}
	for _, text := range []string{"", "M", "-1", "0", "9999999T", "1.5G"} {
		if got, err := ParseSize(text); err == nil {
			t.Errorf("%q is %d", text, got)
		}
	}
}
