/*
 * The loop of both crash and powercut.
 *
 * The moment of a fault is drawn as a number of acknowledgements and some microseconds after, so
 * that a slow machine compares as much as a fast one.  Every draw is a function of seed, case and
 * writer; what threads do to each other is not, so a case is repeated as far as that goes.
 */

#include "tests/crash/drive.h"

#include "kvstore/base/bytes.h"
#include "tests/driver/scratch.h"
#include "tests/harness.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    ROUND = 10,
    PATH_BYTES = 300,
    ACKS_MAX = 36,
    WRITE_MS_MAX = 3000,
    COMPARED_MIN = 20,
    CYCLE_MS_MAX = 150
};

struct driver {
    const struct cr_options *options;
    const struct cr_medium *medium;
    struct cr_run run;
    struct ex_random random; /* Of the main thread. */
    char scratch[PATH_BYTES], log_dir[PATH_BYTES], log_path[PATH_BYTES + 8];
    char state[PATH_BYTES + 16], daemon_path[1200];
    struct ex_flags flags;
    struct timespec begun, shown;
    double write_s, restart_s, compare_s;
};

static _Noreturn void give_up(const struct driver *driver, const char *why)
{
    (void)fprintf(stderr, "%s: %s\n", driver->options->program, why);
    if (driver->run.daemon != NULL) ex_daemon_destroy(driver->run.daemon);
    if (driver->medium->drop != NULL) driver->medium->drop(driver->medium->context);
    if (!driver->options->keep) {
        ex_remove_tree(driver->scratch);
        ex_remove_tree(driver->log_dir);
    }
    exit(EXIT_FAILURE);
}

static void pause_us(uint64_t us)
{
    const struct timespec time = {.tv_sec = (time_t)(us / 1000000),
                                  .tv_nsec = (long)(us % 1000000) * 1000};
    (void)nanosleep(&time, NULL);
}

/* ---- places ---- */

static dev_t device_of(const char *path)
{
    struct stat stat_of;
    return stat(path, &stat_of) == 0 ? stat_of.st_dev : 0;
}

static void make_places(struct driver *driver)
{
    static const char *const log_places[] = {"/dev/shm", "/tmp", "/var/tmp"};
    const char *dir = driver->options->dir == NULL ? "/tmp" : driver->options->dir;
    if (!ex_make_scratch(dir, driver->options->program, driver->scratch, PATH_BYTES))
        give_up(driver, "the scratch folder cannot be made; see --dir");
    for (unsigned i = 0; i < KV_ARRAY_COUNT(log_places) && driver->log_dir[0] == '\0'; i++) {
        if (device_of(log_places[i]) == device_of(driver->scratch)) continue;
        if (!ex_make_scratch(log_places[i], driver->options->program, driver->log_dir, PATH_BYTES))
            driver->log_dir[0] = '\0';
    }
    if (driver->log_dir[0] == '\0')
        give_up(driver, "no other file system for the log: neither /dev/shm nor /tmp");
    cr_make_key(driver->scratch);
    (void)snprintf(driver->log_path, sizeof(driver->log_path), "%s/log", driver->log_dir);
    driver->run.log_path = driver->log_path;
    ex_build_path(driver->options->plant == NULL ? "cached/cached" : "cached/cached-test",
                  driver->daemon_path, sizeof(driver->daemon_path));
    if (driver->options->keep)
        (void)fprintf(stderr, "%s: %s and %s are kept\n", driver->options->program, driver->scratch,
                      driver->log_dir);
}

static void fill_flags(struct driver *driver, uint32_t round)
{
    struct ex_flags *flags = &driver->flags;
    flags->count = 0;
    ex_flag(flags, "--engine.backend=synthetic");
    ex_flag(flags, "--engine.threads=1");
    ex_flag(flags, "--engine.live_sessions=32");
    ex_flag(flags, "--window.spare_tokens=%u", (unsigned)CR_SPARE);
    ex_flag(flags, "--hbm.bytes=8MiB");
    ex_flag(flags, "--pool.bytes=2MiB");
    ex_flag(flags, "--ssd.bytes=64MiB");
    ex_flag(flags, "--ssd.segment_bytes=256KiB");
    ex_flag(flags, "--index.ram=4MiB");
    ex_flag(flags, "--quota.default_sessions=0");
    ex_flag(flags, "--quota.default_turns=0");
    /* Compaction at every start and while writing: most of each segment is of rewritten pages. */
    ex_flag(flags, "--ssd.compact_below=0.9");
    ex_flag(flags, "--ssd.compact_rate=1GiB");
    /* Zeros over what is free, a few times between two faults. */
    ex_flag(flags, "--ssd.erase_within=150ms");
    const char *io = getenv("CACHED_TEST_IO"); /* Every round on this backend. */
    if (io == NULL) io = round % 4 == 3 ? "pool" : "auto";
    ex_flag(flags, "--io.backend=%s", io);
    if (driver->options->encrypt || round % 4 == 2) {
        ex_flag(flags, "--ssd.encryption=on");
        ex_flag(flags, "--ssd.master_key_file=%s/" CR_KEY_NAME, driver->scratch);
    }
    if (driver->options->plant != NULL) {
        ex_flag(flags, "--plant");
        ex_flag(flags, "%s", driver->options->plant);
    }
}

