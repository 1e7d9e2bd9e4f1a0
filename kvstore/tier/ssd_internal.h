#pragma once

/* The SSD tier from inside: for tier_ssd.c and the ssd_*.c beside it only. */

#include "kvstore/plan/erase.h"
#include "kvstore/tier/ssd_make.h"
#include "kvstore/tier/ssd_space.h"
#include "kvstore/tier/tier_ssd.h"

#define KV_SSD_READ_ONLY_BYTES 160u

struct kv_ssd_segment {
    int fd;               /* -1: no such file. */
    bool dirty;           /* Written since its last fdatasync was started. */
    uint64_t valid_bytes; /* Of the file as found at start: what was stored beyond is gone. */
    uint32_t written_to;  /* Its pages before this one are in use, or were written through. */
    struct kv_disk_op sync;
    struct kv_ssd *ssd;
};

#define KV_SSD_RUNS_MAX 32u

/* Free pages that zeros are being written to, in runs; nobody else's meanwhile.  Their flush is one
 * of the group's, so that no fdatasync ever takes the error of another. */
struct kv_ssd_zeroing {
    bool active;
    bool erases; /* What was stored in them; else ahead of their use. */
    struct kv_ssd_run {
        uint32_t first, count;
    } runs[KV_SSD_RUNS_MAX];
    uint32_t run_count, run_at; /* The one being written. */
    uint32_t count;             /* Of all. */
    struct kv_disk_op op;
    struct kv_ssd_flush flush;
    uint8_t *zeros; /* Of one write; made when first needed. */
};

/* Owned by: shard. */
struct kv_ssd {
    struct kv_disk *disk;
    struct kv_ssd_place place;
    char *dir;
    uint64_t bytes_max;
    uint32_t pages_per_segment;
    uint32_t page_max; /* What bytes_max allows. */
    struct kv_ssd_segment *segments;
    uint32_t segment_max; /* Length of the array; also holds files beyond bytes_max. */
    uint32_t segment_count;
    struct kv_ssd_space space;

    /* ssd_ahead.c */
    struct kv_ssd_make make;
    bool making;
    bool make_failed; /* Until one that somebody waits for can be made, or the next look. */
    uint32_t segments_allowed; /* As things stood when last looked. */
    uint64_t full_ns;          /* When kv_ssd_look() saw that there is no room; 0: it did not. */
    struct kv_ssd_zeroing zeroing;
    uint32_t zero_segment; /* No segment before it has pages to be written through. */
    uint32_t written_free; /* Free pages that were written through. */
    struct kv_erase erase;
    uint32_t erase_at; /* Where its pass is. */
    struct kv_ssd_wait *waits, *waits_last;

    struct kv_ssd_flush *waiting; /* Next round, in order. */
    struct kv_ssd_flush *waiting_last;
    struct kv_ssd_flush *serving; /* This round. */
    uint32_t syncs_inflight;      /* 0: no round runs. */
    uint32_t dirty_count;

    uint64_t segments_repaired;
    uint64_t pages_read;
    uint64_t pages_written;
    uint64_t pages_ahead;  /* Written through before they were needed, */
    uint64_t pages_behind; /* and given out before they were. */
    uint64_t pages_erased; /* Zeros written over what was stored. */
    uint64_t flushes;
    uint64_t io_errors;
    uint32_t ops_inflight;
    char read_only_reason[KV_SSD_READ_ONLY_BYTES]; /* Empty: writable. */
};

static inline bool kv_ssd_is_read_only(const struct kv_ssd *ssd)
{
    return ssd->read_only_reason[0] != '\0';
}

/* Pages of a segment that was just made or opened are free from here on; soiled: nobody knows what
 * is in them. */
void kv_ssd_take_segment(struct kv_ssd *ssd, uint32_t number, int fd, uint64_t valid_bytes,
                         bool soiled);
/* The lowest number without a file. */
uint32_t kv_ssd_next_number(const struct kv_ssd *ssd);
/* What the file system leaves us now. */
void kv_ssd_look_for_room(struct kv_ssd *ssd);
/* As things stood when last looked. */
bool kv_ssd_may_add(const struct kv_ssd *ssd);
/* Of the page in its segment's file. */
uint64_t kv_ssd_page_offset(const struct kv_ssd *ssd, uint32_t page);
void kv_ssd_refuse_writes(struct kv_ssd *ssd, const char *what, uint32_t number,
                          const struct kv_disk_op *op);
void kv_ssd_mark_dirty(struct kv_ssd *ssd, uint32_t page);

/* ---- ssd_ahead.c ---- */

/* Whether zeros are being written to the page. */
bool kv_ssd_is_zeroing(const struct kv_ssd *ssd, uint32_t page);
bool kv_ssd_is_zeroing_in(const struct kv_ssd *ssd, uint32_t segment);
/* Whether the page counts as written through, once it is free. */
bool kv_ssd_is_written(const struct kv_ssd *ssd, uint32_t page);
/* Pages in use by others than whoever writes ahead. */
uint32_t kv_ssd_in_use(const struct kv_ssd *ssd);
/* Starts making another segment, unless one is being made.  False: out of memory. */
bool kv_ssd_make_another(struct kv_ssd *ssd);
