/*
 * Random calls of everything that the BUSE module offers, from several threads.
 *
 *     fuzz SEED CALLS
 *
 * Some threads make, change and remove devices in configfs, some open ports and
 * fetch, acknowledge, map and close, and some use the disks, each rightly and
 * wrongly. Invariants: each thread has random numbers of its own, from the
 * seed; at the end everything is closed and removed. That every call returns
 * is a claim of this program: it ends.
 *
 * Not here: what a call must answer (interface.py), whether bytes are right
 * (daemon.c), what the kernel logs and what is left (../fuzzer.sh).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define DEVICES 2
#define QUEUES 2
#define HANDLES 12
#define TOKENS 8
#define IO_BYTES 65536
#define CONFIG "/sys/kernel/config/buse"
#define ACK_WITH_ERRNO _IOW(0xbe, 1, uint32_t)
/* No process has memory here. */
#define BAD_ADDRESS ((void *)0xffff888000000000)

/* What a call was about, for the count of those that succeeded. */
enum kind { CONFIGURING, OPENING, FETCHING, ACKNOWLEDGING, OTHER, DISK, KINDS };

struct dice {
	uint64_t state;
	/* The device that a thread opens ports of, most of the time. */
	unsigned int home;
};

struct handle {
	int file, is_read, has_errno;
	uint64_t tokens[TOKENS];
	int tokens_count;
	void *map;
	size_t map_bytes;
};

static atomic_long calls_left;
static atomic_long succeeded[KINDS];

static uint64_t roll(struct dice *dice, uint64_t below)
{
	dice->state ^= dice->state << 13;
	dice->state ^= dice->state >> 7;
	dice->state ^= dice->state << 17;
	return (dice->state >> 11) % below;
}

/* One of n times. */
static int once_in(struct dice *dice, int n)
{
	return roll(dice, n) == 0;
}

/* Numbers that tend to be on a border of something. */
static uint64_t odd_number(struct dice *dice)
{
	static const uint64_t odd[] = {
		0, 1, 511, 512, 513, 4095, 4096, 8192, 65536, 1 << 20,
		UINT32_MAX, 1ULL << 32, (1ULL << 32) + 1, (1ULL << 32) + 2,
		1ULL << 63, UINT64_MAX - 1, UINT64_MAX,
	};

	if (once_in(dice, 4))
		return dice->state;
	return odd[roll(dice, sizeof(odd) / sizeof(*odd))] +
	       (once_in(dice, 4) ? roll(dice, 3) - 1 : 0);
}

static int count(enum kind kind, long answer)
{
	/* That nothing is there is no test of anything. */
	if (answer < 0 && errno == EAGAIN) {
		usleep(200);
		return 0;
	}
	atomic_fetch_sub(&calls_left, 1);
	if (answer >= 0)
		atomic_fetch_add(&succeeded[kind], 1);
	return answer >= 0;
}

static void drop(struct handle *handle)
{
	if (handle->map)
		munmap(handle->map, handle->map_bytes);
	count(OTHER, close(handle->file));
	memset(handle, 0, sizeof(*handle));
	handle->file = -1;
}

static void open_port(struct dice *dice, struct handle *handle,
		      unsigned int device, unsigned int queue, int is_read)
{
	static const int modes[] = { O_RDONLY, O_WRONLY, O_RDWR | O_APPEND };
	char path[64];

	if (handle->file >= 0)
		drop(handle);
	snprintf(path, sizeof(path), "/dev/buse%u-%c%u", device,
		 is_read ? 'r' : 'w', queue);
	handle->is_read = is_read;
	handle->file = open(path, O_NONBLOCK | (once_in(dice, 20) ?
						modes[roll(dice, 3)] : O_RDWR));
	count(OPENING, handle->file);
}

/* All ports of a device, so that its disk appears. */
static void open_all(struct dice *dice, struct handle *handles)
{
	unsigned int n;

	for (n = 0; n < 2 * QUEUES; n++)
		open_port(dice, &handles[n], dice->home, n / 2, n % 2);
}

