/*
 * One random bit turned over is detected or harmless: no wrong byte is ever served.
 *
 * A directory is prepared once: sessions of three users, records in RocksDB's tables and in its
 * log. Each start works on a copy.  Flips in pages come many to a start, each in another session,
 * so that one start judges them all; flips in a segment's header, in superblock and `acknowledged`
 * and in RocksDB's files come alone, because they may concern everything.  Half of the starts are
 * damaged before, half while the daemon runs.
 *
 * Afterwards every session is asked for, and a turn tries it.  What was not damaged must be served
 * in full.  What was is served in full with the right bits (harmless), or less of it with the right
 * bits (detected), or the daemon refused to start in one sentence (detected).  Less without a word
 * of it in answers or log is silent, which fails.
 */

#include "tests/crash/damage.h"
#include "tests/crash/drive.h"

#include "kvstore/base/bytes.h"
#include "tests/driver/scratch.h"

#include <assert.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    SESSIONS = 64,
    PATH_BYTES = 300,
    /* A block of cases, in this order. */
    PAGES = 43,
    HEADERS = 2,
    SUPERBLOCK = 2,
    NOTES = 2,
    INDEX = 8,
    BLOCK = 2 * PAGES + HEADERS + SUPERBLOCK + NOTES + INDEX,
};

enum target {
    TARGET_PAGE,
    TARGET_HEADER,
    TARGET_SUPERBLOCK,
    TARGET_NOTES,
    TARGET_INDEX,
    TARGETS,
};
static const char *const target_names[TARGETS] = {"pages", "segment headers", "superblock",
                                                  "acknowledged", "RocksDB"};

struct tally {
    uint64_t flips[TARGETS], detected[TARGETS], refused[TARGETS];
    uint64_t starts, silent;
};

struct rig {
    const struct cr_options *options;
    struct cr_run run;
    struct cr_damage damage;
    struct tally tally;
    struct ex_random random;
    struct ex_flags flags;
    struct timespec begun, shown;
    char scratch[PATH_BYTES], template_dir[PATH_BYTES + 16], state[PATH_BYTES + 16];
    char daemon_path[1200], log_path[PATH_BYTES + 16], daemon_log[PATH_BYTES + 16];
    struct cr_flip flips[PAGES];
    uint32_t flip_count;
    enum target target;
    bool refused, said; /* Of the start at hand: no start; its log tells of damage. */
};

static _Noreturn void give_up(struct rig *rig, const char *why)
{
    (void)fprintf(stderr, "bitflip: %s\n", why);
    ex_daemon_destroy(rig->run.daemon);
    if (!rig->options->keep) ex_remove_tree(rig->scratch);
    exit(EXIT_FAILURE);
}

static struct client *client_of(const struct cr_writer *writer)
{
    return ex_daemon_client(writer->run->daemon, writer->user, writer->index);
}

static void each_writer(struct rig *rig, void *(*work)(void *))
{
    for (uint32_t w = 0; w < CR_WRITERS; w++) {
        struct cr_writer *writer = &rig->run.writers[w];
        const int code = pthread_create(&writer->thread, NULL, work, writer);
        if (code != 0) give_up(rig, "no thread");
    }
    for (uint32_t w = 0; w < CR_WRITERS; w++) {
        struct cr_writer *writer = &rig->run.writers[w];
        (void)pthread_join(writer->thread, NULL);
        cr_counts_add(&rig->run.counts, &writer->counts);
        writer->counts = (struct cr_counts){0};
    }
}

/* ---- what is prepared ---- */

static void *prepare_half(void *context)
{
    for (uint32_t i = 0; i < SESSIONS / CR_WRITERS / 2; i++)
        cr_stock(context);
    return NULL;
}

static void fill_flags(struct rig *rig)
{
    struct ex_flags *flags = &rig->flags;
    ex_flag(flags, "--engine.backend=synthetic");
    ex_flag(flags, "--engine.threads=1");
    ex_flag(flags, "--engine.live_sessions=32");
    ex_flag(flags, "--window.spare_tokens=%u", (unsigned)CR_SPARE);
    ex_flag(flags, "--hbm.bytes=8MiB");
    ex_flag(flags, "--pool.bytes=2MiB");
    ex_flag(flags, "--ssd.bytes=32MiB");
    ex_flag(flags, "--ssd.segment_bytes=256KiB");
    ex_flag(flags, "--index.ram=4MiB");
    ex_flag(flags, "--quota.default_sessions=0");
    ex_flag(flags, "--quota.default_turns=0");
    if (rig->options->encrypt) {
        cr_make_key(rig->scratch);
        ex_flag(flags, "--ssd.encryption=on");
        ex_flag(flags, "--ssd.master_key_file=%s/" CR_KEY_NAME, rig->scratch);
    }
    if (rig->options->plant == NULL) return;
    ex_flag(flags, "--plant");
    ex_flag(flags, "%s", rig->options->plant);
}

