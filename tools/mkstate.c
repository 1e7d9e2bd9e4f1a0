/*
 * Writes a state directory of many users, sessions and checkpoints through the real store.
 *
 * This file reads the command line and sees that the directory is empty and nobody else's.
 */

#include "tools/mkstate.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/clock.h"
#include "kvstore/base/limits.h"
#include "tools/mkstate_content.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum { EXIT_USAGE = 2 };

/* As a user's quotas are: 20 sessions of some 20 checkpoints. */
#define SESSIONS_DEFAULT 20u
#define CHECKPOINTS_DEFAULT 20u

static void print_usage(FILE *out)
{
    (void)fprintf(
        out,
        "usage: mkstate --checkpoints N [--users U] [--sessions S] [--seed K]\n"
        "               [--master-key FILE] DIR\n"
        "\n"
        "Writes a state directory with N checkpoints to DIR, which is made or is empty, through "
        "the\n"
        "daemon's own store: `kvdump verify DIR` finds it right, and a daemon with engine.backend "
        "=\n"
        "synthetic, no engine.model_dir and the default ssd.segment_bytes serves it.\n"
        "\n"
        "  --checkpoints N  of all sessions together, 1 to %u\n"
        "  --users U        (default: as many as N / 400 needs)\n"
        "  --sessions S     of each user (default 20); U x S is at most N, and at most %u;\n"
        "                   a session has at most %u checkpoints\n"
        "  --seed K         same seed, same names and tokens (default 1)\n"
        "  --master-key FILE  encrypted, as a daemon with this ssd.master_key_file does it\n"
        "  --help           this text\n"
        "\n"
        "All checkpoints of a session lie in one page of 128 tokens (20,480 B), or in as few as "
        "there\n"
        "is room for: a million is about 1.3 GiB.  Progress is told on stderr every 2 s.  A run "
        "that\n"
        "is ended leaves what was saved until then.\n"
        "\n"
        "exit code: 0 done, 1 failed, 2 wrong usage\n"
        "example:   mkstate --checkpoints 1000000 /var/tmp/state\n",
        MKSTATE_CHECKPOINTS_MAX, KV_SESSIONS_MAX, MKSTATE_PER_SESSION_MAX);
}

static int usage_error(const char *text, const char *value)
{
    (void)fprintf(stderr, "mkstate: %s%s; `mkstate --help` says how it is used\n", text, value);
    return EXIT_USAGE;
}

static bool read_number(const char *text, uint64_t min, uint64_t max, uint64_t *ret_value)
{
    char *end = NULL;
    errno = 0;
    const unsigned long long value = strtoull(text, &end, 10);
    if (errno != 0 || *end != '\0' || *text < '0' || *text > '9') return false;
    if (value < min || value > max) return false;
    *ret_value = value;
    return true;
}

/* What was not said, and whether it goes together.  0, or the exit code. */
static int complete(struct mkstate_plan *plan, uint64_t users, uint64_t sessions)
{
    char text[96];
    if (sessions == 0) sessions = KV_MIN(SESSIONS_DEFAULT, plan->checkpoints);
    if (users == 0) {
        const uint64_t each = sessions * CHECKPOINTS_DEFAULT;
        users = KV_MAX(plan->checkpoints / each, UINT64_C(1));
    }
    (void)snprintf(text, sizeof(text), "%" PRIu64 " users x %" PRIu64 " sessions", users, sessions);
    if (users * sessions > plan->checkpoints)
        return usage_error("more sessions than checkpoints: ", text);
    if (users * sessions > KV_SESSIONS_MAX)
        return usage_error("more sessions than a daemon takes (1048576): ", text);
    plan->users = (uint32_t)users;
    plan->sessions = (uint32_t)sessions;
    const uint64_t most = plan->checkpoints / (users * sessions);
    (void)snprintf(text, sizeof(text), "%" PRIu64 ", and some have a quarter more", most);
    if (most + most / 4 + 1 > MKSTATE_PER_SESSION_MAX)
        return usage_error("more than 4096 checkpoints a session: ", text);
    return 0;
}

