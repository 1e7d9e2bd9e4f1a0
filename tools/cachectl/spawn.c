/*
 * Starting and stopping a daemon of one's own.
 *
 * posix_spawn and not fork: C core's threads may be running in this process, and a forked copy of
 * them is not supported.  While such a daemon runs, the signals that end a program are held back,
 * and the long loops ask spawn_interrupted(): so Ctrl-C stops the daemon and removes its files too.
 */

#include "tools/cachectl/spawn.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/clock.h"
#include "kvstore/base/digest.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define READY_MS 20000u
#define STOP_MS 20000u
#define POLL_MS 5

static void sleep_ms(long ms)
{
    const struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
    (void)nanosleep(&pause, NULL);
}

bool spawn_self_path(const char *relative, char *path, size_t path_bytes)
{
    char self[1024];

    const ssize_t count = readlink("/proc/self/exe", self, sizeof(self) - 1);
    if (count <= 0) return false;
    self[count] = '\0';
    if (!relative) return snprintf(path, path_bytes, "%s", self) < (int)path_bytes;
    *(strrchr(self, '/')) = '\0';
    return snprintf(path, path_bytes, "%s/%s", self, relative) < (int)path_bytes;
}

/* out_path: NULL: both are inherited. */
static pid_t start(char *const argv[], const char *out_path, bool errors_too)
{
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    sigset_t defaults, none;
    pid_t pid = 0;

    if (posix_spawn_file_actions_init(&actions) != 0) return 0;
    if (posix_spawnattr_init(&attributes) != 0) {
        (void)posix_spawn_file_actions_destroy(&actions);
        return 0;
    }
    (void)posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    if (out_path)
        (void)posix_spawn_file_actions_addopen(&actions, 1, out_path, O_WRONLY | O_CREAT | O_APPEND,
                                               0600);
    if (out_path && errors_too) (void)posix_spawn_file_actions_adddup2(&actions, 1, 2);
    /* This program ignores two signals and may hold others back; its children start afresh. */
    (void)sigemptyset(&none);
    (void)posix_spawnattr_setsigmask(&attributes, &none);
    (void)sigemptyset(&defaults);
    (void)sigaddset(&defaults, SIGPIPE);
    (void)sigaddset(&defaults, SIGXFSZ);
    (void)posix_spawnattr_setsigdefault(&attributes, &defaults);
    /* Its own group: a Ctrl-C here must not end it before we have asked it to stop. */
    (void)posix_spawnattr_setpgroup(&attributes, 0);
    (void)posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK |
                                                    POSIX_SPAWN_SETPGROUP);
    if (posix_spawn(&pid, argv[0], &actions, &attributes, argv, environ) != 0) pid = 0;
    (void)posix_spawn_file_actions_destroy(&actions);
    (void)posix_spawnattr_destroy(&attributes);
    return pid;
}

pid_t spawn_process(char *const argv[], const char *log_path)
{
    return start(argv, log_path, true);
}

pid_t spawn_tool(char *const argv[])
{
    return start(argv, "/dev/null", false);
}

static const int ends[] = {SIGINT, SIGTERM, SIGHUP};

/* Without those that are ignored (nohup): held back, they would be pending all the same. */
static void ending_signals(sigset_t *set)
{
    struct sigaction action;

    (void)sigemptyset(set);
    for (size_t i = 0; i < KV_ARRAY_COUNT(ends); i++)
        if (sigaction(ends[i], NULL, &action) == 0 && action.sa_handler != SIG_IGN)
            (void)sigaddset(set, ends[i]);
}

void spawn_hold_signals(void)
{
    sigset_t held;

    ending_signals(&held);
    (void)pthread_sigmask(SIG_BLOCK, &held, NULL);
}

int spawn_signal(void)
{
    sigset_t pending, ending;

    ending_signals(&ending);
    if (sigpending(&pending) != 0 || sigandset(&pending, &pending, &ending) != 0) return 0;
    for (size_t i = 0; i < KV_ARRAY_COUNT(ends); i++)
        if (sigismember(&pending, ends[i]) == 1) return ends[i];
    return 0;
}

bool spawn_interrupted(void)
{
    return spawn_signal() != 0;
}

int spawn_signal_fd(void)
{
    sigset_t ending;

    ending_signals(&ending);
    return signalfd(-1, &ending, SFD_CLOEXEC | SFD_NONBLOCK);
}

bool spawn_wait(pid_t pid, bool (*go_on)(void *context), void *context, int *ret_status)
{
    pid_t ended = 0;
    bool killed = false;

    while (ended == 0 || (ended < 0 && errno == EINTR)) {
        if (!killed && !go_on(context)) killed = kill(pid, SIGTERM) == 0;
        ended = waitpid(pid, ret_status, WNOHANG);
        if (ended == 0) sleep_ms(20);
    }
    return ended == pid;
}

