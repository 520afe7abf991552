// SPDX-License-Identifier: GPL-2.0
/*
 * Defaults of the attributes, and whether their values go together.
 *
 * Invariants: values are judged all at once when the power goes on, so the
 * order in which they were written does not matter. What passes cannot
 * overflow: every product of sizes below is bounded here.
 *
 * Not here: reading and writing attributes (config.c).
 */
#define pr_fmt(fmt) "buse: " fmt

#include <linux/cpumask.h>
#include <linux/mm.h>
#include <linux/sizes.h>

#include "buse.h"

#define BUSE_CHUNK_BYTES_MAX	(1ULL << 30)
#define BUSE_SHM_BYTES_MAX	(1ULL << 32)
#define BUSE_AREA_BYTES_MAX	(1ULL << 40)
#define BUSE_IO_BYTES_MAX	(1ULL << 30)
#define BUSE_SIZE_BYTES_MAX	(1ULL << 62)
#define BUSE_QUEUES_MAX		4096ULL
#define BUSE_QUEUE_DEPTH_MAX	10240ULL

/* The range of an attribute. */
struct buse_rule {
	const char *name;
	size_t offset;
	u64 low;
	u64 high;
	/* 0: a block, which is the lowest value then. */
	u64 unit;
};

#define BUSE_RULE(name, low, high, unit)				\
	{ #name, offsetof(struct buse_settings, name), low, high, unit }

static const struct buse_rule buse_rules[] = {
	BUSE_RULE(size, 0, BUSE_SIZE_BYTES_MAX, 0),
	BUSE_RULE(io_min, 0, BUSE_IO_BYTES_MAX, 0),
	BUSE_RULE(io_opt, 0, BUSE_IO_BYTES_MAX, 0),
	BUSE_RULE(collision_area_size, 0, BUSE_AREA_BYTES_MAX, 0),
	/* Two pages: one is left beside the records. */
	BUSE_RULE(write_chunk_size, 2 * PAGE_SIZE, BUSE_CHUNK_BYTES_MAX,
		  PAGE_SIZE),
	/* A page, which is the shortest limit that a disk may have. */
	BUSE_RULE(read_shm_size, PAGE_SIZE, BUSE_SHM_BYTES_MAX, 512),
	BUSE_RULE(hw_queues, 1, BUSE_QUEUES_MAX, 1),
	BUSE_RULE(queue_depth, 1, BUSE_QUEUE_DEPTH_MAX, 1),
	BUSE_RULE(no_scheduler, 0, 1, 1),
	BUSE_RULE(can_write_zeroes, 0, 1, 1),
	BUSE_RULE(can_discard, 0, 1, 1),
	BUSE_RULE(can_secure_erase, 0, 1, 1),
	/* Kernels have no such request any more. */
	BUSE_RULE(can_write_same, 0, 0, 1),
	BUSE_RULE(chunk_age_ms, 0, BUSE_TIME_MS_MAX, 1),
	BUSE_RULE(death_timeout_ms, 0, BUSE_TIME_MS_MAX, 1),
};

void buse_settings_init(struct buse_settings *settings)
{
	*settings = (struct buse_settings){
		.size = SZ_1G,
		.blocksize = 512,
		.collision_area_size = 4096,
		.write_chunk_size = SZ_2M,
		.write_shm_size = SZ_32M,
		.read_shm_size = SZ_32M,
		.hw_queues = 1,
		.queue_depth = 64,
		.no_scheduler = 1,
		.on_death = BUSE_ON_DEATH_WAIT,
	};
}

/* Whether a value is in its range and a multiple of its unit; logs if not. */
static int buse_value_check(u32 index, const char *name, u64 value, u64 low,
			    u64 high, u64 unit)
{
	if (value >= low && value <= high &&
	    value == div64_u64(value, unit) * unit)
		return 0;
	if (unit == 1)
		pr_err("buse%u: %s=%llu is not from %llu to %llu\n", index,
		       name, value, low, high);
	else
		pr_err("buse%u: %s=%llu is not a multiple of %llu from %llu to %llu\n",
		       index, name, value, unit, low, high);
	return -EINVAL;
}

/* Every value by itself. */
static int buse_rules_check(u32 index, const struct buse_settings *s)
{
	const struct buse_rule *rule;
	u64 value, unit;
	int err = 0;
	size_t n;

	for (n = 0; n < ARRAY_SIZE(buse_rules) && !err; n++) {
		rule = &buse_rules[n];
		unit = rule->unit ? rule->unit : s->blocksize;
		value = *(const u64 *)((const u8 *)s + rule->offset);
		err = buse_value_check(index, rule->name, value,
				       rule->unit ? rule->low : unit,
				       rule->high, unit);
	}
	return err;
}

/* Values that the prototype mended in silence, and that have one sense. */
static void buse_settings_complete(struct buse_settings *s)
{
	if (!s->io_min)
		s->io_min = s->blocksize;
	if (!s->io_opt)
		s->io_opt = s->blocksize;
	if (!s->collision_area_size)
		s->collision_area_size = 4096;
	if (!s->queue_depth)
		s->queue_depth = 64;
}

static void buse_layout_fill(const struct buse_settings *s,
			     struct buse_layout *layout)
{
	u64 records = buse_records_max(s->write_chunk_size, s->blocksize);
	u64 data = buse_chunk_data_bytes(s->write_chunk_size, s->blocksize);
	u64 slots = s->read_shm_size / BUSE_SLOT_BYTES;
	u64 request = min(data, slots * BUSE_SLOT_BYTES);

	/* A read or a write fits into a chunk and into the read memory. */
	request -= request % s->blocksize;
	*layout = (struct buse_layout){
		.queues = min_t(u64, s->hw_queues, num_online_cpus()),
		.records_max = records,
		.chunk_data_bytes = data,
		.chunks = div64_u64(s->write_shm_size, s->write_chunk_size),
		.slots = slots,
		.areas_slots = buse_areas_slots(s->size, s->collision_area_size,
						BUSE_AREAS_SLOTS_MAX),
		.area_sectors = s->collision_area_size / BUSE_SECTOR_BYTES,
		.request_sectors_max = request / BUSE_SECTOR_BYTES,
		.range_sectors_max =
			buse_range_sectors_max(records,
					       s->collision_area_size /
					       BUSE_SECTOR_BYTES,
					       round_down(UINT_MAX >> 9, 8)),
	};
}

/* Whether the memory of all queues can exist at all. */
static int buse_memory_check(u32 index, const struct buse_settings *s,
			     const struct buse_layout *layout)
{
	u64 bytes = layout->queues * (s->write_shm_size + s->read_shm_size);
	struct sysinfo info;

	si_meminfo(&info);
	if (bytes / info.mem_unit <= info.totalram)
		return 0;
	pr_err("buse%u: no memory for %u times write_shm_size=%llu and read_shm_size=%llu\n",
	       index, layout->queues, s->write_shm_size, s->read_shm_size);
	return -ENOMEM;
}

int buse_size_check(u32 index, const struct buse_settings *s, u64 size)
{
	return buse_value_check(index, "size", size, s->blocksize,
				BUSE_SIZE_BYTES_MAX, s->blocksize);
}

/*
 * Completes the settings and derives the layout from them; or says in the
 * kernel's log which attribute has which wrong value.
 */
int buse_settings_check(u32 index, struct buse_settings *s,
			struct buse_layout *layout)
{
	int err;

	if (s->blocksize != 512 && s->blocksize != 4096) {
		pr_err("buse%u: blocksize=%llu is neither 512 nor 4096\n",
		       index, s->blocksize);
		return -EINVAL;
	}
	buse_settings_complete(s);
	err = buse_rules_check(index, s);
	if (!err)
		err = buse_value_check(index, "write_shm_size",
				       s->write_shm_size, s->write_chunk_size,
				       BUSE_SHM_BYTES_MAX, s->write_chunk_size);
	if (err)
		return err;
	buse_layout_fill(s, layout);
	return buse_memory_check(index, s, layout);
}