static void prepare(struct rig *rig)
{
    char why[EX_WHY_BYTES];
    struct ex_stats stats = {0};
    for (int half = 0; half < 2; half++) {
        /* The start after a kill moves the log into a table; the second half stays in the log. */
        if (!ex_daemon_start(rig->run.daemon, &rig->flags, why)) give_up(rig, why);
        each_writer(rig, prepare_half);
        if (!ex_call_stats(ex_daemon_operator(rig->run.daemon), &stats, why) ||
            !ex_daemon_stop(rig->run.daemon, SIGKILL, why))
            give_up(rig, why);
    }
    if (cr_failed(&rig->run.counts) > 0) give_up(rig, "the directory cannot be prepared");
    if (rename(rig->state, rig->template_dir) != 0) give_up(rig, "the directory cannot be moved");
    uint8_t master[32]; /* As cr_make_key() writes it. */
    for (uint8_t i = 0; i < sizeof(master); i++)
        master[i] = i;
    cr_damage_scan(&rig->damage, rig->template_dir, stats.page_bytes,
                   rig->options->encrypt ? master : NULL, rig->run.writers, CR_WRITERS);
    if (rig->damage.page_count < SESSIONS || rig->damage.segment_count < 2)
        give_up(rig, "too few pages are on disk");
}

/* ---- what is served ---- */

static struct rig *rig_of(const struct cr_writer *writer)
{
    return KV_CONTAINER_OF(writer->run, struct rig, run);
}

static const char *damage_text(const struct rig *rig, const struct cr_session *session)
{
    for (uint32_t i = 0; i < rig->flip_count; i++)
        if (rig->flips[i].owner == session) return rig->flips[i].text;
    return rig->target == TARGET_PAGE ? "none here" : rig->flips[0].text;
}

/* Less than everything, which only damage excuses.  has_cause: the answer says so itself. */
static void weaker(struct cr_writer *writer, struct cr_session *session, bool has_cause,
                   const char *what)
{
    struct rig *rig = rig_of(writer);
    session->has_rolled = true; /* Seen weaker. */
    if (!has_cause) writer->counts.dropped++;
    if (rig->target == TARGET_INDEX || session->in_flight) return;
    cr_fail(writer, CR_LOST, session, NULL, "not damaged, and %.300s; damage: %s", what,
            rig->flips[0].text);
}

static bool compare_points(struct cr_writer *writer, struct cr_session *session,
                           const struct ex_view *view)
{
    uint32_t found = 0;
    for (uint32_t i = 0; i < view->point_count; i++) {
        const struct ex_checkpoint *listed = &view->points[i];
        const struct cr_point *point = cr_find(session, &listed->id);
        if (point == NULL && listed->branch) continue;
        if (point == NULL || point->position != listed->position ||
            memcmp(point->digest, listed->digest, 32) != 0) {
            cr_fail(writer, CR_WRONG, session, &listed->id, "listed at %u, never made; damage: %s",
                    listed->position, damage_text(rig_of(writer), session));
            return false;
        }
        found++;
    }
    writer->counts.found += found;
    if (found < session->point_count) weaker(writer, session, true, "a checkpoint is not listed");
    return true;
}

/* False: the head went before the answer (others needed room): the turn has to be made again. */
static bool try_answer(struct cr_writer *writer, struct cr_session *session,
                       const struct cr_point *point, bool last)
{
    char why[EX_WHY_BYTES];
    struct ex_decode_answer answer;
    struct ex_decode call = {.session = session->name,
                             .max_tokens = CR_ANSWER,
                             .forced_count = CR_ANSWER,
                             .ignore_eos = true,
                             .no_checkpoint = true};
    const uint32_t from = point->position + CR_SUFFIX;
    memcpy(call.forced, point->ids + from, sizeof(call.forced[0]) * CR_ANSWER);
    const bool ok = ex_call_decode(client_of(writer), &call, &answer, why);
    if (!ok && !last && strstr(why, "HEAD_MOVED") != NULL) return false;
    if (!ok)
        cr_fail(writer, CR_LOST, session, &point->id, "an answer failed: %.300s; damage: %s", why,
                damage_text(rig_of(writer), session));
    else if (answer.first_position != from || answer.count != CR_ANSWER ||
             memcmp(answer.crcs, point->crcs, sizeof(point->crcs)) != 0)
        cr_fail(writer, CR_WRONG, session, &point->id, "logits %08x at %u, want %08x; damage: %s",
                answer.crcs[0], from, point->crcs[0], damage_text(rig_of(writer), session));
    return true;
}

