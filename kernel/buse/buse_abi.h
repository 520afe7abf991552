/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * The interface between the module and a daemon: packets, records, tokens.
 *
 * Invariant: everything here is little endian and fixed; a daemon written for
 * the thesis' prototype uses the same bytes. docs/format/buse_device.md
 * describes them one by one.
 *
 * Not here: the attributes in configfs (config.c), anything inside the kernel
 * (buse.h). User space may include this file.
 */
#ifndef BUSE_ABI_H
#define BUSE_ABI_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* What read() on /dev/buse<N>-w<i> returns: a chunk, a flush or the end. */
struct buse_write_packet {
	__le64 shm_offset;
	__le64 records;
};

/* What read() on /dev/buse<N>-r<i> returns: a read or the end. */
struct buse_read_packet {
	__le64 sector;
	__le64 sectors;
	__le64 shm_offset;
};

/* One of the records at the start of a chunk. */
struct buse_record {
	__le64 sector;
	__le64 sectors;
	__le64 sequence;
	__le64 flag;
};

/* Values of buse_record.flag: numbers of the kernel's requests. */
#define BUSE_RECORD_WRITE		1
#define BUSE_RECORD_DISCARD		3
#define BUSE_RECORD_SECURE_ERASE	5
#define BUSE_RECORD_WRITE_ZEROES	9

/* A shm_offset above this, and below BUSE_END, is the token of a flush. */
#define BUSE_FLUSH_ABOVE		(1ULL << 32)
/* This shm_offset says that nothing more will come. It is not acknowledged. */
#define BUSE_END			(~0ULL)

/*
 * An acknowledgement is the __le64 shm_offset of the packet. After
 * BUSE_ACK_WITH_ERRNO with the value 1 it is this instead, until the file is
 * closed.
 */
struct buse_ack {
	__le64 token;
	/* 0, or a positive number of errno.h. */
	__le32 error;
	/* 0. */
	__le32 reserved;
};

#define BUSE_ACK_WITH_ERRNO		_IOW(0xbe, 1, __u32)

#endif
