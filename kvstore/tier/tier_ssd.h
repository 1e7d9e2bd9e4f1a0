#pragma once

/*
 * Pages on SSD: segment files opened with O_DIRECT, page i of the tier at
 *   segment i / pages_per_segment, offset 4096 + (i % pages_per_segment) * page_bytes.
 *
 * Owned by: shard.  The tier moves opaque pages; which page holds what is the index's business.
 * Files: DIR/segment-%06u.kv, reserved to segment_bytes when created, and written through with
 * zeros ahead of their use; first 4 KiB is the segment header (format/segment_header.h).  Space is
 * a bitmap in RAM, rebuilt from the index at start: an allocated page without a record is free
 * after a restart.
 */

#include "kvstore/base/disk.h"
#include "kvstore/base/status.h"
#include "kvstore/format/ids.h"

#include <stdbool.h>
#include <stdint.h>

#define KV_SSD_PAGE_NONE UINT32_MAX

struct kv_ssd;

struct kv_ssd_options {
    const char *dir; /* Exists. */
    uint64_t bytes_max;
    uint64_t segment_bytes;
    uint32_t page_bytes;
    struct kv_directory_id directory;
    uint64_t erase_within_ns; /* Zeros over what was stored in free pages; 0: never. */
};

/* KV_INVALID, in one sentence: bytes_max holds no segment, or a segment no page. */
kv_status kv_ssd_check(const struct kv_ssd_options *options, struct kv_error *err) KV_MUST_CHECK;

/* Opens what is there, makes the first segment if there is none.  KV_INVALID: a segment was made
 * with another page size (another model) or segment size or for another directory, or bytes_max
 * holds no segment, one sentence; KV_CORRUPT: a segment's header is unreadable or its file was cut;
 * KV_IO: cannot open, no O_DIRECT, or no space for the first segment. */
kv_status kv_ssd_open(const struct kv_ssd_options *options, struct kv_disk *disk,
                      struct kv_ssd **ret_ssd, struct kv_error *err) KV_MUST_CHECK;
/* Nothing of its owner's in flight; waits for what it does by itself. */
void kv_ssd_close(struct kv_ssd *ssd);

/* Pages of each segment; *ret_segments: more than the highest number a segment can have, or has. */
uint32_t kv_ssd_shape(const struct kv_ssd *ssd, uint32_t *ret_segments);
/* Whether the page's file is there, and was long enough for it when it was opened. */
bool kv_ssd_present(const struct kv_ssd *ssd, uint32_t page);

/* Recovery: claims one page.  KV_MISS: no such page (its segment file is missing); KV_CORRUPT: it
 * is claimed already. */
kv_status kv_ssd_claim(struct kv_ssd *ssd, uint32_t page) KV_MUST_CHECK;
/* Whether the page exists and is in use; a quarantined one is not. */
bool kv_ssd_claimed(const struct kv_ssd *ssd, uint32_t page);

/* All or nothing, preferably adjacent.  KV_BUSY: there is no room, and what is freed makes some:
 * bytes_max is reached, or the file system has nothing left for another segment; KV_INVALID:
 * read-only after a failed flush; KV_MISS: not yet, a segment is being made: kv_ssd_wait();
 * KV_NOMEM. */
kv_status kv_ssd_alloc(struct kv_ssd *ssd, uint32_t count, uint32_t *ret_pages,
                       struct kv_error *err) KV_MUST_CHECK;

/* After KV_MISS.  ready() runs once, never inside of this call, when there may be room: then alloc
 * again, and wait again if it says so and `status` is KV_OK.  Another status says why no segment
 * could be made: KV_IO, the file system is full or failing (sys_errno kept in err). */
struct kv_ssd_wait {
    void (*ready)(struct kv_ssd_wait *wait);
    kv_status status;
    struct kv_error err;
    struct kv_ssd_wait *next; /* Owned by the tier. */
};
void kv_ssd_wait(struct kv_ssd *ssd, struct kv_ssd_wait *wait);

/* Goes on making space ahead of its use (plan/prewrite.h), and with zeros over what was stored in
 * pages that are free now (plan/erase.h), in the background.  Once a loop turn; now_ns: of the
 * clock by which erase_within_ns counts. */
void kv_ssd_tick(struct kv_ssd *ssd, uint64_t now_ns);
/* Waits for what is under way of it. */
void kv_ssd_rest(struct kv_ssd *ssd);
void kv_ssd_free(struct kv_ssd *ssd, uint32_t page);

/* In pages.  What the tier may hold follows from bytes_max, and from what its file system has left,
 * which others use too: no segment is made that would take the last of it. */
struct kv_ssd_room {
    uint32_t used;
    uint32_t limit;  /* Of used, as things stand. */
    bool is_bounded; /* By the file system, not by bytes_max. */
};
struct kv_ssd_room kv_ssd_room(const struct kv_ssd *ssd);
/* Once a loop turn: looks again, a second after it was found full, whether the file system has room
 * or a segment can be made.  now_ns: of a clock that always moves. */
void kv_ssd_look(struct kv_ssd *ssd, uint64_t now_ns);

