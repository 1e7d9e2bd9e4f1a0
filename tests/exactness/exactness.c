/*
 * EXACT means the bits of a session that never left memory, for any chunk size and batch.
 *
 * Random histories run on the real daemon, with checkpoints, evictions, expiry, rollbacks, restarts
 * and kills; the same calls, resumed at the same positions, run on a session that never left this
 * process.  Every token and the CRC of the logits it was taken from must be equal.
 *
 * Histories come in groups that share one daemon, each group in a child process: a history is
 * repeated by running its group up to it.  The parent adds up, shows progress, and writes where to
 * go on.
 */

#include "tests/exactness/run.h"

#include "kvstore/base/bytes.h"
#include "tests/driver/scratch.h"
#include "tests/harness.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { GROUP = 10, ROUND = 10 * GROUP, JOBS_MAX = 16, EXIT_USAGE = 2, COUNTS_MIN = 10 };
enum { TINY_EVERY = 8 }; /* Of the groups of random schedules. */

struct options {
    uint64_t seed;
    uint32_t from, count, jobs;
    bool verbose, strict, keep, expect_difference, crowd;
    const char *plant, *state_file, *commit;
};

/* Paths next to this program: BUILD/tests/exactness. */
struct places {
    char dir[256];              /* Of this run; removed at the end. */
    char tiny[300], micro[300]; /* Models. */
    char daemon[1024], mkmodel[1024];
};

struct tally {
    struct ex_counts counts;
    uint32_t done; /* Histories from 0 on that are counted. */
    struct timespec begun, shown;
};

/* ---- a group: one process, one daemon ---- */

static struct ex_daemon *group_daemon(struct ex_run *run, const struct options *options,
                                      const struct places *places, uint32_t group)
{
    static const uint32_t spares[] = {4, 7, 16, 16, 40};
    struct ex_random random = {ex_mix(ex_mix(options->seed) ^ ~(uint64_t)group)};
    char dir[300];
    char why[EX_WHY_BYTES];
    run->setup.spare_tokens = spares[ex_random_below(&random, 5)];
    ex_setup_draw(&run->setup, &random, run->crowd);
    /* Random schedules are many: most of them run on half of the layers. */
    const char *model = run->crowd && group % TINY_EVERY != 0 ? places->micro : places->tiny;
    run->model = ref_model_open(model, run->setup.spare_tokens, run->crowd ? &random : NULL);
    EXPECT(run->model != NULL);
    const struct kv_layout *layout = ref_model_layout(run->model);
    (void)snprintf(dir, sizeof(dir), "%s/%u", places->dir, group);
    EXPECT(mkdir(dir, 0700) == 0);
    const struct ex_daemon_options daemon_options = {
        .dir = dir,
        .program = places->daemon,
    };
    run->setup.model_dir = model;
    run->setup.plant = options->plant;
    run->setup.page_bytes = layout->page_bytes;
    run->setup.image_bytes = layout->image_bytes;
    run->daemon = ex_daemon_create(&daemon_options);
    if (!ex_setup_start(run->daemon, &run->setup, why)) ex_wrong(run, "%s", why);
    return run->daemon;
}

void ex_report(struct ex_run *run)
{
    const ssize_t count = write(run->report_fd, &run->counts, sizeof(run->counts));
    EXPECT(count == (ssize_t)sizeof(run->counts)); /* Below PIPE_BUF: in one piece. */
    run->counts = (struct ex_counts){0};
}

/* Histories [first, end) of a group are counted; those before them only set the stage. */
static void group_run(const struct options *options, const struct places *places, uint32_t group,
                      uint32_t first, uint32_t end, int report_fd)
{
    struct ex_run *run = calloc(1, sizeof(*run));
    char dir[300];
    char why[EX_WHY_BYTES];
    EXPECT(run != NULL);
    run->seed = options->seed;
    run->plant = options->plant;
    run->strict = options->strict;
    run->crowd = options->crowd;
    run->report_fd = report_fd;
    run->history = group * GROUP;
    (void)group_daemon(run, options, places, group);
    for (uint32_t history = group * GROUP; history < end; history++) {
        run->verbose = options->verbose && history >= first;
        ex_history(run, history);
        if (history < first) run->counts = (struct ex_counts){0};
        if (history >= first) ex_report(run);
    }
    if (!ex_daemon_stop(run->daemon, SIGTERM, why)) ex_wrong(run, "%s", why);
    ex_daemon_destroy(run->daemon);
    ref_model_close(run->model);
    free(run);
    (void)snprintf(dir, sizeof(dir), "%s/%u", places->dir, group);
    if (!options->keep) ex_remove_tree(dir);
}

