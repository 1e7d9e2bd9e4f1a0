/*
 * The accept loop.
 *
 * gRPC's own listener gives up for good on the first EMFILE, knows no limit, and lets connections
 * take the descriptors that the store needs.  So connections are taken here, in a way that survives
 * all of it:
 *
 * - One descriptor is held in reserve.  Where the process has no other, it is given up for a
 *   moment to take the next connection from the queue and close it, so that its client hears of it
 *   instead of waiting.  Where even that fails, the queue is left alone for BACK_OFF_MS.
 * - Connections have a limit: KV_CONNECTIONS_MAX, and what RLIMIT_NOFILE leaves beside the files of
 *   the store, read again once a second because somebody may change it.
 * - A connection that says nothing is closed; until it speaks it costs a descriptor and no memory
 *   of gRPC's.
 *
 * A connection that was handed on is closed by its new owner, who does not tell.  Its slot keeps
 * the socket's cookie, which the kernel gives out once: when the descriptor is no socket any more,
 * or one with another cookie, it is gone.  They are looked at once a second, and when the limit is
 * met: 1,000 calls of getsockopt, some 0.2 ms.
 */

#include "cached/rpc/rpc_accept.h"

#include "cached/rpc/rpc_listen.h"
#include "kvstore/base/bytes.h"
#include "kvstore/base/clock.h"
#include "kvstore/base/limits.h"
#include "kvstore/base/thread.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#define TICK_MS 1000
#define BACK_OFF_MS 100
#define TELL_NS (60ull * 1000000000u) /* Between two lines of one kind. */
#define ACCEPTS_PER_TURN 64u
/* A peer over TCP that takes nothing of what was sent for so long is gone. */
#define USER_TIMEOUT_MS 20000

enum slot_state { SLOT_FREE, SLOT_SILENT, SLOT_HANDED };

struct slot {
    enum slot_state state;
    int fd;
    uint64_t cookie;
    uint64_t accepted_ns;
};

struct teller {
    uint64_t told_ns, untold;
};

struct rpc_accept {
    struct rpc_accept_options options;
    struct rpc_listen listen;
    struct kv_thread thread;
    int wake_fd;

    atomic_bool stops;
    _Atomic(const char *) trouble;
    _Atomic uint64_t open, accepted, refused_limit, refused_files, closed_silent;

    /* The thread's. */
    int reserve_fd; /* -1: given up, and not got back yet. */
    uint32_t connections_max;
    uint64_t back_off_ns; /* The queue is left alone until then. */
    struct teller limit_teller, silent_teller;
    struct slot slots[KV_CONNECTIONS_MAX];
    struct pollfd polls[1 + RPC_LISTEN_MAX + KV_CONNECTIONS_MAX];
    uint32_t poll_slots[KV_CONNECTIONS_MAX]; /* Of the polls behind the listening ones. */
};

static int open_reserve(void)
{
    return open("/dev/null", O_RDONLY | O_CLOEXEC);
}

static void read_limit(struct rpc_accept *accept)
{
    struct rlimit limit = {0};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
    const uint64_t reserved = accept->options.reserved_files;
    const uint64_t left = limit.rlim_cur > reserved ? limit.rlim_cur - reserved : 0;
    accept->connections_max =
        (uint32_t)KV_MIN(KV_MAX(left, KV_CONNECTIONS_MIN), (uint64_t)KV_CONNECTIONS_MAX);
}

kv_status rpc_accept_create(const struct rpc_accept_options *options,
                            struct rpc_accept **ret_accept, struct kv_error *err)
{
    kv_status status;
    struct rpc_accept *accept = calloc(1, sizeof(*accept));
    if (accept == NULL) return KV_FAIL(err, KV_NOMEM, "create the accept loop");
    accept->options = *options;
    accept->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    accept->reserve_fd = open_reserve();
    accept->connections_max = KV_CONNECTIONS_MIN;
    read_limit(accept);
    if (accept->wake_fd < 0 || accept->reserve_fd < 0) {
        status = KV_FAIL_ERRNO(err, KV_IO, "create the descriptors of the accept loop");
        goto fail;
    }
    status = rpc_listen_open(&accept->listen, options->socket, options->listen, err);
    if (status != KV_OK) goto fail;
    *ret_accept = accept;
    return KV_OK;

fail:
    rpc_accept_destroy(accept);
    return status;
}

/* A line at most once a minute, with how many it stands for. */
static bool may_tell(struct teller *teller, uint64_t now_ns, uint64_t *ret_count)
{
    teller->untold++;
    if (teller->told_ns != 0 && now_ns - teller->told_ns < TELL_NS) return false;
    *ret_count = teller->untold;
    *teller = (struct teller){.told_ns = now_ns};
    return true;
}

static uint64_t cookie_of(int fd)
{
    uint64_t cookie = 0;
    socklen_t bytes = sizeof(cookie);
    if (getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &bytes) != 0) return 0;
    return cookie;
}

