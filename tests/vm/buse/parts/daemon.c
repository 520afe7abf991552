/*
 * A daemon for the BUSE module, for tests: a disk in a file.
 *
 *     daemon INDEX IMAGE [delay_us]
 *
 * Invariants: of two writes of a block the one with the higher sequence number
 * stays, whatever the order in which chunks come; the numbers lie in
 * IMAGE.sequence, so they survive a kill as the image does. Each port has two
 * threads, so acknowledgements come out of order. A flush is acknowledged when
 * the queue's chunks before it are applied.
 *
 * Not here: making the device (the scripts), durability (IMAGE is in memory).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define THREADS_PER_PORT 2
#define END UINT64_MAX
#define STRIPES 1024

struct record {
	uint64_t sector, sectors, sequence, flag;
};

struct port {
	int file, is_read;
	uint8_t *memory;
	/* Held from a fetch to the count of what was fetched. */
	pthread_mutex_t fetch;
	pthread_mutex_t lock;
	pthread_cond_t idle;
	int busy;
};

static uint64_t index_, blocksize, size, chunk_bytes, delay_us;
static uint8_t *image;
static uint64_t *sequences;
static pthread_mutex_t stripes[STRIPES];

static void die(const char *what)
{
	fprintf(stderr, "daemon: %s: %s\n", what, strerror(errno));
	exit(1);
}

static uint64_t attribute(const char *name)
{
	char path[256], text[64];
	FILE *file;

	snprintf(path, sizeof(path), "/sys/kernel/config/buse/%llu/%s",
		 (unsigned long long)index_, name);
	file = fopen(path, "r");
	if (!file || !fgets(text, sizeof(text), file))
		die(path);
	fclose(file);
	return strtoull(text, NULL, 0);
}

static void *map(const char *path, int flags, uint64_t bytes, int *keep)
{
	int file = open(path, flags, 0600);
	void *memory;

	if (file < 0)
		die(path);
	if ((flags & O_CREAT) && ftruncate(file, bytes))
		die(path);
	memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (memory == MAP_FAILED)
		die(path);
	if (keep)
		*keep = file;
	else
		close(file);
	return memory;
}

static void dawdle(void)
{
	if (delay_us)
		usleep(random() % delay_us);
}

static void apply_block(uint64_t block, uint64_t sequence, const uint8_t *data)
{
	pthread_mutex_t *stripe = &stripes[block % STRIPES];

	pthread_mutex_lock(stripe);
	/* The same one again is redelivery: it may have been applied by half. */
	if (sequence >= sequences[block]) {
		if (data)
			memcpy(image + block * blocksize, data, blocksize);
		else
			memset(image + block * blocksize, 0, blocksize);
		sequences[block] = sequence;
	}
	pthread_mutex_unlock(stripe);
}

static void apply_chunk(const uint8_t *chunk, uint64_t count)
{
	const struct record *records = (const struct record *)chunk;
	const uint8_t *data = chunk + chunk_bytes / blocksize * sizeof(*records);
	uint64_t n, at, from, to;

	for (n = 0; n < count; n++) {
		from = records[n].sector * 512;
		to = from + records[n].sectors * 512;
		if (to > size || from % blocksize || to % blocksize ||
		    !records[n].sequence) {
			fprintf(stderr, "daemon: a record that cannot be\n");
			abort();
		}
		for (at = from; at < to; at += blocksize) {
			apply_block(at / blocksize, records[n].sequence,
				    records[n].flag == 1 ? data : NULL);
			if (records[n].flag == 1)
				data += blocksize;
		}
	}
	if (data > chunk + chunk_bytes)
		abort();
}

static void acknowledge(struct port *port, uint64_t token)
{
	/* After rmdir under load, nobody waits for it any more. */
	if (write(port->file, &token, sizeof(token)) != sizeof(token) &&
	    errno != ENODEV)
		die("acknowledgement");
}

