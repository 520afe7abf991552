// SPDX-License-Identifier: GPL-2.0
/*
 * Chunks: opening, room for a write, closing, and what reads find in them.
 *
 * Invariants: a queue has one open chunk at most. A closed chunk is in the
 * list of what is ready, in the order of closing, and is fetched only when
 * its writers are zero. The extents of a chunk cover its requests from before
 * they are complete until it is acknowledged.
 *
 * Not here: copying (write.c), handing over and acknowledging (deliver.c).
 */
#include <linux/jiffies.h>

#include "buse.h"

static void buse_chunk_open(struct buse_queue *queue)
{
	struct buse_device *device = queue->device;
	struct buse_chunk *chunk;

	lockdep_assert_held(&queue->write_lock);
	chunk = list_first_entry_or_null(&queue->free, struct buse_chunk,
					 item.node);
	if (!chunk)
		return;
	list_del_init(&chunk->item.node);
	chunk->state = BUSE_CHUNK_OPEN;
	chunk->records = 0;
	chunk->data_bytes = 0;
	chunk->extents_count = 0;
	chunk->first_sector = U64_MAX;
	chunk->end_sector = 0;
	chunk->ordinal = atomic64_inc_return(&device->last_ordinal);
	chunk->opened_jiffies = jiffies;
	queue->open = chunk;
	if (device->settings.chunk_age_ms)
		queue_delayed_work(buse_io_wq, &queue->age_work,
				   msecs_to_jiffies(device->settings.chunk_age_ms));
}

/* Closes the open chunk, if there is one: nothing is added to it any more. */
void buse_chunk_close_open(struct buse_queue *queue)
{
	struct buse_chunk *chunk = queue->open;

	lockdep_assert_held(&queue->write_lock);
	if (!chunk)
		return;
	queue->open = NULL;
	chunk->state = BUSE_CHUNK_READY;
	chunk->item.order = ++queue->last_order;
	list_add_tail(&chunk->item.node, &queue->ready);
	if (!chunk->writers)
		wake_up_interruptible(&queue->write_wait);
}

/*
 * Takes room for a write in the open chunk, or in a new one, and returns that
 * chunk; NULL if there is none. The caller copies, then calls
 * buse_chunk_end_write().
 */
struct buse_chunk *buse_chunk_reserve(struct buse_queue *queue,
				      const struct buse_extent *extent,
				      u32 records, u32 data_bytes,
				      struct buse_place *place)
{
	const struct buse_layout *layout = &queue->device->layout;
	struct buse_chunk *chunk = queue->open;

	lockdep_assert_held(&queue->write_lock);
	if (chunk && (chunk->records + records > layout->records_max ||
		      chunk->data_bytes + data_bytes > layout->chunk_data_bytes))
		buse_chunk_close_open(queue);
	if (!queue->open)
		buse_chunk_open(queue);
	chunk = queue->open;
	if (!chunk)
		return NULL;
	*place = (struct buse_place){ chunk->records, chunk->data_bytes };
	chunk->records += records;
	chunk->data_bytes += data_bytes;
	/* One record at least for each: there are as many places. */
	chunk->extents[chunk->extents_count++] = *extent;
	chunk->first_sector = min(chunk->first_sector, extent->sector);
	chunk->end_sector = max(chunk->end_sector,
				extent->sector + extent->sectors);
	chunk->writers++;
	if (chunk->records == layout->records_max ||
	    layout->chunk_data_bytes - chunk->data_bytes <
	    queue->device->settings.blocksize)
		buse_chunk_close_open(queue);
	return chunk;
}

/* A writer has copied what it had. */
void buse_chunk_end_write(struct buse_queue *queue, struct buse_chunk *chunk)
{
	bool is_whole;

	spin_lock(&queue->write_lock);
	is_whole = !--chunk->writers && chunk->state == BUSE_CHUNK_READY;
	spin_unlock(&queue->write_lock);
	if (is_whole)
		wake_up_interruptible(&queue->write_wait);
}

