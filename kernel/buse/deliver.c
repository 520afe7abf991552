// SPDX-License-Identifier: GPL-2.0
/*
 * The daemon's side of a write queue: fetching chunks and flushes,
 * acknowledging them, and getting them again.
 *
 * Invariants: items are fetched in order and acknowledged in any order. A
 * chunk is acknowledged by its offset and a flush by its token, and only
 * while it is fetched; any other value is EINVAL and changes nothing. What a
 * daemon leaves unacknowledged comes first for the next one, in its order.
 *
 * Not here: files and blocking (chardev.c).
 */
#include "buse.h"

static void buse_packet_fill(struct buse_queue *queue, struct buse_item *item,
			     struct buse_write_packet *packet)
{
	struct buse_chunk *chunk;
	u64 token;

	if (item->kind == BUSE_ITEM_FLUSH) {
		token = buse_flush_of(item)->token;
		packet->shm_offset = cpu_to_le64(token);
		packet->records = cpu_to_le64(token);
		return;
	}
	chunk = buse_chunk_of(item);
	packet->shm_offset = cpu_to_le64(buse_chunk_offset(queue, chunk));
	packet->records = cpu_to_le64(chunk->records);
}

/* The next item that can be handed over, with the lock of the writes. */
static struct buse_item *buse_next_item(struct buse_queue *queue)
{
	struct buse_item *item = list_first_entry_or_null(&queue->ready,
							  struct buse_item,
							  node);

	if (item && item->kind == BUSE_ITEM_CHUNK && buse_chunk_of(item)->writers)
		return NULL;
	return item;
}

/* Fetches the next item; false if there is none now. */
bool buse_deliver_write(struct buse_queue *queue,
			struct buse_write_packet *packet)
{
	struct buse_item *item;
	bool is_end = false;

	spin_lock(&queue->write_lock);
	item = buse_next_item(queue);
	if (item) {
		list_move_tail(&item->node, &queue->fetched);
		if (item->kind == BUSE_ITEM_CHUNK)
			buse_chunk_of(item)->state = BUSE_CHUNK_FETCHED;
		buse_packet_fill(queue, item, packet);
	} else if (list_empty(&queue->ready)) {
		is_end = READ_ONCE(queue->device->is_ending);
		if (is_end)
			*packet = (struct buse_write_packet){
				.shm_offset = cpu_to_le64(BUSE_END),
			};
	}
	spin_unlock(&queue->write_lock);
	return item || is_end;
}

bool buse_deliver_has_write(struct buse_queue *queue)
{
	bool has;

	spin_lock(&queue->write_lock);
	has = buse_next_item(queue) || (list_empty(&queue->ready) &&
					READ_ONCE(queue->device->is_ending));
	spin_unlock(&queue->write_lock);
	return has;
}

/* The fetched item with this offset or token, with the lock of the writes. */
static struct buse_item *buse_fetched_item(struct buse_queue *queue, u64 token)
{
	u64 chunk_bytes = queue->device->settings.write_chunk_size;
	struct buse_chunk *chunk;
	struct buse_item *item;
	u64 index;

	if (!buse_is_flush_token(token)) {
		index = div64_u64(token, chunk_bytes);
		if (index >= queue->device->layout.chunks ||
		    index * chunk_bytes != token)
			return NULL;
		chunk = &queue->chunks[index];
		return chunk->state == BUSE_CHUNK_FETCHED ? &chunk->item : NULL;
	}
	/* Few: each hardware queue has one flush in flight. */
	list_for_each_entry(item, &queue->fetched, node)
		if (item->kind == BUSE_ITEM_FLUSH &&
		    buse_flush_of(item)->token == token)
			return item;
	return NULL;
}

/* Puts a fetched item back to its place before all newer ones. */
static void buse_item_return(struct buse_queue *queue, struct buse_item *item)
{
	struct buse_item *other;

	list_del(&item->node);
	if (item->kind == BUSE_ITEM_CHUNK)
		buse_chunk_of(item)->state = BUSE_CHUNK_READY;
	list_for_each_entry(other, &queue->ready, node)
		if (other->order > item->order)
			break;
	/* Before the newer one, or at the end, which is the list's head. */
	list_add_tail(&item->node, &other->node);
	wake_up_interruptible(&queue->write_wait);
}

/* The packet of an item did not reach its reader. */
void buse_deliver_undo(struct buse_queue *queue, u64 token)
{
	struct buse_item *item;

	spin_lock(&queue->write_lock);
	item = buse_fetched_item(queue, token);
	if (item)
		buse_item_return(queue, item);
	spin_unlock(&queue->write_lock);
}

int buse_deliver_ack(struct buse_queue *queue, u64 token, blk_status_t status)
{
	struct buse_item *item;

	spin_lock(&queue->write_lock);
	item = buse_fetched_item(queue, token);
	if (item) {
		list_del_init(&item->node);
		if (item->kind == BUSE_ITEM_CHUNK) {
			buse_chunk_of(item)->state = BUSE_CHUNK_RELEASED;
			/*
			 * Under the lock: a flush that begins behind this
			 * would otherwise not hear of it.
			 */
			if (status)
				buse_flush_note_failure(queue, item->order,
							status);
		}
	}
	spin_unlock(&queue->write_lock);
	if (!item)
		return -EINVAL;
	if (item->kind == BUSE_ITEM_FLUSH) {
		buse_flush_part_done(buse_flush_of(item), status);
	} else {
		buse_chunk_release(queue, buse_chunk_of(item));
		buse_write_resume(queue);
		buse_read_recheck(queue->device);
	}
	wake_up(&queue->device->drain_wait);
	return 0;
}

/* The daemon is gone: what it had fetched becomes ready, in order. */
void buse_deliver_again(struct buse_queue *queue)
{
	struct buse_item *item;

	spin_lock(&queue->write_lock);
	/* The newest first, so that each finds its place at the front. */
	while (!list_empty(&queue->fetched)) {
		item = list_last_entry(&queue->fetched, struct buse_item, node);
		buse_item_return(queue, item);
	}
	spin_unlock(&queue->write_lock);
}