/* A turn on the last checkpoint: resumes there or below, computes the rest, and has the bits. */
static bool try_turn(struct cr_writer *writer, struct cr_session *session, bool last)
{
    char why[EX_WHY_BYTES], what[200];
    struct ex_prefill_answer answer;
    const struct cr_point *point = &session->points[session->point_count - 1];
    const uint32_t count = point->position + CR_SUFFIX;
    const struct ex_prefill call = {.session = session->name,
                                    .ids = point->ids,
                                    .count = count,
                                    .no_checkpoint = true,
                                    .level = EX_LEVEL_ACCEPTED};
    writer->counts.tried++;
    if (!ex_call_prefill(client_of(writer), &call, &answer, why)) {
        cr_fail(writer, CR_LOST, session, &point->id, "a turn failed: %.300s; damage: %s", why,
                damage_text(rig_of(writer), session));
        return true;
    }
    if (answer.hit_tokens + answer.computed_tokens != count)
        cr_fail(writer, CR_WRONG, session, &point->id, "hit %u and computed %u of %u",
                answer.hit_tokens, answer.computed_tokens, count);
    if (answer.hit_tokens < (point->position & ~1u) || answer.weakened > 0) {
        (void)snprintf(what, sizeof(what), "a turn at %u resumes at %u (%s, %s)", point->position,
                       answer.hit_tokens, ex_outcome_name(answer.outcome), answer.reason);
        weaker(writer, session, strcmp(answer.reason, "CORRUPT") == 0, what);
    }
    return try_answer(writer, session, point, last);
}

static void try_session(struct cr_writer *writer, struct cr_session *session)
{
    for (int tries = 1; !try_turn(writer, session, tries == CR_TRIES); tries++) {
    }
}

static void compare_session(struct cr_writer *writer, struct cr_session *session,
                            struct ex_view *view)
{
    char why[EX_WHY_BYTES];
    writer->counts.acknowledged++;
    if (!ex_call_view(client_of(writer), session->name, view, why)) {
        const bool gone = strstr(why, "SESSION_NOT_FOUND") != NULL;
        if (!gone)
            cr_fail(writer, CR_LOST, session, NULL, "%.300s; damage: %s", why,
                    damage_text(rig_of(writer), session));
        else
            weaker(writer, session, false, "the session is gone");
        /* As a harness would: it opens it again and sends the prompt. */
        if (!gone || !ex_call_open(client_of(writer), session->name, why)) return;
    } else if (!compare_points(writer, session, view)) {
        return;
    }
    try_session(writer, session);
}

static void *compare(void *context)
{
    struct cr_writer *writer = context;
    struct ex_view *view = calloc(1, sizeof(*view));
    assert(view != NULL);
    for (uint32_t i = 0; i < writer->session_count; i++)
        compare_session(writer, writer->sessions[i], view);
    free(view);
    return NULL;
}

/* Some sessions are in memory when the damage comes. */
static void *touch(void *context)
{
    struct cr_writer *writer = context;
    try_session(writer, writer->sessions[ex_random_below(&writer->random, writer->session_count)]);
    return NULL;
}

/* ---- a start ---- */

struct group {
    enum target target;
    bool running;
    uint32_t first, count; /* Cases. */
};

/* The cases of a block that share a start with `number`. */
static struct group group_of(uint32_t number)
{
    static const struct {
        enum target target;
        uint32_t count;
    } alone[] = {{TARGET_HEADER, HEADERS},
                 {TARGET_SUPERBLOCK, SUPERBLOCK},
                 {TARGET_NOTES, NOTES},
                 {TARGET_INDEX, INDEX}};
    const uint32_t block = number / BLOCK * BLOCK, at = number % BLOCK;
    if (at < PAGES) return (struct group){TARGET_PAGE, false, block, PAGES};
    if (at < 2 * PAGES) return (struct group){TARGET_PAGE, true, block + PAGES, PAGES};
    uint32_t i = 0;
    for (uint32_t end = 2 * PAGES + alone[0].count; at >= end; end += alone[i].count)
        i++;
    return (struct group){alone[i].target, at % 2 == 1, number, 1};
}