/* ---- one fault ---- */

static void each_writer(struct driver *driver, void *(*work)(void *))
{
    for (uint32_t w = 0; w < CR_WRITERS; w++)
        EXPECT(pthread_create(&driver->run.writers[w].thread, NULL, work,
                              &driver->run.writers[w]) == 0);
}

static void join_writers(struct driver *driver)
{
    for (uint32_t w = 0; w < CR_WRITERS; w++) {
        struct cr_writer *writer = &driver->run.writers[w];
        EXPECT(pthread_join(writer->thread, NULL) == 0);
        cr_counts_add(&driver->run.counts, &writer->counts);
        writer->counts = (struct cr_counts){0};
    }
}

static void count_phases(struct cr_run *run)
{
    bool busy = false;
    for (uint32_t w = 0; w < CR_WRITERS; w++) {
        const enum cr_phase phase = atomic_load(&run->writers[w].phase);
        run->counts.phases[phase]++;
        if (phase != CR_IDLE) busy = true;
    }
    if (busy) run->counts.busy_kills++;
    run->counts.kills++;
}

static void write_and_fault(struct driver *driver)
{
    struct cr_run *run = &driver->run;
    const struct cr_medium *medium = driver->medium;
    const uint32_t acks = ex_random_below(&driver->random, ACKS_MAX);
    const uint32_t us = ex_random_below(&driver->random, 4000);
    char why[EX_WHY_BYTES] = "";
    struct timespec begun;
    (void)clock_gettime(CLOCK_MONOTONIC, &begun);
    atomic_store(&run->acks, 0);
    for (uint32_t w = 0; w < CR_WRITERS; w++)
        atomic_store(&run->writers[w].phase, CR_IDLE);
    atomic_store(&run->killing, false);
    each_writer(driver, cr_write);
    while (atomic_load(&run->acks) < acks && ex_seconds_since(&begun) < WRITE_MS_MAX / 1000.0 &&
           run->failures_shown == 0)
        pause_us(200);
    pause_us(us);
    atomic_store(&run->killing, true);
    /* After a cut calls are answered still; a kill leaves what it met. */
    if (medium->cut != NULL) count_phases(run);
    if (medium->cut != NULL && !medium->cut(medium->context, why)) {
        join_writers(driver);
        give_up(driver, why);
    }
    /* Now and then long enough for every call to be answered. */
    if (medium->cut != NULL)
        pause_us(ex_random_below(&driver->random,
                                 ex_random_percent(&driver->random, 20) ? 40000 : 2000));
    ex_daemon_signal(run->daemon, SIGKILL);
    join_writers(driver);
    if (medium->cut == NULL) count_phases(run);
    if (!ex_daemon_stop(run->daemon, SIGKILL, why))
        cr_fail(&run->writers[0], CR_WRONG, NULL, NULL, "%s", why);
    (void)clock_gettime(CLOCK_MONOTONIC, &run->died);
    driver->write_s += ex_seconds_since(&begun);
    if (medium->restore != NULL && !medium->restore(medium->context, why)) give_up(driver, why);
}

/* Now and then a second fault, while it recovers. */
static void start_and_compare(struct driver *driver)
{
    struct cr_run *run = &driver->run;
    char why[EX_WHY_BYTES];
    struct timespec begun;
    (void)clock_gettime(CLOCK_MONOTONIC, &begun);
    atomic_store(&run->killing, false);
    atomic_store(&run->ready, false);
    atomic_store(&run->broken, false);
    ex_daemon_spawn(run->daemon, &driver->flags);
    each_writer(driver, cr_compare);
    if (ex_random_percent(&driver->random, 10)) {
        pause_us(ex_random_below(&driver->random, 40000));
        (void)ex_daemon_stop(run->daemon, SIGKILL, why);
        run->counts.starting++;
        ex_daemon_spawn(run->daemon, &driver->flags);
    }
    const bool ok = ex_daemon_wait(run->daemon, why);
    driver->restart_s += ex_seconds_since(&begun);
    if (!ok) cr_fail(&run->writers[0], CR_LOST, NULL, NULL, "everything: %.350s", why);
    atomic_store(ok ? &run->ready : &run->broken, true);
    (void)clock_gettime(CLOCK_MONOTONIC, &begun);
    join_writers(driver);
    if (ok) cr_compare_users(run);
    cr_counts_add(&run->counts, &run->writers[0].counts);
    for (uint32_t w = 0; w < CR_WRITERS; w++) {
        if (w > 0) cr_counts_add(&run->counts, &run->writers[w].counts);
        run->writers[w].counts = (struct cr_counts){0};
    }
    driver->compare_s += ex_seconds_since(&begun);
}

