/* ram [SIZE]: a disk in memory; a new driver begins with zeroes. */
#include <inttypes.h>
#include <sawmill.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int ram_read(void *user, uint64_t offset, void *into, size_t length)
{
    memcpy(into, (char *)user + offset, length);
    return 0;
}

static int ram_write(void *user, uint64_t offset, const void *bytes, size_t length, int fua)
{
    (void)fua;
    memcpy((char *)user + offset, bytes, length);
    return 0;
}

static int ram_discard(void *user, uint64_t offset, uint64_t length)
{
    memset((char *)user + offset, 0, length);
    return 0;
}

static int ram_zero(void *user, uint64_t offset, uint64_t length, int keep_space)
{
    (void)keep_space;
    return ram_discard(user, offset, length);
}

int main(int argc, char **argv)
{
    struct sawmill_driver driver = {0};
    uint64_t bytes = sawmill_parse_size(argc > 1 ? argv[1] : "64M");
    void *disk = calloc(1, bytes ? bytes : 1);
    char size[40];
    const char *options[] = {size, "threads=2", NULL};
    driver.struct_bytes = sizeof driver;
    driver.abilities = SAWMILL_ANY_BYTE;
    driver.read = ram_read;
    driver.write = ram_write;
    driver.discard = ram_discard;
    driver.write_zeroes = ram_zero;
    snprintf(size, sizeof size, "size=%" PRIu64, bytes);
    if (disk == NULL || bytes == 0 || sawmill_serve(&driver, disk, options) < 0) {
        fprintf(stderr, "ram: %s\n", disk == NULL ? "no memory" : sawmill_error());
        return 1;
    }
    free(disk);
    return 0;
}