/* ---- a round: jobs side by side ---- */

static pid_t job_start(const struct options *options, const struct places *places, uint32_t job,
                       uint32_t first, uint32_t end, int report_fd)
{
    const pid_t parent = getpid();
    const pid_t pid = fork();
    EXPECT(pid >= 0);
    if (pid != 0) return pid;
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(EXIT_FAILURE);
    for (uint32_t group = first / GROUP + job; group * GROUP < end; group += options->jobs)
        group_run(options, places, group, KV_MAX(first, group * GROUP),
                  KV_MIN(end, (group + 1) * GROUP), report_fd);
    _exit(EXIT_SUCCESS);
}

static void add_counts(struct ex_counts *to, const struct ex_counts *more)
{
    /* All members are u64. */
    uint64_t *sums = (uint64_t *)to;
    const uint64_t *numbers = (const uint64_t *)more;
    _Static_assert(sizeof(*to) % sizeof(*sums) == 0, "counts are u64 only");
    for (size_t i = 0; i < sizeof(*to) / sizeof(*sums); i++)
        sums[i] += numbers[i];
}

static void show_progress(struct tally *tally, const struct options *options)
{
    if (ex_seconds_since(&tally->shown) < 2.0) return;
    (void)clock_gettime(CLOCK_MONOTONIC, &tally->shown);
    (void)fprintf(stderr, "exactness: %" PRIu64 " histories (to %u), %" PRIu64 " turns, %.0f s\n",
                  tally->counts.histories, options->from + options->count, tally->counts.turns,
                  ex_seconds_since(&tally->begun));
}

/* Reads counters until every writer is gone. */
static void gather(int fd, struct tally *tally, const struct options *options)
{
    struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
    for (;;) {
        struct ex_counts counts;
        show_progress(tally, options);
        if (poll(&poll_fd, 1, 500) <= 0) continue;
        const ssize_t got = read(fd, &counts, sizeof(counts));
        if (got == 0) return;
        if (got < 0 && errno == EINTR) continue;
        EXPECT(got == (ssize_t)sizeof(counts));
        add_counts(&tally->counts, &counts);
    }
}

/* 0, or how the first job that failed ended.  Others are stopped then. */
static int wait_jobs(pid_t *pids, uint32_t count)
{
    int worst = 0;
    for (uint32_t left = count; left > 0; left--) {
        int status;
        pid_t ended;
        do {
            ended = waitpid(-1, &status, 0);
        } while (ended < 0 && errno == EINTR);
        EXPECT(ended > 0);
        const int code = WIFEXITED(status) ? WEXITSTATUS(status) : EX_EXIT_WRONG;
        if (!WIFEXITED(status) && worst == 0)
            (void)fprintf(stderr, "exactness: a job ended with status 0x%x\n", (unsigned)status);
        for (uint32_t i = 0; i < count; i++) {
            if (pids[i] == ended) pids[i] = 0;
            if (code != 0 && worst == 0 && pids[i] > 0) (void)kill(pids[i], SIGKILL);
        }
        if (worst == 0) worst = code;
    }
    return worst;
}

/* The first failure stops the others, so a waiter must look while counters still come in. */
static int round_run(const struct options *options, const struct places *places, uint32_t first,
                     uint32_t end, struct tally *tally)
{
    int fds[2];
    EXPECT(pipe2(fds, O_CLOEXEC) == 0);
    (void)fflush(NULL);
    const pid_t parent = getpid();
    const pid_t waiter = fork();
    EXPECT(waiter >= 0);
    if (waiter == 0) {
        pid_t pids[JOBS_MAX];
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(EXIT_FAILURE);
        (void)close(fds[0]);
        for (uint32_t job = 0; job < options->jobs; job++)
            pids[job] = job_start(options, places, job, first, end, fds[1]);
        (void)close(fds[1]);
        _exit(wait_jobs(pids, options->jobs));
    }
    (void)close(fds[1]);
    gather(fds[0], tally, options);
    (void)close(fds[0]);
    int status;
    EXPECT(waitpid(waiter, &status, 0) == waiter);
    return WIFEXITED(status) ? WEXITSTATUS(status) : EX_EXIT_WRONG;
}

