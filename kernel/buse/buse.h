/* SPDX-License-Identifier: GPL-2.0 */
/*
 * BUSE: block devices in user space whose writes are batched in the kernel.
 *
 * A write is complete as soon as it is copied into a chunk, a piece of shared
 * memory that belongs to one queue. A daemon gets whole chunks from one
 * character device per queue, and reads from another. What it has not
 * acknowledged when it dies, the next daemon gets again.
 *
 * Locking order, outermost first:
 *
 *   buse_config.lock       mutex: settings, and the pointer to the device
 *   buse_device.life       mutex: state, which ports are open, policy
 *   buse_device.deferred_lock   spinlock: reads that wait for chunks
 *   buse_queue.write_lock  spinlock, one queue at a time: chunks, items
 *   buse_queue.read_lock   spinlock: slots and reads of one queue
 *
 * All of them are taken in process context only. No request is ended and no
 * payload is copied with a spinlock held: ending a request may submit the
 * next one on the same stack.
 *
 * Who refuses requests: buse_device.refuse is set first, then each lock above
 * is taken to clear its lists. Whoever adds to a list looks at it under the
 * same lock. So nothing slips in behind.
 *
 * Life time: a port (struct device) lives until its last file is closed and
 * has a reference to its buse_device; a buse_device lives as long as a port
 * or the config item needs it; a config item lives from mkdir to the end of
 * rmdir, which waits for stop_work.
 *
 * Not here: bytes of the interface (buse_abi.h), arithmetic (hazard.h),
 * differences between kernels (compat.h).
 */
#ifndef BUSE_H
#define BUSE_H

#include <linux/atomic.h>
#include <linux/blk-mq.h>
#include <linux/cdev.h>
#include <linux/completion.h>
#include <linux/configfs.h>
#include <linux/device.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/spinlock.h>
#include <linux/wait.h>
#include <linux/workqueue.h>

#include "buse_abi.h"
#include "hazard.h"

/* Reads lie at multiples of this in the read memory. */
#define BUSE_SLOT_BYTES		4096ULL
/* The most collision areas with counters of their own. */
#define BUSE_AREAS_SLOTS_MAX	(1ULL << 20)
/* The longest time in an attribute: a day. Times in jiffies do not wrap. */
#define BUSE_TIME_MS_MAX	86400000ULL
/* Ports of all devices together. */
#define BUSE_PORTS_MAX		(1U << 16)

enum buse_on_death {
	BUSE_ON_DEATH_WAIT,
	BUSE_ON_DEATH_FAIL,
};

/* The attributes by their names in configfs. Sizes are bytes. */
struct buse_settings {
	u64 size;
	u64 blocksize;
	u64 io_min;
	u64 io_opt;
	u64 collision_area_size;
	u64 write_chunk_size;
	u64 write_shm_size;
	u64 read_shm_size;
	u64 hw_queues;
	u64 queue_depth;
	u64 no_scheduler;
	u64 can_write_same;
	u64 can_write_zeroes;
	u64 can_discard;
	u64 can_secure_erase;
	u64 chunk_age_ms;
	u64 death_timeout_ms;
	enum buse_on_death on_death;
};

/* What follows from the settings. */
struct buse_layout {
	u32 queues;
	u32 records_max;
	u32 chunk_data_bytes;
	u32 chunks;
	u32 slots;
	u32 areas_slots;
	u64 area_sectors;
	u32 request_sectors_max;
	u32 range_sectors_max;
};

/* The directory of a device in configfs. */
struct buse_config {
	struct config_item item;
	u32 index;
	/* Of the fields below. */
	struct mutex lock;
	struct buse_settings settings;
	/* NULL while the power is off. */
	struct buse_device *device;
};

/* Memory that the daemon may map. */
struct buse_memory {
	void *address;
	struct page **pages;
	unsigned long pages_count;
};

/* Counters of one collision area, or of several that share them. */
struct buse_area {
	/* The number of the last record. */
	atomic64_t sequence;
	/* Records that are not acknowledged. */
	atomic_t pending;
};

enum buse_item_kind {
	BUSE_ITEM_CHUNK,
	BUSE_ITEM_FLUSH,
};

/* An entry of a write queue's lists of what is ready, and what is fetched. */
struct buse_item {
	struct list_head node;
	enum buse_item_kind kind;
	/* Its place in the queue: redelivery keeps the order. */
	u64 order;
};

enum buse_chunk_state {
	BUSE_CHUNK_FREE,
	BUSE_CHUNK_OPEN,
	BUSE_CHUNK_READY,
	BUSE_CHUNK_FETCHED,
	/* Acknowledged; its counts are being taken back without a lock. */
	BUSE_CHUNK_RELEASED,
};

