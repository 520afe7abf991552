/* http.h: a part of a file from a server, for lazy.c.  HTTP/1.0, no TLS, no redirects. */
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static char host[256], port[16] = "80", path[1024];
static unsigned long long size; /* of the whole file, set by get() */

static int get(unsigned long long from, unsigned long long end, char *into)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found;
    static char text[1 << 17];
    ssize_t count = -1, have = 0;
    if (getaddrinfo(host, port, &hints, &found) != 0) return EIO;
    int server = socket(found->ai_family, SOCK_STREAM, 0);
    int ok = connect(server, found->ai_addr, found->ai_addrlen) == 0 &&
             dprintf(server, "GET /%s HTTP/1.0\r\nHost: %s\r\nRange: bytes=%llu-%llu\r\n\r\n",
                     path, host, from, end - 1) > 0;
    freeaddrinfo(found);
    while (ok && (count = read(server, text + have, sizeof text - 1 - have)) > 0) have += count;
    close(server);
    text[have] = 0;
    char *body = memmem(text, have, "\r\n\r\n", 4);
    char *range = strcasestr(text, "\r\nContent-Range: bytes ");
    if (!body || !range || range > body || text + have - (body + 4) != (ssize_t)(end - from))
        return EIO;
    memcpy(into, body + 4, end - from);
    return sscanf(strchr(range, '/'), "/%llu", &size) == 1 ? 0 : EIO;
}