static void damage(struct rig *rig, const struct group *group)
{
    cr_damage_files(&rig->damage, rig->state);
    for (uint32_t i = 0; i < group->count; i++) {
        struct ex_random random = {ex_mix(ex_mix(rig->options->seed) ^ (group->first + i))};
        struct cr_flip *flip = &rig->flips[rig->flip_count];
        bool done = !rig->options->idle;
        if (!done) continue;
        switch (group->target) {
        case TARGET_PAGE:
            done = cr_flip_page(&rig->damage, &random, flip);
            break;
        case TARGET_HEADER:
            cr_flip_segment_header(&rig->damage, &random, flip);
            break;
        case TARGET_SUPERBLOCK:
            cr_flip_twin(rig->state, "superblock", &random, flip);
            break;
        case TARGET_NOTES:
            cr_flip_twin(rig->state, "acknowledged", &random, flip);
            break;
        default:
            cr_flip_index(&rig->damage, &random, flip);
            break;
        }
        if (done) rig->flip_count++;
    }
}

/* less: not everything was served. */
static void count_flip(struct rig *rig, const struct cr_flip *flip, bool less)
{
    const bool silent = less && !rig->refused && !rig->said;
    rig->tally.flips[rig->target]++;
    if (silent)
        rig->tally.silent++;
    else if (less)
        rig->tally.detected[rig->target]++;
    if (silent)
        (void)fprintf(stderr,
                      "bitflip: seed %llu case %u: what was acknowledged is gone and "
                      "nothing says why: %s\n",
                      (unsigned long long)rig->options->seed, rig->run.kill, flip->text);
    if (rig->options->verbose)
        (void)fprintf(stderr, "bitflip: %s: %s\n", flip->text,
                      silent ? "silent"
                      : less ? "detected"
                             : "harmless");
}

static bool session_weaker(const struct rig *rig, const struct cr_session *only)
{
    for (uint32_t w = 0; w < CR_WRITERS; w++)
        for (uint32_t s = 0; s < rig->run.writers[w].session_count; s++) {
            const struct cr_session *session = rig->run.writers[w].sessions[s];
            if ((only == NULL || session == only) && session->has_rolled) return true;
        }
    return false;
}

/* Whether an operator could know: what it says of the damage in its log. */
static bool log_tells(const struct rig *rig)
{
    enum { LOG_BYTES = 1 << 20 };
    char *text = malloc(LOG_BYTES);
    assert(text != NULL);
    ex_daemon_log(rig->run.daemon, text, LOG_BYTES);
    const char *dropped = strstr(text, ", dropped ");
    const bool tells = strstr(text, "level=error") != NULL || strstr(text, "level=warn") != NULL ||
                       (dropped != NULL && dropped[strlen(", dropped ")] != '0');
    free(text);
    return tells;
}

/* Exit code 2 and a sentence; anything else is a crash. */
static void judge_refusal(struct rig *rig, const char *why)
{
    rig->refused = true;
    rig->tally.refused[rig->target]++;
    if (strstr(why, "status 0x200 ") == NULL)
        cr_fail(&rig->run.writers[0], CR_WRONG, NULL, NULL, "%.350s; damage: %s", why,
                rig->flips[0].text);
    else if (rig->target != TARGET_HEADER && rig->target != TARGET_INDEX)
        cr_fail(&rig->run.writers[0], CR_LOST, NULL, NULL, "refused for a bit of %s: %.300s",
                target_names[rig->target], why);
    if (rig->options->verbose) (void)fprintf(stderr, "bitflip: refused: %s\n", why);
}

static void stop(struct rig *rig)
{
    char why[EX_WHY_BYTES];
    struct ex_stats stats;
    struct cr_writer *first = &rig->run.writers[0];
    if (!ex_call_stats(ex_daemon_operator(rig->run.daemon), &stats, why))
        cr_fail(first, CR_WRONG, NULL, NULL, "%.300s; damage: %s", why, rig->flips[0].text);
    else if (stats.wrong_bytes > 0)
        cr_fail(first, CR_WRONG, NULL, NULL, "%llu wrong bytes were served; damage: %s and %u more",
                (unsigned long long)stats.wrong_bytes, rig->flips[0].text, rig->flip_count - 1);
    else if (stats.lost_batches > 0 && rig->target != TARGET_INDEX)
        cr_fail(first, CR_WRONG, NULL, NULL,
                "it says %llu acknowledged batches are lost; damage: %s",
                (unsigned long long)stats.lost_batches, rig->flips[0].text);
    if (!ex_daemon_stop(rig->run.daemon, SIGKILL, why))
        cr_fail(first, CR_WRONG, NULL, NULL, "%.300s; damage: %s", why, rig->flips[0].text);
    rig->said = log_tells(rig);
}

