// Package driver speaks the protocol of docs/format/driver.md from a driver's side: control
// packets, commands, answers, the sockets and shared memory of queues, and starting a host.
//
// Invariants: every command is answered exactly once; memory stays mapped until no callback runs
// any more; what breaks the protocol ends the session with an error that says what it was.
//
// Two modules use it: sawmill, and buse through a symbolic link. So it imports nothing of ours and
// keeps to the language of Go 1.16, which the second one needs. Not here: what a device looks like
// to its author.
package driver
