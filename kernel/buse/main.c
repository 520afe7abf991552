// SPDX-License-Identifier: GPL-2.0
/*
 * Loading and unloading.
 *
 * Invariants: directories in configfs come last and go first, and hold the
 * module: there is no device while it is unloaded. Work in progress has ended
 * before what it uses goes away.
 *
 * Not here: devices.
 */
#include <linux/module.h>

#include "buse.h"

/* Beginnings and ends of devices, which may wait for a daemon. */
struct workqueue_struct *buse_life_wq;
/* What writing back memory may depend on. */
struct workqueue_struct *buse_io_wq;

static void buse_workqueues_destroy(void)
{
	if (buse_life_wq)
		destroy_workqueue(buse_life_wq);
	if (buse_io_wq)
		destroy_workqueue(buse_io_wq);
}

static int __init buse_init(void)
{
	int err = -ENOMEM;

	buse_life_wq = alloc_workqueue("buse_life", WQ_UNBOUND, 0);
	buse_io_wq = alloc_workqueue("buse_io", WQ_UNBOUND | WQ_MEM_RECLAIM, 0);
	if (!buse_life_wq || !buse_io_wq)
		goto fail;
	err = buse_chardev_init();
	if (err)
		goto fail;
	err = buse_config_init();
	if (err) {
		buse_chardev_exit();
		goto fail;
	}
	return 0;
fail:
	buse_workqueues_destroy();
	return err;
}

static void __exit buse_exit(void)
{
	buse_config_exit();
	buse_workqueues_destroy();
	buse_chardev_exit();
}

module_init(buse_init);
module_exit(buse_exit);

MODULE_DESCRIPTION("Block devices in user space with batched writes");
MODULE_AUTHOR("The Sawmill authors");
MODULE_LICENSE("GPL");
MODULE_VERSION("1.0");
