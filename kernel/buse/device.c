// SPDX-License-Identifier: GPL-2.0
/*
 * Making and unmaking a device with power: tag set, queues, disk, ports.
 *
 * Invariants: a buse_device is whole or does not exist. The disk is made with
 * the power, and shown when every port is open. After buse_device_withdraw()
 * no request exists; after buse_device_forget() no disk does, and the last
 * reference frees the rest.
 *
 * Not here: when these things happen (life.c), whether values are good
 * (settings.c).
 */
#define pr_fmt(fmt) "buse: " fmt

#include <linux/blkdev.h>
#include <linux/log2.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "buse.h"
#include "compat.h"

static const struct block_device_operations buse_disk_ops = {
	.owner = THIS_MODULE,
};

static int buse_tags_create(struct buse_device *device)
{
	struct blk_mq_tag_set *set = &device->tag_set;
	int err;

	set->ops = &buse_mq_ops;
	set->nr_hw_queues = device->layout.queues;
	set->queue_depth = device->settings.queue_depth;
	set->numa_node = NUMA_NO_NODE;
	set->cmd_size = sizeof(struct buse_request);
	set->flags = buse_tag_flags(device->settings.no_scheduler);
	set->driver_data = device;
	err = blk_mq_alloc_tag_set(set);
	if (err) {
		set->tags = NULL;
		return err;
	}
	/* The block layer may want fewer. */
	device->layout.queues = min(device->layout.queues, set->nr_hw_queues);
	return 0;
}

static int buse_queues_create(struct buse_device *device)
{
	u32 n, count = device->layout.queues;
	size_t bytes = roundup_pow_of_two(array_size(count,
						     sizeof(*device->queues)));
	int err = 0;

	/* A power of two, so that the locks are aligned to cache lines. */
	device->queues = kvzalloc(bytes, GFP_KERNEL);
	if (!device->queues)
		return -ENOMEM;
	for (n = 0; n < count && !err; n++)
		err = buse_queue_init(&device->queues[n], device, n);
	return err;
}

static int buse_disk_create(struct buse_device *device)
{
	const struct buse_settings *s = &device->settings;
	const struct buse_layout *layout = &device->layout;
	u32 range = layout->range_sectors_max;
	const struct buse_limits limits = {
		.block_bytes = s->blocksize,
		.io_min_bytes = s->io_min,
		.io_opt_bytes = s->io_opt,
		.request_sectors_max = layout->request_sectors_max,
		.discard_sectors_max = s->can_discard ? range : 0,
		.write_zeroes_sectors_max = s->can_write_zeroes ? range : 0,
		.secure_erase_sectors_max = s->can_secure_erase ? range : 0,
	};
	struct gendisk *disk = buse_alloc_disk(&device->tag_set, &limits,
					       device);

	if (IS_ERR(disk))
		return PTR_ERR(disk);
	disk->fops = &buse_disk_ops;
	snprintf(disk->disk_name, sizeof(disk->disk_name), "buse%u",
		 device->index);
	set_capacity(disk, s->size / BUSE_SECTOR_BYTES);
	device->disk = disk;
	return 0;
}

static void buse_device_release(struct kref *ref)
{
	struct buse_device *device = container_of(ref, struct buse_device, ref);
	u32 n;

	for (n = 0; device->queues && n < device->layout.queues; n++)
		if (device->queues[n].device)
			buse_queue_destroy(&device->queues[n]);
	kvfree(device->queues);
	kvfree(device->areas);
	kfree(device);
}

void buse_device_get(struct buse_device *device)
{
	kref_get(&device->ref);
}

void buse_device_put(struct buse_device *device)
{
	kref_put(&device->ref, buse_device_release);
}

/* Gives back disk and tags; no request exists. */
void buse_device_forget(struct buse_device *device)
{
	if (device->disk)
		put_disk(device->disk);
	device->disk = NULL;
	if (device->tag_set.tags)
		blk_mq_free_tag_set(&device->tag_set);
}

/* With config->lock: makes a device from the settings. */
struct buse_device *buse_device_create(struct buse_config *config)
{
	struct buse_device *device = kzalloc(sizeof(*device), GFP_KERNEL);
	int err;

	if (!device)
		return ERR_PTR(-ENOMEM);
	kref_init(&device->ref);
	device->index = config->index;
	device->config = config;
	device->settings = config->settings;
	buse_life_init(device);
	spin_lock_init(&device->deferred_lock);
	INIT_LIST_HEAD(&device->deferred);
	err = buse_settings_check(device->index, &device->settings,
				  &device->layout);
	if (err)
		goto fail;
	err = buse_tags_create(device);
	if (err)
		goto fail;
	err = -ENOMEM;
	device->areas = kvcalloc(device->layout.areas_slots,
				 sizeof(*device->areas), GFP_KERNEL);
	if (!device->areas)
		goto fail;
	err = buse_queues_create(device);
	if (!err)
		err = buse_disk_create(device);
	if (!err)
		err = buse_ports_create(device);
	if (err)
		goto fail;
	if (device->layout.queues < device->settings.hw_queues)
		pr_info("buse%u: %u queues instead of hw_queues=%llu: there are not more processors\n",
			device->index, device->layout.queues,
			device->settings.hw_queues);
	return device;
fail:
	buse_device_forget(device);
	buse_device_put(device);
	return ERR_PTR(err);
}

/* Shows the disk. Reads its partition table, which needs the daemon. */
int buse_device_add(struct buse_device *device)
{
	int err = device_add_disk(NULL, device->disk, NULL);

	if (err)
		pr_err("buse%u: no disk: error %d\n", device->index, err);
	return err;
}

/* Removes the disk, after writing back what caches hold of it. */
void buse_device_withdraw(struct buse_device *device)
{
	del_gendisk(device->disk);
}

/* A larger size; with config->lock, so the disk stays there. */
void buse_device_resize(struct buse_device *device, u64 size)
{
	device->settings.size = size;
	set_capacity_and_notify(device->disk, size / BUSE_SECTOR_BYTES);
}
