/* null [SIZE]: takes every write, and reads as zeroes. */
#include <inttypes.h>
#include <sawmill.h>
#include <stdio.h>
#include <string.h>

static int null_read(void *user, uint64_t offset, void *into, size_t length)
{
    (void)user, (void)offset;
    memset(into, 0, length);
    return 0;
}

static int null_write(void *user, uint64_t offset, const void *bytes, size_t length, int fua)
{
    (void)user, (void)offset, (void)bytes, (void)length, (void)fua;
    return 0;
}

static int null_discard(void *user, uint64_t offset, uint64_t length)
{
    (void)user, (void)offset, (void)length;
    return 0;
}

static int null_zero(void *user, uint64_t offset, uint64_t length, int keep_space)
{
    (void)user, (void)offset, (void)length, (void)keep_space;
    return 0;
}

int main(int argc, char **argv)
{
    struct sawmill_driver driver = {0};
    uint64_t bytes = sawmill_parse_size(argc > 1 ? argv[1] : "64M");
    char size[40];
    const char *options[] = {size, NULL};
    driver.struct_bytes = sizeof driver;
    driver.abilities = SAWMILL_ANY_BYTE;
    driver.read = null_read;
    driver.write = null_write;
    driver.discard = null_discard;
    driver.write_zeroes = null_zero;
    snprintf(size, sizeof size, "size=%" PRIu64, bytes);
    if (bytes == 0 || sawmill_serve(&driver, NULL, options) < 0) {
        fprintf(stderr, "null: %s\n", sawmill_error());
        return 1;
    }
    return 0;
}
