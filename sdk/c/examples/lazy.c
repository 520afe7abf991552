/* lazy http://HOST:PORT/PATH FILE: a copy on read; FILE.map has a byte for each 64 KiB, 1 when
 * FILE has them. */
#define _GNU_SOURCE /* memmem, strcasestr; loff_t is off64_t */
#include "http.h"
#include <fcntl.h>
#include <sawmill.h>

static int file, map; /* one thread serves, so fetches need no lock */

static int lazy_read(void *user, uint64_t offset, void *into, size_t length)
{
    for (uint64_t from = offset >> 16 << 16; from < offset + length; from += 1 << 16) {
        char has = 0, bytes[1 << 16];
        uint64_t end = from + (1 << 16) < size ? from + (1 << 16) : size;
        if (pread(map, &has, 1, from >> 16) < 0) return errno;
        if (has == 0 && (get(from, end, bytes) ||
                         pwrite(file, bytes, end - from, from) != (ssize_t)(end - from) ||
                         fdatasync(file) || pwrite(map, "\1", 1, from >> 16) != 1))
            return EIO; /* the map is never ahead of the bytes */
    }
    return user == &file || pread(file, into, length, offset) == (ssize_t)length ? 0 : EIO;
}

static int lazy_write(void *user, uint64_t offset, const void *bytes, size_t length, int fua)
{
    (void)user, (void)fua; /* the rest of its blocks comes from the server */
    if (lazy_read(&file, offset, NULL, length) != 0) return EIO;
    return pwrite(file, bytes, length, offset) == (ssize_t)length ? 0 : EIO;
}

static int lazy_flush(void *user)
{
    return (void)user, fdatasync(file) || fdatasync(map) ? EIO : 0;
}

int main(int argc, char **argv)
{
    struct sawmill_driver driver = {
        sizeof driver, SAWMILL_ANY_BYTE, lazy_read, lazy_write, lazy_flush, 0, 0, 0, 0, 0, 0};
    char option[40], byte, name[4096];
    const char *options[] = {option, NULL};
    if (argc != 3 ||
        sscanf(argv[1], "http://%255[^:/]%*[:]%15[0-9]/%1023s", host, port, path) != 3 ||
        get(0, 1, &byte))
        return fprintf(stderr, "usage: lazy http://HOST:PORT/PATH FILE\n"), 2;
    snprintf(name, sizeof name, "%s.map", argv[2]);
    snprintf(option, sizeof option, "size=%llu", size);
    file = open(argv[2], O_RDWR | O_CREAT, 0666), map = open(name, O_RDWR | O_CREAT, 0666);
    if (file < 0 || map < 0 || ftruncate(file, size) || ftruncate(map, (size >> 16) + 1))
        return perror(argv[2]), 1;
    if (sawmill_serve(&driver, NULL, options) < 0)
        return fprintf(stderr, "lazy: %s\n", sawmill_error()), 1;
    return 0;
}