static void fetch(struct dice *dice, struct handle *handle)
{
	size_t bytes = handle->is_read ? 24 : 16;
	uint64_t packet[16] = {};
	struct iovec parts[2] = { { packet, 8 }, { packet + 1, bytes - 8 } };

	if (once_in(dice, 20)) {
		count(FETCHING, read(handle->file, BAD_ADDRESS, bytes));
		return;
	}
	if (once_in(dice, 20)) {
		count(FETCHING, readv(handle->file, parts, 2));
		return;
	}
	if (once_in(dice, 20))
		bytes = roll(dice, sizeof(packet));
	if (!count(FETCHING, read(handle->file, packet, bytes)))
		return;
	if (handle->tokens_count == TOKENS)
		handle->tokens_count = 0;
	handle->tokens[handle->tokens_count++] = packet[handle->is_read ? 2 : 0];
}

static void acknowledge(struct dice *dice, struct handle *handle)
{
	struct {
		uint64_t token;
		uint32_t error, reserved;
		uint64_t behind[4];
	} ack = {};
	size_t bytes = handle->has_errno ? 16 : 8;
	int n;

	if (handle->tokens_count && !once_in(dice, 8)) {
		n = roll(dice, handle->tokens_count);
		ack.token = handle->tokens[n];
		/* Once more later, now and then. */
		if (!once_in(dice, 8))
			handle->tokens[n] =
				handle->tokens[--handle->tokens_count];
	} else {
		ack.token = odd_number(dice);
	}
	if (once_in(dice, 8))
		ack.error = once_in(dice, 3) ? odd_number(dice) : roll(dice, 200);
	if (once_in(dice, 40))
		ack.reserved = 1;
	if (once_in(dice, 20))
		bytes = roll(dice, sizeof(ack));
	count(ACKNOWLEDGING, write(handle->file, once_in(dice, 40) ? BAD_ADDRESS : &ack,
		    bytes));
}

static void map(struct dice *dice, struct handle *handle)
{
	size_t bytes = once_in(dice, 2) ? 65536ULL << roll(dice, 4) :
					  odd_number(dice) % (64 << 20);
	off_t offset = once_in(dice, 8) ? odd_number(dice) & ~4095ULL : 0;

	if (handle->map) {
		if (once_in(dice, 2))
			memset(handle->map, roll(dice, 256), 4096);
		count(OTHER, munmap(handle->map, handle->map_bytes));
		handle->map = NULL;
		return;
	}
	handle->map = mmap(NULL, bytes, once_in(dice, 8) ? PROT_READ | PROT_EXEC :
						PROT_READ | PROT_WRITE,
			   once_in(dice, 8) ? MAP_PRIVATE : MAP_SHARED,
			   handle->file, offset);
	handle->map_bytes = bytes;
	if (!count(OTHER, handle->map == MAP_FAILED ? -1 : 0)) {
		handle->map = NULL;
	} else if (mprotect(handle->map, 4096, PROT_READ | PROT_WRITE)) {
		munmap(handle->map, bytes);
		handle->map = NULL;
	}
}

static void control(struct dice *dice, struct handle *handle)
{
	uint32_t value = once_in(dice, 4) ? odd_number(dice) : roll(dice, 2);
	unsigned long command = once_in(dice, 4) ? odd_number(dice) :
						   ACK_WITH_ERRNO;
	char bytes[24];

	switch (roll(dice, 4)) {
	case 0:
		count(OTHER, lseek(handle->file, odd_number(dice), SEEK_SET));
		break;
	case 1:
		count(OTHER, pread(handle->file, bytes, sizeof(bytes), 0));
		break;
	case 2:
		count(OTHER, ioctl(handle->file, command, BAD_ADDRESS));
		break;
	default:
		if (count(OTHER, ioctl(handle->file, command, &value)) &&
		    command == ACK_WITH_ERRNO)
			handle->has_errno = value;
	}
}

