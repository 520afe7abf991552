// SPDX-License-Identifier: GPL-2.0
/*
 * Flushes: an item on every queue, behind the chunks of all writes that were
 * complete before it.
 *
 * Invariants: a flush completes when each of its parts is acknowledged or
 * canceled, and is freed then. Its token is a number, unique in the life of
 * the device, and the same on all queues; nothing that user space writes is
 * used as a pointer. A chunk that failed is reported by the flushes behind
 * it, or, without any, by the next flush, once.
 *
 * Not here: weak flushes. A daemon that acknowledges at once has them.
 */
#include <linux/slab.h>

#include "buse.h"

/* One part is done. Nothing may touch the flush afterwards. */
void buse_flush_part_done(struct buse_flush *flush, blk_status_t status)
{
	struct request *rq = flush->rq;

	if (status)
		WRITE_ONCE(flush->status, status);
	if (!atomic_dec_and_test(&flush->parts))
		return;
	status = READ_ONCE(flush->status);
	kfree(flush);
	blk_mq_end_request(rq, status);
}

/* Puts one part into its queue; returns why that is refused. */
static blk_status_t buse_flush_enqueue(struct buse_queue *queue,
				       struct buse_flush_item *part)
{
	blk_status_t refuse;

	spin_lock(&queue->write_lock);
	refuse = READ_ONCE(queue->device->refuse);
	if (!refuse) {
		buse_chunk_close_open(queue);
		if (queue->failed) {
			WRITE_ONCE(part->flush->status, queue->failed);
			queue->failed = BLK_STS_OK;
		}
		part->item.order = ++queue->last_order;
		list_add_tail(&part->item.node, &queue->ready);
		wake_up_interruptible(&queue->write_wait);
	}
	spin_unlock(&queue->write_lock);
	return refuse;
}

blk_status_t buse_flush_submit(struct buse_device *device, struct request *rq)
{
	u32 n, queues = device->layout.queues;
	struct buse_flush *flush;
	blk_status_t refuse;

	flush = kzalloc(struct_size(flush, items, queues),
			GFP_ATOMIC | __GFP_NOWARN);
	/* The block layer asks again soon. */
	if (!flush)
		return BLK_STS_RESOURCE;
	flush->rq = rq;
	flush->token = buse_flush_token(atomic64_inc_return(&device->flushes));
	atomic_set(&flush->parts, queues);
	for (n = 0; n < queues; n++) {
		flush->items[n].item.kind = BUSE_ITEM_FLUSH;
		flush->items[n].flush = flush;
	}
	/* The last part may be done, and the flush freed, within this loop. */
	for (n = 0; n < queues; n++) {
		refuse = buse_flush_enqueue(&device->queues[n],
					    &flush->items[n]);
		if (refuse)
			buse_flush_part_done(flush, refuse);
	}
	return BLK_STS_OK;
}

static void buse_flush_take(struct list_head *from, struct list_head *into)
{
	struct buse_item *item, *next;

	list_for_each_entry_safe(item, next, from, node)
		if (item->kind == BUSE_ITEM_FLUSH)
			list_move_tail(&item->node, into);
}

/* Ends the parts of flushes on this queue that no daemon will acknowledge. */
void buse_flush_cancel(struct buse_queue *queue, blk_status_t status,
		       bool with_fetched)
{
	struct buse_item *item, *next;
	LIST_HEAD(canceled);

	spin_lock(&queue->write_lock);
	buse_flush_take(&queue->ready, &canceled);
	if (with_fetched)
		buse_flush_take(&queue->fetched, &canceled);
	spin_unlock(&queue->write_lock);
	list_for_each_entry_safe(item, next, &canceled, node)
		buse_flush_part_done(buse_flush_of(item), status);
}

/* Tells the flushes behind a failed chunk, or else the next one. */
void buse_flush_note_failure(struct buse_queue *queue, u64 order,
			     blk_status_t status)
{
	struct list_head *lists[] = { &queue->fetched, &queue->ready };
	struct buse_item *item;
	bool is_told = false;
	unsigned int n;

	lockdep_assert_held(&queue->write_lock);
	for (n = 0; n < ARRAY_SIZE(lists); n++) {
		list_for_each_entry(item, lists[n], node) {
			if (item->kind != BUSE_ITEM_FLUSH || item->order < order)
				continue;
			WRITE_ONCE(buse_flush_of(item)->status, status);
			is_told = true;
		}
	}
	if (!is_told)
		queue->failed = status;
}
