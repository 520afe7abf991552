// SPDX-License-Identifier: GPL-2.0
/*
 * Writes, discards, write-zeroes and secure erases: into a chunk, and done.
 *
 * Invariants: a request is in a chunk, with a record for each collision area
 * that it touches, before it is complete; so a request that begins after it
 * completed gets higher sequence numbers. The payload is copied once, without
 * a lock. Requests that wait for a chunk begin in order.
 *
 * Not here: room in chunks (chunk.c). A write with FUA comes as a write and a
 * flush, because the block layer knows that we have no FUA.
 */
#include <linux/blkdev.h>
#include <linux/bvec.h>

#include "buse.h"

struct buse_area *buse_area_at(struct buse_device *device, u64 sector)
{
	const struct buse_layout *layout = &device->layout;

	return &device->areas[buse_area_index(sector, layout->area_sectors,
					      layout->areas_slots - 1)];
}

static u64 buse_record_flag(struct request *rq)
{
	switch (req_op(rq)) {
	case REQ_OP_DISCARD:
		return BUSE_RECORD_DISCARD;
	case REQ_OP_SECURE_ERASE:
		return BUSE_RECORD_SECURE_ERASE;
	case REQ_OP_WRITE_ZEROES:
		return BUSE_RECORD_WRITE_ZEROES;
	default:
		return BUSE_RECORD_WRITE;
	}
}

/* Writes a record for each piece of the extent, with its sequence number. */
static void buse_records_fill(struct buse_device *device,
			      struct buse_record *record, struct request *rq)
{
	struct buse_extent left = buse_request_of(rq)->extent, piece;
	u64 flag = buse_record_flag(rq), sequence;
	struct buse_area *area;

	while (left.sectors) {
		piece = buse_first_piece(&left, device->layout.area_sectors);
		area = buse_area_at(device, piece.sector);
		atomic_inc(&area->pending);
		sequence = atomic64_inc_return(&area->sequence);
		*record++ = (struct buse_record){
			.sector = cpu_to_le64(piece.sector),
			.sectors = cpu_to_le64(piece.sectors),
			.sequence = cpu_to_le64(sequence),
			.flag = cpu_to_le64(flag),
		};
		left.sector += piece.sectors;
		left.sectors -= piece.sectors;
	}
}

/* Copies a request into its place of the chunk, and completes it. */
static void buse_write_copy(struct buse_queue *queue, struct buse_chunk *chunk,
			    struct request *rq, const struct buse_place *place)
{
	struct buse_device *device = queue->device;
	u8 *start = queue->write_memory.address + buse_chunk_offset(queue, chunk);
	u8 *at = start + device->layout.records_max * BUSE_RECORD_BYTES +
		 place->data_bytes;
	struct req_iterator each;
	struct bio_vec segment;

	buse_records_fill(device, (struct buse_record *)start + place->record,
			  rq);
	if (req_op(rq) == REQ_OP_WRITE) {
		rq_for_each_segment(segment, rq, each) {
			memcpy_from_bvec(at, &segment);
			at += segment.bv_len;
		}
	}
	buse_chunk_end_write(queue, chunk);
	blk_mq_end_request(rq, BLK_STS_OK);
}

/* With the lock of the writes; returns the chunk, or NULL without room. */
static struct buse_chunk *buse_write_reserve(struct buse_queue *queue,
					     struct request *rq,
					     struct buse_place *place)
{
	struct buse_request *request = buse_request_of(rq);
	u32 bytes = req_op(rq) == REQ_OP_WRITE ? blk_rq_bytes(rq) : 0;

	return buse_chunk_reserve(queue, &request->extent, request->records,
				  bytes, place);
}

blk_status_t buse_write_submit(struct buse_queue *queue, struct request *rq)
{
	const struct buse_layout *layout = &queue->device->layout;
	struct buse_request *request = buse_request_of(rq);
	struct buse_chunk *chunk = NULL;
	struct buse_place place;
	blk_status_t refuse;

	request->records = buse_pieces_count(&request->extent,
					     layout->area_sectors);
	/* The limits of the disk rule this out; it would wait forever. */
	if (WARN_ON_ONCE(request->records > layout->records_max))
		return BLK_STS_IOERR;
	spin_lock(&queue->write_lock);
	refuse = READ_ONCE(queue->device->refuse);
	if (!refuse) {
		if (list_empty(&queue->waiting))
			chunk = buse_write_reserve(queue, rq, &place);
		if (!chunk)
			list_add_tail(&request->node, &queue->waiting);
	}
	spin_unlock(&queue->write_lock);
	if (chunk)
		buse_write_copy(queue, chunk, rq, &place);
	return refuse;
}

/* A chunk is free: those that wait go on, in order. */
void buse_write_resume(struct buse_queue *queue)
{
	struct buse_request *request;
	struct buse_chunk *chunk;
	struct buse_place place;

	do {
		chunk = NULL;
		spin_lock(&queue->write_lock);
		request = list_first_entry_or_null(&queue->waiting,
						   struct buse_request, node);
		if (request)
			chunk = buse_write_reserve(queue, buse_rq_of(request),
						   &place);
		if (chunk)
			list_del_init(&request->node);
		spin_unlock(&queue->write_lock);
		if (chunk)
			buse_write_copy(queue, chunk, buse_rq_of(request),
					&place);
	} while (chunk);
}

void buse_write_cancel(struct buse_queue *queue, struct list_head *canceled)
{
	spin_lock(&queue->write_lock);
	list_splice_tail_init(&queue->waiting, canceled);
	spin_unlock(&queue->write_lock);
}
