/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Arithmetic of extents, collision areas and tokens.
 *
 * Invariant: pure functions. They neither lock nor allocate, and compile
 * outside the kernel, where "make check" tests them.
 *
 * Not here: which extents exist (chunk.c), who waits for them (read.c).
 */
#ifndef BUSE_HAZARD_H
#define BUSE_HAZARD_H

#ifdef __KERNEL__
#include <linux/math64.h>
#include <linux/types.h>
#else
#include "hazard_host.h"
#endif

#define BUSE_SECTOR_BYTES	512ULL
#define BUSE_RECORD_BYTES	32ULL

/* A run of sectors of 512 bytes on the disk. */
struct buse_extent {
	u64 sector;
	u64 sectors;
};

bool buse_extents_overlap(const struct buse_extent *a,
			  const struct buse_extent *b);
struct buse_extent buse_first_piece(const struct buse_extent *extent,
				    u64 area_sectors);
u64 buse_pieces_count(const struct buse_extent *extent, u64 area_sectors);
u64 buse_area_index(u64 sector, u64 area_sectors, u64 mask);
u64 buse_areas_slots(u64 size_bytes, u64 area_bytes, u64 slots_max);
u64 buse_records_max(u64 chunk_bytes, u64 block_bytes);
u64 buse_chunk_data_bytes(u64 chunk_bytes, u64 block_bytes);
u64 buse_range_sectors_max(u64 records, u64 area_sectors, u64 sectors_max);
u64 buse_flush_token(u64 number);
bool buse_is_flush_token(u64 token);

#endif
