/*
 * The daemon under test is the program itself, started as a user would start it: its own directory,
 * a unix socket, a file of tokens.
 *
 * It dies with the test (PR_SET_PDEATHSIG), so a failed run leaves nothing behind.  Channels are
 * made only after the log says that it is ready: a channel that meets no socket waits a second
 * before it tries again, which a test with hundreds of restarts would feel.
 */

#include "tests/exactness/daemon.h"

#include "kvstore/base/digest.h"
#include "kvstore/base/status.h"
#include "tests/exactness/calls.h"
#include "tests/harness.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define START_MS_MAX 60000u
#define CALL_MS_MAX 60000u
#define PATH_BYTES 512u
#define FLAG_COUNT 24u

struct ex_daemon {
    struct ex_daemon_options options; /* Its dir is a copy. */
    char dir[PATH_BYTES];
    pid_t pid; /* 0: does not run. */
    off_t log_start;
    struct client *clients[EX_USERS][EX_LANES];
    struct client *operator_client;
};

static const char *const user_tokens[EX_USERS] = {"exactness-alice-0123456789",
                                                  "exactness-bob-0123456789"};
static const char operator_token[] = "exactness-operator-0123456789";

static void put_path(char path[PATH_BYTES], const struct ex_daemon *daemon, const char *name)
{
    const int count = snprintf(path, PATH_BYTES, "%s/%s", daemon->options.dir, name);
    EXPECT(count > 0 && (unsigned)count < PATH_BYTES);
}

static void write_token(FILE *file, const char *user, const char *role, const char *token)
{
    struct kv_digest digest;
    kv_sha256(token, strlen(token), &digest);
    (void)fprintf(file, "%s %s ", user, role);
    for (unsigned i = 0; i < sizeof(digest.bytes); i++)
        (void)fprintf(file, "%02x", digest.bytes[i]);
    (void)fprintf(file, "\n");
}

struct ex_daemon *ex_daemon_create(const struct ex_daemon_options *options)
{
    struct ex_daemon *daemon = calloc(1, sizeof(*daemon));
    char path[PATH_BYTES];
    EXPECT(daemon != NULL);
    daemon->options = *options;
    (void)snprintf(daemon->dir, sizeof(daemon->dir), "%s", options->dir);
    daemon->options.dir = daemon->dir;
    put_path(path, daemon, "tokens");
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    EXPECT(fd >= 0);
    FILE *file = fdopen(fd, "w");
    EXPECT(file != NULL);
    write_token(file, "alice", "harness", user_tokens[0]);
    write_token(file, "bob", "harness", user_tokens[1]);
    write_token(file, "root", "ops", operator_token);
    EXPECT(fclose(file) == 0);
    return daemon;
}

/* As many calls at once as there are lanes, and nobody pushes anybody out. */
static void draw_crowd(struct ex_setup *setup, struct ex_random *random)
{
    static const char *const drafts[] = {"auto", "on", "off"};
    /* Rarely the smallest, which cost most: passes of few rows come from the sizes of runs, too. */
    static const uint32_t chunks[] = {1, 5, 5, 16, 16, 33, 33, 64, 128, 128};
    const uint32_t chunk = chunks[ex_random_below(random, 10)];
    setup->chunk_tokens = chunk;
    setup->live_sessions = EX_LANES + 1 + ex_random_below(random, 3);
    setup->pool_slots = 7 * EX_LANES + ex_random_between(random, 8, 20);
    setup->hbm_pages = 240;
    setup->pass_rows = chunk + ex_random_below(random, 2 * chunk + 40);
    if (setup->pass_rows < 2 || ex_random_percent(random, 20)) setup->pass_rows = 0;
    setup->threads = ex_random_between(random, 1, 3);
    setup->draft = drafts[ex_random_below(random, 3)];
}