static void forget_marks(struct rig *rig)
{
    for (uint32_t w = 0; w < CR_WRITERS; w++)
        for (uint32_t s = 0; s < rig->run.writers[w].session_count; s++)
            rig->run.writers[w].sessions[s]->in_flight =
                rig->run.writers[w].sessions[s]->has_rolled = false;
    rig->flip_count = 0;
    rig->refused = rig->said = false;
}

static void group_run(struct rig *rig, const struct group *group)
{
    char why[EX_WHY_BYTES];
    forget_marks(rig);
    rig->target = group->target;
    rig->run.kill = group->first;
    rig->tally.starts++;
    ex_remove_tree(rig->state);
    ex_remove_tree(rig->daemon_log);
    cr_copy_tree(rig->template_dir, rig->state);
    for (uint32_t w = 0; w < CR_WRITERS; w++)
        rig->run.writers[w].random.state = ex_mix(rig->options->seed + group->first) + w;
    if (!group->running) damage(rig, group);
    const bool started = ex_daemon_start(rig->run.daemon, &rig->flags, why);
    if (!started && group->running) give_up(rig, why);
    if (!started) judge_refusal(rig, why);
    if (started && group->running) {
        each_writer(rig, touch);
        damage(rig, group);
    }
    if (started) each_writer(rig, compare);
    if (started) stop(rig);
    cr_counts_add(&rig->run.counts, &rig->run.writers[0].counts);
    rig->run.writers[0].counts = (struct cr_counts){0};
}

static void group_count(struct rig *rig, const struct group *group, uint32_t first, uint32_t end)
{
    const bool one = group->target != TARGET_PAGE;
    for (uint32_t i = 0; i < rig->flip_count; i++) {
        const uint32_t number = group->first + i;
        if (number < first || number >= end) continue;
        count_flip(rig, &rig->flips[i],
                   rig->refused || session_weaker(rig, one ? NULL : rig->flips[i].owner));
    }
}

/* ---- the end ---- */

static uint64_t sum(const uint64_t numbers[TARGETS])
{
    uint64_t all = 0;
    for (int i = 0; i < TARGETS; i++)
        all += numbers[i];
    return all;
}

static int verdict(const struct rig *rig)
{
    const struct cr_counts *c = &rig->run.counts;
    const struct tally *t = &rig->tally;
    const uint64_t flips = sum(t->flips), detected = sum(t->detected);
    (void)printf("seed: %llu\n", (unsigned long long)rig->options->seed);
    for (int i = 0; i < TARGETS; i++)
        (void)printf("%s: %llu flips, %llu detected, of these %llu by refusing to start\n",
                     target_names[i], (unsigned long long)t->flips[i],
                     (unsigned long long)t->detected[i], (unsigned long long)t->refused[i]);
    (void)printf("%llu starts, %.0f ms each; %llu sessions asked for, %llu turns, %llu checkpoints "
                 "found; %llu were less without CORRUPT as the reason\n",
                 (unsigned long long)t->starts,
                 ex_seconds_since(&rig->begun) * 1000 / (double)KV_MAX(t->starts, 1u),
                 (unsigned long long)c->acknowledged, (unsigned long long)c->tried,
                 (unsigned long long)c->found, (unsigned long long)c->dropped);
    (void)printf("%llu flips, %llu detected, %llu harmless, %llu silent, %llu wrong\n",
                 (unsigned long long)flips, (unsigned long long)detected,
                 (unsigned long long)(flips - detected - t->silent), (unsigned long long)t->silent,
                 (unsigned long long)cr_failed(c));
    if (rig->options->expect_loss) {
        if (cr_failed(c) > 0) return EXIT_SUCCESS;
        (void)fprintf(stderr, "bitflip: a wrong byte was expected and none was found\n");
        return EXIT_FAILURE;
    }
    if (cr_failed(c) > 0 || t->silent > 0) return CR_EXIT_LOSS;
    bool says = flips > 0 && c->tried > 0;
    for (int i = 0; i < TARGETS && flips >= BLOCK; i++)
        says = says && t->flips[i] > 0;
    if (says && (detected > 0 || flips < BLOCK)) return EXIT_SUCCESS;
    (void)fprintf(stderr, "bitflip: too little was flipped or detected: the run says nothing\n");
    return EXIT_FAILURE;
}

