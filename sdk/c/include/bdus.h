/* bdus.h: programs that were written for BDUS 0.1, on the block devices of Sawmill.
 *
 * The names, layouts and rules are those of libbdus 0.1.2 (https://github.com/albertofaria/bdus,
 * libbdus under MIT); the text is our own.  Callbacks that a device of an unmodified kernel
 * cannot use are accepted and never called: write_same, secure_erase, ioctl.  See
 * docs/guide/bdus.md.
 */
#ifndef BDUS_HEADER_BDUS_H_
#define BDUS_HEADER_BDUS_H_

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define BDUS_HEADER_VERSION_MAJOR 0
#define BDUS_HEADER_VERSION_MINOR 1
#define BDUS_HEADER_VERSION_PATCH 2

/* A program may define the version that it was written for: all three, or none. */
#if !defined(BDUS_REQUIRE_VERSION_MAJOR) && !defined(BDUS_REQUIRE_VERSION_MINOR) && \
    !defined(BDUS_REQUIRE_VERSION_PATCH)
#define BDUS_REQUIRE_VERSION_MAJOR BDUS_HEADER_VERSION_MAJOR
#define BDUS_REQUIRE_VERSION_MINOR BDUS_HEADER_VERSION_MINOR
#define BDUS_REQUIRE_VERSION_PATCH BDUS_HEADER_VERSION_PATCH
#elif !defined(BDUS_REQUIRE_VERSION_MAJOR) || !defined(BDUS_REQUIRE_VERSION_MINOR) || \
    !defined(BDUS_REQUIRE_VERSION_PATCH)
#error "define all of BDUS_REQUIRE_VERSION_MAJOR, _MINOR and _PATCH, or none"
#endif
#if BDUS_REQUIRE_VERSION_MAJOR != 0 || BDUS_REQUIRE_VERSION_MINOR != 1 || \
    BDUS_REQUIRE_VERSION_PATCH < 0 || BDUS_REQUIRE_VERSION_PATCH > 2
#error "this bdus.h is of version 0.1.2: it serves programs that require 0.1.0, 0.1.1 or 0.1.2"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* A callback returns this to end the driver immediately. */
enum { bdus_abort = INT_MIN };

struct bdus_ops;
struct bdus_attrs;

/* The device, as callbacks see it. */
struct bdus_ctx {
    const uint64_t id;              /* never used twice, until the machine restarts */
    const char *const path;         /* from on_device_available() on; "" before */
    const struct bdus_ops *const ops;
    const struct bdus_attrs *const attrs; /* with the values in effect */
    const bool is_rerun;
    void *private_data;
#if BDUS_REQUIRE_VERSION_PATCH >= 1
    const uint32_t major; /* 0 where the device is not a block device of this kernel */
    const uint32_t minor;
#endif
};

/* The driver.  A callback that is NULL is not supported.  All return 0 or bdus_abort; read to
 * discard also ENOLINK, ENOSPC or ETIMEDOUT, which users of a ublk device see
 * (docs/guide/doors.md has the other doors), or another error, which becomes EIO.  Callbacks must
 * stay valid until bdus_run() or bdus_rerun() returns.  C++: no exception may leave one. */
struct bdus_ops {
    int (*initialize)(struct bdus_ctx *ctx);
    int (*on_device_available)(struct bdus_ctx *ctx);
    int (*terminate)(struct bdus_ctx *ctx);
    int (*read)(char *buffer, uint64_t offset, uint32_t size, struct bdus_ctx *ctx);
    int (*write)(const char *buffer, uint64_t offset, uint32_t size, struct bdus_ctx *ctx);
    int (*write_same)(const char *buffer, uint64_t offset, uint32_t size, struct bdus_ctx *ctx);
    int (*write_zeros)(uint64_t offset, uint32_t size, bool may_unmap, struct bdus_ctx *ctx);
    int (*fua_write)(const char *buffer, uint64_t offset, uint32_t size, struct bdus_ctx *ctx);
    int (*flush)(struct bdus_ctx *ctx);
    int (*discard)(uint64_t offset, uint32_t size, struct bdus_ctx *ctx);
    int (*secure_erase)(uint64_t offset, uint32_t size, struct bdus_ctx *ctx);
    int (*ioctl)(uint32_t command, void *argument, struct bdus_ctx *ctx);
};

