package sawmill

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"
	"syscall"
)

// Main is the end of a driver's main function: it prints where the device is, when it starts the
// host itself, and serves until the device has ended, which SIGINT and SIGTERM ask for. It exits
// with 1 and a line of the log when something went wrong.
func Main(device Device, options Options) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	handle, err := Start(ctx, device, options)
	if err != nil {
		log.Fatal(err)
	}
	if handle.Started() {
		doors, _ := handle.Doors(ctx)
		for _, door := range doors {
			fmt.Println(door)
		}
	}
	if err := handle.Wait(); err != nil {
		log.Fatal(err)
	}
}