void ex_setup_draw(struct ex_setup *setup, struct ex_random *random, bool crowd)
{
    static const uint32_t chunks[] = {1, 3, 7, 16, 64, 128};
    static const uint32_t lives[] = {1, 2, 4};
    setup->chunk_tokens = chunks[ex_random_below(random, 6)];
    setup->live_sessions = lives[ex_random_below(random, 3)];
    /* A call pins one slot per stop and one for the image it reads: 7 at most, of two calls 14. */
    setup->pool_slots = ex_random_between(random, 8, 20) + (setup->live_sessions == 4 ? 8 : 0);
    setup->hbm_pages = setup->live_sessions == 4 ? 110 : ex_random_between(random, 52, 70);
    setup->io_pool = ex_random_percent(random, 30);
    setup->pass_rows = setup->threads = 0;
    setup->draft = "auto";
    if (crowd) draw_crowd(setup, random);
}

/* ---- start ---- */

struct flags {
    char text[FLAG_COUNT][PATH_BYTES + 32];
    char *argv[FLAG_COUNT + 4];
    int count;
};

static void flag(struct flags *flags, const char *fmt, ...) KV_PRINTF(2, 3);

static void flag(struct flags *flags, const char *fmt, ...)
{
    va_list args;
    EXPECT(flags->count < (int)FLAG_COUNT);
    char *text = flags->text[flags->count];
    va_start(args, fmt);
    (void)vsnprintf(text, sizeof(flags->text[0]), fmt, args);
    va_end(args);
    flags->argv[flags->count + 1] = text;
    flags->count++;
}

static void fill_flags(struct flags *flags, const struct ex_daemon *daemon,
                       const struct ex_setup *setup)
{
    const struct ex_daemon_options *options = &daemon->options;
    const uint64_t slot_bytes = (options->image_bytes + 4095u) / 4096u * 4096u;

    *flags = (struct flags){0};
    flags->argv[0] = (char *)(uintptr_t)options->program;
    flag(flags, "--server.socket=%s/socket", options->dir);
    flag(flags, "--server.token_file=%s/tokens", options->dir);
    flag(flags, "--state.dir=%s/state", options->dir);
    flag(flags, "--engine.model_dir=%s", options->model_dir);
    flag(flags, "--engine.chunk_tokens=%u", setup->chunk_tokens);
    flag(flags, "--engine.live_sessions=%u", setup->live_sessions);
    flag(flags, "--engine.pass_rows=%u", setup->pass_rows);
    flag(flags, "--engine.threads=%u", setup->threads);
    flag(flags, "--engine.draft=%s", setup->draft);
    flag(flags, "--window.spare_tokens=%u", setup->spare_tokens);
    flag(flags, "--hbm.bytes=%" PRIu64, (uint64_t)options->page_bytes * setup->hbm_pages);
    flag(flags, "--pool.bytes=%" PRIu64, slot_bytes * setup->pool_slots);
    flag(flags, "--pool.ttl=%ums", EX_POOL_TTL_MS);
    flag(flags, "--ssd.ttl=%ums", EX_ROWS_TTL_MS);
    flag(flags, "--ssd.bytes=256MiB");
    flag(flags, "--ssd.segment_bytes=4MiB");
    flag(flags, "--index.ram=4MiB");
    flag(flags, "--io.backend=%s", setup->io_pool ? "pool" : "auto");
    flag(flags, "--clock.mode=virtual");
    if (options->plant != NULL) {
        flag(flags, "--plant");
        flag(flags, "%s", options->plant);
    }
}

/* Between fork and exec: only what is safe in a child of a process with threads. */
static _Noreturn void become(const struct flags *flags, int log_fd, pid_t parent)
{
    sigset_t none;
    (void)sigemptyset(&none);
    (void)sigprocmask(SIG_SETMASK, &none, NULL);
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(126);
    (void)dup2(log_fd, STDOUT_FILENO);
    (void)dup2(log_fd, STDERR_FILENO);
    (void)execv(flags->argv[0], flags->argv);
    _exit(127);
}

/* What it wrote since this start. */
static void read_log(const struct ex_daemon *daemon, char *text, size_t bytes)
{
    char path[PATH_BYTES];
    text[0] = '\0';
    put_path(path, daemon, "log");
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    const ssize_t count = pread(fd, text, bytes - 1, daemon->log_start);
    (void)close(fd);
    text[count > 0 ? count : 0] = '\0';
}