static void free_slot(struct rpc_accept *accept, struct slot *slot)
{
    assert(slot->state != SLOT_FREE);
    slot->state = SLOT_FREE;
    atomic_fetch_sub(&accept->open, 1);
}

static void sweep(struct rpc_accept *accept)
{
    for (uint32_t i = 0; i < KV_CONNECTIONS_MAX; i++) {
        struct slot *slot = &accept->slots[i];
        if (slot->state == SLOT_HANDED && cookie_of(slot->fd) != slot->cookie)
            free_slot(accept, slot);
    }
}

static struct slot *find_free(struct rpc_accept *accept)
{
    if (atomic_load(&accept->open) >= accept->connections_max) return NULL;
    for (uint32_t i = 0; i < KV_CONNECTIONS_MAX; i++) {
        if (accept->slots[i].state == SLOT_FREE) return &accept->slots[i];
    }
    return NULL;
}

static void refuse(struct rpc_accept *accept, int fd, uint64_t now_ns)
{
    uint64_t count;
    (void)close(fd);
    atomic_fetch_add(&accept->refused_limit, 1);
    if (!may_tell(&accept->limit_teller, now_ns, &count)) return;
    kv_log(accept->options.log, KV_LOG_WARN, "connections_refused",
           "text=\"%" PRIu32 " connections are open, more are closed at once\" count=%" PRIu64,
           accept->connections_max, count);
}

/* A connection is there: keep it until it speaks. */
static void keep(struct rpc_accept *accept, int fd, uint64_t now_ns, bool *may_sweep)
{
    const int on = 1;
    const int timeout_ms = USER_TIMEOUT_MS;
    struct slot *slot = find_free(accept);
    if (slot == NULL && *may_sweep) {
        *may_sweep = false;
        sweep(accept);
        slot = find_free(accept);
    }
    const uint64_t cookie = cookie_of(fd);
    if (slot == NULL || cookie == 0) {
        refuse(accept, fd, now_ns);
        return;
    }
    /* On a unix socket these fail, and there is nothing to set. */
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, sizeof(timeout_ms));
    *slot = (struct slot){.state = SLOT_SILENT, .fd = fd, .cookie = cookie, .accepted_ns = now_ns};
    atomic_fetch_add(&accept->open, 1);
    atomic_fetch_add(&accept->accepted, 1);
}

static void begin_trouble(struct rpc_accept *accept, int cause)
{
    if (atomic_load(&accept->trouble) != NULL) return;
    const bool is_files = cause == EMFILE || cause == ENFILE;
    const char *text = is_files ? "too few file descriptors: new connections are refused"
                                : "too little memory of the kernel: new connections wait";
    atomic_store(&accept->trouble, text);
    kv_log(accept->options.log, KV_LOG_ERROR, "connections_stopped", "text=\"%s\" errno=%d", text,
           cause);
}

/* No descriptor, or no memory for one.  false: the queue is to be left alone for a while. */
static bool survive(struct rpc_accept *accept, int listen_fd, int cause)
{
    int fd = -1;
    atomic_fetch_add(&accept->refused_files, 1);
    begin_trouble(accept, cause);
    if ((cause == EMFILE || cause == ENFILE) && accept->reserve_fd >= 0) {
        (void)close(accept->reserve_fd);
        fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC);
        if (fd >= 0) (void)close(fd);
        accept->reserve_fd = open_reserve();
    }
    return fd >= 0;
}

static void accept_some(struct rpc_accept *accept, int listen_fd, uint64_t now_ns)
{
    bool may_sweep = true;
    for (unsigned i = 0; i < ACCEPTS_PER_TURN; i++) {
        const int fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0) {
            keep(accept, fd, now_ns, &may_sweep);
            continue;
        }
        if (errno == EAGAIN) return;
        const int cause = errno;
        if (cause != EMFILE && cause != ENFILE && cause != ENOBUFS && cause != ENOMEM)
            continue; /* Of that connection: it is gone already. */
        if (survive(accept, listen_fd, cause)) continue;
        accept->back_off_ns = now_ns + BACK_OFF_MS * 1000000ull;
        return;
    }
}

