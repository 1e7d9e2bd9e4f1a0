/*
 * `cachectl bench ssd-commit`: checkpoints acknowledged at level SSD, beside fio.
 *
 * Eight writers save one checkpoint after the other, each when its last one was acknowledged, and
 * share flushes of the segment and syncs of the manifest's log as they come.  fio then does what
 * was counted: the same pages with as many calls of fdatasync between them as there were flushes of
 * the segment, and as many small writes with fdatasync as there were syncs of the log.  Once with
 * 32 pages in flight and the log beside them, where nothing waits for anything; once in turn, as
 * one writer alone would have to do it.  All files are written through before.
 */

#include "kvstore/base/bytes.h"
#include "tools/cachectl/bench_list.h"
#include "tools/cachectl/bench_ssd.h"
#include "tools/cachectl/bench_ssd_fio.h"
#include "tools/cachectl/spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define WRITERS 8u
#define SIZES 2u
#define LINES_PER_SIZE 2u
#define LOG_BLOCK 4096u
#define FILE_BYTES (256ull << 20) /* Of fio's data, gone through again and again. */
#define FILL_BYTES (1u << 20)

struct size {
    const char *name;
    uint32_t delta;              /* Tokens of one save. */
    uint32_t saves, quick_saves; /* Of one writer in one run. */
};

static const struct size sizes[SIZES] = {
    {"450 KB deltas", 512, 150, 40},
    {"30-token deltas", 30, 300, 80},
};

struct writer {
    struct bench_history history;
    struct committing *committing;
    uint32_t left;
};

/* What one run did. */
struct work {
    uint64_t saves, bytes, flushes, syncs;
};

struct committing {
    struct bench_progress *progress;
    const struct size *size;
    struct bench_ssd own;
    struct writer writers[WRITERS];
    uint32_t saves;
    uint32_t running;
    bool failed;
    struct work work, sum; /* Of the last run, and of all that were measured. */
    const char *fio;
    char data[BENCH_SSD_DIR_BYTES + 32], log[BENCH_SSD_DIR_BYTES + 32];
};

/* ---- writers ---- */

static void save_next(struct writer *writer)
{
    struct committing *committing = writer->committing;
    const uint32_t tokens = bench_history_tokens(&writer->history) + committing->size->delta;
    if (committing->failed || writer->left == 0) {
        committing->running--;
        return;
    }
    writer->left--;
    if (bench_history_save(&writer->history, tokens)) return;
    committing->failed = true;
    committing->running--;
}

static void saved(struct bench_history *history)
{
    struct writer *writer = KV_CONTAINER_OF(history, struct writer, history);
    struct committing *committing = writer->committing;
    committing->work.saves++;
    committing->failed |= history->failed || spawn_interrupted();
    save_next(writer);
}

static struct work count(struct committing *committing)
{
    const struct kv_ssd_usage usage = kv_ssd_usage(committing->own.store->ssd);
    return (struct work){
        .bytes = usage.pages_written * committing->own.layout.page_bytes,
        .flushes = usage.flushes,
        .syncs = kv_manifest_stats(committing->own.manifest).syncs,
    };
}

/* The places of the last run are free and written through: the next one takes them again. */
static void clear(struct committing *committing)
{
    for (uint32_t i = 0; i < WRITERS; i++)
        bench_history_drop(&committing->writers[i].history);
    bench_ssd_settle(&committing->own);
}

static bool run_store(void *context, double *ret_seconds)
{
    struct committing *committing = context;
    clear(committing);
    const struct work before = count(committing);
    committing->work.saves = 0;
    committing->running = WRITERS;
    const double began = bench_now();
    for (uint32_t i = 0; i < WRITERS; i++) {
        committing->writers[i].left = committing->saves;
        save_next(&committing->writers[i]);
    }
    while (committing->running > 0)
        bench_ssd_turn(&committing->own);
    *ret_seconds = bench_now() - began;
    const struct work after = count(committing);
    struct work *work = &committing->work;
    work->bytes = after.bytes - before.bytes;
    work->flushes = after.flushes - before.flushes;
    work->syncs = after.syncs - before.syncs;
    committing->sum.saves += work->saves;
    committing->sum.bytes += work->bytes;
    committing->sum.flushes += work->flushes;
    committing->sum.syncs += work->syncs;
    return !committing->failed;
}

/* ---- fio ---- */