static void *write_thread(void *argument)
{
	struct port *port = argument;
	uint64_t packet[2];

	for (;;) {
		pthread_mutex_lock(&port->fetch);
		if (read(port->file, packet, sizeof(packet)) != sizeof(packet))
			die("read of a write port");
		pthread_mutex_lock(&port->lock);
		if (packet[0] > (1ULL << 32)) {
			while (port->busy)
				pthread_cond_wait(&port->idle, &port->lock);
			pthread_mutex_unlock(&port->lock);
			pthread_mutex_unlock(&port->fetch);
			if (packet[0] == END)
				return NULL;
			acknowledge(port, packet[0]);
			continue;
		}
		port->busy++;
		pthread_mutex_unlock(&port->lock);
		pthread_mutex_unlock(&port->fetch);
		dawdle();
		apply_chunk(port->memory + packet[0], packet[1]);
		dawdle();
		acknowledge(port, packet[0]);
		pthread_mutex_lock(&port->lock);
		if (!--port->busy)
			pthread_cond_broadcast(&port->idle);
		pthread_mutex_unlock(&port->lock);
	}
}

static void *read_thread(void *argument)
{
	struct port *port = argument;
	uint64_t packet[3];

	for (;;) {
		if (read(port->file, packet, sizeof(packet)) != sizeof(packet))
			die("read of a read port");
		if (packet[2] == END)
			return NULL;
		dawdle();
		memcpy(port->memory + packet[2], image + packet[0] * 512,
		       packet[1] * 512);
		acknowledge(port, packet[2]);
	}
}

static void start(struct port *port, const char *kind, unsigned int queue,
		  pthread_t *threads)
{
	char path[64];
	int n;

	snprintf(path, sizeof(path), "/dev/buse%llu-%c%u",
		 (unsigned long long)index_, *kind, queue);
	port->is_read = *kind == 'r';
	pthread_mutex_init(&port->fetch, NULL);
	pthread_mutex_init(&port->lock, NULL);
	pthread_cond_init(&port->idle, NULL);
	port->memory = map(path, O_RDWR, attribute(port->is_read ?
						   "read_shm_size" :
						   "write_shm_size"),
			   &port->file);
	for (n = 0; n < THREADS_PER_PORT; n++)
		if (pthread_create(&threads[n], NULL, port->is_read ?
				   read_thread : write_thread, port))
			die("thread");
}

int main(int count, char **words)
{
	unsigned int n, queues;
	struct port *ports;
	pthread_t *threads;
	char path[4096];

	if (count < 3)
		return 2;
	index_ = strtoull(words[1], NULL, 10);
	delay_us = count > 3 ? strtoull(words[3], NULL, 10) : 0;
	srandom(getpid());
	blocksize = attribute("blocksize");
	/* It may be told of a size that the disk will only grow to. */
	size = getenv("DAEMON_SIZE") ? strtoull(getenv("DAEMON_SIZE"), NULL, 0) :
				       attribute("size");
	chunk_bytes = attribute("write_chunk_size");
	queues = attribute("hw_queues");
	for (n = 0; n < STRIPES; n++)
		pthread_mutex_init(&stripes[n], NULL);
	image = map(words[2], O_RDWR | O_CREAT, size, NULL);
	snprintf(path, sizeof(path), "%s.sequence", words[2]);
	sequences = map(path, O_RDWR | O_CREAT, size / blocksize * 8, NULL);
	ports = calloc(2 * queues, sizeof(*ports));
	threads = calloc(2 * queues * THREADS_PER_PORT, sizeof(*threads));
	if (!ports || !threads)
		die("memory");
	for (n = 0; n < queues; n++) {
		start(&ports[2 * n], "w", n, &threads[2 * n * THREADS_PER_PORT]);
		start(&ports[2 * n + 1], "r", n,
		      &threads[(2 * n + 1) * THREADS_PER_PORT]);
	}
	for (n = 0; n < 2 * queues * THREADS_PER_PORT; n++)
		pthread_join(threads[n], NULL);
	return 0;
}
