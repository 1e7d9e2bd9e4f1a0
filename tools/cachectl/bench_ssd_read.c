/*
 * `cachectl bench ssd-read`: rows of sessions from SSD into memory, beside fio.
 *
 * Sessions of one length are stored side by side and read in turn, one at a time and each as a
 * whole: more of them than the memory for pages holds, so that every page is read from the device,
 * and another one is given up for it, as in a daemon under load.  fio reads the same bytes of the
 * same file in the same order, with blocks of a page, as many in flight.  Where a session has fewer
 * pages than that, fio too waits for all of them before it starts the next.  What encryption costs
 * is measured against the same sessions in a second store, which encrypts.  The store's memory is
 * in huge pages where the kernel gives them; fio's is if some are set aside (vm.nr_hugepages).
 */

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/format/segment_header.h"
#include "tools/cachectl/bench_list.h"
#include "tools/cachectl/bench_ssd.h"
#include "tools/cachectl/bench_ssd_fio.h"
#include "tools/cachectl/spawn.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#define SAVE_PAGES 64u /* Of one save, while the sessions are made. */
#define RUN_BYTES (1536ull << 20)
#define QUICK_RUN_BYTES (384ull << 20)
#define GIB (1024.0 * 1024 * 1024)
#define SIZES 3u
#define LINES_PER_SIZE 5u

struct size {
    const char *name;
    uint32_t tokens, sessions;
};

static const struct size sizes[SIZES] = {{"1k", 1024, 64}, {"16k", 16384, 8}, {"200k", 200000, 2}};

/* One session's read.  Owned by: struct reading. */
struct restore {
    struct kv_read read;
    struct reading *reading;
    const struct bench_history *history;
    uint32_t tokens;
    uint32_t *pages, *slots;
    bool *fresh;
    bool done;
    uint32_t bad; /* Pages that are not what was stored. */
};

/* What is measured of one length.  Owned by: the benchmark's stack. */
struct reading {
    struct bench_progress *progress;
    const struct size *size;
    struct bench_ssd own;
    struct bench_history *histories;
    struct restore restore;
    uint32_t next;   /* Session to be read. */
    uint32_t rounds; /* Sessions of one run. */
    bool encrypted;  /* The store's pages. */
    bool huge;       /* fio's buffers. */
    bool checks;     /* Pages are verified. */
    const char *fio;
    char segment[BENCH_SSD_DIR_BYTES + 32];
    uint32_t runs, anchor_runs; /* Since the last comparison was begun. */
    double p99[BENCH_PAIRS_MAX], anchor_p99[BENCH_PAIRS_MAX];
    double cpu[BENCH_PAIRS_MAX], anchor_cpu[BENCH_PAIRS_MAX]; /* Seconds a GiB. */
};

static uint32_t pages_of(const struct size *size)
{
    return kv_pages_for(size->tokens);
}

static uint64_t run_bytes(const struct reading *reading)
{
    return (uint64_t)reading->rounds * pages_of(reading->size) * reading->own.layout.page_bytes;
}

