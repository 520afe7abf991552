/* sawmill.h: block devices whose drivers are ordinary programs.  C99 and C++.
 *
 * A driver is a table of functions.  Several threads may call them at once, with ranges that
 * lie inside the device; each returns 0 or an errno.  What users see of it depends on the door:
 * docs/guide/doors.md.  The manual is sawmill_serve(3); docs/format/driver.md explains the
 * options.
 */
#ifndef SAWMILL_H
#define SAWMILL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Abilities of a driver that its functions do not show. */
enum {
    SAWMILL_FUA = 1,     /* write() with fua set makes that write durable; else flush() follows */
    SAWMILL_ANY_BYTE = 2 /* ranges may begin and end at any byte; else at blocks */
};

/* How sawmill_serve ends when nothing went wrong. */
enum { SAWMILL_ENDED = 0, SAWMILL_REPLACED = 1 };

/* The device that a driver serves.  The library owns it: attached() gets it, it is valid until
 * sawmill_serve returns, and nothing frees it. */
struct sawmill_device;

/* A write chunk: docs/format/write_chunk.md. */
struct sawmill_chunk {
    const void *bytes;     /* 0: entries; from metadata_bytes on their data, without gaps */
    size_t length;         /* 8: bytes in use */
    size_t metadata_bytes; /* 16 */
    uint64_t entries;      /* 24: their number */
    uint64_t horizon;      /* 32 */
    uint64_t floor;        /* 40 */
    uint32_t queue;        /* 48: on which it arrived */
    uint32_t again;        /* 52: 1 when a former driver had it */
};

/* One write of a chunk. */
struct sawmill_chunk_entry {
    uint64_t sector;       /* first byte on the device / 512 */
    uint64_t sectors;      /* bytes / 512 */
    uint64_t write_number; /* of two that overlap, the higher is newer */
    uint64_t flag;         /* 1: a write */
};

/* A driver.  Its functions must stay valid until sawmill_serve returns.  They may be NULL: without
 * write() and write_chunk() the device is read-only, without flush() every answered write is
 * durable.  A driver that takes chunks has write_chunk() and flush_queue() instead of write() and
 * flush(). */
struct sawmill_driver {
    size_t struct_bytes; /* sizeof(struct sawmill_driver) */
    unsigned abilities;  /* SAWMILL_FUA | SAWMILL_ANY_BYTE */
    int (*read)(void *user, uint64_t offset, void *into, size_t length);
    int (*write)(void *user, uint64_t offset, const void *bytes, size_t length, int fua);
    int (*flush)(void *user);
    int (*discard)(void *user, uint64_t offset, uint64_t length);
    int (*write_zeroes)(void *user, uint64_t offset, uint64_t length, int keep_space);
    int (*write_chunk)(void *user, const struct sawmill_chunk *chunk);
    int (*flush_queue)(void *user, uint32_t queue);
    /* The host has accepted the driver: commands follow. */
    void (*attached)(void *user, struct sawmill_device *device);
    /* The device can be used: "KIND ADDRESS" for each door, then NULL.  The strings are valid
     * during the call. */
    void (*ready)(void *user, const char *const *doors);
};

/* Serves a device until it ends or its driver is replaced.  `options` are strings "name=value",
 * then NULL; it may be NULL.  Besides those of the protocol ("size=67108864"): "name", "door" (once
 * for each door), "threads", "socket" (of a host; overrides SAWMILL_DRIVER), "replace=1" (take the
 * place of the driver that serves the device), and "host=none": this process has the device, opens
 * the doors, and calls the functions on threads of its own (sawmill_serve(3)).
 * Returns SAWMILL_ENDED, SAWMILL_REPLACED or a negative errno, which sawmill_error explains.
 *
 * Pointers: `driver` and `options` are read during the call only, which lasts as long as the
 * device.  `user` is yours; it is passed on as it is, and must stay valid until the call returns.
 * `into`, `bytes`, `chunk` and `chunk->bytes` are the library's, valid only during the function
 * that gets them.  The library frees nothing of yours.
 *
 * A panic, which is a bug in the library, aborts your process with a message on stderr at the
 * call that it happened in; it does not unwind into your frames.
 *
 * C++: no exception may leave a function of the table.  The library's frames below it cannot be
 * unwound: catch it there, and return an errno. */
int sawmill_serve(const struct sawmill_driver *driver, void *user, const char *const *options);

/* Replaces the driver of the device of this name.  Otherwise like sawmill_serve. */
int sawmill_rerun(
    const char *name, const struct sawmill_driver *driver, void *user, const char *const *options);

/* Sends "flush", "end", "fail" or "replace" to the device of this name.  Returns 0 or a negative
 * errno. */
int sawmill_ask(const char *name, const char *what);

/* Ends the device when everything is answered; or immediately, failing requests.  Any thread may
 * call these. */
void sawmill_device_end(struct sawmill_device *device);
void sawmill_device_fail(struct sawmill_device *device, const char *message);

/* Writes the value of an option in effect, or of "name" or "generation", to `into`, cut to `length`
 * bytes including the NUL.  Returns the length of the value, 0 if there is none. */
size_t sawmill_device_option(
    struct sawmill_device *device, const char *name, char *into, size_t length);

/* The last error in this thread.  Never NULL; valid until the thread's next call. */
const char *sawmill_error(void);

/* Parses a size such as "64M" into bytes; 0 for invalid text. */
uint64_t sawmill_parse_size(const char *text);

/* "0.1.0" */
const char *sawmill_version(void);

#ifdef __cplusplus
}
#endif
#endif
