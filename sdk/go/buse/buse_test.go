// Tests of the API of BUSE: options with their defaults and refusals, the order of callbacks, and
// flushes. The bytes of a host's packets come from mockhost. Not here: chunks and their order
// (sawmill/chunk_test.go).

package buse

import (
	"errors"
	"runtime"
	"strings"
	"testing"

	"github.com/asch/buse/lib/go/buse/internal/mockhost"
)

// recorder is a driver that records its calls.
type recorder struct {
	calls chan string
	read  func(sector, length int64, chunk []byte) error
	write func(writes int64, chunk []byte) error
}

func (r recorder) BuseRead(sector, length int64, chunk []byte) error {
	return r.read(sector, length, chunk)
}
func (r recorder) BuseWrite(writes int64, chunk []byte) error { return r.write(writes, chunk) }
func (r recorder) BusePreRun()                                { r.calls <- "pre-run" }
func (r recorder) BusePostRemove()                            { r.calls <- "post-remove" }

var fine = Options{
	Durable: true, WriteChunkSize: 65536, BlockSize: 4096,
	WriteShmSize: 1 << 20, ReadShmSize: 1 << 20,
	Size: 1 << 30, CollisionArea: 1 << 20, QueueDepth: 8, Threads: 1,
}

const effect = "mode=batch\nwrite_chunk_size=65536\nmetadata_bytes=512\n" +
	"collision_area_size=1048576\n"

// running is a running device on a mock host, with its HELLO.
func running(
	t *testing.T, rw BuseReadWriter, o Options,
) (*mockhost.Driver, *Buse, string, chan struct{}) {
	t.Helper()
	host := mockhost.New(t)
	t.Setenv("SAWMILL_DRIVER", host.Path)
	came, hello := make(chan *mockhost.Driver, 1), make(chan string, 1)
	go func() {
		driver, text := host.Accept()
		driver.Welcome(effect)
		hello <- text
		came <- driver
	}()
	device, err := New(rw, o)
	if err != nil {
		t.Fatal(err)
	}
	over := make(chan struct{})
	go func() {
		device.Run()
		close(over)
	}()
	return <-came, &device, <-hello, over
}

func Test_options_that_do_not_go_together_are_refused_with_the_messages_of_buse_go(t *testing.T) {
	for _, c := range []struct {
		text   string
		change func(o *Options)
	}{
		{"Not enough memory!", func(o *Options) { o.ReadShmSize = 1 << 60 }},
		{"Write buffer size has to be a multiple of chunk size!",
			func(o *Options) { o.WriteChunkSize = 3 << 16 }},
		{"Write buffer size has to be a multiple of chunk size!",
			func(o *Options) { o.WriteChunkSize = 0 }},
		{"Block size has to 512 or 4096!", func(o *Options) { o.BlockSize = 1024 }},
		{"Minimal IO has to be at least a block size and a power of 2!",
			func(o *Options) { o.IOMin = 512 }},
		{"Minimal IO has to be at least a block size and a power of 2!",
			func(o *Options) { o.IOMin = 12288 }},
		{"Optimal IO has to be at least a block size and a power of 2!",
			func(o *Options) { o.IOOpt = 6 << 10 }},
	} {
		o := fine
		c.change(&o)
		if _, err := New(recorder{}, o); err == nil || err.Error() != c.text {
			t.Errorf("%v, expected %s", err, c.text)
		}
	}
}

func Test_options_have_the_defaults_of_buse_go(t *testing.T) {
	o, err := Options{
		BlockSize: 4096, WriteChunkSize: 65536, WriteShmSize: 65536, Threads: 1 << 20,
	}.checked()
	if err != nil {
		t.Fatal(err)
	}
	cpus := runtime.NumCPU()
	if o.Threads != cpus || o.CPUsPerNode != cpus || o.IOMin != 4096 || o.IOOpt != 4096 {
		t.Fatalf("%+v", o)
	}
}

