/* A program for BDUS 0.1.0 whose only callback is one that is never called here. */
#define BDUS_REQUIRE_VERSION_MAJOR 0
#define BDUS_REQUIRE_VERSION_MINOR 1
#define BDUS_REQUIRE_VERSION_PATCH 0
#include <bdus.h>
#include <errno.h>
#include <stdio.h>

static int on_secure_erase(uint64_t offset, uint32_t size, struct bdus_ctx *ctx)
{
    (void)offset, (void)size, (void)ctx;
    return 0;
}

int main(void)
{
    struct bdus_ops ops = {0};
    struct bdus_attrs attrs = {0};
    ops.secure_erase = on_secure_erase;
    attrs.logical_block_size = 512;
    attrs.size = 1 << 20;
    if (sizeof(struct bdus_ctx) != 48)
        return 3;
    if (bdus_run(&ops, &attrs, NULL))
        return 0;
    printf("errno %d: %s\n", errno, bdus_get_error_message());
    return errno == ENOTSUP ? 0 : 1;
}
