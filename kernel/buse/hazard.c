// SPDX-License-Identifier: GPL-2.0
/*
 * Arithmetic of extents, collision areas and tokens. hazard.h has its
 * invariants.
 *
 * Not here: locks and lists.
 */
#include "hazard.h"

bool buse_extents_overlap(const struct buse_extent *a,
			  const struct buse_extent *b)
{
	/* By differences, so that an extent at the end of u64 is no problem. */
	if (a->sector <= b->sector)
		return b->sector - a->sector < a->sectors && b->sectors;
	return a->sector - b->sector < b->sectors && a->sectors;
}

/* The part of an extent that lies in the collision area where it begins. */
struct buse_extent buse_first_piece(const struct buse_extent *extent,
				    u64 area_sectors)
{
	u64 into = extent->sector -
		   div64_u64(extent->sector, area_sectors) * area_sectors;
	struct buse_extent piece = *extent;

	if (piece.sectors > area_sectors - into)
		piece.sectors = area_sectors - into;
	return piece;
}

/* How many collision areas an extent touches: it has as many records. */
u64 buse_pieces_count(const struct buse_extent *extent, u64 area_sectors)
{
	u64 last;

	if (!extent->sectors)
		return 0;
	/* By the last sector: one that ends at a border touches no more. */
	last = extent->sector + extent->sectors - 1;
	return div64_u64(last, area_sectors) -
	       div64_u64(extent->sector, area_sectors) + 1;
}

/*
 * The place of an area's counters. Disks with more areas than places share:
 * the numbers of an area still rise, only with gaps.
 */
u64 buse_area_index(u64 sector, u64 area_sectors, u64 mask)
{
	return div64_u64(sector, area_sectors) & mask;
}

/* How many places for counters a disk gets: a power of two. */
u64 buse_areas_slots(u64 size_bytes, u64 area_bytes, u64 slots_max)
{
	u64 areas = div64_u64(size_bytes - 1, area_bytes) + 1;
	u64 slots = 1;

	while (slots < areas && slots < slots_max)
		slots <<= 1;
	return slots;
}

/* How many records fit into a chunk's metadata. */
u64 buse_records_max(u64 chunk_bytes, u64 block_bytes)
{
	return div64_u64(chunk_bytes, block_bytes);
}

/* What a chunk has left for data. */
u64 buse_chunk_data_bytes(u64 chunk_bytes, u64 block_bytes)
{
	u64 records = buse_records_max(chunk_bytes, block_bytes);

	return chunk_bytes - records * BUSE_RECORD_BYTES;
}

/*
 * The longest discard whose records fit into one chunk wherever it begins:
 * it may touch one area more than it is long.
 */
u64 buse_range_sectors_max(u64 records, u64 area_sectors, u64 sectors_max)
{
	if (records < 2)
		return 0;
	if (area_sectors >= div64_u64(sectors_max, records - 1))
		return sectors_max;
	return (records - 1) * area_sectors;
}

/*
 * The token of the flush with this number: never an offset, never the end.
 * Numbers begin with 0; it takes longer than a machine lives to wrap.
 */
u64 buse_flush_token(u64 number)
{
	return (1ULL << 32) + 1 + number % ((1ULL << 63) - 1);
}

bool buse_is_flush_token(u64 token)
{
	return token > (1ULL << 32) && token != ~0ULL;
}
