/* ram [recoverable] [foreground] [log] [threads=N] [rerun=ID] [none=CALLBACK]
 *     [fail=CALLBACK:VALUE] [drop] [file=PATH]
 * A BDUS program that the tests steer: a disk of 16 MiB in memory, or in a file,
 * that several drivers share. */
#define _GNU_SOURCE
#include <bdus.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SIZE ((uint64_t)16 << 20)

static char *disk;
static bool drops, is_alone;
static const char *failing = "";
static int failure;
static pthread_t caller;

/* What the callback of this name returns; with one callback at a time, only on the thread that
 * called bdus_run(). */
static int outcome(const char *name)
{
    if (is_alone && !pthread_equal(caller, pthread_self()))
        abort();
    return strcmp(failing, name) == 0 ? failure : 0;
}

static int on_initialize(struct bdus_ctx *ctx)
{
    if (strcmp(ctx->path, "") != 0 || ctx->attrs->max_read_write_size == 0)
        return EPROTO;
    if (drops && (setgid(65534) != 0 || setuid(65534) != 0))
        return errno;
    return outcome("initialize");
}

static int on_available(struct bdus_ctx *ctx)
{
    printf("%" PRIu64 " %s %u:%u\n", ctx->id, ctx->path, ctx->major, ctx->minor);
    fflush(stdout);
    return outcome("on_device_available");
}

static int on_terminate(struct bdus_ctx *ctx)
{
    fprintf(stderr, "terminate %s\n", ctx->is_rerun ? "rerun" : "run");
    return outcome("terminate");
}

static int on_read(char *buffer, uint64_t offset, uint32_t size, struct bdus_ctx *ctx)
{
    (void)ctx;
    memcpy(buffer, disk + offset, size);
    return (uintptr_t)buffer % 4096 == 0 ? outcome("read") : EINVAL;
}

static int on_write(const char *buffer, uint64_t offset, uint32_t size, struct bdus_ctx *ctx)
{
    (void)ctx;
    int told = outcome("write");
    if (told == 0)
        memcpy(disk + offset, buffer, size);
    return told;
}

static int on_write_zeros(uint64_t offset, uint32_t size, bool may_unmap, struct bdus_ctx *ctx)
{
    (void)may_unmap, (void)ctx;
    memset(disk + offset, 0, size);
    return outcome("write_zeros");
}

static int on_flush(struct bdus_ctx *ctx)
{
    (void)ctx;
    return outcome("flush");
}

static int on_ioctl(uint32_t command, void *argument, struct bdus_ctx *ctx)
{
    (void)command, (void)argument, (void)ctx;
    return ENOTTY;
}

int main(int argc, char **argv)
{
    struct bdus_ops ops = {
        .initialize = on_initialize, .on_device_available = on_available,
        .terminate = on_terminate, .read = on_read, .write = on_write,
        .write_zeros = on_write_zeros, .flush = on_flush, .ioctl = on_ioctl};
    struct bdus_attrs attrs = {.logical_block_size = 512, .size = SIZE};
    const char *rerun = NULL, *path = NULL;
    for (int at = 1; at < argc; at++) {
        char *word = argv[at], *value = strchr(word, '=');
        if (strcmp(word, "recoverable") == 0) attrs.recoverable = true;
        else if (strcmp(word, "foreground") == 0) attrs.dont_daemonize = true;
        else if (strcmp(word, "log") == 0) attrs.log = true;
        else if (strcmp(word, "drop") == 0) drops = true;
        else if (strncmp(word, "threads=", 8) == 0)
            attrs.max_concurrent_callbacks = atoi(value + 1);
        else if (strncmp(word, "rerun=", 6) == 0) rerun = value + 1;
        else if (strncmp(word, "file=", 5) == 0) path = value + 1;
        else if (strncmp(word, "size=", 5) == 0) attrs.size = strtoull(value + 1, NULL, 10);
        else if (strcmp(word, "none=flush") == 0) ops.flush = NULL;
        else if (strcmp(word, "none=write_zeros") == 0) ops.write_zeros = NULL;
        else if (strncmp(word, "fail=", 5) == 0) {
            failing = value + 1;
            value = strchr(value, ':');
            *value = 0;
            failure = strcmp(value + 1, "abort") == 0 ? bdus_abort : atoi(value + 1);
        } else return fprintf(stderr, "what is %s?\n", word), 2;
    }
    int file = path ? open(path, O_RDWR | O_CREAT, 0666) : -1;
    if (path && (file < 0 || ftruncate(file, SIZE) != 0)) return perror(path), 2;
    disk = mmap(NULL, SIZE, PROT_READ | PROT_WRITE,
                path ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, file, 0);
    if (disk == MAP_FAILED) return perror("mmap"), 2;
    is_alone = attrs.max_concurrent_callbacks <= 1;
    caller = pthread_self();
    bool done = rerun ? bdus_rerun(strtoull(rerun, NULL, 10), &ops, &attrs, NULL)
                      : bdus_run(&ops, &attrs, NULL);
    if (!done)
        return fprintf(stderr, "errno %d: %s\n", errno, bdus_get_error_message()), 1;
    return 0;
}