static void *use_ports(void *argument)
{
	struct dice *dice = argument;
	struct handle handles[HANDLES] = {};
	struct handle *handle;
	struct pollfd waiting;
	int n;

	for (n = 0; n < HANDLES; n++)
		handles[n].file = -1;
	while (atomic_load(&calls_left) > 0) {
		handle = &handles[roll(dice, HANDLES)];
		if (once_in(dice, handles[0].file < 0 ? 40 : 4000)) {
			open_all(dice, handles);
		} else if (handle->file < 0) {
			usleep(20);
			if (once_in(dice, 400))
				open_port(dice, handle, roll(dice, DEVICES),
					  roll(dice, QUEUES + 1), roll(dice, 2));
		} else if (once_in(dice, 1000)) {
			drop(handle);
		} else if (once_in(dice, 10)) {
			control(dice, handle);
		} else if (once_in(dice, 20)) {
			map(dice, handle);
		} else if (once_in(dice, 10)) {
			waiting = (struct pollfd){ handle->file,
						   POLLIN | POLLOUT, 0 };
			count(OTHER, poll(&waiting, 1, roll(dice, 3)));
		} else if (once_in(dice, 2)) {
			fetch(dice, handle);
		} else {
			acknowledge(dice, handle);
		}
	}
	for (n = 0; n < HANDLES; n++)
		if (handles[n].file >= 0)
			drop(&handles[n]);
	return NULL;
}

static void *use_disks(void *argument)
{
	static const int ranges[] = { BLKDISCARD, BLKZEROOUT, BLKSECDISCARD };
	struct dice *dice = argument;
	uint64_t range[2];
	char path[64];
	void *bytes;
	int file;

	if (posix_memalign(&bytes, 4096, IO_BYTES))
		exit(1);
	memset(bytes, 1, IO_BYTES);
	while (atomic_load(&calls_left) > 0) {
		snprintf(path, sizeof(path), "/dev/buse%u",
			 (unsigned int)roll(dice, DEVICES));
		file = open(path, O_RDWR | (once_in(dice, 8) ? 0 : O_DIRECT));
		if (file < 0) {
			usleep(1000);
			continue;
		}
		while (!once_in(dice, 50) && atomic_load(&calls_left) > 0) {
			range[0] = roll(dice, 4096) * 512;
			range[1] = (1 + roll(dice, IO_BYTES / 512)) * 512;
			if (once_in(dice, 2)) {
				range[0] &= ~4095ULL;
				range[1] = (range[1] + 4095) & ~4095ULL;
			}
			switch (roll(dice, 12)) {
			case 0:
				count(DISK, fdatasync(file));
				break;
			case 1:
				count(DISK, ioctl(file, ranges[roll(dice, 3)], range));
				break;
			case 2:
			case 3:
			case 4:
				count(DISK, pread(file, bytes, range[1], range[0]));
				break;
			default:
				count(DISK, pwrite(file, bytes, range[1], range[0]));
			}
		}
		close(file);
	}
	free(bytes);
	return NULL;
}

static void put(unsigned int device, const char *name, const char *value)
{
	char path[128];
	int file;

	snprintf(path, sizeof(path), CONFIG "/%u/%s", device, name);
	file = open(path, O_WRONLY);
	if (!count(CONFIGURING, file))
		return;
	count(CONFIGURING, write(file, value, strlen(value)));
	close(file);
}

static void put_number(unsigned int device, const char *name, uint64_t value)
{
	char text[32];

	snprintf(text, sizeof(text), "%llu", (unsigned long long)value);
	put(device, name, text);
}

static void change_attribute(struct dice *dice, unsigned int device)
{
	static const char *const names[] = {
		"size", "blocksize", "io_min", "io_opt", "collision_area_size",
		"write_chunk_size", "write_shm_size", "read_shm_size",
		"hw_queues", "queue_depth", "no_scheduler", "can_write_same",
		"can_write_zeroes", "can_discard", "can_secure_erase",
		"chunk_age_ms", "death_timeout_ms", "on_death", "state",
	};
	static const char *const words[] = {
		"", "\n", "wait", "fail", "-1", "0x", "1e9", "running", "%s%n",
		"99999999999999999999999999",
	};
	const char *name = names[roll(dice, sizeof(names) / sizeof(*names))];
	uint64_t odd = odd_number(dice);

	/* Memory beyond the guest's would only show who is killed for it. */
	if (odd >> 32 == 1)
		odd >>= 12;
	if (once_in(dice, 4))
		put(device, name,
		    words[roll(dice, sizeof(words) / sizeof(*words))]);
	else if (once_in(dice, 2))
		put_number(device, name, odd);
	else
		put_number(device, name, 512ULL << roll(dice, 14));
}