/* ---- where to go on ---- */

static void state_head(char *head, size_t bytes, const struct options *options)
{
    (void)snprintf(head, bytes, "commit %s seed %" PRIu64 " plant %s%s", options->commit,
                   options->seed, options->plant == NULL ? "none" : options->plant,
                   options->crowd ? " schedule random" : "");
}

static void state_read(const struct options *options, struct tally *tally)
{
    char head[256], line[512];
    struct tally found = {0};
    state_head(head, sizeof(head), options);
    FILE *file = fopen(options->state_file, "r");
    if (file == NULL) return;
    bool ok = fgets(line, sizeof(line), file) != NULL && strncmp(line, head, strlen(head)) == 0 &&
              line[strlen(head)] == '\n';
    ok = ok && fscanf(file, "done %" SCNu32, &found.done) == 1;
    uint64_t *numbers = (uint64_t *)&found.counts;
    for (size_t i = 0; ok && i < sizeof(found.counts) / sizeof(*numbers); i++)
        ok = fscanf(file, "%" SCNu64, &numbers[i]) == 1;
    (void)fclose(file);
    if (!ok) return;
    tally->counts = found.counts;
    tally->done = found.done;
    (void)fprintf(stderr, "exactness: going on after history %u\n", found.done);
}

static void state_write(const struct options *options, const struct tally *tally)
{
    char head[256], part[1024];
    state_head(head, sizeof(head), options);
    (void)snprintf(part, sizeof(part), "%s.part", options->state_file);
    FILE *file = fopen(part, "w");
    EXPECT(file != NULL);
    (void)fprintf(file, "%s\ndone %u", head, tally->done);
    const uint64_t *numbers = (const uint64_t *)&tally->counts;
    for (size_t i = 0; i < sizeof(tally->counts) / sizeof(*numbers); i++)
        (void)fprintf(file, " %" PRIu64, numbers[i]);
    (void)fprintf(file, "\n");
    EXPECT(fflush(file) == 0 && fsync(fileno(file)) == 0);
    EXPECT(fclose(file) == 0);
    EXPECT(rename(part, options->state_file) == 0);
}

/* ---- the end ---- */

static void print_counts(const struct options *options, const struct tally *tally)
{
    const struct ex_counts *c = &tally->counts;
    if (options->commit[0] != '\0') (void)printf("commit: %s\n", options->commit);
    (void)printf("seed: %" PRIu64 "\n", options->seed);
    (void)printf("EXACT from the live head %" PRIu64 ", from a window image %" PRIu64 " (%" PRIu64
                 " cut below it, %" PRIu64 " at an odd position)\n",
                 c->from_live, c->from_image, c->from_image_cut, c->from_image_odd);
    (void)printf("%" PRIu64 " decodes on a stored head, %" PRIu64 " turns side by side, %" PRIu64
                 " restarts (%" PRIu64 " by kill -9), %" PRIu64 " expiries\n",
                 c->restored, c->beside, c->restarts, c->kills, c->expiries);
    if (c->missed > 0)
        (void)printf("%" PRIu64 " plans overlooked a window on another branch\n", c->missed);
    if (c->marked > 0)
        (void)printf("%" PRIu64 " replays over approximate rows where exact ones reached as far\n",
                     c->marked);
    (void)printf("%" PRIu64 " logits compared, %.0f s\n", c->crcs, ex_seconds_since(&tally->begun));
    (void)printf("%" PRIu64 " histories, %" PRIu64 " turns: EXACT %" PRIu64 ", REPLAY %" PRIu64
                 ", MISS %" PRIu64 ", %" PRIu64 " bits differ\n",
                 c->histories, c->turns, c->outcomes[EX_EXACT], c->outcomes[EX_REPLAY],
                 c->outcomes[EX_MISS], c->differ);
}