/* The device.  0 selects the default of every field but the first and the third. */
struct bdus_attrs {
    uint32_t logical_block_size;  /* a power of two from 512 to the page */
    uint32_t physical_block_size; /* 0, or a power of two from logical_block_size to the page */
    uint64_t size;                /* a multiple of the physical block */
    uint32_t max_concurrent_callbacks; /* 1: all callbacks on the thread that called bdus_run() */
    uint32_t max_read_write_size;      /* 0, or the page or more */
    uint32_t max_write_same_size;      /* these: 0, or the logical block or more */
    uint32_t max_write_zeros_size;
    uint32_t max_discard_erase_size;
    bool disable_partition_scanning;
    bool recoverable;    /* the device stays when the driver dies, and waits 30 s for another */
    bool dont_daemonize;
    bool log;            /* `bdus logs` prints the output */
};

struct bdus_version {
    uint32_t major;
    uint32_t minor;
    uint32_t patch;
};

bool bdus_run_0_1_0_(
    const struct bdus_ops *ops, const struct bdus_attrs *attrs, void *private_data);
bool bdus_run_0_1_1_(
    const struct bdus_ops *ops, const struct bdus_attrs *attrs, void *private_data);
bool bdus_rerun_0_1_0_(
    uint64_t dev_id, const struct bdus_ops *ops, const struct bdus_attrs *attrs,
    void *private_data);
bool bdus_rerun_0_1_1_(
    uint64_t dev_id, const struct bdus_ops *ops, const struct bdus_attrs *attrs,
    void *private_data);
bool bdus_get_dev_id_from_path_0_1_0_(uint64_t *out_dev_id, const char *dev_path);
bool bdus_flush_dev_0_1_0_(uint64_t dev_id);
bool bdus_destroy_dev_0_1_0_(uint64_t dev_id);
const char *bdus_get_error_message_0_1_0_(void);
const struct bdus_version *bdus_get_libbdus_version_0_1_0_(void);
bool bdus_get_kbdus_version_0_1_0_(struct bdus_version *out_kbdus_version);

/* Serves a new device until it is destroyed or its driver replaced.  On failure returns false: see
 * errno and bdus_get_error_message(). */
static inline bool bdus_run(
    const struct bdus_ops *ops, const struct bdus_attrs *attrs, void *private_data)
{
#if BDUS_REQUIRE_VERSION_PATCH >= 1
    return bdus_run_0_1_1_(ops, attrs, private_data);
#else
    return bdus_run_0_1_0_(ops, attrs, private_data);
#endif
}

/* Replaces the driver of a device; the device continues. */
static inline bool bdus_rerun(
    uint64_t dev_id, const struct bdus_ops *ops, const struct bdus_attrs *attrs, void *private_data)
{
#if BDUS_REQUIRE_VERSION_PATCH >= 1
    return bdus_rerun_0_1_1_(dev_id, ops, attrs, private_data);
#else
    return bdus_rerun_0_1_0_(dev_id, ops, attrs, private_data);
#endif
}

static inline bool bdus_get_dev_id_from_path(uint64_t *out_dev_id, const char *dev_path)
{
    return bdus_get_dev_id_from_path_0_1_0_(out_dev_id, dev_path);
}

static inline bool bdus_flush_dev(uint64_t dev_id)
{
    return bdus_flush_dev_0_1_0_(dev_id);
}

static inline bool bdus_destroy_dev(uint64_t dev_id)
{
    return bdus_destroy_dev_0_1_0_(dev_id);
}

static inline const char *bdus_get_error_message(void)
{
    return bdus_get_error_message_0_1_0_();
}

static inline const struct bdus_version *bdus_get_libbdus_version(void)
{
    return bdus_get_libbdus_version_0_1_0_();
}

/* There is no kernel module: the version of this library's protocol takes its place. */
static inline bool bdus_get_kbdus_version(struct bdus_version *out_kbdus_version)
{
    return bdus_get_kbdus_version_0_1_0_(out_kbdus_version);
}

#ifdef __cplusplus
}
#endif
#endif
