/*
 * The daemon under test is the program itself, started as a user would start it: its own directory,
 * a unix socket, a file of tokens.
 *
 * It dies with the test (PR_SET_PDEATHSIG), so a failed run leaves nothing behind.  Channels are
 * made only after the log says that it is ready: a channel that meets no socket waits a second
 * before it tries again, which a test with hundreds of restarts would feel.
 */

#include "tests/driver/daemon.h"

#include "kvstore/base/digest.h"
#include "tests/driver/calls.h"
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

struct ex_daemon {
    struct ex_daemon_options options; /* Its dir is a copy. */
    char dir[PATH_BYTES], state_dir[PATH_BYTES];
    pid_t pid; /* 0: does not run. */
    off_t log_start;
    struct client *clients[EX_USERS][EX_LANES];
    struct client *operator_client;
};

static const char *const user_names[EX_USERS] = {"alice", "bob", "carol"};
static const char *const user_tokens[EX_USERS] = {
    "driver-alice-0123456789", "driver-bob-0123456789", "driver-carol-0123456789"};
static const char operator_token[] = "driver-operator-0123456789";

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
    if (options->state_dir == NULL)
        put_path(daemon->state_dir, daemon, "state");
    else
        (void)snprintf(daemon->state_dir, sizeof(daemon->state_dir), "%s", options->state_dir);
    put_path(path, daemon, "tokens");
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    EXPECT(fd >= 0);
    FILE *file = fdopen(fd, "w");
    EXPECT(file != NULL);
    for (uint32_t user = 0; user < EX_USERS; user++)
        write_token(file, user_names[user], "harness", user_tokens[user]);
    write_token(file, "root", "ops", operator_token);
    EXPECT(fclose(file) == 0);
    return daemon;
}

/* ---- start ---- */

void ex_flag(struct ex_flags *flags, const char *fmt, ...)
{
    va_list args;
    EXPECT(flags->count < EX_FLAGS_MAX);
    va_start(args, fmt);
    (void)vsnprintf(flags->text[flags->count], EX_FLAG_BYTES, fmt, args);
    va_end(args);
    flags->count++;
}

struct command {
    struct ex_flags flags;
    char *argv[EX_FLAGS_MAX + 2];
};

static void fill_command(struct command *command, const struct ex_daemon *daemon,
                         const struct ex_flags *flags)
{
    const struct ex_daemon_options *options = &daemon->options;
    command->flags = *flags;
    ex_flag(&command->flags, "--server.socket=%s/socket", options->dir);
    ex_flag(&command->flags, "--server.token_file=%s/tokens", options->dir);
    ex_flag(&command->flags, "--state.dir=%s", daemon->state_dir);
    command->argv[0] = (char *)(uintptr_t)options->program;
    for (uint32_t i = 0; i < command->flags.count; i++)
        command->argv[i + 1] = command->flags.text[i];
    command->argv[command->flags.count + 1] = NULL;
}

/* Between fork and exec: only what is safe in a child of a process with threads. */
static _Noreturn void become(const struct command *command, int log_fd, pid_t parent)
{
    sigset_t none;
    (void)sigemptyset(&none);
    (void)sigprocmask(SIG_SETMASK, &none, NULL);
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(126);
    (void)dup2(log_fd, STDOUT_FILENO);
    (void)dup2(log_fd, STDERR_FILENO);
    (void)execv(command->argv[0], command->argv);
    _exit(127);
}

void ex_daemon_log(const struct ex_daemon *daemon, char *text, size_t bytes)
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

bool ex_daemon_wait(struct ex_daemon *daemon, char *why)
{
    const struct timespec pause = {.tv_nsec = 1000000};
    char text[8192];
    for (uint32_t ms = 0; ms < START_MS_MAX; ms++) {
        int status;
        ex_daemon_log(daemon, text, sizeof(text));
        if (strstr(text, "event=ready") != NULL) return true;
        if (waitpid(daemon->pid, &status, WNOHANG) == daemon->pid) {
            daemon->pid = 0;
            ex_daemon_log(daemon, text, sizeof(text));
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

void ex_daemon_spawn(struct ex_daemon *daemon, const struct ex_flags *flags)
{
    struct command *command = calloc(1, sizeof(*command));
    char path[PATH_BYTES];
    EXPECT(command != NULL);
    EXPECT(daemon->pid == 0);
    fill_command(command, daemon, flags);
    put_path(path, daemon, "log");
    const int log_fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    EXPECT(log_fd >= 0);
    daemon->log_start = lseek(log_fd, 0, SEEK_END);
    const pid_t self = getpid();
    daemon->pid = fork();
    EXPECT(daemon->pid >= 0);
    if (daemon->pid == 0) become(command, log_fd, self);
    (void)close(log_fd);
    free(command);
}

bool ex_daemon_start(struct ex_daemon *daemon, const struct ex_flags *flags, char *why)
{
    ex_daemon_spawn(daemon, flags);
    return ex_daemon_wait(daemon, why);
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

void ex_daemon_signal(struct ex_daemon *daemon, int signal_number)
{
    EXPECT(daemon->pid > 0);
    (void)kill(daemon->pid, signal_number);
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

/* Each is one thread's, so no other thread makes the same. */
struct client *ex_daemon_client(struct ex_daemon *daemon, uint32_t user, uint32_t lane)
{
    struct client **client = &daemon->clients[user][lane];
    if (*client == NULL) *client = connect_as(daemon, user_tokens[user]);
    return *client;
}

struct client *ex_daemon_operator(struct ex_daemon *daemon)
{
    if (daemon->operator_client == NULL)
        daemon->operator_client = connect_as(daemon, operator_token);
    return daemon->operator_client;
}
