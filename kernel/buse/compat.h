/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Differences between the kernels that this module compiles on: 6.1 and later.
 *
 * Invariant: no other file asks for LINUX_VERSION_CODE.
 *
 * Not here: what the module does with any of this.
 */
#ifndef BUSE_COMPAT_H
#define BUSE_COMPAT_H

#include <linux/blk-mq.h>
#include <linux/blkdev.h>
#include <linux/device.h>
#include <linux/version.h>

/* Limits of a disk as we know them; sizes are bytes unless named sectors. */
struct buse_limits {
	u32 block_bytes;
	u32 io_min_bytes;
	u32 io_opt_bytes;
	u32 request_sectors_max;
	u32 discard_sectors_max;
	u32 write_zeroes_sectors_max;
	u32 secure_erase_sectors_max;
};

/* Since 6.4 a class does not name its module. */
static inline struct class *buse_class_create(const char *name)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 4, 0)
	return class_create(name);
#else
	return class_create(THIS_MODULE, name);
#endif
}

/* Flags of the tag set. Merging became the rule in 6.14. */
static inline u32 buse_tag_flags(bool no_scheduler)
{
	u32 flags = 0;

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 14, 0)
	flags |= BLK_MQ_F_SHOULD_MERGE;
	if (no_scheduler)
		flags |= BLK_MQ_F_NO_SCHED;
#else
	if (no_scheduler)
		flags |= BLK_MQ_F_NO_SCHED_BY_DEFAULT;
#endif
	return flags;
}

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 9, 0)

static inline struct gendisk *buse_alloc_disk(struct blk_mq_tag_set *set,
					      const struct buse_limits *from,
					      void *data)
{
	struct queue_limits limits = {
		.logical_block_size = from->block_bytes,
		.physical_block_size = from->block_bytes,
		.io_min = from->io_min_bytes,
		.io_opt = from->io_opt_bytes,
		.max_hw_sectors = from->request_sectors_max,
		.max_segments = USHRT_MAX,
		.max_segment_size = UINT_MAX,
		.max_hw_discard_sectors = from->discard_sectors_max,
		.discard_granularity = from->discard_sectors_max ?
				       from->block_bytes : 0,
		.max_write_zeroes_sectors = from->write_zeroes_sectors_max,
		.max_secure_erase_sectors = from->secure_erase_sectors_max,
	};
	struct gendisk *disk;

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 11, 0)
	limits.features = BLK_FEAT_WRITE_CACHE;
#endif
	disk = blk_mq_alloc_disk(set, &limits, data);
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 11, 0)
	if (!IS_ERR(disk)) {
		blk_queue_write_cache(disk->queue, true, false);
		blk_queue_flag_set(QUEUE_FLAG_NONROT, disk->queue);
	}
#endif
	return disk;
}

#else

static inline struct gendisk *buse_alloc_disk(struct blk_mq_tag_set *set,
					      const struct buse_limits *from,
					      void *data)
{
	struct gendisk *disk = blk_mq_alloc_disk(set, data);
	struct request_queue *q;

	if (IS_ERR(disk))
		return disk;
	q = disk->queue;
	blk_queue_logical_block_size(q, from->block_bytes);
	blk_queue_physical_block_size(q, from->block_bytes);
	blk_queue_io_min(q, from->io_min_bytes);
	blk_queue_io_opt(q, from->io_opt_bytes);
	blk_queue_max_hw_sectors(q, from->request_sectors_max);
	blk_queue_max_segments(q, USHRT_MAX);
	blk_queue_max_segment_size(q, UINT_MAX);
	blk_queue_max_discard_sectors(q, from->discard_sectors_max);
	if (from->discard_sectors_max)
		q->limits.discard_granularity = from->block_bytes;
	blk_queue_max_write_zeroes_sectors(q, from->write_zeroes_sectors_max);
	blk_queue_max_secure_erase_sectors(q, from->secure_erase_sectors_max);
	blk_queue_write_cache(q, true, false);
	blk_queue_flag_set(QUEUE_FLAG_NONROT, q);
	return disk;
}

#endif

#endif
