// SPDX-License-Identifier: GPL-2.0
/*
 * The life of a device: from power on to power off, with daemons that come,
 * die and come back.
 *
 *   waiting            -> running   the last port is opened
 *   running            -> waiting   a port is closed
 *   waiting or running -> stopping  power off, rmdir
 *   stopping           -> off       all is acknowledged or given up
 *
 * Invariants: the state changes with buse_device.life held. The disk is shown
 * at the first "running" and stays until "stopping". While stopping, a closed
 * port means that nobody will answer: what waits fails at once, so the end
 * never hangs for want of a daemon. Completed writes are given up only there.
 *
 * Not here: lists of requests (queue.c), files (chardev.c).
 */
#define pr_fmt(fmt) "buse: " fmt

#include <linux/jiffies.h>

#include "buse.h"

static u32 buse_ports_count(const struct buse_device *device)
{
	return 2 * device->layout.queues;
}

/* Refuses new requests, and ends those that wait. */
static void buse_life_refuse(struct buse_device *device, blk_status_t status,
			     bool with_fetched)
{
	lockdep_assert_held(&device->life);
	WRITE_ONCE(device->refuse, status);
	buse_cancel(device, status, with_fetched);
}

/* What happens to requests while a port is closed. */
static void buse_life_apply_policy(struct buse_device *device)
{
	unsigned long timeout =
		msecs_to_jiffies(device->settings.death_timeout_ms);
	unsigned long due = device->lost_jiffies + timeout;

	lockdep_assert_held(&device->life);
	if (device->settings.on_death == BUSE_ON_DEATH_FAIL)
		buse_life_refuse(device, BLK_STS_IOERR, false);
	else if (timeout)
		mod_delayed_work(buse_life_wq, &device->death_work,
				 time_after(due, jiffies) ? due - jiffies : 0);
}

/* No daemon came in time. */
static void buse_life_death_work(struct work_struct *work)
{
	struct buse_device *device = container_of(to_delayed_work(work),
						  struct buse_device,
						  death_work);
	unsigned long timeout;

	mutex_lock(&device->life);
	timeout = msecs_to_jiffies(device->settings.death_timeout_ms);
	/* It may have come, and gone again, since this was started. */
	if (device->state == BUSE_STATE_WAITING && timeout && !device->refuse &&
	    time_after_eq(jiffies, device->lost_jiffies + timeout)) {
		pr_warn("buse%u: no daemon for %llu ms: its requests fail\n",
			device->index, device->settings.death_timeout_ms);
		buse_life_refuse(device, BLK_STS_TIMEOUT, false);
	}
	mutex_unlock(&device->life);
}

static void buse_life_run(struct buse_device *device)
{
	device->state = BUSE_STATE_RUNNING;
	WRITE_ONCE(device->refuse, BLK_STS_OK);
	cancel_delayed_work(&device->death_work);
	if (!device->is_added)
		queue_work(buse_life_wq, &device->add_work);
}

/* Shows the disk: in a work, because open() must return before it can. */
static void buse_life_add_work(struct work_struct *work)
{
	struct buse_device *device = container_of(work, struct buse_device,
						  add_work);
	bool must_add;
	int err;

	mutex_lock(&device->life);
	must_add = device->state == BUSE_STATE_RUNNING && !device->is_added;
	mutex_unlock(&device->life);
	if (!must_add)
		return;
	err = buse_device_add(device);
	mutex_lock(&device->life);
	device->is_added = !err;
	mutex_unlock(&device->life);
}

/* A port is opened. */
int buse_life_bind(struct buse_port *port)
{
	struct buse_device *device = port->queue->device;
	int err = 0;

	mutex_lock(&device->life);
	if (device->state >= BUSE_STATE_STOPPING) {
		err = -ENODEV;
	} else if (port->is_bound) {
		err = -EBUSY;
	} else {
		WRITE_ONCE(port->is_bound, true);
		if (++device->bound_count == buse_ports_count(device))
			buse_life_run(device);
	}
	mutex_unlock(&device->life);
	return err;
}

/* The last file of a port is closed, and its memory is not mapped any more. */
void buse_life_unbind(struct buse_port *port)
{
	struct buse_device *device = port->queue->device;

	mutex_lock(&device->life);
	WRITE_ONCE(port->is_bound, false);
	WRITE_ONCE(port->has_errno, false);
	device->bound_count--;
	if (port->is_read)
		buse_read_again(port->queue);
	else
		buse_deliver_again(port->queue);
	if (device->state == BUSE_STATE_RUNNING) {
		device->state = BUSE_STATE_WAITING;
		device->lost_jiffies = jiffies;
		buse_life_apply_policy(device);
	} else if (device->state >= BUSE_STATE_STOPPING) {
		buse_life_refuse(device, BLK_STS_IOERR, false);
	} else if (device->refuse) {
		/* What came back from this port right now. */
		buse_cancel(device, device->refuse, false);
	}
	mutex_unlock(&device->life);
	wake_up(&device->drain_wait);
}