func Test_callbacks_get_blocks_and_whole_chunks_between_pre_run_and_post_remove(t *testing.T) {
	calls := make(chan string, 4)
	rw := recorder{
		calls: calls,
		read: func(sector, length int64, chunk []byte) error {
			if sector != 3 || length != 2 || len(chunk) != 8192 {
				t.Error("read", sector, length, len(chunk))
			}
			chunk[0] = 7
			return nil
		},
		write: func(writes int64, chunk []byte) error {
			if writes != 2 || len(chunk) != 65536 || chunk[0] != 9 {
				t.Error("write", writes, len(chunk), chunk[0])
			}
			return nil
		},
	}
	driver, device, hello, over := running(t, rw, fine)
	for _, line := range []string{
		"mode=batch\n", "hw_queues=1\n", "collision_area_size=1048576\n", "size=1073741824\n",
	} {
		if !strings.Contains(hello, line) {
			t.Errorf("HELLO %q lacks %q", hello, line)
		}
	}
	if strings.Contains(hello, "weak_flush") {
		t.Error("a durable device has no weak flush")
	}
	driver.Memory[0][65536] = 9
	driver.Memory[1][4096] = 1
	driver.Memory[1][5000] = 1
	driver.Command(0, mockhost.Command{
		Kind: mockhost.Chunk, Number: 1, Offset: 65536, Length: 9000, Entries: 2,
	})
	driver.Command(1, mockhost.Command{
		Kind: mockhost.Read, Number: 2, Address: 3 * 4096, Length: 8192, Offset: 4096,
	})
	for lane := range driver.Lanes {
		if _, errno, err := driver.Answer(lane); errno != 0 || err != nil {
			t.Fatal(errno, err)
		}
	}
	if driver.Memory[1][4096] != 7 || driver.Memory[1][5000] != 0 {
		t.Fatal("what the callback leaves alone is zeroes")
	}
	if err := device.RemoveDevice(); err == nil {
		t.Fatal("a device that runs is not removed")
	}
	if err := device.StopDevice(); err != nil {
		t.Fatal(err)
	}
	if kind, text := driver.Receive(); kind != mockhost.Leave || text != "outcome=ended\n" {
		t.Fatal(kind, text)
	}
	driver.End("ended")
	<-over
	if err := device.RemoveDevice(); err != nil {
		t.Fatal(err)
	}
	if first, last := <-calls, <-calls; first != "pre-run" || last != "post-remove" {
		t.Fatal(first, last)
	}
}

func Test_an_error_of_a_callback_is_answered_as_one(t *testing.T) {
	rw := recorder{
		calls: make(chan string, 4),
		read:  func(int64, int64, []byte) error { return errors.New("no") },
		write: func(int64, []byte) error { panic("a bug") },
	}
	driver, _, _, over := running(t, rw, fine)
	driver.Command(0, mockhost.Command{Kind: mockhost.Chunk, Number: 1})
	driver.Command(1, mockhost.Command{Kind: mockhost.Read, Number: 2, Length: 4096})
	for lane := range driver.Lanes {
		if _, errno, err := driver.Answer(lane); errno != 5 || err != nil {
			t.Fatal(errno, err)
		}
	}
	driver.End("ended")
	<-over
}

func Test_a_flush_of_a_durable_device_waits_for_its_chunks(t *testing.T) {
	goOn := make(chan struct{})
	rw := recorder{
		calls: make(chan string, 4), write: func(int64, []byte) error { <-goOn; return nil },
	}
	driver, _, _, over := running(t, rw, fine)
	driver.Command(0,
		mockhost.Command{Kind: mockhost.Chunk, Number: 1},
		mockhost.Command{Kind: mockhost.Flush, Number: 2})
	close(goOn)
	for number := uint64(1); number <= 2; number++ {
		if n, errno, err := driver.Answer(0); n != number || errno != 0 || err != nil {
			t.Fatal(n, errno, err)
		}
	}
	driver.End("ended")
	<-over
}

func Test_a_device_that_is_not_durable_has_a_weak_flush(t *testing.T) {
	o := fine
	o.Durable = false
	if facts := o.facts(); facts.Get("weak_flush") != "1" {
		t.Fatal(facts)
	}
}
