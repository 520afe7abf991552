/* mirror A B: A holds the bytes, B each of them XOR 0xFF.  A read that finds a difference fails. */
#define _FILE_OFFSET_BITS 64
#define _XOPEN_SOURCE 700
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sawmill.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
static int half[2]; /* one thread serves, so no read sees half a write */

static int mirror_read(void *user, uint64_t offset, void *into, size_t length)
{
    unsigned char *a = into, *b = malloc(length);
    int same = b && pread(half[0], a, length, offset) == (ssize_t)length &&
               pread(half[1], b, length, offset) == (ssize_t)length;
    (void)user;
    for (size_t at = 0; same && at < length; at++)
        same = a[at] == (b[at] ^ 0xFF);
    free(b);
    return same ? 0 : EIO;
}

static int mirror_write(void *user, uint64_t offset, const void *bytes, size_t length, int fua)
{
    unsigned char *b = malloc(length);
    int done;
    (void)user, (void)fua;
    for (size_t at = 0; b && at < length; at++)
        b[at] = ((const unsigned char *)bytes)[at] ^ 0xFF;
    done = b && pwrite(half[0], bytes, length, offset) == (ssize_t)length &&
           pwrite(half[1], b, length, offset) == (ssize_t)length;
    free(b);
    return done ? 0 : EIO;
}

static int mirror_flush(void *user)
{
    int a = fdatasync(half[0]), b = fdatasync(half[1]);
    return (void)user, a == 0 && b == 0 ? 0 : EIO;
}

int main(int argc, char **argv)
{
    struct sawmill_driver driver = {
        sizeof driver, SAWMILL_ANY_BYTE, mirror_read, mirror_write, mirror_flush, 0, 0, 0, 0, 0, 0};
    char size[40];
    const char *options[] = {size, NULL};
    if (argc != 3 ||
        (half[0] = open(argv[1], O_RDWR)) < 0 || (half[1] = open(argv[2], O_RDWR)) < 0 ||
        lseek(half[0], 0, SEEK_END) != lseek(half[1], 0, SEEK_END))
        return fprintf(stderr, "usage: mirror A B, files or devices of one size\n"), 2;
    snprintf(size, sizeof size, "size=%" PRIu64, (uint64_t)lseek(half[0], 0, SEEK_END));
    if (sawmill_serve(&driver, NULL, options) < 0)
        return fprintf(stderr, "mirror: %s\n", sawmill_error()), 1;
    return 0;
}