/* The policy may change at any time: it also decides for those that wait. */
void buse_life_set_policy(struct buse_device *device,
			  enum buse_on_death on_death, u64 timeout_ms)
{
	mutex_lock(&device->life);
	device->settings.on_death = on_death;
	device->settings.death_timeout_ms = timeout_ms;
	cancel_delayed_work(&device->death_work);
	if (device->state == BUSE_STATE_WAITING && device->is_added) {
		WRITE_ONCE(device->refuse, BLK_STS_OK);
		buse_life_apply_policy(device);
	}
	mutex_unlock(&device->life);
}

/* Begins the end. Forced: what a daemon has fetched is given up as well. */
void buse_life_stop(struct buse_device *device, bool is_forced)
{
	mutex_lock(&device->life);
	if (is_forced)
		WRITE_ONCE(device->is_forced, true);
	if (device->state < BUSE_STATE_STOPPING) {
		device->state = BUSE_STATE_STOPPING;
		queue_work(buse_life_wq, &device->stop_work);
	}
	if (is_forced || device->bound_count != buse_ports_count(device))
		buse_life_refuse(device, BLK_STS_IOERR, is_forced);
	mutex_unlock(&device->life);
	wake_up(&device->drain_wait);
}

/* Whether no living daemon has anything left to acknowledge. */
static bool buse_life_is_drained(struct buse_device *device)
{
	struct buse_queue *queue;
	bool is_drained = true;
	u32 n;

	if (READ_ONCE(device->is_forced))
		return true;
	for (n = 0; n < device->layout.queues && is_drained; n++) {
		queue = &device->queues[n];
		spin_lock(&queue->write_lock);
		is_drained = !READ_ONCE(queue->write_port->is_bound) ||
			     (list_empty(&queue->ready) &&
			      list_empty(&queue->fetched));
		spin_unlock(&queue->write_lock);
	}
	return is_drained;
}

/* Nothing comes any more: closes the chunks, and tells the daemon. */
void buse_life_end_queues(struct buse_device *device)
{
	struct buse_queue *queue;
	u32 n;

	for (n = 0; n < device->layout.queues; n++) {
		queue = &device->queues[n];
		spin_lock(&queue->write_lock);
		buse_chunk_close_open(queue);
		spin_unlock(&queue->write_lock);
		cancel_delayed_work_sync(&queue->age_work);
	}
	WRITE_ONCE(device->is_ending, true);
	for (n = 0; n < device->layout.queues; n++) {
		wake_up_interruptible(&device->queues[n].write_wait);
		wake_up_interruptible(&device->queues[n].read_wait);
	}
}

static void buse_life_stop_work(struct work_struct *work)
{
	struct buse_device *device = container_of(work, struct buse_device,
						  stop_work);
	struct buse_config *config = device->config;
	u64 dropped;

	cancel_work_sync(&device->add_work);
	cancel_delayed_work_sync(&device->death_work);
	if (device->is_added)
		buse_device_withdraw(device);
	buse_life_end_queues(device);
	wait_event(device->drain_wait, buse_life_is_drained(device));
	buse_ports_remove(device);
	dropped = buse_chunks_dropped(device);
	if (dropped)
		pr_warn("buse%u: power off without a daemon: %llu chunks of completed writes are lost\n",
			device->index, dropped);
	mutex_lock(&device->life);
	device->state = BUSE_STATE_OFF;
	mutex_unlock(&device->life);
	/* Whoever resizes the disk holds this lock. */
	mutex_lock(&config->lock);
	config->device = NULL;
	mutex_unlock(&config->lock);
	buse_device_forget(device);
	/* From here on rmdir may free the config item. */
	complete_all(&device->stopped);
	buse_device_put(device);
}

bool buse_life_is_stopping(struct buse_device *device)
{
	return READ_ONCE(device->state) >= BUSE_STATE_STOPPING;
}

const char *buse_life_state(struct buse_device *device)
{
	switch (READ_ONCE(device->state)) {
	case BUSE_STATE_WAITING:
		return READ_ONCE(device->refuse) ? "failing" : "waiting";
	case BUSE_STATE_RUNNING:
		return "running";
	case BUSE_STATE_STOPPING:
		return "stopping";
	default:
		return "off";
	}
}

void buse_life_init(struct buse_device *device)
{
	mutex_init(&device->life);
	device->state = BUSE_STATE_WAITING;
	INIT_WORK(&device->add_work, buse_life_add_work);
	INIT_WORK(&device->stop_work, buse_life_stop_work);
	INIT_DELAYED_WORK(&device->death_work, buse_life_death_work);
	init_waitqueue_head(&device->drain_wait);
	init_completion(&device->stopped);
}
