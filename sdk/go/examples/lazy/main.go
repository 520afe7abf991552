// lazy URL FILE: a disk fetched as it is used. FILE holds the fetched bytes, FILE.map a byte for
// each block.
package main

import (
	"context"
	"errors"
	"io"
	"log"
	"os"
	"sync"

	"sawmill"
)

const block = 64 << 10

type lazy struct {
	sawmill.Device // of FILE
	source         io.ReaderAt
	file, blockMap *os.File
	sync.Mutex     // of blockMap
}

// fetch gets what FILE lacks of a range. A block counts when it is on the disk.
func (l *lazy) fetch(off int64, length int) (err error) {
	l.Lock()
	defer l.Unlock()
	for n := off / block; n*block < off+int64(length) && err == nil; n++ {
		state := make([]byte, 1)
		if _, err = l.blockMap.ReadAt(state, n); err != nil || state[0] == 1 {
			continue
		}
		from := io.NewSectionReader(l.source, n*block, block)
		_, err = io.Copy(io.NewOffsetWriter(l.file, n*block), from)
		if err = errors.Join(err, l.file.Sync()); err == nil {
			_, err = l.blockMap.WriteAt([]byte{1}, n)
		}
	}
	return err
}

func (l *lazy) ReadAt(ctx context.Context, p []byte, off int64) error {
	return errors.Join(l.fetch(off, len(p)), l.Device.ReadAt(ctx, p, off))
}

func (l *lazy) WriteAt(ctx context.Context, p []byte, off int64) error {
	return errors.Join(l.fetch(off, len(p)), l.Device.WriteAt(ctx, p, off))
}

func (l *lazy) Flush(context.Context) error { return errors.Join(l.file.Sync(), l.blockMap.Sync()) }

func main() {
	source, err := sawmill.OpenHTTP(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	file, _ := os.OpenFile(os.Args[2], os.O_RDWR|os.O_CREATE, 0o600)
	blockMap, _ := os.OpenFile(os.Args[2]+".map", os.O_RDWR|os.O_CREATE, 0o600)
	err = errors.Join(file.Truncate(source.Size), blockMap.Truncate(source.Size/block+1))
	if err != nil {
		log.Fatal(err)
	}
	under := sawmill.FromReaderWriterAt(file, file)
	device := lazy{Device: under, source: source, file: file, blockMap: blockMap}
	sawmill.Main(&device, sawmill.Options{Size: source.Size})
}
