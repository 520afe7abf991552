// file PATH [SIZE]: a file, or another disk, as a disk. A missing file is created, with SIZE.
package main

import (
	"io"
	"log"
	"os"

	"sawmill"
)

func main() {
	if len(os.Args) < 2 {
		log.Fatal("usage: file PATH [SIZE]")
	}
	file, err := os.OpenFile(os.Args[1], os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		log.Fatal(err)
	}
	size, err := file.Seek(0, io.SeekEnd) // works for disks too
	if err == nil && len(os.Args) > 2 && size == 0 {
		if size, err = sawmill.ParseSize(os.Args[2]); err == nil {
			err = file.Truncate(size)
		}
	}
	if err != nil {
		log.Fatal(err)
	}
	// A file has a method Sync: that is the flush.
	device := sawmill.FromReaderWriterAt(file, file)
	sawmill.Main(device, sawmill.Options{Size: size})
}