/* ---- segments that are emptied ---- */

/* Numbers that a segment may have: below this. */
uint32_t kv_ssd_segment_max(const struct kv_ssd *ssd);
struct kv_ssd_segment_use {
    uint32_t pages, used; /* pages 0: there is no such file. */
    bool is_filling;      /* The lowest one with free pages. */
};
struct kv_ssd_segment_use kv_ssd_segment_use(const struct kv_ssd *ssd, uint32_t number);
/* Nothing of the segment is given out before kv_ssd_segments_open(); at most KV_SSD_CLOSED_MAX. */
void kv_ssd_segment_close(struct kv_ssd *ssd, uint32_t number);
void kv_ssd_segments_open(struct kv_ssd *ssd);
bool kv_ssd_closed(const struct kv_ssd *ssd, uint32_t page);
/* The page's bytes were wrong: it is given to nobody any more, also where its segment file is made
 * later.  KV_MISS: beyond what the tier may hold; KV_NOMEM. */
kv_status kv_ssd_quarantine(struct kv_ssd *ssd, uint32_t page) KV_MUST_CHECK;
bool kv_ssd_quarantined(const struct kv_ssd *ssd, uint32_t page);
/* Where a page lies: segment file and offset in it, for people. */
void kv_ssd_place(const struct kv_ssd *ssd, uint32_t page, uint32_t *ret_segment,
                  uint64_t *ret_offset);

struct kv_ssd_op;
typedef void kv_ssd_done_fn(struct kv_ssd_op *op, kv_status status);

struct kv_ssd_op {
    uint32_t page;
    uint8_t *buf; /* page_bytes, aligned to KV_IO_ALIGN. */
    kv_ssd_done_fn *done;
    struct kv_disk_op disk_op; /* Owned by the tier while in flight. */
    void *context;             /* Owner's. */
    struct kv_ssd *ssd;        /* Set by the tier. */
};

void kv_ssd_read_start(struct kv_ssd *ssd, struct kv_ssd_op *op);
void kv_ssd_write_start(struct kv_ssd *ssd, struct kv_ssd_op *op);

/* Flush of everything whose write completed before this call.  Waiting flushes are served by one
 * fdatasync a segment (group commit): a flush that starts while another runs joins the next one.
 * KV_IO: read-only after a failure, and done will not run. */
struct kv_ssd_flush {
    void (*done)(struct kv_ssd_flush *flush, kv_status status);
    struct kv_ssd_flush *next; /* Owned by the tier. */
};
kv_status kv_ssd_flush_start(struct kv_ssd *ssd, struct kv_ssd_flush *flush) KV_MUST_CHECK;

/* ---- quarantined pages that are tried again ---- */

/* Tries whether a quarantined page keeps what is written to it, and leaves zeros in it.  done():
 * KV_OK; KV_IO: it cannot be written or read (sys_errno); KV_CORRUPT: something else came back;
 * KV_INVALID: read-only, now or by a flush that failed meanwhile. */
struct kv_ssd_retest {
    uint32_t page;
    void (*done)(struct kv_ssd_retest *retest, kv_status status);
    int sys_errno;
    /* Owned by the tier until done. */
    struct kv_ssd *ssd;
    struct kv_disk_op op;
    struct kv_ssd_flush flush;
    uint8_t *wrote, *found;
    uint8_t step;
};
/* done() runs only after KV_OK, and never inside of this call.  KV_MISS: its segment file is not
 * there; KV_INVALID: read-only; KV_NOMEM. */
kv_status kv_ssd_retest_start(struct kv_ssd *ssd, struct kv_ssd_retest *retest) KV_MUST_CHECK;
/* After a retest that ended with KV_OK: the page is free again. */
void kv_ssd_release(struct kv_ssd *ssd, uint32_t page);

struct kv_ssd_usage {
    uint64_t bytes_max;   /* Configured. */
    uint64_t bytes_limit; /* And what the file system allows of it now. */
    uint64_t bytes_used;  /* Allocated pages. */
    uint64_t bytes_files; /* Segment files on disk. */
    /* Of the pages in these files; the four together are all of them. */
    uint32_t pages_free, pages_used, pages_closed, pages_quarantined;
    uint64_t pages_read, pages_written, flushes; /* flushes: fdatasync calls. */
    uint64_t io_errors;
    uint64_t pages_ahead;       /* Written through before they were needed, */
    uint64_t pages_behind;      /* and given out before that was done. */
    uint64_t pages_erased;      /* Written over because of what had been stored in them, */
    uint32_t pages_unerased;    /* and free ones that were not yet, or nobody knows. */
    uint64_t segments_repaired; /* Found cut, empty or with a damaged header at start. */
    uint32_t ops_inflight;
    bool read_only;
    const char *read_only_reason; /* NULL while writable. */
};
/* Takes no more writes from now on, and kv_ssd_usage() says why; the first cause stays. */
void kv_ssd_refuse(struct kv_ssd *ssd, const char *why);
struct kv_ssd_usage kv_ssd_usage(const struct kv_ssd *ssd);