/* The daemon has this chunk: its place is free. It is in no list. */
void buse_chunk_release(struct buse_queue *queue, struct buse_chunk *chunk)
{
	struct buse_device *device = queue->device;
	struct buse_extent left, piece;
	u32 n;

	for (n = 0; n < chunk->extents_count; n++) {
		left = chunk->extents[n];
		while (left.sectors) {
			piece = buse_first_piece(&left,
						 device->layout.area_sectors);
			atomic_dec(&buse_area_at(device, piece.sector)->pending);
			left.sector += piece.sectors;
			left.sectors -= piece.sectors;
		}
	}
	spin_lock(&queue->write_lock);
	chunk->state = BUSE_CHUNK_FREE;
	/* In front: this memory may still be in a processor's cache. */
	list_add(&chunk->item.node, &queue->free);
	spin_unlock(&queue->write_lock);
}

/* Closes an open chunk that has reached its age. */
void buse_chunk_age_work(struct work_struct *work)
{
	struct buse_queue *queue = container_of(to_delayed_work(work),
						struct buse_queue, age_work);
	unsigned long age = msecs_to_jiffies(queue->device->settings.chunk_age_ms);
	unsigned long due;

	spin_lock(&queue->write_lock);
	if (queue->open) {
		due = queue->open->opened_jiffies + age;
		/* The chunk that this was started for may be gone already. */
		if (time_after_eq(jiffies, due))
			buse_chunk_close_open(queue);
		else
			queue_delayed_work(buse_io_wq, &queue->age_work,
					   due - jiffies);
	}
	spin_unlock(&queue->write_lock);
}

static bool buse_chunk_meets(const struct buse_chunk *chunk,
			     const struct buse_extent *extent, u64 horizon)
{
	u32 n;

	if (chunk->ordinal > horizon || extent->sector >= chunk->end_sector ||
	    extent->sector + extent->sectors <= chunk->first_sector)
		return false;
	for (n = 0; n < chunk->extents_count; n++)
		if (buse_extents_overlap(&chunk->extents[n], extent))
			return true;
	return false;
}

static bool buse_items_meet(struct list_head *items,
			    const struct buse_extent *extent, u64 horizon)
{
	struct buse_item *item;

	list_for_each_entry(item, items, node)
		if (item->kind == BUSE_ITEM_CHUNK &&
		    buse_chunk_meets(buse_chunk_of(item), extent, horizon))
			return true;
	return false;
}

/*
 * Whether any chunk up to the horizon holds a write of these sectors that is
 * not acknowledged. Open ones are closed, because otherwise they might never
 * reach the daemon.
 */
bool buse_chunks_scan(struct buse_device *device,
		      const struct buse_extent *extent, u64 horizon)
{
	struct buse_queue *queue;
	bool is_met = false;
	u32 n;

	for (n = 0; n < device->layout.queues; n++) {
		queue = &device->queues[n];
		spin_lock(&queue->write_lock);
		if (queue->open &&
		    buse_chunk_meets(queue->open, extent, horizon)) {
			is_met = true;
			buse_chunk_close_open(queue);
		}
		is_met = is_met ||
			 buse_items_meet(&queue->ready, extent, horizon) ||
			 buse_items_meet(&queue->fetched, extent, horizon);
		spin_unlock(&queue->write_lock);
	}
	return is_met;
}

/* How many chunks with completed writes no daemon has acknowledged. */
u64 buse_chunks_dropped(struct buse_device *device)
{
	struct buse_queue *queue;
	struct buse_item *item;
	u64 count = 0;
	u32 n;

	for (n = 0; n < device->layout.queues; n++) {
		queue = &device->queues[n];
		spin_lock(&queue->write_lock);
		count += !!queue->open;
		list_for_each_entry(item, &queue->ready, node)
			count += item->kind == BUSE_ITEM_CHUNK;
		list_for_each_entry(item, &queue->fetched, node)
			count += item->kind == BUSE_ITEM_CHUNK;
		spin_unlock(&queue->write_lock);
	}
	return count;
}
