/* buffering IMAGE [FLUSH_S [no-flush]]: a block of 4096 bytes that only a flush puts into the file
 * IMAGE, as a driver with a cache of its own.  A flush says so and takes that many seconds; or it
 * has no flush.  For tests of replacement.
 *
 * Not here: a driver that users should have (examples). */
#define _XOPEN_SOURCE 700
#include <errno.h>
#include <fcntl.h>
#include <sawmill.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int file, flush_s;
static char block[4096];

static int block_read(void *user, uint64_t offset, void *into, size_t length)
{
    (void)user;
    memcpy(into, block + offset, length);
    return 0;
}

static int block_write(void *user, uint64_t offset, const void *bytes, size_t length, int fua)
{
    (void)user, (void)fua;
    memcpy(block + offset, bytes, length);
    return 0;
}

static int block_flush(void *user)
{
    (void)user;
    puts("flushing");
    fflush(stdout);
    sleep(flush_s);
    return pwrite(file, block, sizeof block, 0) == sizeof block ? 0 : EIO;
}

/* What the driver before had in its memory is in the file now, and not before. */
static void attached(void *user, struct sawmill_device *device)
{
    (void)user, (void)device;
    if (pread(file, block, sizeof block, 0) < 0)
        perror("buffering");
}

int main(int argc, char **argv)
{
    struct sawmill_driver driver = {
        sizeof driver, SAWMILL_ANY_BYTE, block_read, block_write, block_flush, 0, 0, 0, 0,
        attached, 0};
    const char *options[] = {"size=4096", "threads=2", NULL};
    file = argc > 1 ? open(argv[1], O_RDWR | O_CREAT, 0600) : -1;
    if (file < 0)
        return 2;
    flush_s = argc > 2 ? atoi(argv[2]) : 0;
    if (argc > 3)
        driver.flush = NULL;
    if (sawmill_serve(&driver, NULL, options) < 0)
        return fprintf(stderr, "buffering: %s\n", sawmill_error()), 1;
    return 0;
}