static double cpu_now(void)
{
    struct rusage used;
    (void)getrusage(RUSAGE_SELF, &used);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
           (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

/* ---- sessions ---- */

static void saved(struct bench_history *history)
{
    (void)history;
}

static bool make_session(struct reading *reading, struct bench_history *history, uint32_t number)
{
    const uint32_t tokens = reading->size->tokens;
    const uint32_t slots = KV_MIN(SAVE_PAGES, pages_of(reading->size));
    if (!bench_history_init(history, &reading->own, number, tokens, slots)) return false;
    history->saved = saved;
    for (uint32_t at = 0; at < tokens;) {
        at = KV_MIN(at + SAVE_PAGES * KV_PAGE_TOKENS, tokens);
        bench_ssd_settle(&reading->own); /* Pages that are written ahead are not given out. */
        if (!bench_go_on(reading->progress) || !bench_history_save(history, at)) return false;
        while (history->busy)
            bench_ssd_turn(&reading->own);
        if (history->failed) return false;
    }
    bench_history_seal(history);
    return true;
}

/* fio reads from front to back what the sessions have page by page. */
static bool check_places(const struct reading *reading)
{
    uint32_t place = 0;
    for (uint32_t s = 0; s < reading->size->sessions; s++) {
        const struct kv_node *head = reading->histories[s].session->head;
        kv_index_path_pages(head, head->tokens, reading->restore.pages);
        for (uint32_t k = 0; k < pages_of(reading->size); k++) {
            const struct kv_page *page =
                kv_index_page(reading->own.store->index, reading->restore.pages[k]);
            if (page->ssd_page == place++) continue;
            ctl_error("page %u of session %u is not where it was expected", k, s);
            return false;
        }
    }
    return true;
}

static bool make_restore(struct reading *reading)
{
    struct restore *restore = &reading->restore;
    const uint32_t pages = pages_of(reading->size);
    restore->reading = reading;
    restore->tokens = reading->size->tokens;
    restore->pages = malloc(pages * sizeof(*restore->pages));
    restore->slots = malloc(pages * sizeof(*restore->slots));
    restore->fresh = malloc(pages * sizeof(*restore->fresh));
    reading->histories = calloc(reading->size->sessions, sizeof(*reading->histories));
    if (restore->pages != NULL && restore->slots != NULL && restore->fresh != NULL &&
        reading->histories != NULL)
        return true;
    ctl_error("no memory for sessions of %s tokens", reading->size->name);
    return false;
}

static int reading_init(struct reading *reading, const struct size *size, bool quick,
                        bool encrypted, const char *fio, struct bench_progress *progress)
{
    const uint32_t pages = pages_of(size);
    const struct bench_ssd_options options = {
        .hbm_pages = KV_MAX(pages, pages * size->sessions / 2) + 2 * SAVE_PAGES,
        .ssd_pages = pages * size->sessions + 2 * SAVE_PAGES,
        .sessions = size->sessions,
        .timed = true,
        .encrypt = encrypted,
    };
    *reading =
        (struct reading){.progress = progress, .size = size, .fio = fio, .encrypted = encrypted};
    bench_say(progress, "storing %u sessions of %s tokens%s", size->sessions, size->name,
              encrypted ? ", encrypted" : "");
    progress->doing = "storing sessions";
    int code = bench_ssd_open(&reading->own, &options, progress);
    if (code != CLIENT_EXIT_OK) return code;
    reading->huge = fio_has_huge(2ull * KV_READ_DEPTH * reading->own.layout.page_bytes);
    if (!make_restore(reading)) return CLIENT_EXIT_FAILED;
    for (uint32_t s = 0; s < size->sessions; s++) {
        struct bench_history *history = &reading->histories[s];
        if (!make_session(reading, history, s)) return CLIENT_EXIT_FAILED;
    }
    const uint64_t session_bytes = (uint64_t)pages * reading->own.layout.page_bytes;
    reading->rounds = (uint32_t)KV_MAX((quick ? QUICK_RUN_BYTES : RUN_BYTES) / session_bytes, 1ull);
    (void)snprintf(reading->segment, sizeof(reading->segment), "%s/ssd/segment-000000.kv",
                   reading->own.dir);
    return check_places(reading) ? CLIENT_EXIT_OK : CLIENT_EXIT_FAILED;
}

static void reading_fini(struct reading *reading)
{
    for (uint32_t s = 0; reading->histories != NULL && s < reading->size->sessions; s++)
        if (reading->histories[s].own != NULL) bench_history_fini(&reading->histories[s]);
    free(reading->histories);
    free(reading->restore.pages);
    free(reading->restore.slots);
    free(reading->restore.fresh);
    bench_ssd_close(&reading->own);
}

/* ---- one run ---- */

/* As a check that says yes. */
static void believe(struct restore *restore, uint32_t k)
{
    struct kv_store *store = restore->reading->own.store;
    const uint32_t slot = restore->slots[k];
    struct kv_page *object = kv_index_page(store->index, restore->pages[k]);
    if (slot == KV_HBM_SLOT_NONE) {
        restore->bad++;
    } else if (object->hbm_slot == KV_HBM_SLOT_NONE) {
        object->hbm_slot = slot;
        kv_hbm_set_owner(store->hbm, slot, restore->pages[k]);
    }
}

static void page_arrived(struct kv_read *read, uint32_t k)
{
    struct restore *restore = KV_CONTAINER_OF(read, struct restore, read);
    const uint32_t start = k * KV_PAGE_TOKENS;
    const uint32_t count = KV_MIN(KV_PAGE_TOKENS, restore->tokens - start);
    if (!restore->reading->checks) {
        believe(restore, k);
        return;
    }
    restore->bad += kv_store_read_check(read, k, &restore->history->chain[k],
                                        restore->history->ids + start, count) != KV_OK;
}

static void session_read(struct kv_read *read)
{
    KV_CONTAINER_OF(read, struct restore, read)->done = true;
}

static bool read_session(struct reading *reading, const struct bench_history *history)
{
    struct restore *restore = &reading->restore;
    struct kv_store *store = reading->own.store;
    const struct kv_node *head = history->session->head;
    restore->history = history;
    restore->done = false;
    kv_index_path_pages(head, head->tokens, restore->pages);
    restore->read = (struct kv_read){.count = pages_of(reading->size),
                                     .pages = restore->pages,
                                     .slots = restore->slots,
                                     .fresh = restore->fresh,
                                     .arrived = page_arrived,
                                     .done = session_read};
    if (kv_store_read_start(store, &restore->read) != KV_OK) {
        ctl_error("a session could not be read, or was still in memory");
        return false;
    }
    while (!restore->done)
        bench_ssd_turn(&reading->own);
    for (uint32_t k = 0; k < restore->read.count; k++)
        if (restore->slots[k] != KV_HBM_SLOT_NONE) kv_hbm_unpin(store->hbm, restore->slots[k]);
    return true;
}

static double p99_of(struct reading *reading)
{
    uint32_t count = 0;
    uint64_t *sorted = bench_ssd_latencies(&reading->own, &count);
    const double p99 = sorted == NULL ? 0 : (double)sorted[(uint64_t)count * 99 / 100] / 1e9;
    free(sorted);
    return p99;
}

static bool run_store(struct reading *reading, bool checks, double *ret_seconds)
{
    reading->checks = checks;
    reading->restore.bad = 0;
    (void)p99_of(reading); /* Of whatever came before. */
    const double cpu = cpu_now(), began = bench_now();
    for (uint32_t i = 0; i < reading->rounds; i++) {
        if (!read_session(reading, &reading->histories[reading->next])) return false;
        reading->next = (reading->next + 1) % reading->size->sessions;
        if (spawn_interrupted()) return false;
    }
    *ret_seconds = bench_now() - began;
    const double used = cpu_now() - cpu;
    if (reading->runs < BENCH_PAIRS_MAX) {
        reading->cpu[reading->runs] = used / ((double)run_bytes(reading) / GIB);
        reading->p99[reading->runs++] = p99_of(reading);
    }
    if (reading->restore.bad == 0) return true;
    ctl_error("%u pages were not what had been stored", reading->restore.bad);
    return false;
}

static bool run_checked(void *context, double *ret_seconds)
{
    return run_store(context, true, ret_seconds);
}

static bool run_unchecked(void *context, double *ret_seconds)
{
    return run_store(context, false, ret_seconds);
}

static bool run_fio(void *context, double *ret_seconds)
{
    struct reading *reading = context;
    const uint64_t page_bytes = reading->own.layout.page_bytes;
    const uint32_t pages = pages_of(reading->size);
    struct fio_result result;
    const struct fio_job job = {
        .file = reading->segment,
        .offset = KV_SEGMENT_HEADER_BYTES,
        .region = (uint64_t)reading->size->sessions * pages * page_bytes,
        .bytes = run_bytes(reading),
        .block = page_bytes,
        .depth = KV_MIN(pages, KV_READ_DEPTH),
        .drains = pages < KV_READ_DEPTH,
        .huge = reading->huge,
        .dir = reading->own.dir,
    };
    if (!fio_run(reading->progress, reading->fio, &job, 1, &result)) return false;
    *ret_seconds = result.seconds;
    if (reading->anchor_runs < BENCH_PAIRS_MAX) {
        reading->anchor_cpu[reading->anchor_runs] = result.cpu_seconds / ((double)job.bytes / GIB);
        reading->anchor_p99[reading->anchor_runs++] = result.p99_seconds;
    }
    return true;
}

/* Seconds a GiB of the checksum alone, over more memory than a cache holds. */
static double time_checksum(const struct reading *reading)
{
    struct kv_hbm *hbm = reading->own.store->hbm;
    const uint32_t page_bytes = reading->own.layout.page_bytes;
    uint64_t bytes = 0;
    const uint8_t *base = kv_hbm_base(hbm, &bytes);
    const double began = cpu_now();
    uint64_t done = 0;
    uint32_t sum = 0; /* Each goes into the next, so that none can be left out. */
    while (done < 1ull << 30)
        for (uint64_t at = 0; at + page_bytes <= bytes && done < 1ull << 30; at += page_bytes) {
            sum = kv_checksum_more(sum, base + at, page_bytes);
            done += page_bytes;
        }
    const double used = cpu_now() - began;
    bench_say(reading->progress, "checksum of 1 GiB alone (%08x): %.3f s", sum, used);
    return used / ((double)done / GIB);
}

/* ---- the lines ---- */

static void name_lines(const struct reading *reading, struct bench_pairs lines[LINES_PER_SIZE])
{
    const char *name = reading->size->name;
    const uint32_t depth = KV_MIN(pages_of(reading->size), KV_READ_DEPTH);
    const double mb = (double)run_bytes(reading) / 1e6;
    lines[0] = (struct bench_pairs){.target = 0.97, .at_least = true};
    lines[1] = (struct bench_pairs){.target = 1.2};
    lines[2] = (struct bench_pairs){.target = 1.3};
    lines[3] = (struct bench_pairs){.target = 0.95, .at_least = true};
    lines[4] = (struct bench_pairs){.target = 0.80, .at_least = true};
    static const uint32_t speeds[] = {0, 3, 4};
    for (size_t i = 0; i < KV_ARRAY_COUNT(speeds); i++) {
        struct bench_pairs *line = &lines[speeds[i]];
        line->speed = true;
        line->unit = line->anchor_unit = mb;
        line->unit_name = "MB/s";
    }
    (void)snprintf(lines[0].what, sizeof(lines[0].what), "sessions of %s", name);
    (void)snprintf(lines[0].anchor, sizeof(lines[0].anchor), "fio, %u in flight%s", depth,
                   reading->huge ? ", huge pages" : "");
    (void)snprintf(lines[1].what, sizeof(lines[1].what), "%s: p99 of a page", name);
    (void)snprintf(lines[1].anchor, sizeof(lines[1].anchor), "fio's");
    (void)snprintf(lines[2].what, sizeof(lines[2].what), "%s: CPU a GiB, without the checksum",
                   name);
    (void)snprintf(lines[2].anchor, sizeof(lines[2].anchor), "fio's");
    (void)snprintf(lines[3].what, sizeof(lines[3].what), "sessions of %s", name);
    (void)snprintf(lines[3].anchor, sizeof(lines[3].anchor), "pages not verified");
    (void)snprintf(lines[4].what, sizeof(lines[4].what), "sessions of %s, encrypted", name);
    (void)snprintf(lines[4].anchor, sizeof(lines[4].anchor), "without encryption");
}

static double middle(double *values, uint32_t count)
{
    for (uint32_t i = 1; i < count; i++)
        for (uint32_t j = i; j > 0 && values[j] < values[j - 1]; j--) {
            const double higher = values[j - 1];
            values[j - 1] = values[j];
            values[j] = higher;
        }
    return values[count / 2];
}

static void add_cpu(struct reading *reading, const char *what, json_t *facts)
{
    char name[64];
    (void)snprintf(name, sizeof(name), "%s: %s", reading->size->name, what);
    if (reading->runs > 0)
        (void)json_object_set_new(facts, name, json_real(middle(reading->cpu, reading->runs)));
}

static void add_facts(struct reading *reading, double checksum, json_t *facts)
{
    char name[64];
    const uint32_t count = reading->runs;
    add_cpu(reading, "CPU seconds a GiB", facts);
    (void)snprintf(name, sizeof(name), "%s: fio's CPU seconds a GiB", reading->size->name);
    (void)json_object_set_new(facts, name, json_real(middle(reading->anchor_cpu, count)));
    (void)snprintf(name, sizeof(name), "%s: checksum's CPU seconds a GiB", reading->size->name);
    (void)json_object_set_new(facts, name, json_real(checksum));
}

/* Against `twin`, which encrypts. */
static int measure(struct reading *reading, struct reading *twin, uint32_t pairs,
                   struct bench_pairs lines[LINES_PER_SIZE], json_t *facts)
{
    struct bench_progress *progress = reading->progress;
    name_lines(reading, lines);
    double unused;
    if (!run_checked(reading, &unused)) return CLIENT_EXIT_FAILED; /* Buffers are touched. */
    reading->runs = 0;
    const double checksum = time_checksum(reading);
    int code =
        bench_pairs_measure(progress, &lines[0], pairs, run_checked, reading, run_fio, reading);
    if (code != CLIENT_EXIT_OK) return code;
    lines[1].count = lines[2].count = pairs;
    for (uint32_t i = 0; i < pairs; i++) {
        lines[1].seconds[i] = reading->p99[i];
        lines[1].anchor_seconds[i] = reading->anchor_p99[i];
        lines[2].seconds[i] = KV_MAX(reading->cpu[i] - checksum, 1e-6);
        lines[2].anchor_seconds[i] = KV_MAX(reading->anchor_cpu[i], 1e-6);
    }
    add_facts(reading, checksum, facts);
    code = bench_pairs_measure(progress, &lines[3], pairs, run_checked, reading, run_unchecked,
                               reading);
    if (code != CLIENT_EXIT_OK) return code;
    if (!run_checked(twin, &unused)) return CLIENT_EXIT_FAILED;
    twin->runs = 0;
    code = bench_pairs_measure(progress, &lines[4], pairs, run_checked, twin, run_checked, reading);
    add_cpu(twin, "encrypted, CPU seconds a GiB", facts);
    return code;
}

static int measure_size(struct reading reading[2], uint32_t size, bool quick, const char *fio,
                        struct bench_progress *progress, struct bench_pairs lines[LINES_PER_SIZE],
                        json_t *facts)
{
    int code = CLIENT_EXIT_OK;
    memset(reading, 0, 2 * sizeof(*reading));
    for (uint32_t i = 0; i < 2 && code == CLIENT_EXIT_OK; i++)
        code = reading_init(&reading[i], &sizes[size], quick, i == 1, fio, progress);
    if (code == CLIENT_EXIT_OK)
        code = measure(&reading[0], &reading[1], quick ? 5 : 9, lines, facts);
    if (code == CLIENT_EXIT_OK && size == 0)
        (void)json_object_set_new(facts, "backend",
                                  json_string(kv_disk_backend(reading[0].own.ring)));
    for (uint32_t i = 0; i < 2; i++)
        if (reading[i].size != NULL) reading_fini(&reading[i]);
    return code;
}

int bench_ssd_read(struct bench_progress *progress, bool quick)
{
    struct bench_pairs *lines = calloc(SIZES * LINES_PER_SIZE, sizeof(*lines));
    struct reading *reading = calloc(2, sizeof(*reading)); /* Without encryption, and with. */
    json_t *facts = json_object();
    char path[1024];
    const char *fio = fio_find(path, sizeof(path));
    int code = fio == NULL ? CLIENT_EXIT_UNAVAILABLE : CLIENT_EXIT_OK;

    if (code == CLIENT_EXIT_OK && (lines == NULL || reading == NULL || facts == NULL)) {
        ctl_error("no memory for the results");
        code = CLIENT_EXIT_FAILED;
    }
    for (uint32_t i = 0; i < SIZES && code == CLIENT_EXIT_OK; i++) {
        code = measure_size(reading, i, quick, fio, progress, &lines[i * LINES_PER_SIZE], facts);
    }
    if (code == CLIENT_EXIT_OK)
        code = bench_pairs_report(progress->ctl, "ssd-read", lines, SIZES * LINES_PER_SIZE, facts);
    else
        json_decref(facts);
    free(reading);
    free(lines);
    return code;
}
