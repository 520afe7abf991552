// SPDX-License-Identifier: GPL-2.0
/*
 * Reads: after the writes that they must see, into a slot of shared memory,
 * to the daemon, and back.
 *
 * Invariants: a read goes to the daemon when every chunk that was opened
 * before it and holds a write of its sectors is acknowledged. Newer chunks do
 * not delay it, so nothing starves it. A slot belongs to one read from its
 * start to its end, and a redelivered read keeps its slot.
 *
 * Not here: which chunks hold which sectors (chunk.c).
 */
#include <linux/bitmap.h>
#include <linux/blkdev.h>
#include <linux/bvec.h>

#include "buse.h"

static u32 buse_slots_needed(const struct buse_request *request)
{
	return DIV_ROUND_UP(request->extent.sectors * BUSE_SECTOR_BYTES,
			    BUSE_SLOT_BYTES);
}

/* Whether a chunk may hold a write of these sectors: no is certain. */
static bool buse_areas_pending(struct buse_device *device,
			       const struct buse_extent *extent)
{
	struct buse_extent left = *extent, piece;

	while (left.sectors) {
		piece = buse_first_piece(&left, device->layout.area_sectors);
		if (atomic_read(&buse_area_at(device, piece.sector)->pending))
			return true;
		left.sector += piece.sectors;
		left.sectors -= piece.sectors;
	}
	return false;
}

/* With the lock of the reads; false if there is no room now. */
static bool buse_slot_take(struct buse_queue *queue,
			   struct buse_request *request)
{
	u32 slots = queue->device->layout.slots;
	u32 needed = buse_slots_needed(request);
	unsigned long slot;

	lockdep_assert_held(&queue->read_lock);
	slot = bitmap_find_next_zero_area(queue->slots, slots, 0, needed, 0);
	if (slot >= slots)
		return false;
	bitmap_set(queue->slots, slot, needed);
	request->slot = slot;
	request->is_fetched = false;
	queue->slot_owners[slot] = request;
	list_add_tail(&request->node, &queue->reads_ready);
	wake_up_interruptible(&queue->read_wait);
	return true;
}

static void buse_slot_free(struct buse_queue *queue,
			   struct buse_request *request)
{
	lockdep_assert_held(&queue->read_lock);
	queue->slot_owners[request->slot] = NULL;
	bitmap_clear(queue->slots, request->slot, buse_slots_needed(request));
}

/* Those that wait for a slot get one, in order. */
static void buse_slots_resume(struct buse_queue *queue)
{
	struct buse_request *request;

	lockdep_assert_held(&queue->read_lock);
	while (!list_empty(&queue->reads_waiting)) {
		request = list_first_entry(&queue->reads_waiting,
					   struct buse_request, node);
		list_del_init(&request->node);
		if (buse_slot_take(queue, request))
			continue;
		list_add(&request->node, &queue->reads_waiting);
		break;
	}
}

/* Nothing stands in the way of this read. Returns why it is refused. */
static blk_status_t buse_read_start(struct buse_request *request)
{
	struct buse_queue *queue = request->queue;
	blk_status_t refuse;

	spin_lock(&queue->read_lock);
	refuse = READ_ONCE(queue->device->refuse);
	if (!refuse && (!list_empty(&queue->reads_waiting) ||
			!buse_slot_take(queue, request)))
		list_add_tail(&request->node, &queue->reads_waiting);
	spin_unlock(&queue->read_lock);
	return refuse;
}

blk_status_t buse_read_submit(struct buse_queue *queue, struct request *rq)
{
	struct buse_request *request = buse_request_of(rq);
	struct buse_device *device = queue->device;
	blk_status_t refuse;
	bool must_wait;

	if (!buse_areas_pending(device, &request->extent))
		return buse_read_start(request);
	/* Chunks that are opened from here on hold no write before this read. */
	request->horizon = atomic64_read(&device->last_ordinal);
	spin_lock(&device->deferred_lock);
	refuse = READ_ONCE(device->refuse);
	if (refuse) {
		spin_unlock(&device->deferred_lock);
		return refuse;
	}
	/*
	 * Counted before the search: whoever acknowledges a chunk that the
	 * search still finds, sees the count, because both take write_lock.
	 */
	atomic_inc(&device->deferred_count);
	must_wait = buse_chunks_scan(device, &request->extent,
				     request->horizon);
	if (must_wait)
		list_add_tail(&request->node, &device->deferred);
	else
		atomic_dec(&device->deferred_count);
	spin_unlock(&device->deferred_lock);
	return must_wait ? BLK_STS_OK : buse_read_start(request);
}

/* A chunk was acknowledged: reads that waited for it start. */
void buse_read_recheck(struct buse_device *device)
{
	struct buse_request *request, *next;
	blk_status_t refuse;
	LIST_HEAD(free);

	if (!atomic_read(&device->deferred_count))
		return;
	spin_lock(&device->deferred_lock);
	list_for_each_entry_safe(request, next, &device->deferred, node) {
		if (buse_areas_pending(device, &request->extent) &&
		    buse_chunks_scan(device, &request->extent,
				     request->horizon))
			continue;
		list_move_tail(&request->node, &free);
		atomic_dec(&device->deferred_count);
	}
	spin_unlock(&device->deferred_lock);
	list_for_each_entry_safe(request, next, &free, node) {
		list_del_init(&request->node);
		refuse = buse_read_start(request);
		if (refuse)
			blk_mq_end_request(buse_rq_of(request), refuse);
	}
}

