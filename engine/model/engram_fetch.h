#pragma once

/*
 * The Engram tables where they lie in the mapped checkpoint, and the thread that copies the rows of
 * a pass out of them while the layers before run (the model's specification, section 2.8, rule 5).
 *
 * Tables are the file mapping itself: one read-only copy in the page cache serves every process of
 * the machine.  Reading a row may mean a disk read; only the fetch thread pays for that.
 *
 * struct eng_fetch is owned by: the thread that runs passes (worker).  Between start and the last
 * wait its numbers belong to the fetch thread; each table's rows belong to the caller from its wait
 * until the next start.
 */

#include "engine/model/engram.h"

struct eng_engram_table {
    const uint8_t *codes;  /* rows x dim e4m3 */
    const uint8_t *scales; /* rows x dim / 32 ue8m0 */
    uint64_t rows;
    uint32_t dim; /* A multiple of 32. */
};

/* Bytes of a fetched row: dim codes, then its scales; quant.h calls that a window row. */
static inline uint32_t eng_engram_row_bytes(const struct eng_engram_table *table)
{
    return table->dim + table->dim / 32;
}

/* Tells the kernel how the mapping will be read: rows at random, huge pages where it has them. */
void eng_engram_table_advise(const struct eng_engram_table *table);

struct eng_fetch;

/* Borrows the tables.  At most rows_max rows per table and pass.  Tables of more than
 * resident_bytes together are taken to lie on disk.  KV_NOMEM, KV_BUSY (no thread). */
kv_status eng_fetch_create(const struct eng_engram_table *tables, uint32_t table_count,
                           uint32_t rows_max, uint64_t resident_bytes, struct eng_fetch **ret_fetch,
                           struct kv_error *err) KV_MUST_CHECK;
/* What this machine's memory can be expected to keep: half of it. */
uint64_t eng_fetch_resident_bytes(void);
void eng_fetch_destroy(struct eng_fetch *fetch);

/* Room for rows_max row numbers of a table; to be filled before start. */
uint64_t *eng_fetch_numbers(struct eng_fetch *fetch, uint32_t table);

/* Begins to copy `count` rows of each of the tables [first, end), in this order; end > first. Every
 * table of an earlier start has been waited for. */
void eng_fetch_start(struct eng_fetch *fetch, uint32_t first, uint32_t end, uint32_t count);

/* Waits until the rows of the next table in that order are there: `table` must be it.  Row i of
 * the numbers stands at i x eng_engram_row_bytes(). */
const uint8_t *eng_fetch_wait(struct eng_fetch *fetch, uint32_t table);

/* Rows copied since create; any thread. */
uint64_t eng_fetch_rows(const struct eng_fetch *fetch);
