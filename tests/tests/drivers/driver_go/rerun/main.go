// rerun NAME PATH: becomes the driver of a device that runs, with the bytes of a file.
package main

import (
	"context"
	"log"
	"os"

	"sawmill"
)

func main() {
	file, err := os.OpenFile(os.Args[2], os.O_RDWR, 0)
	if err != nil {
		log.Fatal(err)
	}
	device := sawmill.FromReaderWriterAt(file, file)
	handle, err := sawmill.Rerun(context.Background(), os.Args[1], device, sawmill.Options{})
	if err != nil {
		log.Fatal(err)
	}
	if err := handle.Wait(); err != nil {
		log.Fatal(err)
	}
}