/* Fetches the next read; false if there is none now. */
bool buse_read_deliver(struct buse_queue *queue,
		       struct buse_read_packet *packet)
{
	struct buse_request *request;
	bool is_end = false;

	spin_lock(&queue->read_lock);
	request = list_first_entry_or_null(&queue->reads_ready,
					   struct buse_request, node);
	if (request) {
		list_move_tail(&request->node, &queue->reads_fetched);
		request->is_fetched = true;
		*packet = (struct buse_read_packet){
			.sector = cpu_to_le64(request->extent.sector),
			.sectors = cpu_to_le64(request->extent.sectors),
			.shm_offset = cpu_to_le64(request->slot *
						  BUSE_SLOT_BYTES),
		};
	} else if (READ_ONCE(queue->device->is_ending)) {
		is_end = true;
		*packet = (struct buse_read_packet){
			.shm_offset = cpu_to_le64(BUSE_END),
		};
	}
	spin_unlock(&queue->read_lock);
	return request || is_end;
}

bool buse_read_has(struct buse_queue *queue)
{
	return !list_empty_careful(&queue->reads_ready) ||
	       READ_ONCE(queue->device->is_ending);
}

/* The fetched read with this offset, with the lock of the reads. */
static struct buse_request *buse_fetched_read(struct buse_queue *queue,
					      u64 shm_offset)
{
	u64 slot = shm_offset / BUSE_SLOT_BYTES;
	struct buse_request *request;

	if (slot >= queue->device->layout.slots ||
	    slot * BUSE_SLOT_BYTES != shm_offset)
		return NULL;
	request = queue->slot_owners[slot];
	return request && request->is_fetched ? request : NULL;
}

/* The packet of a read did not reach its reader. */
void buse_read_undo(struct buse_queue *queue, u64 shm_offset)
{
	struct buse_request *request;

	spin_lock(&queue->read_lock);
	request = buse_fetched_read(queue, shm_offset);
	if (request) {
		request->is_fetched = false;
		list_move(&request->node, &queue->reads_ready);
		wake_up_interruptible(&queue->read_wait);
	}
	spin_unlock(&queue->read_lock);
}

static void buse_read_copy(struct buse_queue *queue, struct request *rq)
{
	u8 *at = queue->read_memory.address +
		 buse_request_of(rq)->slot * BUSE_SLOT_BYTES;
	struct req_iterator each;
	struct bio_vec segment;

	rq_for_each_segment(segment, rq, each) {
		memcpy_to_bvec(&segment, at);
		at += segment.bv_len;
	}
}

int buse_read_ack(struct buse_queue *queue, u64 shm_offset,
		  blk_status_t status)
{
	struct buse_request *request;

	spin_lock(&queue->read_lock);
	request = buse_fetched_read(queue, shm_offset);
	if (request) {
		/* From here on it is ours: in no list, and not fetched. */
		request->is_fetched = false;
		list_del_init(&request->node);
	}
	spin_unlock(&queue->read_lock);
	if (!request)
		return -EINVAL;
	if (!status)
		buse_read_copy(queue, buse_rq_of(request));
	spin_lock(&queue->read_lock);
	buse_slot_free(queue, request);
	buse_slots_resume(queue);
	spin_unlock(&queue->read_lock);
	blk_mq_end_request(buse_rq_of(request), status);
	return 0;
}

/* The daemon is gone: the reads that it had are the first for the next. */
void buse_read_again(struct buse_queue *queue)
{
	struct buse_request *request;

	spin_lock(&queue->read_lock);
	list_for_each_entry(request, &queue->reads_fetched, node)
		request->is_fetched = false;
	list_splice_init(&queue->reads_fetched, &queue->reads_ready);
	spin_unlock(&queue->read_lock);
}

void buse_read_cancel(struct buse_queue *queue, bool with_fetched,
		      struct list_head *canceled)
{
	struct buse_request *request;
	LIST_HEAD(slotted);

	spin_lock(&queue->read_lock);
	list_splice_init(&queue->reads_ready, &slotted);
	if (with_fetched)
		list_splice_tail_init(&queue->reads_fetched, &slotted);
	list_for_each_entry(request, &slotted, node) {
		request->is_fetched = false;
		buse_slot_free(queue, request);
	}
	list_splice_tail_init(&slotted, canceled);
	list_splice_tail_init(&queue->reads_waiting, canceled);
	spin_unlock(&queue->read_lock);
}

void buse_read_cancel_deferred(struct buse_device *device,
			       struct list_head *canceled)
{
	struct buse_request *request;

	spin_lock(&device->deferred_lock);
	list_for_each_entry(request, &device->deferred, node)
		atomic_dec(&device->deferred_count);
	list_splice_tail_init(&device->deferred, canceled);
	spin_unlock(&device->deferred_lock);
}
