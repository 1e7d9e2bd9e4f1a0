/*
 * The accept loop.
 *
 * Goal: a connection is handed on when it has spoken and not before; above the limit it is closed
 * at once, and room is found again when others were closed by who has them; a stop takes the socket
 * file away and hands nothing on.
 * Method: real sockets.  The limit is KV_CONNECTIONS_MIN, because all descriptors are reserved.
 */

#include "cached/rpc/rpc_accept.h"
#include "kvstore/base/limits.h"
#include "tests/harness.h"

#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define CLIENTS (KV_CONNECTIONS_MIN + 8u)

struct env {
    char dir[32], path[64];
    struct rpc_accept *accept;
    atomic_uint count; /* Of handed. */
    int handed[2 * CLIENTS];
};

static void connected(void *context, int fd)
{
    struct env *env = context;
    const unsigned at = atomic_load(&env->count);
    env->handed[at] = fd;
    atomic_store(&env->count, at + 1);
}

static struct rpc_accept_options options_of(struct env *env)
{
    return (struct rpc_accept_options){.socket = env->path,
                                       .listen = "127.0.0.1:0",
                                       .reserved_files = UINT64_MAX / 2,
                                       .connected = connected,
                                       .context = env};
}

static void env_init(struct env *env)
{
    *env = (struct env){.dir = "test_accept.XXXXXX"};
    EXPECT(mkdtemp(env->dir) != NULL);
    (void)snprintf(env->path, sizeof(env->path), "%s/socket", env->dir);
    const struct rpc_accept_options options = options_of(env);
    EXPECT(rpc_accept_create(&options, &env->accept, NULL) == KV_OK);
    EXPECT(rpc_accept_start(env->accept, NULL) == KV_OK);
}

static void env_fini(struct env *env)
{
    rpc_accept_destroy(env->accept);
    EXPECT(access(env->path, F_OK) != 0);
    EXPECT(rmdir(env->dir) == 0);
}

static int connect_to(const struct env *env)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    (void)snprintf(address.sun_path, sizeof(address.sun_path), "%s", env->path);
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT(fd >= 0 && connect(fd, (const struct sockaddr *)&address, sizeof(address)) == 0);
    return fd;
}

static bool wait_handed(struct env *env, unsigned count)
{
    const struct timespec pause = {.tv_nsec = 2000000};
    for (int i = 0; i < 2500 && atomic_load(&env->count) < count; i++)
        (void)nanosleep(&pause, NULL);
    return atomic_load(&env->count) == count;
}

/* Whether the other side closes it within that time. */
static bool is_closed(int fd, int ms)
{
    struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
    char byte;
    return poll(&poll_fd, 1, ms) == 1 && recv(fd, &byte, 1, MSG_DONTWAIT) <= 0;
}

static void test_waits_for_a_byte(void)
{
    struct env env;
    struct rpc_accept_counts counts;
    env_init(&env);
    const int quiet = connect_to(&env), loud = connect_to(&env), gone = connect_to(&env);
    (void)close(gone);
    EXPECT(write(loud, "x", 1) == 1);
    EXPECT(wait_handed(&env, 1));
    char byte = 0;
    EXPECT(read(env.handed[0], &byte, 1) == 1 && byte == 'x'); /* It was left in the socket. */
    EXPECT(!is_closed(quiet, 100));
    EXPECT_EQ_U64(atomic_load(&env.count), 1);
    EXPECT(write(quiet, "y", 1) == 1);
    EXPECT(wait_handed(&env, 2));
    rpc_accept_counts(env.accept, &counts);
    EXPECT_EQ_U64(counts.accepted, 3);
    EXPECT_EQ_U64(counts.refused_limit, 0);
    EXPECT(rpc_accept_trouble(env.accept) == NULL);

    /* Over TCP, too. */
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)rpc_accept_port(env.accept)),
                                  .sin_addr = {htonl(INADDR_LOOPBACK)}};
    const int tcp = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT(connect(tcp, (const struct sockaddr *)&address, sizeof(address)) == 0);
    EXPECT(write(tcp, "z", 1) == 1);
    EXPECT(wait_handed(&env, 3));

    const int late = connect_to(&env);
    rpc_accept_stop(env.accept);
    EXPECT(is_closed(late, 5000));
    EXPECT(!is_closed(tcp, 0)); /* It has another owner. */
    const int fds[] = {quiet, loud, tcp, late, env.handed[0], env.handed[1], env.handed[2]};
    for (size_t i = 0; i < sizeof(fds) / sizeof(fds[0]); i++)
        (void)close(fds[i]);
    env_fini(&env);
}

static void test_limit(void)
{
    struct env env;
    struct rpc_accept_counts counts;
    int fds[CLIENTS];
    env_init(&env);
    for (unsigned i = 0; i < CLIENTS; i++) {
        fds[i] = connect_to(&env);
        if (i < KV_CONNECTIONS_MIN) EXPECT(write(fds[i], "x", 1) == 1);
    }
    EXPECT(wait_handed(&env, KV_CONNECTIONS_MIN));
    for (unsigned i = KV_CONNECTIONS_MIN; i < CLIENTS; i++)
        EXPECT(is_closed(fds[i], 5000));
    rpc_accept_counts(env.accept, &counts);
    EXPECT_EQ_U64(counts.open, KV_CONNECTIONS_MIN);
    EXPECT_EQ_U64(counts.refused_limit, CLIENTS - KV_CONNECTIONS_MIN);

    /* Closed by who has them, some descriptors taken by something else at once. */
    for (unsigned i = 0; i < 5; i++)
        (void)close(env.handed[i]);
    const int other = dup(STDERR_FILENO);
    for (unsigned i = 0; i < 5; i++) {
        const int fd = connect_to(&env);
        EXPECT(write(fd, "x", 1) == 1);
        EXPECT(wait_handed(&env, KV_CONNECTIONS_MIN + i + 1));
        (void)close(fds[i]);
        fds[i] = fd;
    }
    const int more = connect_to(&env);
    EXPECT(is_closed(more, 5000)); /* No sixth. */
    rpc_accept_stop(env.accept);
    (void)close(more);
    (void)close(other);
    for (unsigned i = 0; i < CLIENTS; i++)
        (void)close(fds[i]);
    for (unsigned i = 5; i < KV_CONNECTIONS_MIN + 5; i++)
        (void)close(env.handed[i]);
    env_fini(&env);
}

static void test_one_owner(void)
{
    struct env env;
    struct rpc_accept *second = NULL;
    struct kv_error err = {0};
    env_init(&env);
    struct rpc_accept_options options = options_of(&env);
    EXPECT(rpc_accept_create(&options, &second, &err) == KV_INVALID);
    EXPECT(strstr(err.text, "another process serves on the socket") != NULL);
    char text[32];
    (void)snprintf(text, sizeof(text), "127.0.0.1:%d", rpc_accept_port(env.accept));
    options.socket = "";
    options.listen = text;
    EXPECT(rpc_accept_create(&options, &second, &err) == KV_INVALID);
    EXPECT_EQ_I64(err.sys_errno, EADDRINUSE);
    EXPECT(access(env.path, F_OK) == 0); /* The first one's is left alone. */
    env_fini(&env);
}

int main(void)
{
    test_waits_for_a_byte();
    test_limit();
    test_one_owner();
    HARNESS_END();
}
