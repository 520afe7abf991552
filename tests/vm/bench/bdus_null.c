/*
 * A driver that does nothing with the bytes, for bench/bdus.py: the same program before BDUS's
 * kernel module and before Sawmill's library, by whichever libbdus.so it finds. Arguments: bytes of
 * the device, callbacks at once. Prints the path of its device. Not here: anything a driver should
 * do.
 */
#include <bdus.h>
#include <stdio.h>
#include <stdlib.h>

static int on_read(char *buffer, uint64_t offset, uint32_t size, struct bdus_ctx *ctx)
{
    (void)buffer, (void)offset, (void)size, (void)ctx;
    return 0;
}

static int on_write(const char *buffer, uint64_t offset, uint32_t size, struct bdus_ctx *ctx)
{
    (void)buffer, (void)offset, (void)size, (void)ctx;
    return 0;
}

static int on_device_available(struct bdus_ctx *ctx)
{
    printf("ready %s\n", ctx->path);
    fflush(stdout);
    return 0;
}

int main(int argc, char **argv)
{
    struct bdus_ops ops = {0};
    struct bdus_attrs attrs = {0};
    if (argc != 3)
        return 2;
    ops.read = on_read;
    ops.write = on_write;
    ops.on_device_available = on_device_available;
    attrs.size = strtoull(argv[1], NULL, 10);
    attrs.logical_block_size = 512;
    attrs.max_concurrent_callbacks = (uint32_t)strtoul(argv[2], NULL, 10);
    attrs.dont_daemonize = true;
    if (!bdus_run(&ops, &attrs, NULL)) {
        fprintf(stderr, "bdus_run: %s\n", bdus_get_error_message());
        return 1;
    }
    return 0;
}