static int verdict(const struct options *options, const struct tally *tally, int code)
{
    const struct ex_counts *c = &tally->counts;
    if (options->expect_difference) {
        if (code == EX_EXIT_DIFFERENT && c->differ > 0) return EXIT_SUCCESS;
        (void)fprintf(stderr, "exactness: a difference was expected and none was found\n");
        return EXIT_FAILURE;
    }
    if (code != 0 || c->differ > 0) return EXIT_FAILURE;
    if (c->crcs == 0) {
        (void)fprintf(stderr, "exactness: no logits were compared\n");
        return EXIT_FAILURE;
    }
    for (int outcome = EX_EXACT; c->histories >= 50 && outcome <= EX_MISS; outcome++) {
        if (c->outcomes[outcome] > COUNTS_MIN) continue;
        (void)fprintf(stderr, "exactness: too few turns with %s\n",
                      ex_outcome_name((enum ex_outcome)outcome));
        return EXIT_FAILURE;
    }
    return EXIT_SUCCESS;
}

/* ---- arguments ---- */

static const char usage[] =
    "usage: exactness [--histories N] [--from K] [--seed S] [--plant window|tail|none] ...\n"
    "\n"
    "Compares random histories on the real daemon, bit for bit, with a session that never left\n"
    "memory.\n"
    "\n"
    "  --histories N         how many (default 50); --count is the same\n"
    "  --from K              first history (default 0); --first is the same\n"
    "  --history K           this one only, with its operations\n"
    "  --seed S              default 1\n"
    "  --schedule NAME       plain (default), or random: many sessions at once, any chunk, pass\n"
    "                        and thread count, and any pieces for the reference\n"
    "  --plant NAME          a wrong byte in restored windows or tails: must be found\n"
    "  --expect-difference   exit 0 only if bits differ\n"
    "  --state FILE          written every 100 histories; goes on from there\n"
    "  --commit TEXT         of the build: printed, and part of what --state compares\n"
    "  --jobs N              processes side by side (default: cores, at most 4)\n"
    "  --strict              also fails where a window of another branch was overlooked\n"
    "  --verbose, --keep     print operations; keep directories and logs of the daemons\n"
    "\n"
    "exit code: 0 all equal, 1 bits differ or a fact does not hold, 2 wrong usage\n";

enum {
    OPT_COUNT = 1,
    OPT_FROM,
    OPT_ONE,
    OPT_SEED,
    OPT_JOBS,
    OPT_PLANT,
    OPT_STATE,
    OPT_COMMIT,
    OPT_SCHEDULE
};

static const struct option long_options[] = {
    {"histories", required_argument, NULL, OPT_COUNT},
    {"count", required_argument, NULL, OPT_COUNT},
    {"from", required_argument, NULL, OPT_FROM},
    {"first", required_argument, NULL, OPT_FROM},
    {"history", required_argument, NULL, OPT_ONE},
    {"seed", required_argument, NULL, OPT_SEED},
    {"jobs", required_argument, NULL, OPT_JOBS},
    {"plant", required_argument, NULL, OPT_PLANT},
    {"schedule", required_argument, NULL, OPT_SCHEDULE},
    {"state", required_argument, NULL, OPT_STATE},
    {"commit", required_argument, NULL, OPT_COMMIT},
    {"expect-difference", no_argument, NULL, 'd'},
    {"strict", no_argument, NULL, 's'},
    {"verbose", no_argument, NULL, 'v'},
    {"keep", no_argument, NULL, 'k'},
    {"help", no_argument, NULL, 'h'},
    {0},
};

static bool take_number(struct options *options, int option, const char *text)
{
    uint64_t number;
    if (!ex_parse_number(text, option == OPT_SEED ? UINT64_MAX : 100000000, &number)) return false;
    if (option == OPT_SEED) options->seed = number;
    if (option == OPT_COUNT) options->count = (uint32_t)number;
    if (option == OPT_FROM) options->from = (uint32_t)number;
    if (option == OPT_JOBS) options->jobs = (uint32_t)KV_MIN(number, (uint64_t)JOBS_MAX);
    if (option == OPT_ONE) {
        options->from = (uint32_t)number;
        options->count = 1;
        options->verbose = true;
    }
    return true;
}