bool spawn_wait_ready(const char *endpoint, pid_t pid, uint32_t timeout_ms)
{
    const struct client_options options = {.endpoint = endpoint, .timeout_ms = 1000};
    struct client_failure failure;
    struct timespec start, now;
    bool serving = false;

    (void)clock_gettime(CLOCK_MONOTONIC, &start);
    while (!serving) {
        (void)clock_gettime(CLOCK_MONOTONIC, &now);
        const int64_t waited =
            (now.tv_sec - start.tv_sec) * 1000 + (now.tv_nsec - start.tv_nsec) / 1000000;
        if (waited > timeout_ms || spawn_interrupted()) return false;
        if (pid > 0 && waitpid(pid, NULL, WNOHANG) == pid) return false;
        /* A channel that failed to connect waits a second and more before it tries again; a new one
         * tries at once. */
        struct client *client = client_create(&options);
        if (!client) return false;
        if (!client_health(client, "", &serving, &failure)) serving = false;
        client_destroy(client);
        if (!serving) sleep_ms(POLL_MS);
    }
    return true;
}

static bool write_file(const char *path, const char *text)
{
    const int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    const size_t count = strlen(text);
    bool ok = fd >= 0 && write(fd, text, count) == (ssize_t)count;
    if (fd >= 0 && close(fd) != 0) ok = false;
    return ok;
}

/* A token of 256 random bits in its own file, and its line for the daemon's file. */
static bool make_token(const char *path, const char *user, const char *role, char *line,
                       size_t line_bytes)
{
    uint8_t random[32];
    char token[65], digest_text[65];
    struct kv_digest digest;

    if (getrandom(random, sizeof(random), 0) != (ssize_t)sizeof(random)) return false;
    for (size_t i = 0; i < sizeof(random); i++)
        (void)snprintf(token + 2 * i, 3, "%02x", random[i]);
    kv_sha256(token, 64, &digest);
    for (size_t i = 0; i < sizeof(digest.bytes); i++)
        (void)snprintf(digest_text + 2 * i, 3, "%02x", digest.bytes[i]);
    (void)snprintf(line, line_bytes, "%s %s %s\n", user, role, digest_text);
    return write_file(path, token);
}

/* Of a state directory that stays: a daemon's own limits and clock. */
static void format_given(const struct spawn_options *options, const struct spawn *spawn, char *text,
                         size_t text_bytes)
{
    (void)snprintf(text, text_bytes,
                   "[server]\nsocket = %s/sock\ntoken_file = %s/tokens\n"
                   "[state]\ndir = %s\n[engine]\nbackend = %s\n[pool]\nbytes = 64MiB\n"
                   "[quota]\ndefault_sessions = 0\ndefault_turns = 0\n",
                   spawn->dir, spawn->dir, options->state_dir, options->backend);
}

static bool write_files(const struct spawn_options *options, struct spawn *spawn)
{
    char path[SPAWN_PATH_BYTES], user_line[160], ops_line[128], tokens[320], text[2048];

    (void)snprintf(spawn->endpoint, sizeof(spawn->endpoint), "unix:%s/sock", spawn->dir);
    (void)snprintf(spawn->user_token, sizeof(spawn->user_token), "%s/user.token", spawn->dir);
    (void)snprintf(spawn->ops_token, sizeof(spawn->ops_token), "%s/ops.token", spawn->dir);
    (void)snprintf(spawn->log, sizeof(spawn->log), "%s/log", spawn->dir);
    const char *user = options->user ? options->user : "user";
    if (!make_token(spawn->user_token, user, "harness", user_line, sizeof(user_line)) ||
        !make_token(spawn->ops_token, "ops", "ops", ops_line, sizeof(ops_line)))
        return false;
    (void)snprintf(tokens, sizeof(tokens), "%s%s", user_line, ops_line);
    (void)snprintf(path, sizeof(path), "%s/tokens", spawn->dir);
    if (!write_file(path, tokens)) return false;
    (void)snprintf(path, sizeof(path), "%s/state", spawn->dir);
    if (mkdir(path, 0700) != 0) return false;

    /* Wide limits: what is measured is the cache's logic, not a full tier. */
    (void)snprintf(text, sizeof(text),
                   "[server]\nsocket = %s/sock\ntoken_file = %s/tokens\n"
                   "[state]\ndir = %s/state\n"
                   "[engine]\nbackend = %s\n%s%s\n%s%s\n"
                   "[hbm]\nbytes = 512MiB\n[pool]\nbytes = 512MiB\n"
                   "[ssd]\nbytes = 4GiB\nsegment_bytes = 16MiB\n"
                   "[quota]\ndefault_sessions = 0\ndefault_turns = 0\n"
                   "[log]\nlevel = warn\n[clock]\nmode = virtual\n",
                   spawn->dir, spawn->dir, spawn->dir, options->backend,
                   options->model_dir ? "model_dir = " : "",
                   options->model_dir ? options->model_dir : "", options->draft ? "draft = " : "",
                   options->draft ? options->draft : "");
    if (options->state_dir) format_given(options, spawn, text, sizeof(text));
    (void)snprintf(path, sizeof(path), "%s/conf", spawn->dir);
    return write_file(path, text);
}