static void show_progress(struct driver *driver)
{
    if (ex_seconds_since(&driver->shown) < 2.0) return;
    (void)clock_gettime(CLOCK_MONOTONIC, &driver->shown);
    (void)fprintf(stderr, "%s: %llu of %u %s, %llu compared, %.0f s\n", driver->options->program,
                  (unsigned long long)driver->run.counts.kills, driver->options->count,
                  driver->options->unit, (unsigned long long)driver->run.counts.acknowledged,
                  ex_seconds_since(&driver->begun));
}

static void draw_case(struct driver *driver, uint32_t number)
{
    const uint64_t seed = ex_mix(ex_mix(driver->options->seed) ^ number);
    driver->run.kill = number;
    driver->random.state = seed;
    for (uint32_t w = 0; w < CR_WRITERS; w++)
        driver->run.writers[w].random.state = ex_mix(seed + 1 + w);
}

/* ---- a round ---- */

static void round_begin(struct driver *driver, uint32_t round)
{
    char why[EX_WHY_BYTES];
    const struct ex_daemon_options options = {
        .dir = driver->scratch, .state_dir = driver->state, .program = driver->daemon_path};
    fill_flags(driver, round);
    (void)snprintf(driver->state, sizeof(driver->state), "%s/state", driver->scratch);
    if (driver->medium->make != NULL &&
        !driver->medium->make(driver->medium->context, driver->scratch, driver->state,
                              sizeof(driver->state), why))
        give_up(driver, why);
    driver->run.log_fd =
        open(driver->log_path, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600);
    EXPECT(driver->run.log_fd >= 0);
    driver->run.daemon = ex_daemon_create(&options);
    if (!ex_daemon_start(driver->run.daemon, &driver->flags, why)) give_up(driver, why);
}

static void round_end(struct driver *driver)
{
    char path[PATH_BYTES + 8];
    ex_daemon_destroy(driver->run.daemon);
    driver->run.daemon = NULL;
    cr_forget(&driver->run);
    (void)close(driver->run.log_fd);
    if (driver->medium->drop != NULL) driver->medium->drop(driver->medium->context);
    if (driver->options->keep) return;
    if (driver->medium->drop == NULL) ex_remove_tree(driver->state);
    (void)snprintf(path, sizeof(path), "%s/log", driver->scratch);
    ex_remove_tree(path);
}

/* Cases before `first` only set the stage. */
static void round_run(struct driver *driver, uint32_t round, uint32_t first, uint32_t end)
{
    struct cr_run *run = &driver->run;
    round_begin(driver, round);
    for (uint32_t number = round * ROUND; number < end && cr_failed(&run->counts) == 0; number++) {
        const struct cr_counts before = run->counts;
        draw_case(driver, number);
        run->deep = number + 1 == end;
        write_and_fault(driver);
        start_and_compare(driver);
        if (driver->options->verbose)
            (void)fprintf(stderr, "%s: case %u: %llu compared, %llu by a turn\n",
                          driver->options->program, number,
                          (unsigned long long)(run->counts.acknowledged - before.acknowledged),
                          (unsigned long long)(run->counts.tried - before.tried));
        if (number < first && cr_failed(&run->counts) == 0) run->counts = before;
        show_progress(driver);
    }
    round_end(driver);
}

/* ---- the end ---- */

static double cpu_ms(int who)
{
    struct rusage usage;
    EXPECT(getrusage(who, &usage) == 0);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1e3 +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e3;
}

