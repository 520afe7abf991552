// A host as a child process: which program it is, how it starts, and where its socket is. Not here:
// the packets on that socket (attach.go).

package driver

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// The interval of checks whether a starting host listens.
const checkInterval = 5 * time.Millisecond

// Host is a program `sawmill run` that was started here. It outlives this process.
type Host struct {
	Socket  string
	process *os.Process
	ended   chan struct{}
}

// Program is the program of a host: $SAWMILL, else sawmill on the path.
func Program() string {
	if program := os.Getenv("SAWMILL"); program != "" {
		return program
	}
	return "sawmill"
}

// DefaultDoors are those of $SAWMILL_DOORS, separated by spaces; else ublk for root where the
// kernel has it; else none, which means an NBD socket.
func DefaultDoors() []string {
	if doors := strings.Fields(os.Getenv("SAWMILL_DOORS")); len(doors) > 0 {
		return doors
	}
	if _, err := os.Stat("/dev/ublk-control"); err == nil && os.Geteuid() == 0 {
		return []string{"ublk"}
	}
	return nil
}

// StartHost starts a host in a session of its own and waits until drivers can connect.
func StartHost(ctx context.Context, name string, doors []string) (*Host, error) {
	arguments := []string{"run", "--json", "--name", name}
	for _, door := range doors {
		arguments = append(arguments, "--door", door)
	}
	// A file, not a pipe: the host still writes when this process is dead.
	output, err := os.CreateTemp("", "sawmill-host-")
	if err != nil {
		return nil, fmt.Errorf("cannot create a file for the output of the host: %w", err)
	}
	defer output.Close()
	defer os.Remove(output.Name())
	command := exec.Command(Program(), arguments...)
	command.Stdout, command.Stderr = output, os.Stderr
	command.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := command.Start(); err != nil {
		text := "cannot start a host: install sawmill or set SAWMILL to its path: %w"
		return nil, fmt.Errorf(text, err)
	}
	host := &Host{process: command.Process, ended: make(chan struct{})}
	go func() {
		_ = command.Wait()
		close(host.ended)
	}()
	ticker := time.NewTicker(checkInterval)
	defer ticker.Stop()
	for {
		if host.Socket, err = readSocket(output.Name()); host.Socket != "" || err != nil {
			return host, err
		}
		select {
		case <-ctx.Done():
			host.Stop()
			return nil, ctx.Err()
		case <-host.ended:
			text := "the host did not start (%v): its reason is above"
			return nil, fmt.Errorf(text, command.ProcessState)
		case <-ticker.C:
		}
	}
}

// readSocket finds the line with the socket where drivers connect.
func readSocket(path string) (string, error) {
	file, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		var line struct{ Event, Socket string }
		if json.Unmarshal(lines.Bytes(), &line) == nil && line.Event == "listening" {
			return line.Socket, nil
		}
	}
	return "", nil
}

// Stop ends a host that has no device yet, or ends its device cleanly.
func (h *Host) Stop() {
	_ = h.process.Signal(syscall.SIGTERM)
	h.Wait()
}

// Wait waits until the host has ended.
func (h *Host) Wait() { <-h.ended }

// SocketOf finds the driver socket of a running device.
func SocketOf(ctx context.Context, name string) (string, error) {
	output, err := exec.CommandContext(ctx, Program(), "driver", "socket", name).Output()
	if err != nil {
		var failed *exec.ExitError
		if errors.As(err, &failed) {
			return "", fmt.Errorf("device %s: %s", name, strings.TrimSpace(string(failed.Stderr)))
		}
		return "", fmt.Errorf("cannot find device %s: %w", name, err)
	}
	return strings.TrimSpace(string(output)), nil
}