void spawn_remove_tree(const char *path, int depth)
{
    DIR *dir = opendir(path);

    for (const struct dirent *entry; dir && (entry = readdir(dir)) != NULL;) {
        char child[512];
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (snprintf(child, sizeof(child), "%s/%s", path, entry->d_name) >= (int)sizeof(child))
            continue;
        if (unlink(child) != 0 && depth > 0) spawn_remove_tree(child, depth - 1);
    }
    if (dir) (void)closedir(dir);
    (void)rmdir(path);
}

static void say_last_line(const char *log_path)
{
    char line[512], last[512] = "";
    FILE *log = fopen(log_path, "re");

    while (log && fgets(line, sizeof(line), log))
        memcpy(last, line, sizeof(last));
    if (log) (void)fclose(log);
    last[strcspn(last, "\n")] = '\0';
    if (last[0] != '\0') ctl_error("it said: %s", last);
}

int spawn_again(const struct ctl *ctl, struct spawn *spawn)
{
    char flag[] = "--config", conf[SPAWN_PATH_BYTES];

    (void)snprintf(conf, sizeof(conf), "%s/conf", spawn->dir);
    char *const argv[] = {spawn->program, flag, conf, NULL};
    const uint64_t began = kv_clock_stopwatch_ns();
    spawn->pid = spawn_process(argv, spawn->log);
    if (spawn->pid == 0) {
        ctl_error("cannot start %s", spawn->program);
        return CLIENT_EXIT_UNAVAILABLE;
    }
    if (spawn_wait_ready(spawn->endpoint, spawn->pid, READY_MS)) {
        spawn->ready_ns = kv_clock_stopwatch_ns() - began;
        ctl_say(ctl, "started %s in %s", spawn->program, spawn->dir);
        return CLIENT_EXIT_OK;
    }
    if (!spawn_interrupted()) {
        ctl_error("%s does not serve", spawn->program);
        say_last_line(spawn->log);
    }
    (void)spawn_kill(spawn);
    return CLIENT_EXIT_UNAVAILABLE;
}

int spawn_start(const struct ctl *ctl, const struct spawn_options *options, struct spawn *ret)
{
    const char *tmp = getenv("TMPDIR");

    *ret = (struct spawn){0};
    /* Before C core starts its threads: they inherit the mask. */
    spawn_hold_signals();
    /* A socket's path may have 107 bytes. */
    if (!tmp || strlen(tmp) > 60 || tmp[0] != '/') tmp = "/tmp";
    if (options->daemon) {
        (void)snprintf(ret->program, sizeof(ret->program), "%s", options->daemon);
    } else if (!spawn_self_path("../cached/cached", ret->program, sizeof(ret->program))) {
        ret->program[0] = '\0';
    }
    if (access(ret->program, X_OK) != 0) {
        ctl_error("no daemon at %s: give --daemon PATH", ret->program);
        return CLIENT_EXIT_NOT_FOUND;
    }
    (void)snprintf(ret->dir, sizeof(ret->dir), "%s/cachectl.XXXXXX", tmp);
    if (!mkdtemp(ret->dir)) {
        ctl_error("cannot make a directory in %s: %s", tmp, strerror(errno));
        ret->dir[0] = '\0';
        return CLIENT_EXIT_FAILED;
    }
    int code = CLIENT_EXIT_UNAVAILABLE;
    if (write_files(options, ret))
        code = spawn_again(ctl, ret);
    else
        ctl_error("cannot write in %s: %s", ret->dir, strerror(errno));
    if (code == CLIENT_EXIT_OK) return code;
    spawn_remove_tree(ret->dir, 2);
    *ret = (struct spawn){0};
    return code;
}

bool spawn_kill(struct spawn *spawn)
{
    if (spawn->pid == 0) return true;
    (void)kill(spawn->pid, SIGKILL);
    const bool ended = waitpid(spawn->pid, NULL, 0) == spawn->pid;
    spawn->pid = 0;
    return ended;
}

bool spawn_halt(struct spawn *spawn)
{
    int state = 0;
    pid_t ended = 0;

    if (spawn->pid == 0) return true;
    (void)kill(spawn->pid, SIGTERM);
    for (unsigned waited = 0; waited < STOP_MS && ended == 0; waited += 20) {
        ended = waitpid(spawn->pid, &state, WNOHANG);
        if (ended == 0) sleep_ms(20);
    }
    if (ended == 0) {
        (void)kill(spawn->pid, SIGKILL);
        (void)waitpid(spawn->pid, &state, 0);
    }
    const bool well = ended == spawn->pid && WIFEXITED(state) && WEXITSTATUS(state) == 0;
    spawn->pid = 0;
    if (well) return true;
    ctl_error("the daemon did not end well (%s %d); its files are in %s",
              ended == 0           ? "killed after 20 s, signal"
              : WIFSIGNALED(state) ? "signal"
                                   : "exit code",
              WIFSIGNALED(state) ? WTERMSIG(state) : WEXITSTATUS(state), spawn->dir);
    say_last_line(spawn->log);
    return false;
}

bool spawn_stop(struct spawn *spawn)
{
    const bool well = spawn_halt(spawn);
    if (well && spawn->dir[0] != '\0') spawn_remove_tree(spawn->dir, 2);
    *spawn = (struct spawn){0};
    return well;
}