/* NULL: it is there and empty. */
static const char *why_not(const char *dir)
{
    if (mkdir(dir, 0700) == 0) return NULL;
    if (errno != EEXIST) return strerror(errno);
    DIR *entries = opendir(dir);
    if (entries == NULL) return strerror(errno);
    const char *why = NULL;
    for (const struct dirent *entry; (entry = readdir(entries)) != NULL;)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            why = "it is not empty, and nothing in it is touched";
    (void)closedir(entries);
    return why;
}

/* No daemon starts on it meanwhile.  -1: the sentence is printed. */
static int lock(const char *dir)
{
    char path[4096], pid[24];
    (void)snprintf(path, sizeof(path), "%s/lock", dir);
    const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    const int count = snprintf(pid, sizeof(pid), "%ld\n", (long)getpid());
    if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0 && pwrite(fd, pid, (size_t)count, 0) == count)
        return fd;
    (void)fprintf(stderr, "mkstate: lock %s: %s\n", path, strerror(errno));
    if (fd >= 0) (void)close(fd);
    return -1;
}

static int make(const struct mkstate_plan *plan)
{
    struct mkstate_made made = {0};
    struct kv_error err = {0};
    const uint64_t begun = kv_clock_stopwatch_ns();
    const char *why = why_not(plan->dir);
    if (why != NULL) {
        (void)fprintf(stderr, "mkstate: %s: %s\n", plan->dir, why);
        return EXIT_FAILURE;
    }
    const int fd = lock(plan->dir);
    if (fd < 0) return EXIT_FAILURE;
    const kv_status status = mkstate_write(plan, &made, &err);
    (void)close(fd);
    if (status != KV_OK) {
        (void)fprintf(stderr, "mkstate: %s; %" PRIu64 " checkpoints were saved before\n", err.text,
                      made.checkpoints);
        return EXIT_FAILURE;
    }
    (void)printf("%" PRIu64 " checkpoints of %" PRIu64 " sessions of %" PRIu64 " users: %" PRIu64
                 " pages, %" PRIu64 " bytes, %" PRIu32 " segments, %.1f s\n",
                 made.checkpoints, made.sessions, made.users, made.pages, made.bytes, made.segments,
                 (double)(kv_clock_stopwatch_ns() - begun) / 1e9);
    return fflush(stdout) == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"checkpoints", required_argument, NULL, 'c'},
        {"users", required_argument, NULL, 'u'},
        {"sessions", required_argument, NULL, 'n'},
        {"seed", required_argument, NULL, 's'},
        {"master-key", required_argument, NULL, 'k'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    struct mkstate_plan plan = {.seed = MKSTATE_SEED_DEFAULT};
    uint64_t users = 0, sessions = 0;
    int option;

    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (option == 'c') {
            if (!read_number(optarg, 1, MKSTATE_CHECKPOINTS_MAX, &plan.checkpoints))
                return usage_error("--checkpoints must be 1 to 100000000, found ", optarg);
        } else if (option == 'u') {
            if (!read_number(optarg, 1, KV_SESSIONS_MAX, &users))
                return usage_error("--users must be 1 to 1048576, found ", optarg);
        } else if (option == 'n') {
            if (!read_number(optarg, 1, KV_SESSIONS_MAX, &sessions))
                return usage_error("--sessions must be 1 to 1048576, found ", optarg);
        } else if (option == 's') {
            if (!read_number(optarg, 0, UINT64_MAX, &plan.seed))
                return usage_error("--seed must be a number, found ", optarg);
        } else if (option == 'k') {
            plan.master_key = optarg;
        } else if (option == 'h') {
            print_usage(stdout);
            return EXIT_SUCCESS;
        } else {
            print_usage(stderr);
            return EXIT_USAGE;
        }
    }
    if (plan.checkpoints == 0) return usage_error("--checkpoints is missing", "");
    if (optind < argc) plan.dir = argv[optind++];
    if (plan.dir == NULL || plan.dir[0] == '\0') return usage_error("the directory is missing", "");
    if (optind < argc) return usage_error("unexpected argument ", argv[optind]);
    const int code = complete(&plan, users, sessions);
    return code == 0 ? make(&plan) : code;
}
