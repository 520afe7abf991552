// Package sawmill turns Go programs into block devices: a driver answers reads and writes, and the
// device is available as a disk (ublk), over NBD, as a file (FUSE) or to a virtual machine
// (vhost-user).
//
//	disk, _ := os.OpenFile("disk.img", os.O_RDWR, 0)
//	device := sawmill.FromReaderWriterAt(disk, disk)
//	err := sawmill.Serve(ctx, device, sawmill.Options{Size: 64 << 20})
//
// A host, `sawmill run`, holds the device and outlives this process, which may be replaced or
// restarted while the device is in use. docs/guide/driver-go.md is the guide, docs/format/driver.md
// the protocol.
//
// Invariants: a slice passed to a callback is shared memory and valid only until the callback
// returns; an error that is a syscall.Errno is the errno of its request (docs/guide/doors.md says
// what users see of it), other errors become EIO and a line in the log; a panic of a callback fails
// only its request.
//
// Not here: the bytes on the socket (internal/driver).
package sawmill