static bool take_option(struct options *options, int option, const char *text)
{
    switch (option) {
    case OPT_PLANT:
        options->plant = strcmp(text, "none") == 0 ? NULL : text;
        return true;
    case OPT_SCHEDULE:
        options->crowd = strcmp(text, "random") == 0;
        return options->crowd || strcmp(text, "plain") == 0;
    case OPT_STATE:
        options->state_file = text;
        return true;
    case OPT_COMMIT:
        options->commit = text;
        return true;
    case 'd':
        options->expect_difference = true;
        return true;
    case 's':
        options->strict = true;
        return true;
    case 'v':
        options->verbose = true;
        return true;
    case 'k':
        options->keep = true;
        return true;
    case 'h':
        (void)fputs(usage, stdout);
        harness_exit(EXIT_SUCCESS);
    default:
        return option >= OPT_COUNT && option <= OPT_JOBS && take_number(options, option, text);
    }
}

static void parse(int argc, char **argv, struct options *options)
{
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    int option;
    *options = (struct options){.seed = 1, .count = 50, .commit = ""};
    options->jobs = cores < 1 ? 1 : cores > 4 ? 4 : (uint32_t)cores;
    while ((option = getopt_long(argc, argv, "", long_options, NULL)) != -1) {
        if (take_option(options, option, optarg)) continue;
        (void)fputs(usage, stderr);
        harness_exit(EXIT_USAGE);
    }
    if (optind < argc || options->jobs == 0 || options->count == 0) {
        (void)fputs(usage, stderr);
        harness_exit(EXIT_USAGE);
    }
    /* Slow builds run fewer: CACHED_TEST_DIVISOR, as in every test.  A search for a planted bug
     * ends where it is found, and is as long everywhere. */
    if (options->plant == NULL) options->count = (uint32_t)harness_count(options->count);
}

/* ---- start ---- */

static void make_model(const struct options *options, const struct places *places,
                       const char *config, char dir[300])
{
    char command[2048];
    const char *file_name = strrchr(config, '/');
    (void)snprintf(dir, 300, "%s/%s", places->dir, file_name == NULL ? config : "micro");
    (void)snprintf(command, sizeof(command),
                   "'%s' --config '%s' --seed %" PRIu64 " '%s' >/dev/null", places->mkmodel, config,
                   options->seed % 1000, dir);
    EXPECT(system(command) == 0);
}

static void find_places(struct places *places, const struct options *options)
{
    ex_build_path("cached/cached-test", places->daemon, sizeof(places->daemon));
    ex_build_path("tools/mkmodel", places->mkmodel, sizeof(places->mkmodel));

    /* A unix socket's path holds 107 bytes: a long TMPDIR does not fit. */
    const char *base = getenv("TMPDIR");
    if (base == NULL || strlen(base) > 60) base = "/tmp";
    EXPECT(ex_make_scratch(base, "exactness", places->dir, sizeof(places->dir)));
    make_model(options, places, "tiny", places->tiny);
    if (options->crowd) make_model(options, places, MICRO_CONFIG, places->micro);
    if (options->keep) (void)fprintf(stderr, "exactness: %s is kept\n", places->dir);
}

static int run_all(const struct options *options, const struct places *places, struct tally *tally)
{
    const uint32_t end = options->from + options->count;
    int code = 0;
    for (uint32_t first = KV_MAX(options->from, tally->done); first < end && code == 0;) {
        /* Rounds end at multiples of their size, wherever this run began. */
        const uint32_t next = KV_MIN(end, (first / ROUND + 1) * ROUND);
        code = round_run(options, places, first, next, tally);
        first = next;
        if (code != 0 || options->state_file == NULL) continue;
        tally->done = next;
        state_write(options, tally);
    }
    return code;
}

int main(int argc, char **argv)
{
    struct options options;
    struct places places = {0};
    struct tally tally = {0};
    parse(argc, argv, &options);
    (void)clock_gettime(CLOCK_MONOTONIC, &tally.begun);
    tally.shown = tally.begun;
    if (options.state_file != NULL) state_read(&options, &tally);
    find_places(&places, &options);
    const int code = run_all(&options, &places, &tally);
    if (!options.keep) ex_remove_tree(places.dir);
    const int checked = harness_end();
    print_counts(&options, &tally);
    return checked == EXIT_SUCCESS ? verdict(&options, &tally, code) : checked;
}
