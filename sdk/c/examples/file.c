/* file PATH [SIZE]: the bytes of a file or a block device; a flush makes them durable. */
#define _FILE_OFFSET_BITS 64
#define _XOPEN_SOURCE 700
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sawmill.h>
#include <stdio.h>
#include <unistd.h>

static int file;

static int file_read(void *user, uint64_t offset, void *into, size_t length)
{
    ssize_t count;
    (void)user;
    for (; length > 0; into = (char *)into + count, offset += count, length -= count)
        if ((count = pread(file, into, length, offset)) <= 0)
            return count < 0 ? errno : EIO;
    return 0;
}

static int file_write(void *user, uint64_t offset, const void *bytes, size_t length, int fua)
{
    ssize_t count;
    (void)user, (void)fua;
    for (; length > 0; bytes = (const char *)bytes + count, offset += count, length -= count)
        if ((count = pwrite(file, bytes, length, offset)) < 0)
            return errno;
    return 0;
}

static int file_flush(void *user)
{
    (void)user;
    return fdatasync(file) == 0 ? 0 : errno;
}

int main(int argc, char **argv)
{
    struct sawmill_driver driver = {
        sizeof driver, SAWMILL_ANY_BYTE, file_read, file_write, file_flush, 0, 0, 0, 0, 0, 0};
    uint64_t bytes = argc > 2 ? sawmill_parse_size(argv[2]) : 0;
    char size[40];
    const char *options[] = {size, "threads=4", NULL};
    file = argc > 1 ? open(argv[1], O_RDWR | O_CREAT, 0666) : -1;
    /* It grows and is never cut: another driver may serve it still. */
    if (file < 0 || (argc > 2 && bytes == 0) || (bytes > (uint64_t)lseek(file, 0, SEEK_END) &&
        ftruncate(file, bytes) < 0 && errno != EINVAL)) {
        fprintf(stderr, "usage: file PATH [SIZE], PATH to read and write, SIZE like 64M\n");
        return 2;
    }
    /* The end of a block device, which cannot be cut to a size, is its size. */
    bytes = bytes ? bytes : (uint64_t)lseek(file, 0, SEEK_END);
    snprintf(size, sizeof size, "size=%" PRIu64, bytes);
    if (sawmill_serve(&driver, NULL, options) < 0)
        return fprintf(stderr, "file: %s\n", sawmill_error()), 1;
    return 0;
}