struct buse_chunk {
	struct buse_item item;
	enum buse_chunk_state state;
	u32 index;
	/* Threads that copy into it. It is not handed over before they end. */
	u32 writers;
	u32 records;
	u32 data_bytes;
	/* One for each request: what reads look at. User space cannot touch it. */
	u32 extents_count;
	struct buse_extent *extents;
	/* From the first sector to behind the last one. */
	u64 first_sector;
	u64 end_sector;
	/* Chunks of the device in the order of their opening. */
	u64 ordinal;
	unsigned long opened_jiffies;
};

/* Where a write lies in its chunk: its first record, and its data. */
struct buse_place {
	u32 record;
	u32 data_bytes;
};

/* A flush in flight, with an item for each queue. */
struct buse_flush;

struct buse_flush_item {
	struct buse_item item;
	struct buse_flush *flush;
};

struct buse_flush {
	struct request *rq;
	u64 token;
	atomic_t parts;
	blk_status_t status;
	struct buse_flush_item items[];
};

/* What a request of the block layer carries for us. */
struct buse_request {
	struct list_head node;
	struct buse_queue *queue;
	struct buse_extent extent;
	/* Of all but reads: one for each collision area. */
	u32 records;
	/* A deferred read waits for chunks up to this ordinal. */
	u64 horizon;
	/* Of a read: its place in the memory. */
	u32 slot;
	bool is_fetched;
};

/* One hardware queue: a write queue and a read queue with their memory. */
struct buse_queue {
	struct buse_device *device;
	u32 index;
	int node;
	struct buse_port *write_port;
	struct buse_port *read_port;
	struct buse_memory write_memory;
	struct buse_memory read_memory;

	/* Of the fields up to age_work, and of chunks. */
	spinlock_t write_lock ____cacheline_aligned_in_smp;
	struct buse_chunk *chunks;
	struct buse_chunk *open;
	struct list_head free;
	struct list_head ready;
	struct list_head fetched;
	/* Writes without room: in order, none overtakes. */
	struct list_head waiting;
	u64 last_order;
	/* Of a chunk that the daemon refused; the next flush reports it. */
	blk_status_t failed;
	wait_queue_head_t write_wait;
	struct delayed_work age_work;

	/* Of the fields below. */
	spinlock_t read_lock ____cacheline_aligned_in_smp;
	struct list_head reads_waiting;
	struct list_head reads_ready;
	struct list_head reads_fetched;
	unsigned long *slots;
	struct buse_request **slot_owners;
	wait_queue_head_t read_wait;
};

/* One character device. */
struct buse_port {
	struct device dev;
	struct cdev cdev;
	struct buse_queue *queue;
	bool is_read;
	/* Open; under buse_device.life, read anywhere. */
	bool is_bound;
	bool has_errno;
};

enum buse_state {
	/* Not every port is open. */
	BUSE_STATE_WAITING,
	BUSE_STATE_RUNNING,
	BUSE_STATE_STOPPING,
	BUSE_STATE_OFF,
};

/* A device with power. */
struct buse_device {
	struct kref ref;
	u32 index;
	struct buse_config *config;
	struct buse_settings settings;
	struct buse_layout layout;
	struct buse_queue *queues;
	struct buse_area *areas;
	atomic64_t last_ordinal;
	atomic64_t flushes;

	struct blk_mq_tag_set tag_set;
	struct gendisk *disk;

	/* Of the fields up to stopped, but for the two that ends set once. */
	struct mutex life;
	enum buse_state state;
	u32 bound_count;
	bool is_added;
	unsigned long lost_jiffies;
	/* What new requests get instead of service; BLK_STS_OK: service. */
	blk_status_t refuse;
	/* No more requests come: an empty queue is at its end. */
	bool is_ending;
	/* Nobody waits for the daemon any more. */
	bool is_forced;
	struct work_struct add_work;
	struct work_struct stop_work;
	struct delayed_work death_work;
	wait_queue_head_t drain_wait;
	struct completion stopped;

	/* Of the reads that wait for chunks. */
	spinlock_t deferred_lock;
	struct list_head deferred;
	atomic_t deferred_count;
};

static inline struct buse_request *buse_request_of(struct request *rq)
{
	return blk_mq_rq_to_pdu(rq);
}

static inline struct request *buse_rq_of(struct buse_request *request)
{
	return blk_mq_rq_from_pdu(request);
}

static inline struct buse_chunk *buse_chunk_of(struct buse_item *item)
{
	return container_of(item, struct buse_chunk, item);
}

static inline struct buse_flush *buse_flush_of(struct buse_item *item)
{
	return container_of(item, struct buse_flush_item, item)->flush;
}