/* Spoke, hung up, or neither yet. */
static void look_at(struct rpc_accept *accept, struct slot *slot)
{
    char byte;
    const ssize_t got = recv(slot->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (got > 0) {
        slot->state = SLOT_HANDED;
        accept->options.connected(accept->options.context, slot->fd);
        return;
    }
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    (void)close(slot->fd);
    free_slot(accept, slot);
}

static void close_silent(struct rpc_accept *accept, uint64_t now_ns)
{
    uint64_t count;
    for (uint32_t i = 0; i < KV_CONNECTIONS_MAX; i++) {
        struct slot *slot = &accept->slots[i];
        if (slot->state != SLOT_SILENT) continue;
        if (now_ns < slot->accepted_ns + KV_CONNECTION_SILENT_MS * 1000000ull) continue;
        (void)close(slot->fd);
        free_slot(accept, slot);
        atomic_fetch_add(&accept->closed_silent, 1);
        if (may_tell(&accept->silent_teller, now_ns, &count))
            kv_log(accept->options.log, KV_LOG_INFO, "connections_silent",
                   "text=\"closed, nothing came for %u ms\" count=%" PRIu64,
                   KV_CONNECTION_SILENT_MS, count);
    }
}

/* The trouble is over when the reserve is there and one more descriptor is to be had. */
static void tick(struct rpc_accept *accept, uint64_t now_ns)
{
    read_limit(accept);
    sweep(accept);
    close_silent(accept, now_ns);
    if (accept->reserve_fd < 0) accept->reserve_fd = open_reserve();
    if (atomic_load(&accept->trouble) == NULL || accept->reserve_fd < 0) return;
    const int fd = open_reserve();
    if (fd < 0) return;
    (void)close(fd);
    atomic_store(&accept->trouble, NULL);
    kv_log(accept->options.log, KV_LOG_INFO, "connections_again",
           "text=\"connections are taken again\" refused=%" PRIu64,
           atomic_load(&accept->refused_files));
}

/* Returns how many polls there are; those of silent connections begin at *ret_first. */
static nfds_t fill_polls(struct rpc_accept *accept, uint64_t now_ns, nfds_t *ret_first)
{
    nfds_t count = 0;
    accept->polls[count++] = (struct pollfd){.fd = accept->wake_fd, .events = POLLIN};
    for (unsigned i = 0; i < accept->listen.count; i++)
        accept->polls[count++] = (struct pollfd){
            .fd = now_ns < accept->back_off_ns ? -1 : accept->listen.fds[i], .events = POLLIN};
    *ret_first = count;
    for (uint32_t i = 0; i < KV_CONNECTIONS_MAX; i++) {
        if (accept->slots[i].state != SLOT_SILENT) continue;
        accept->poll_slots[count - *ret_first] = i;
        accept->polls[count++] = (struct pollfd){.fd = accept->slots[i].fd, .events = POLLIN};
    }
    return count;
}

static void accept_run(void *context)
{
    struct rpc_accept *accept = context;
    uint64_t tick_ns = 0;
    kv_thread_assert(KV_THREAD_ACCEPT);

    while (!atomic_load(&accept->stops)) {
        nfds_t first;
        uint64_t now_ns = kv_clock_stopwatch_ns();
        if (now_ns - tick_ns >= TICK_MS * 1000000ull) {
            tick(accept, now_ns);
            tick_ns = now_ns;
        }
        const nfds_t count = fill_polls(accept, now_ns, &first);
        const int wait_ms = now_ns < accept->back_off_ns ? BACK_OFF_MS : TICK_MS;
        if (poll(accept->polls, count, wait_ms) <= 0) continue;
        now_ns = kv_clock_stopwatch_ns();
        for (nfds_t i = first; i < count; i++) {
            if (accept->polls[i].revents == 0) continue;
            look_at(accept, &accept->slots[accept->poll_slots[i - first]]);
        }
        for (nfds_t i = 1; i < first; i++) {
            if (accept->polls[i].revents != 0) accept_some(accept, accept->polls[i].fd, now_ns);
        }
    }
    rpc_listen_close(&accept->listen);
    for (uint32_t i = 0; i < KV_CONNECTIONS_MAX; i++) {
        if (accept->slots[i].state == SLOT_SILENT) (void)close(accept->slots[i].fd);
    }
}

kv_status rpc_accept_start(struct rpc_accept *accept, struct kv_error *err)
{
    return kv_thread_start(&accept->thread, KV_THREAD_ACCEPT, "kv-accept", accept_run, accept, err);
}

int rpc_accept_port(const struct rpc_accept *accept)
{
    return accept->listen.port;
}

void rpc_accept_counts(struct rpc_accept *accept, struct rpc_accept_counts *ret_counts)
{
    *ret_counts = (struct rpc_accept_counts){
        .open = atomic_load(&accept->open),
        .accepted = atomic_load(&accept->accepted),
        .refused_limit = atomic_load(&accept->refused_limit),
        .refused_files = atomic_load(&accept->refused_files),
        .closed_silent = atomic_load(&accept->closed_silent),
    };
}

const char *rpc_accept_trouble(struct rpc_accept *accept)
{
    return atomic_load(&accept->trouble);
}

void rpc_accept_stop(struct rpc_accept *accept)
{
    atomic_store(&accept->stops, true);
    const int rc = eventfd_write(accept->wake_fd, 1);
    assert(rc == 0);
    kv_thread_join(&accept->thread);
}

void rpc_accept_destroy(struct rpc_accept *accept)
{
    if (accept == NULL) return;
    if (accept->thread.started) rpc_accept_stop(accept);
    rpc_listen_close(&accept->listen);
    if (accept->wake_fd >= 0) (void)close(accept->wake_fd);
    if (accept->reserve_fd >= 0) (void)close(accept->reserve_fd);
    free(accept);
}
