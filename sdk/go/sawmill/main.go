// The main function of a simple driver: serve one device until a signal or its end. Not here:
// anything that a program may want to decide (serve.go).

package sawmill

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"
	"syscall"
)

// Main is the end of a driver's main function: if it starts the host itself, it prints where the
// device is. It serves until the device has ended; SIGINT and SIGTERM end it. On an error it logs a
// line and exits with 1.
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