static bool make_file(const char *path, uint64_t bytes)
{
    uint8_t *block = aligned_alloc(KV_IO_ALIGN, FILL_BYTES);
    const int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_DIRECT | O_CLOEXEC, 0600);
    bool ok = fd >= 0 && block != NULL;
    for (uint32_t i = 0; ok && i < FILL_BYTES; i++)
        block[i] = (uint8_t)((i * 2654435761u) >> 13);
    for (uint64_t at = 0; ok && at < bytes; at += FILL_BYTES)
        ok = pwrite(fd, block, FILL_BYTES, (off_t)at) == (ssize_t)FILL_BYTES;
    ok = ok && fsync(fd) == 0;
    if (!ok) ctl_error("cannot write %s: %s", path, strerror(errno));
    if (fd >= 0) (void)close(fd);
    free(block);
    return ok;
}

static struct fio_job data_job(const struct committing *committing, uint64_t block, uint32_t depth,
                               uint32_t flush)
{
    const uint64_t bytes = committing->work.bytes;
    return (struct fio_job){
        .flush = flush,
        .file = committing->data,
        .region = FILE_BYTES / block * block,
        .bytes = KV_MAX(bytes / block, 1ull) * block,
        .block = block,
        .depth = depth,
        .dir = committing->own.dir,
    };
}

static struct fio_job log_job(const struct committing *committing)
{
    return (struct fio_job){
        .flush = 1,
        .file = committing->log,
        .region = FILE_BYTES,
        .bytes = KV_MAX(committing->work.syncs, 1ull) * LOG_BLOCK,
        .block = LOG_BLOCK,
        .depth = 1,
        .dir = committing->own.dir,
    };
}

static uint32_t pages_of_flush(const struct committing *committing)
{
    const struct work *work = &committing->work;
    const uint64_t flushes = KV_MAX(work->flushes, 1ull);
    const uint64_t pages = work->bytes / committing->own.layout.page_bytes;
    return (uint32_t)KV_MAX((pages + flushes / 2) / flushes, 1ull);
}

/* Nothing waits for anything: what the device does with these bytes and flushes. */
static bool run_beside(void *context, double *ret_seconds)
{
    const struct committing *committing = context;
    struct fio_result results[FIO_JOBS_MAX];
    const struct fio_job jobs[] = {data_job(committing, committing->own.layout.page_bytes,
                                            KV_READ_DEPTH, pages_of_flush(committing)),
                                   log_job(committing)};
    if (!fio_run(committing->progress, committing->fio, jobs, 2, results)) return false;
    *ret_seconds = KV_MAX(results[0].seconds, results[1].seconds);
    return true;
}

/* Each waits for the one before: pages, their flush, a record, its flush. */
static bool run_in_turn(void *context, double *ret_seconds)
{
    const struct committing *committing = context;
    struct fio_result data, log;
    const uint64_t round = (uint64_t)pages_of_flush(committing) * committing->own.layout.page_bytes;
    const struct fio_job of_data = data_job(committing, round, 1, 1);
    const struct fio_job of_log = log_job(committing);
    if (!fio_run(committing->progress, committing->fio, &of_data, 1, &data) ||
        !fio_run(committing->progress, committing->fio, &of_log, 1, &log))
        return false;
    /* The last round may be a smaller one. */
    *ret_seconds =
        data.seconds * (double)committing->work.bytes / (double)of_data.bytes + log.seconds;
    return true;
}

/* ---- one size of deltas ---- */

static int committing_init(struct committing *committing, const struct size *size, bool quick,
                           const char *fio, struct bench_progress *progress)
{
    const uint32_t saves = quick ? size->quick_saves : size->saves;
    const uint32_t tokens = saves * size->delta;
    const uint32_t pages_of_save = kv_pages_for(size->delta) + 1;
    const uint32_t pages = WRITERS * (kv_pages_for(tokens) + 2 * pages_of_save);
    const struct bench_ssd_options options = {
        .hbm_pages = WRITERS * pages_of_save + 8,
        .ssd_pages = pages,
        .sessions = WRITERS,
    };
    *committing =
        (struct committing){.progress = progress, .size = size, .saves = saves, .fio = fio};
    progress->doing = "writing files through";
    bench_say(progress, "%s: writing files through", size->name);
    int code = bench_ssd_open(&committing->own, &options, progress);
    if (code != CLIENT_EXIT_OK) return code;
    for (uint32_t i = 0; i < WRITERS; i++) {
        struct writer *writer = &committing->writers[i];
        writer->committing = committing;
        if (!bench_history_init(&writer->history, &committing->own, i, tokens, pages_of_save))
            return CLIENT_EXIT_FAILED;
        writer->history.saved = saved;
    }
    (void)snprintf(committing->data, sizeof(committing->data), "%s/fio.data", committing->own.dir);
    (void)snprintf(committing->log, sizeof(committing->log), "%s/fio.log", committing->own.dir);
    if (!make_file(committing->data, FILE_BYTES) || !make_file(committing->log, FILE_BYTES))
        return CLIENT_EXIT_FAILED;
    /* Twice: the places in use at the end of the first run are taken again in the second. */
    double unused;
    if (!run_store(committing, &unused) || !run_store(committing, &unused))
        return CLIENT_EXIT_FAILED;
    committing->sum = (struct work){0};
    return CLIENT_EXIT_OK;
}