static bool wait_ready(struct ex_daemon *daemon, char *why)
{
    const struct timespec pause = {.tv_nsec = 1000000};
    char text[8192];
    for (uint32_t ms = 0; ms < START_MS_MAX; ms++) {
        int status;
        read_log(daemon, text, sizeof(text));
        if (strstr(text, "event=ready") != NULL) return true;
        if (waitpid(daemon->pid, &status, WNOHANG) == daemon->pid) {
            daemon->pid = 0;
            read_log(daemon, text, sizeof(text));
            (void)snprintf(why, EX_WHY_BYTES,
                           "the daemon ended with status 0x%x while starting: %.500s",
                           (unsigned)status, text);
            return false;
        }
        (void)nanosleep(&pause, NULL);
    }
    (void)snprintf(why, EX_WHY_BYTES, "the daemon was not ready within %u ms", START_MS_MAX);
    return false;
}

static struct client *connect_as(const struct ex_daemon *daemon, const char *token)
{
    char endpoint[PATH_BYTES + 8];
    (void)snprintf(endpoint, sizeof(endpoint), "unix:%s/socket", daemon->options.dir);
    const struct client_options options = {
        .endpoint = endpoint, .token = token, .timeout_ms = CALL_MS_MAX};
    struct client *client = client_create(&options);
    EXPECT(client != NULL);
    return client;
}

bool ex_daemon_start(struct ex_daemon *daemon, const struct ex_setup *setup, char *why)
{
    struct flags *flags = calloc(1, sizeof(*flags));
    char path[PATH_BYTES];
    EXPECT(flags != NULL);
    EXPECT(daemon->pid == 0);
    fill_flags(flags, daemon, setup);
    put_path(path, daemon, "log");
    const int log_fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    EXPECT(log_fd >= 0);
    daemon->log_start = lseek(log_fd, 0, SEEK_END);
    const pid_t self = getpid();
    daemon->pid = fork();
    EXPECT(daemon->pid >= 0);
    if (daemon->pid == 0) become(flags, log_fd, self);
    (void)close(log_fd);
    free(flags);
    if (!wait_ready(daemon, why)) return false;

    for (uint32_t user = 0; user < EX_USERS; user++)
        for (uint32_t lane = 0; lane < EX_LANES; lane++)
            daemon->clients[user][lane] = connect_as(daemon, user_tokens[user]);
    daemon->operator_client = connect_as(daemon, operator_token);
    return true;
}

/* ---- stop ---- */

static void disconnect(struct ex_daemon *daemon)
{
    for (uint32_t user = 0; user < EX_USERS; user++) {
        for (uint32_t lane = 0; lane < EX_LANES; lane++) {
            client_destroy(daemon->clients[user][lane]);
            daemon->clients[user][lane] = NULL;
        }
    }
    client_destroy(daemon->operator_client);
    daemon->operator_client = NULL;
}

bool ex_daemon_stop(struct ex_daemon *daemon, int signal_number, char *why)
{
    int status = 0;
    EXPECT(daemon->pid > 0);
    disconnect(daemon);
    (void)kill(daemon->pid, signal_number);
    pid_t ended;
    do {
        ended = waitpid(daemon->pid, &status, 0);
    } while (ended < 0 && errno == EINTR);
    daemon->pid = 0;
    const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    if (signal_number == SIGKILL && killed) return true;
    if (signal_number != SIGKILL && WIFEXITED(status) && WEXITSTATUS(status) == 0) return true;
    (void)snprintf(why, EX_WHY_BYTES, "the daemon ended with status 0x%x after signal %d",
                   (unsigned)status, signal_number);
    return false;
}

void ex_daemon_destroy(struct ex_daemon *daemon)
{
    char why[EX_WHY_BYTES];
    if (daemon == NULL) return;
    if (daemon->pid > 0) (void)ex_daemon_stop(daemon, SIGKILL, why);
    free(daemon);
}

struct client *ex_daemon_client(struct ex_daemon *daemon, uint32_t user, uint32_t lane)
{
    return daemon->clients[user][lane];
}

struct client *ex_daemon_operator(struct ex_daemon *daemon)
{
    return daemon->operator_client;
}
