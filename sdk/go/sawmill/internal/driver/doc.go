// Package driver implements the driver's side of the protocol of docs/format/driver.md: control
// packets, commands, answers, the sockets and shared memory of queues, and starting a host.
//
// Invariants: every command is answered exactly once; memory stays mapped until no callback runs
// any more; a violation of the protocol ends the connection with an error that describes it.
//
// Two modules use it: sawmill, and buse through a symbolic link. So it imports no other package of
// ours and uses only the language of Go 1.16, which buse requires. Not here: the interface for
// authors of devices.
package driver
