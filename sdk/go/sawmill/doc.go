// Package sawmill makes block devices of Go programs: a driver answers reads and writes, and the
// device is there for everybody as a disk (ublk), over NBD, as a file (FUSE) or for a virtual
// machine (vhost-user).
//
//	disk, _ := os.OpenFile("disk.img", os.O_RDWR, 0)
//	device := sawmill.FromReaderWriterAt(disk, disk)
//	err := sawmill.Serve(ctx, device, sawmill.Options{Size: 64 << 20})
//
// The device is held by a host, `sawmill run`; it outlives this process, which may be replaced or
// started again while the device is in use. docs/guide/driver-go.md is the way in,
// docs/format/driver.md the protocol.
//
// Invariants: a slice that a callback gets is shared memory and the callback's until it returns,
// not longer; an error that is a syscall.Errno is the errno of its request (docs/guide/doors.md
// says what users see of it), others are EIO and a line of the log; a panic of a callback fails its
// request alone.
//
// Not here: the bytes on the socket (internal/driver).
package sawmill