static void run_all(struct rig *rig)
{
    const uint32_t first = rig->options->first, end = first + rig->options->count;
    for (uint32_t number = first; number < end && cr_failed(&rig->run.counts) == 0;) {
        const struct group group = group_of(number);
        group_run(rig, &group);
        group_count(rig, &group, first, end);
        number = group.first + group.count;
        if (ex_seconds_since(&rig->shown) < 2.0) continue;
        (void)clock_gettime(CLOCK_MONOTONIC, &rig->shown);
        (void)fprintf(stderr, "bitflip: %u of %u flips, %.0f s\n", KV_MIN(number, end) - first,
                      rig->options->count, ex_seconds_since(&rig->begun));
    }
}

static const char help[] =
    "Turns over one random bit at a time in the pages and headers of segments, in superblock and\n"
    "acknowledged and in RocksDB's files, of a stopped and of a running daemon: what is served is\n"
    "right or less, never wrong.\n"
    "\n"
    "  --flips N      how many (default 200)\n";

static void make_places(struct rig *rig)
{
    const char *dir = rig->options->dir == NULL ? "/dev/shm" : rig->options->dir;
    if (!ex_make_scratch(dir, "bitflip", rig->scratch, PATH_BYTES) &&
        !ex_make_scratch("/tmp", "bitflip", rig->scratch, PATH_BYTES))
        give_up(rig, "the scratch folder cannot be made; see --dir");
    (void)snprintf(rig->template_dir, sizeof(rig->template_dir), "%s/template", rig->scratch);
    (void)snprintf(rig->state, sizeof(rig->state), "%s/state", rig->scratch);
    (void)snprintf(rig->daemon_log, sizeof(rig->daemon_log), "%s/log", rig->scratch);
    (void)snprintf(rig->log_path, sizeof(rig->log_path), "%s/expected", rig->scratch);
    ex_build_path(rig->options->plant == NULL ? "cached/cached" : "cached/cached-test",
                  rig->daemon_path, sizeof(rig->daemon_path));
    rig->run.log_path = rig->log_path;
    rig->run.log_fd = open(rig->log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    const struct ex_daemon_options daemon = {.dir = rig->scratch, .program = rig->daemon_path};
    rig->run.daemon = ex_daemon_create(&daemon);
    if (rig->options->keep) (void)fprintf(stderr, "bitflip: %s is kept\n", rig->scratch);
    for (uint32_t w = 0; w < CR_WRITERS; w++)
        rig->run.writers[w] = (struct cr_writer){.run = &rig->run,
                                                 .index = w,
                                                 .user = w % EX_USERS,
                                                 .random = {ex_mix(rig->options->seed) + w},
                                                 .oracle = cr_oracle_create(CR_SPARE)};
}

static void drop_places(struct rig *rig)
{
    ex_daemon_destroy(rig->run.daemon);
    cr_forget(&rig->run);
    for (uint32_t w = 0; w < CR_WRITERS; w++)
        cr_oracle_destroy(rig->run.writers[w].oracle);
    (void)close(rig->run.log_fd);
    if (!rig->options->keep) ex_remove_tree(rig->scratch);
}

int main(int argc, char **argv)
{
    struct cr_options options = {.program = "bitflip", .unit = "flips", .seed = 1, .count = 200};
    cr_parse(argc, argv, help, &options);
    struct rig *rig = calloc(1, sizeof(*rig));
    assert(rig != NULL);
    rig->options = &options;
    rig->run.seed = options.seed;
    rig->run.program = options.program;
    if (pthread_mutex_init(&rig->run.lock, NULL) != 0) give_up(rig, "no mutex");
    (void)clock_gettime(CLOCK_MONOTONIC, &rig->begun);
    rig->shown = rig->begun;
    make_places(rig);
    fill_flags(rig);
    prepare(rig);
    (void)clock_gettime(CLOCK_MONOTONIC, &rig->begun);
    run_all(rig);
    const int code = cr_idle_code(&options, verdict(rig));
    drop_places(rig);
    free(rig);
    return code;
}
