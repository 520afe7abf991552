// mirror A B: two files or disks of one size. A holds the bytes, B each of them XOR 0xFF;
// a read checks both.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"sync"

	"sawmill"
)

type mirror struct {
	half [2]*os.File
	mu   sync.RWMutex // no read sees half a write
}

func (m *mirror) ReadAt(_ context.Context, p []byte, off int64) error {
	m.mu.RLock()
	defer m.mu.RUnlock()
	q := make([]byte, len(p))
	_, errA := m.half[0].ReadAt(p, off)
	_, errB := m.half[1].ReadAt(q, off)
	for i := range p {
		if p[i]^q[i] != 0xff && errA == nil && errB == nil {
			return fmt.Errorf("the halves differ at byte %d", off+int64(i))
		}
	}
	return errors.Join(errA, errB)
}

func (m *mirror) WriteAt(_ context.Context, p []byte, off int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	q := append([]byte(nil), p...)
	for i := range q {
		q[i] ^= 0xff
	}
	_, errA := m.half[0].WriteAt(p, off)
	_, errB := m.half[1].WriteAt(q, off)
	return errors.Join(errA, errB)
}

func (m *mirror) Flush(context.Context) error {
	return errors.Join(m.half[0].Sync(), m.half[1].Sync())
}

func main() {
	m, size := mirror{}, [2]int64{} // of what cannot be opened: 0
	for i := range m.half {
		m.half[i], _ = os.OpenFile(os.Args[i+1], os.O_RDWR, 0)
		size[i], _ = m.half[i].Seek(0, io.SeekEnd)
	}
	if size[0] != size[1] || size[0] == 0 {
		log.Fatalf("%v must have one size and have %d and %d bytes", os.Args[1:], size[0], size[1])
	}
	sawmill.Main(&m, sawmill.Options{Size: size[0]})
}
