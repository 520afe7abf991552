/* lazy http://HOST:PORT/PATH FILE: a copy on read; FILE.map has a byte for each 64 KiB, 1 when FILE has them. */
#define _GNU_SOURCE /* memmem, strcasestr; loff_t is off64_t */
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <sawmill.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int file, map; /* one thread serves: whoever fetches a block is alone */
static char host[256], port[16] = "80", path[1024];
static unsigned long long size; /* of the whole, as get() finds it */
static int get(unsigned long long from, unsigned long long end, char *into)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found;
    static char text[1 << 17];
    ssize_t count = -1, have = 0;
    if (getaddrinfo(host, port, &hints, &found) != 0) return EIO;
    int server = socket(found->ai_family, SOCK_STREAM, 0);
    int ok = connect(server, found->ai_addr, found->ai_addrlen) == 0 &&
             dprintf(server, "GET /%s HTTP/1.0\r\nHost: %s\r\nRange: bytes=%llu-%llu\r\n\r\n", path, host, from, end - 1) > 0;
    for (freeaddrinfo(found); ok && (count = read(server, text + have, sizeof text - 1 - have)) > 0;) have += count;
    close(server);
    text[have] = 0;
    char *body = memmem(text, have, "\r\n\r\n", 4), *range = strcasestr(text, "\r\nContent-Range: bytes ");
    if (!body || !range || range > body || text + have - (body + 4) != (ssize_t)(end - from)) return EIO;
    memcpy(into, body + 4, end - from);
    return sscanf(strchr(range, '/'), "/%llu", &size) == 1 ? 0 : EIO;
}
static int lazy_read(void *user, uint64_t offset, void *into, size_t length)
{
    for (uint64_t from = offset >> 16 << 16; from < offset + length; from += 1 << 16) {
        char has = 0, bytes[1 << 16];
        uint64_t end = from + (1 << 16) < size ? from + (1 << 16) : size;
        if (pread(map, &has, 1, from >> 16) < 0) return errno;
        if (has == 0 && (get(from, end, bytes) || pwrite(file, bytes, end - from, from) != (ssize_t)(end - from) ||
                         fdatasync(file) || pwrite(map, "\1", 1, from >> 16) != 1)) return EIO; /* the map never leads */
    }
    return user == &file || pread(file, into, length, offset) == (ssize_t)length ? 0 : EIO;
}
static int lazy_write(void *user, uint64_t offset, const void *bytes, size_t length, int fua)
{
    (void)user, (void)fua; /* the rest of its blocks comes from the server */
    return lazy_read(&file, offset, NULL, length) || pwrite(file, bytes, length, offset) != (ssize_t)length ? EIO : 0;
}
static int lazy_flush(void *user) { return (void)user, fdatasync(file) || fdatasync(map) ? EIO : 0; }
int main(int argc, char **argv)
{
    struct sawmill_driver driver = {sizeof driver, SAWMILL_ANY_BYTE, lazy_read, lazy_write, lazy_flush, 0, 0, 0, 0, 0, 0};
    char option[40], byte, name[4096];
    const char *options[] = {option, NULL};
    int url = argc == 3 ? sscanf(argv[1], "http://%255[^:/]%*[:]%15[0-9]/%1023s", host, port, path) : 0;
    if (url != 3 || get(0, 1, &byte)) return fprintf(stderr, "usage: lazy http://HOST:PORT/PATH FILE\n"), 2;
    snprintf(name, sizeof name, "%s.map", argv[2]), snprintf(option, sizeof option, "size=%llu", size);
    file = open(argv[2], O_RDWR | O_CREAT, 0666), map = open(name, O_RDWR | O_CREAT, 0666);
    if (file < 0 || map < 0 || ftruncate(file, size) || ftruncate(map, (size >> 16) + 1)) return perror(argv[2]), 1;
    return sawmill_serve(&driver, NULL, options) < 0 ? fprintf(stderr, "lazy: %s\n", sawmill_error()), 1 : 0;
}