static inline u64 buse_chunk_offset(const struct buse_queue *queue,
				    const struct buse_chunk *chunk)
{
	return chunk->index * queue->device->settings.write_chunk_size;
}

/* main.c */
extern struct workqueue_struct *buse_life_wq;
extern struct workqueue_struct *buse_io_wq;

/* config.c */
int buse_config_init(void);
void buse_config_exit(void);

/* settings.c */
void buse_settings_init(struct buse_settings *settings);
int buse_settings_check(u32 index, struct buse_settings *settings,
			struct buse_layout *layout);
int buse_size_check(u32 index, const struct buse_settings *settings, u64 size);

/* device.c */
struct buse_device *buse_device_create(struct buse_config *config);
void buse_device_get(struct buse_device *device);
void buse_device_put(struct buse_device *device);
int buse_device_add(struct buse_device *device);
void buse_device_withdraw(struct buse_device *device);
void buse_device_forget(struct buse_device *device);
void buse_device_resize(struct buse_device *device, u64 size);

/* life.c */
void buse_life_init(struct buse_device *device);
bool buse_life_is_stopping(struct buse_device *device);
void buse_life_end_queues(struct buse_device *device);
int buse_life_bind(struct buse_port *port);
void buse_life_unbind(struct buse_port *port);
void buse_life_set_policy(struct buse_device *device,
			  enum buse_on_death on_death, u64 timeout_ms);
void buse_life_stop(struct buse_device *device, bool is_forced);
const char *buse_life_state(struct buse_device *device);

/* memory.c */
int buse_memory_create(struct buse_memory *memory, u64 bytes, int node);
void buse_memory_destroy(struct buse_memory *memory);
int buse_memory_map(struct buse_memory *memory, struct vm_area_struct *vma);

/* queue.c */
extern const struct blk_mq_ops buse_mq_ops;
int buse_queue_init(struct buse_queue *queue, struct buse_device *device,
		    u32 index);
void buse_queue_destroy(struct buse_queue *queue);
void buse_cancel(struct buse_device *device, blk_status_t status,
		 bool with_fetched);

/* chunk.c */
void buse_chunk_age_work(struct work_struct *work);
void buse_chunk_close_open(struct buse_queue *queue);
struct buse_chunk *buse_chunk_reserve(struct buse_queue *queue,
				      const struct buse_extent *extent,
				      u32 records, u32 data_bytes,
				      struct buse_place *place);
void buse_chunk_end_write(struct buse_queue *queue, struct buse_chunk *chunk);
void buse_chunk_release(struct buse_queue *queue, struct buse_chunk *chunk);
bool buse_chunks_scan(struct buse_device *device,
		      const struct buse_extent *extent, u64 horizon);
u64 buse_chunks_dropped(struct buse_device *device);

/* write.c */
blk_status_t buse_write_submit(struct buse_queue *queue, struct request *rq);
void buse_write_resume(struct buse_queue *queue);
void buse_write_cancel(struct buse_queue *queue, struct list_head *canceled);
struct buse_area *buse_area_at(struct buse_device *device, u64 sector);

/* deliver.c */
bool buse_deliver_write(struct buse_queue *queue,
			struct buse_write_packet *packet);
void buse_deliver_undo(struct buse_queue *queue, u64 token);
int buse_deliver_ack(struct buse_queue *queue, u64 token, blk_status_t status);
void buse_deliver_again(struct buse_queue *queue);
bool buse_deliver_has_write(struct buse_queue *queue);

/* flush.c */
blk_status_t buse_flush_submit(struct buse_device *device, struct request *rq);
void buse_flush_part_done(struct buse_flush *flush, blk_status_t status);
void buse_flush_cancel(struct buse_queue *queue, blk_status_t status,
		       bool with_fetched);
void buse_flush_note_failure(struct buse_queue *queue, u64 order,
			     blk_status_t status);

/* read.c */
blk_status_t buse_read_submit(struct buse_queue *queue, struct request *rq);
void buse_read_recheck(struct buse_device *device);
bool buse_read_deliver(struct buse_queue *queue,
		       struct buse_read_packet *packet);
void buse_read_undo(struct buse_queue *queue, u64 shm_offset);
int buse_read_ack(struct buse_queue *queue, u64 shm_offset,
		  blk_status_t status);
void buse_read_again(struct buse_queue *queue);
bool buse_read_has(struct buse_queue *queue);
void buse_read_cancel(struct buse_queue *queue, bool with_fetched,
		      struct list_head *canceled);
void buse_read_cancel_deferred(struct buse_device *device,
			       struct list_head *canceled);

/* chardev.c */
int buse_chardev_init(void);
void buse_chardev_exit(void);
int buse_ports_create(struct buse_device *device);
void buse_ports_remove(struct buse_device *device);

#endif
