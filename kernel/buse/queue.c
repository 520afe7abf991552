// SPDX-License-Identifier: GPL-2.0
/*
 * Queues: what the block layer hands to them, and their memory.
 *
 * Invariants: a request is served by the queue of the hardware context that
 * it comes from, and never sleeps there. The block layer's timeout does
 * nothing: a daemon may take as long as it likes, and life.c decides how long
 * requests wait for one that is gone.
 *
 * Not here: reads (read.c), writes (write.c), flushes (flush.c).
 */
#include <linux/bitmap.h>
#include <linux/mm.h>
#include <linux/slab.h>

#include "buse.h"

static blk_status_t buse_queue_rq(struct blk_mq_hw_ctx *hctx,
				  const struct blk_mq_queue_data *bd)
{
	struct request *rq = bd->rq;
	struct buse_request *request = buse_request_of(rq);
	struct buse_queue *queue = hctx->driver_data;

	request->queue = queue;
	request->extent.sector = blk_rq_pos(rq);
	request->extent.sectors = blk_rq_sectors(rq);
	blk_mq_start_request(rq);
	switch (req_op(rq)) {
	case REQ_OP_READ:
		return buse_read_submit(queue, rq);
	case REQ_OP_FLUSH:
		return buse_flush_submit(queue->device, rq);
	case REQ_OP_WRITE:
	case REQ_OP_DISCARD:
	case REQ_OP_SECURE_ERASE:
	case REQ_OP_WRITE_ZEROES:
		return buse_write_submit(queue, rq);
	default:
		return BLK_STS_NOTSUPP;
	}
}

static enum blk_eh_timer_return buse_timeout(struct request *rq)
{
	return BLK_EH_RESET_TIMER;
}

static int buse_init_hctx(struct blk_mq_hw_ctx *hctx, void *data,
			  unsigned int index)
{
	struct buse_device *device = data;

	hctx->driver_data = &device->queues[index];
	return 0;
}

const struct blk_mq_ops buse_mq_ops = {
	.queue_rq = buse_queue_rq,
	.timeout = buse_timeout,
	.init_hctx = buse_init_hctx,
};

/* A node whose processors use this queue. */
static int buse_queue_node(struct buse_device *device, u32 index)
{
	struct blk_mq_queue_map *map = &device->tag_set.map[HCTX_TYPE_DEFAULT];
	unsigned int cpu;

	for_each_possible_cpu(cpu)
		if (map->mq_map[cpu] == index)
			return cpu_to_node(cpu);
	return NUMA_NO_NODE;
}

static int buse_chunks_create(struct buse_queue *queue)
{
	const struct buse_layout *layout = &queue->device->layout;
	struct buse_chunk *chunk;
	u32 n;

	queue->chunks = kvzalloc_node(array_size(layout->chunks,
						 sizeof(*queue->chunks)),
				      GFP_KERNEL, queue->node);
	if (!queue->chunks)
		return -ENOMEM;
	for (n = 0; n < layout->chunks; n++) {
		chunk = &queue->chunks[n];
		chunk->index = n;
		chunk->item.kind = BUSE_ITEM_CHUNK;
		chunk->extents = kvzalloc_node(array_size(layout->records_max,
							  sizeof(struct buse_extent)),
					       GFP_KERNEL, queue->node);
		if (!chunk->extents)
			return -ENOMEM;
		list_add_tail(&chunk->item.node, &queue->free);
	}
	return 0;
}

static int buse_slots_create(struct buse_queue *queue)
{
	u32 slots = queue->device->layout.slots;

	queue->slots = kvzalloc_node(array_size(BITS_TO_LONGS(slots),
						sizeof(long)),
				     GFP_KERNEL, queue->node);
	queue->slot_owners = kvzalloc_node(array_size(slots,
						      sizeof(*queue->slot_owners)),
					   GFP_KERNEL, queue->node);
	return queue->slots && queue->slot_owners ? 0 : -ENOMEM;
}

/* After an error, buse_queue_destroy() frees what there is. */
int buse_queue_init(struct buse_queue *queue, struct buse_device *device,
		    u32 index)
{
	int err;

	queue->device = device;
	queue->index = index;
	queue->node = buse_queue_node(device, index);
	spin_lock_init(&queue->write_lock);
	spin_lock_init(&queue->read_lock);
	INIT_LIST_HEAD(&queue->free);
	INIT_LIST_HEAD(&queue->ready);
	INIT_LIST_HEAD(&queue->fetched);
	INIT_LIST_HEAD(&queue->waiting);
	INIT_LIST_HEAD(&queue->reads_waiting);
	INIT_LIST_HEAD(&queue->reads_ready);
	INIT_LIST_HEAD(&queue->reads_fetched);
	init_waitqueue_head(&queue->write_wait);
	init_waitqueue_head(&queue->read_wait);
	INIT_DELAYED_WORK(&queue->age_work, buse_chunk_age_work);
	err = buse_memory_create(&queue->write_memory,
				 device->settings.write_shm_size, queue->node);
	if (!err)
		err = buse_memory_create(&queue->read_memory,
					 device->settings.read_shm_size,
					 queue->node);
	if (!err)
		err = buse_chunks_create(queue);
	if (!err)
		err = buse_slots_create(queue);
	return err;
}

void buse_queue_destroy(struct buse_queue *queue)
{
	u32 n;

	for (n = 0; queue->chunks && n < queue->device->layout.chunks; n++)
		kvfree(queue->chunks[n].extents);
	kvfree(queue->chunks);
	kvfree(queue->slots);
	kvfree(queue->slot_owners);
	buse_memory_destroy(&queue->write_memory);
	buse_memory_destroy(&queue->read_memory);
}

/*
 * Ends every request that waits, with this status. Chunks stay: their writes
 * are complete, and only a daemon can save them. What a living daemon has
 * fetched stays too unless asked for. The caller has set buse_device.refuse.
 */
void buse_cancel(struct buse_device *device, blk_status_t status,
		 bool with_fetched)
{
	struct buse_request *request, *next;
	struct buse_queue *queue;
	LIST_HEAD(canceled);
	u32 n;

	buse_read_cancel_deferred(device, &canceled);
	for (n = 0; n < device->layout.queues; n++) {
		queue = &device->queues[n];
		buse_write_cancel(queue, &canceled);
		buse_read_cancel(queue, with_fetched, &canceled);
		buse_flush_cancel(queue, status, with_fetched);
	}
	list_for_each_entry_safe(request, next, &canceled, node) {
		list_del_init(&request->node);
		blk_mq_end_request(buse_rq_of(request), status);
	}
}