static void print_counts(const struct driver *driver)
{
    const struct cr_counts *c = &driver->run.counts;
    const double kills = c->kills == 0 ? 1 : (double)c->kills;
    const double cycle_ms = ex_seconds_since(&driver->begun) * 1000 / kills;
    (void)printf("seed: %llu\n", (unsigned long long)driver->options->seed);
    (void)printf(
        "cycle %.0f ms%s: writing %.0f, restart %.0f, comparing %.0f; CPU %.0f ms here, %.0f "
        "ms in daemons\n",
        cycle_ms, cycle_ms <= CYCLE_MS_MAX ? "" : " (above the 150 it may take)",
        driver->write_s * 1000 / kills, driver->restart_s * 1000 / kills,
        driver->compare_s * 1000 / kills, cpu_ms(RUSAGE_SELF) / kills,
        cpu_ms(RUSAGE_CHILDREN) / kills);
    (void)printf("calls under way at %llu of %llu %s (%llu more while starting):",
                 (unsigned long long)c->busy_kills, (unsigned long long)c->kills,
                 driver->options->unit, (unsigned long long)c->starting);
    for (uint32_t phase = 0; phase < CR_PHASES; phase++)
        (void)printf(" %s %llu%s", cr_phase_names[phase], (unsigned long long)c->phases[phase],
                     phase + 1 < CR_PHASES ? "," : "\n");
    (void)printf("%.1f acknowledged checkpoints compared per fault, %.1f by a turn; %llu that were "
                 "under way are there whole; %llu expired and %llu deleted ones are gone; starts "
                 "dropped %llu\n",
                 (double)c->acknowledged / kills, (double)c->tried / kills,
                 (unsigned long long)c->adopted, (unsigned long long)c->expired,
                 (unsigned long long)c->deleted, (unsigned long long)c->dropped);
    (void)printf("%llu %s, %llu acknowledged, %llu found, %llu lost, %llu torn, %llu wrong\n",
                 (unsigned long long)c->kills, driver->options->unit,
                 (unsigned long long)c->acknowledged, (unsigned long long)c->found,
                 (unsigned long long)c->faults[CR_LOST], (unsigned long long)c->faults[CR_TORN],
                 (unsigned long long)c->faults[CR_WRONG]);
}

static int verdict(const struct driver *driver)
{
    const struct cr_counts *c = &driver->run.counts;
    const char *program = driver->options->program;
    if (driver->options->expect_loss) {
        if (cr_failed(c) > 0) return EXIT_SUCCESS;
        (void)fprintf(stderr, "%s: a loss was expected and none was found\n", program);
        return EXIT_FAILURE;
    }
    if (cr_failed(c) > 0) return CR_EXIT_LOSS;
    if (c->kills == 0 || c->acknowledged == 0 || c->tried == 0 || c->busy_kills == 0 ||
        c->acknowledged < (c->kills >= 10 ? COMPARED_MIN * c->kills : 1)) {
        (void)fprintf(stderr, "%s: too little was compared: the run says nothing\n", program);
        return EXIT_FAILURE;
    }
    if (c->found == c->acknowledged) return EXIT_SUCCESS;
    (void)fprintf(stderr, "%s: found is not acknowledged\n", program);
    return CR_EXIT_LOSS;
}

int cr_idle_code(const struct cr_options *options, int code)
{
    if (!options->idle) return code;
    if (code == EXIT_FAILURE) return EXIT_SUCCESS;
    (void)fprintf(stderr, "%s: nothing happened, and the run passed\n", options->program);
    return EXIT_FAILURE;
}

int cr_drive(const struct cr_options *options, const struct cr_medium *medium)
{
    struct driver *driver = calloc(1, sizeof(*driver));
    EXPECT(driver != NULL);
    driver->options = options;
    driver->medium = medium;
    driver->run.seed = options->seed;
    driver->run.program = options->program;
    driver->run.deaf = medium->cut != NULL;
    driver->run.idle = options->idle;
    EXPECT(pthread_mutex_init(&driver->run.lock, NULL) == 0);
    (void)clock_gettime(CLOCK_MONOTONIC, &driver->begun);
    driver->shown = driver->begun;
    make_places(driver);
    for (uint32_t w = 0; w < CR_WRITERS; w++)
        driver->run.writers[w] = (struct cr_writer){.run = &driver->run,
                                                    .index = w,
                                                    .user = w % EX_USERS,
                                                    .oracle = cr_oracle_create(CR_SPARE)};
    const uint32_t end = options->first + options->count;
    for (uint32_t first = options->first; first < end && cr_failed(&driver->run.counts) == 0;) {
        const uint32_t next = KV_MIN(end, (first / ROUND + 1) * ROUND);
        round_run(driver, first / ROUND, first, next);
        first = next;
    }
    print_counts(driver);
    const int code = cr_idle_code(options, verdict(driver));
    for (uint32_t w = 0; w < CR_WRITERS; w++)
        cr_oracle_destroy(driver->run.writers[w].oracle);
    if (!options->keep) {
        ex_remove_tree(driver->scratch);
        ex_remove_tree(driver->log_dir);
    }
    (void)pthread_mutex_destroy(&driver->run.lock);
    free(driver);
    return code;
}