static void committing_fini(struct committing *committing)
{
    for (uint32_t i = 0; i < WRITERS; i++)
        if (committing->writers[i].history.own != NULL)
            bench_history_fini(&committing->writers[i].history);
    bench_ssd_close(&committing->own);
}

static void add_facts(const struct committing *committing, json_t *facts)
{
    const struct work *sum = &committing->sum;
    const struct {
        const char *what;
        double value;
    } list[] = {
        {"checkpoints a flush of the segment", (double)sum->saves / (double)sum->flushes},
        {"checkpoints a sync of the records", (double)sum->saves / (double)sum->syncs},
        {"KB a flush", (double)sum->bytes / (double)sum->flushes / 1e3},
    };
    char name[96];
    for (size_t i = 0; i < KV_ARRAY_COUNT(list); i++) {
        (void)snprintf(name, sizeof(name), "%s: %s", committing->size->name, list[i].what);
        (void)json_object_set_new(facts, name, json_real(list[i].value));
    }
}

static int measure(struct committing *committing, uint32_t pairs,
                   struct bench_pairs lines[LINES_PER_SIZE], json_t *facts)
{
    static const char *const anchors[LINES_PER_SIZE] = {"fio, nothing waits", "fio, one by one"};
    const bench_run runs[LINES_PER_SIZE] = {run_beside, run_in_turn};
    int code = CLIENT_EXIT_OK;
    for (uint32_t i = 0; i < LINES_PER_SIZE && code == CLIENT_EXIT_OK; i++) {
        lines[i] = (struct bench_pairs){.at_least = true,
                                        .speed = true,
                                        .target = i == 0 ? 0.9 : 0,
                                        .unit = (double)WRITERS * committing->saves,
                                        .unit_name = "saves/s"};
        lines[i].anchor_unit = lines[i].unit;
        (void)snprintf(lines[i].what, sizeof(lines[i].what), "%s, %u writers",
                       committing->size->name, WRITERS);
        (void)snprintf(lines[i].anchor, sizeof(lines[i].anchor), "%s", anchors[i]);
        code = bench_pairs_measure(committing->progress, &lines[i], pairs, run_store, committing,
                                   runs[i], committing);
    }
    if (code == CLIENT_EXIT_OK) add_facts(committing, facts);
    return code;
}

int bench_ssd_commit(struct bench_progress *progress, bool quick)
{
    struct bench_pairs *lines = calloc(SIZES * LINES_PER_SIZE, sizeof(*lines));
    struct committing *committing = calloc(1, sizeof(*committing));
    json_t *facts = json_object();
    char path[1024];
    const char *fio = fio_find(path, sizeof(path));
    int code = fio == NULL ? CLIENT_EXIT_UNAVAILABLE : CLIENT_EXIT_OK;

    if (code == CLIENT_EXIT_OK && (lines == NULL || committing == NULL || facts == NULL)) {
        ctl_error("no memory for the results");
        code = CLIENT_EXIT_FAILED;
    }
    for (uint32_t i = 0; i < SIZES && code == CLIENT_EXIT_OK; i++) {
        code = committing_init(committing, &sizes[i], quick, fio, progress);
        if (code == CLIENT_EXIT_OK)
            code = measure(committing, quick ? 5 : 9, &lines[i * LINES_PER_SIZE], facts);
        if (code == CLIENT_EXIT_OK && i == 0)
            (void)json_object_set_new(facts, "backend",
                                      json_string(kv_disk_backend(committing->own.ring)));
        committing_fini(committing);
    }
    if (code == CLIENT_EXIT_OK)
        code =
            bench_pairs_report(progress->ctl, "ssd-commit", lines, SIZES * LINES_PER_SIZE, facts);
    else
        json_decref(facts);
    free(committing);
    free(lines);
    return code;
}
