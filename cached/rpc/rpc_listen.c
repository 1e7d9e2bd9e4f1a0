/*
 * Addresses to listen on.
 *
 * An address has one owner: ports are opened without SO_REUSEPORT, and a socket file is taken over
 * only when nobody answers behind it, which is what one that was killed leaves.  A name such as
 * localhost may stand for several addresses; all get the same port, and a family that this machine
 * does not have is passed over unless nothing else is left.
 */

#include "cached/rpc/rpc_listen.h"

#include "kvstore/base/bytes.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define HOST_MAX 300u

static kv_status check_socket(const char *path, struct sockaddr_un *address, struct kv_error *err)
{
    struct stat info;
    if (strlen(path) >= sizeof(address->sun_path))
        return KV_FAIL(err, KV_INVALID, "the socket path %s has more than %zu bytes", path,
                       sizeof(address->sun_path) - 1);
    memcpy(address->sun_path, path, strlen(path) + 1);
    if (lstat(path, &info) != 0) return KV_OK;
    if (!S_ISSOCK(info.st_mode))
        return KV_FAIL(err, KV_INVALID, "%s exists and is no socket; it is left alone", path);

    /* Non-blocking: EAGAIN is a full queue of connections, so somebody is there. */
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return KV_FAIL_ERRNO(err, KV_IO, "try the socket %s", path);
    const int rc = connect(fd, (const struct sockaddr *)address, sizeof(*address));
    const bool is_served = rc == 0 || errno == EAGAIN;
    (void)close(fd);
    if (is_served) return KV_FAIL(err, KV_INVALID, "another process serves on the socket %s", path);
    (void)unlink(path); /* If that fails, bind() says why. */
    return KV_OK;
}

static kv_status open_socket(struct rpc_listen *listen_on, const char *path, struct kv_error *err)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct stat info;
    const kv_status status = check_socket(path, &address, err);
    if (status != KV_OK) return status;

    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return KV_FAIL_ERRNO(err, KV_IO, "listen on the socket %s", path);
    listen_on->fds[listen_on->count++] = fd;
    if (bind(fd, (const struct sockaddr *)&address, sizeof(address)) != 0)
        return KV_FAIL_ERRNO(err, KV_INVALID, "listen on the socket %s", path);
    if (lstat(path, &info) != 0) return KV_FAIL_ERRNO(err, KV_IO, "look at the socket %s", path);
    listen_on->socket = path;
    listen_on->socket_dev = info.st_dev;
    listen_on->socket_ino = info.st_ino;
    if (listen(fd, SOMAXCONN) != 0)
        return KV_FAIL_ERRNO(err, KV_INVALID, "listen on the socket %s", path);
    return KV_OK;
}

static int port_of(const struct sockaddr_storage *address)
{
    if (address->ss_family == AF_INET6)
        return ntohs(((const struct sockaddr_in6 *)address)->sin6_port);
    return ntohs(((const struct sockaddr_in *)address)->sin_port);
}

static void set_port(struct sockaddr_storage *address, int port)
{
    if (address->ss_family == AF_INET6)
        ((struct sockaddr_in6 *)address)->sin6_port = htons((uint16_t)port);
    else
        ((struct sockaddr_in *)address)->sin_port = htons((uint16_t)port);
}

/* 0, or the errno. */
static int open_address(struct rpc_listen *listen_on, const struct addrinfo *info)
{
    struct sockaddr_storage address = {0};
    socklen_t bytes = info->ai_addrlen;
    const int on = 1;

    memcpy(&address, info->ai_addr, KV_MIN((size_t)bytes, sizeof(address)));
    if (listen_on->port != 0) set_port(&address, listen_on->port);
    const int fd = socket(info->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return errno;
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (info->ai_family == AF_INET6)
        (void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on));
    if (bind(fd, (const struct sockaddr *)&address, bytes) != 0 || listen(fd, SOMAXCONN) != 0 ||
        getsockname(fd, (struct sockaddr *)&address, &bytes) != 0) {
        const int cause = errno;
        (void)close(fd);
        return cause;
    }
    listen_on->fds[listen_on->count++] = fd;
    listen_on->port = port_of(&address);
    return 0;
}

static kv_status open_addresses(struct rpc_listen *listen_on, const char *text,
                                struct kv_error *err)
{
    const struct addrinfo hints = {.ai_flags = AI_PASSIVE, .ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL;
    char host[HOST_MAX];
    const char *colon = strrchr(text, ':');
    if (colon == NULL) return KV_FAIL(err, KV_INVALID, "%s is not host:port", text);
    const bool bracket = text[0] == '[';
    const int count = (int)(colon - text) - (bracket ? 2 : 0);
    (void)snprintf(host, sizeof(host), "%.*s", KV_MAX(count, 0), text + (bracket ? 1 : 0));

    const int rc = getaddrinfo(host, colon + 1, &hints, &found);
    if (rc != 0) return KV_FAIL(err, KV_INVALID, "listen on %s: %s", text, gai_strerror(rc));
    const unsigned before = listen_on->count;
    int cause = 0;
    for (const struct addrinfo *i = found; i != NULL && listen_on->count < RPC_LISTEN_MAX;
         i = i->ai_next) {
        const int failed = open_address(listen_on, i);
        if (failed == 0) continue;
        cause = failed;
        if (cause != EADDRNOTAVAIL && cause != EAFNOSUPPORT) break;
    }
    freeaddrinfo(found);
    const bool is_absent = cause == EADDRNOTAVAIL || cause == EAFNOSUPPORT;
    if (cause == 0 || (is_absent && listen_on->count > before)) return KV_OK;
    errno = cause;
    return KV_FAIL_ERRNO(err, KV_INVALID, "listen on %s", text);
}

kv_status rpc_listen_open(struct rpc_listen *listen_on, const char *socket, const char *address,
                          struct kv_error *err)
{
    kv_status status = KV_OK;
    *listen_on = (struct rpc_listen){0};
    if (socket[0] != '\0') status = open_socket(listen_on, socket, err);
    if (status == KV_OK && address[0] != '\0') status = open_addresses(listen_on, address, err);
    if (status != KV_OK) rpc_listen_close(listen_on);
    return status;
}

void rpc_listen_close(struct rpc_listen *listen_on)
{
    struct stat info;
    for (unsigned i = 0; i < listen_on->count; i++)
        (void)close(listen_on->fds[i]);
    listen_on->count = 0;
    if (listen_on->socket == NULL) return;
    /* Another daemon may have put its own there since somebody removed ours. */
    if (lstat(listen_on->socket, &info) == 0 && info.st_dev == listen_on->socket_dev &&
        info.st_ino == listen_on->socket_ino)
        (void)unlink(listen_on->socket);
    listen_on->socket = NULL;
}
