/*
 * Copies rows of the Engram tables ahead of the layer that needs them.
 *
 * A row is 24 x 264 scattered bytes per token and layer in the real model, which out of a table
 * larger than memory is 24 disk reads: so where a table cannot stay resident, the thread first asks
 * the kernel for every page of the pass (all reads in flight at once) and copies afterwards.
 *
 * A few rows out of tables that stay in memory are copied by the caller itself, when it wants them:
 * that takes less than waking a thread, which on a busy machine waits for its turn.
 *
 * One thread per model, two kinds of semaphore, no lock: the caller posts `start`, the thread posts
 * `done` once per table in order, and each side touches the shared arrays only in its turn.
 */

#include "engine/model/engram_fetch.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/thread.h"

#include <assert.h>
#include <errno.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* Rows of a table: about 50 us of copying, where every row is a miss in the caches. */
#define DIRECT_ROWS_MAX 768u

struct eng_fetch {
    const struct eng_engram_table *tables;
    uint32_t table_count, rows_max;
    uint64_t *numbers[ENG_ENGRAM_MAX];
    uint8_t *rows[ENG_ENGRAM_MAX];
    bool may_be_cold; /* The tables are more than the machine's memory keeps. */

    uint32_t first, end, count; /* The pass in flight. */
    uint32_t next;              /* Table whose wait comes next; `end` when none is in flight. */
    bool direct;                /* This pass leaves the thread asleep. */
    bool quit;
    sem_t start, done;
    _Atomic uint64_t copied;
    struct kv_thread thread;
};

static void advise(const uint8_t *begin, uint64_t bytes, int advice)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t at = (uintptr_t)begin / page * page;
    /* What the kernel makes of advice is its affair: nothing here depends on it. */
    (void)madvise((uint8_t *)at, (uintptr_t)begin + bytes - at, advice);
}

void eng_engram_table_advise(const struct eng_engram_table *table)
{
    const uint64_t code_bytes = table->rows * table->dim;
    advise(table->codes, code_bytes, MADV_RANDOM);
    advise(table->codes, code_bytes, MADV_HUGEPAGE);
    advise(table->scales, code_bytes / 32, MADV_RANDOM);
    advise(table->scales, code_bytes / 32, MADV_HUGEPAGE);
}

static void ask(const struct eng_fetch *fetch, uint32_t t)
{
    const struct eng_engram_table *table = &fetch->tables[t];
    const uint32_t scale_bytes = table->dim / 32;
    for (uint32_t i = 0; i < fetch->count; i++) {
        const uint64_t row = fetch->numbers[t][i];
        advise(table->codes + row * table->dim, table->dim, MADV_WILLNEED);
        advise(table->scales + row * scale_bytes, scale_bytes, MADV_WILLNEED);
    }
}

static void take(struct eng_fetch *fetch, uint32_t t)
{
    const struct eng_engram_table *table = &fetch->tables[t];
    const uint32_t scale_bytes = table->dim / 32;
    uint8_t *to = fetch->rows[t];
    for (uint32_t i = 0; i < fetch->count; i++, to += eng_engram_row_bytes(table)) {
        const uint64_t row = fetch->numbers[t][i];
        assert(row < table->rows);
        memcpy(to, table->codes + row * table->dim, table->dim);
        memcpy(to + table->dim, table->scales + row * scale_bytes, scale_bytes);
    }
    atomic_fetch_add_explicit(&fetch->copied, fetch->count, memory_order_relaxed);
}

static void wait_for(sem_t *semaphore)
{
    while (sem_wait(semaphore) != 0)
        assert(errno == EINTR);
}

static void fetch_main(void *arg)
{
    struct eng_fetch *fetch = arg;
    for (;;) {
        wait_for(&fetch->start);
        if (fetch->quit) return;
        /* The caller may begin another pass as soon as it has the last table. */
        const uint32_t first = fetch->first, end = fetch->end;
        for (uint32_t t = first; fetch->may_be_cold && t < end; t++)
            ask(fetch, t);
        for (uint32_t t = first; t < end; t++) {
            take(fetch, t);
            (void)sem_post(&fetch->done);
        }
    }
}

uint64_t eng_fetch_resident_bytes(void)
{
    return (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE) / 2;
}

kv_status eng_fetch_create(const struct eng_engram_table *tables, uint32_t table_count,
                           uint32_t rows_max, uint64_t resident_bytes, struct eng_fetch **ret_fetch,
                           struct kv_error *err)
{
    uint64_t bytes = 0;
    struct eng_fetch *fetch = calloc(1, sizeof(*fetch));
    if (fetch == NULL) return KV_FAIL(err, KV_NOMEM, "Engram rows");
    assert(table_count >= 1 && table_count <= ENG_ENGRAM_MAX);

    fetch->tables = tables;
    fetch->table_count = table_count;
    fetch->rows_max = rows_max;
    (void)sem_init(&fetch->start, 0, 0);
    (void)sem_init(&fetch->done, 0, 0);
    for (uint32_t t = 0; t < table_count; t++) {
        fetch->numbers[t] = calloc(rows_max, sizeof(*fetch->numbers[t]));
        fetch->rows[t] = calloc(rows_max, eng_engram_row_bytes(&tables[t]));
        if (fetch->numbers[t] == NULL || fetch->rows[t] == NULL) {
            eng_fetch_destroy(fetch);
            return KV_FAIL(err, KV_NOMEM, "Engram rows: %u per pass", rows_max);
        }
        bytes += tables[t].rows * eng_engram_row_bytes(&tables[t]);
    }
    fetch->may_be_cold = bytes > resident_bytes;
    const kv_status status =
        kv_thread_start(&fetch->thread, KV_THREAD_ANY, "engram", fetch_main, fetch, err);
    if (status == KV_OK)
        *ret_fetch = fetch;
    else
        eng_fetch_destroy(fetch);
    return status;
}

void eng_fetch_destroy(struct eng_fetch *fetch)
{
    if (fetch == NULL) return;
    assert(fetch->next == fetch->end);
    fetch->quit = true;
    (void)sem_post(&fetch->start);
    kv_thread_join(&fetch->thread);
    for (uint32_t t = 0; t < fetch->table_count; t++) {
        free(fetch->numbers[t]);
        free(fetch->rows[t]);
    }
    (void)sem_destroy(&fetch->start);
    (void)sem_destroy(&fetch->done);
    free(fetch);
}

uint64_t *eng_fetch_numbers(struct eng_fetch *fetch, uint32_t table)
{
    assert(table < fetch->table_count);
    assert(fetch->next == fetch->end);
    return fetch->numbers[table];
}

void eng_fetch_start(struct eng_fetch *fetch, uint32_t first, uint32_t end, uint32_t count)
{
    assert(fetch->next == fetch->end);
    assert(first < end && end <= fetch->table_count);
    assert(count <= fetch->rows_max);
    fetch->first = fetch->next = first;
    fetch->end = end;
    fetch->count = count;
    fetch->direct = !fetch->may_be_cold && count <= DIRECT_ROWS_MAX;
    if (!fetch->direct) (void)sem_post(&fetch->start);
}

const uint8_t *eng_fetch_wait(struct eng_fetch *fetch, uint32_t table)
{
    assert(fetch->next == table && table < fetch->end);
    if (fetch->direct)
        take(fetch, table);
    else
        wait_for(&fetch->done);
    fetch->next++;
    return fetch->rows[table];
}

uint64_t eng_fetch_rows(const struct eng_fetch *fetch)
{
    return atomic_load_explicit(&fetch->copied, memory_order_relaxed);
}