/* A device that a daemon could serve. */
static void make(struct dice *dice, unsigned int device)
{
	char path[64];
	int changes = roll(dice, 3);

	snprintf(path, sizeof(path), CONFIG "/%u", device);
	count(CONFIGURING, mkdir(path, 0755));
	put_number(device, "size", 2 << 20);
	put_number(device, "hw_queues", 1 + roll(dice, QUEUES));
	put_number(device, "write_chunk_size", 65536);
	put_number(device, "write_shm_size", 65536 << roll(dice, 3));
	put_number(device, "read_shm_size", 65536 << roll(dice, 3));
	put_number(device, "blocksize", once_in(dice, 2) ? 512 : 4096);
	put_number(device, "can_discard", roll(dice, 2));
	put_number(device, "can_secure_erase", roll(dice, 2));
	put_number(device, "can_write_zeroes", roll(dice, 2));
	put_number(device, "chunk_age_ms", roll(dice, 2) * 5);
	while (changes--)
		change_attribute(dice, device);
	put(device, "power", "1");
}

static void remove_device(unsigned int device)
{
	char path[64];

	snprintf(path, sizeof(path), CONFIG "/%u", device);
	count(CONFIGURING, rmdir(path));
}

static void *configure(void *argument)
{
	static const char *const odd_names[] = { "007", "-1", "x", "4294967296",
						 "4294967295" };
	struct dice *dice = argument;
	unsigned int device;
	char path[64];

	while (atomic_load(&calls_left) > 0) {
		device = roll(dice, DEVICES);
		switch (roll(dice, 12)) {
		case 0:
			put(device, "power", "0");
			break;
		case 1:
			remove_device(device);
			break;
		case 2:
			snprintf(path, sizeof(path), CONFIG "/%s",
				 odd_names[roll(dice, 5)]);
			if (count(CONFIGURING, mkdir(path, 0755)))
				count(CONFIGURING, rmdir(path));
			break;
		case 3:
		case 4:
			change_attribute(dice, device);
			break;
		default:
			make(dice, device);
		}
		usleep(roll(dice, 300000));
	}
	return NULL;
}

int main(int words_count, char **words)
{
	static void *(*const kinds[])(void *) = {
		configure, configure, use_ports, use_ports, use_ports, use_disks,
		use_disks,
	};
	enum { THREADS = sizeof(kinds) / sizeof(*kinds) };
	pthread_t threads[THREADS];
	struct dice dice[THREADS];
	unsigned int n, device;

	if (words_count != 3)
		return 2;
	atomic_store(&calls_left, atol(words[2]));
	for (n = 0; n < THREADS; n++) {
		dice[n].state = (strtoull(words[1], NULL, 10) * THREADS + n + 1) *
				0x9e3779b97f4a7c15;
		dice[n].home = n % DEVICES;
		if (pthread_create(&threads[n], NULL, kinds[n], &dice[n]))
			return 1;
	}
	/* Disks come last: they wait until their device is removed. */
	for (n = 0; n < THREADS; n++) {
		if (kinds[n] == use_disks)
			for (device = 0; device < DEVICES; device++)
				remove_device(device);
		pthread_join(threads[n], NULL);
	}
	printf("%s calls, of which these succeeded: %ld to configure, %ld to open, "
	       "%ld to fetch, %ld to acknowledge, %ld to disks, %ld others\n",
	       words[2], succeeded[CONFIGURING], succeeded[OPENING],
	       succeeded[FETCHING], succeeded[ACKNOWLEDGING], succeeded[DISK],
	       succeeded[OTHER]);
	/* Else it has not tested what it is for. */
	return succeeded[ACKNOWLEDGING] == 0 || succeeded[DISK] == 0;
}
