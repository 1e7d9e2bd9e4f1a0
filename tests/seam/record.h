#pragma once

/*
 * Recording: a disk and a manifest that note in one log what passes through them to those they
 * wrap.  Each call has the tick at which it began and the one at which its result was known, so the
 * state of everything at any tick can be told: image.h builds from it what a power cut would leave.
 *
 * A call whose result was never known (`ended` is RECORD_RUNNING) may have happened or not.
 * Owned by: the thread that runs the disk.  For tests.
 */

#include "kvstore/base/disk.h"
#include "kvstore/index/manifest.h"

#define RECORD_RUNNING UINT64_MAX
#define RECORD_NAME_MAX 64u

enum record_kind { RECORD_CALL, RECORD_BATCH };

struct record_event {
    enum record_kind kind;
    enum kv_disk_verb verb;   /* CALL: not READ, LIST, SIZE, OPEN, OPEN_DIR or CLOSE. */
    uint32_t file;            /* Index of files; of MAKE_DIR and SYNC_DIR, of dirs. */
    char to[RECORD_NAME_MAX]; /* RENAME. */
    uint64_t begun, ended;
    int64_t result; /* As of kv_disk_ops.call; BATCH: 0 or -EIO. */
    uint64_t offset, bytes;
    uint8_t *data;                /* WRITE: a copy. */
    struct kv_manifest_put *puts; /* BATCH: copies. */
    uint32_t put_count;
};

struct record_file {
    uint32_t dir;               /* Index of dirs. */
    char name[RECORD_NAME_MAX]; /* When it was made or found, */
    char now[RECORD_NAME_MAX];  /* and at the end; empty: another file took it. */
    bool found;                 /* Not made in this run: it was there before, durable, */
    uint8_t *bytes;             /* with these bytes. */
    uint64_t size;
};

struct recorder {
    uint64_t tick;               /* Grows by one when a call begins and when it ends. */
    struct record_event *events; /* In the order they began. */
    uint32_t event_count, event_capacity;
    struct record_file files[512]; /* Made or found: a name used again is another file. */
    uint32_t file_count;
    char dirs[8][256];
    bool dirs_found[8];
    uint32_t dir_count;
};

/* The tick of something that happened above the disk; nothing else has it. */
static inline uint64_t recorder_mark(struct recorder *recorder)
{
    return recorder->tick++;
}

struct recorder *recorder_create(void);
void recorder_destroy(struct recorder *recorder);

/* Before the run: a file that is there already.  Its bytes are copied. */
void recorder_found(struct recorder *recorder, const char *dir, const char *name,
                    const uint8_t *bytes, uint64_t size);

/* Wrappers; they own neither what they wrap nor the recorder. */
struct kv_disk *recorder_disk(struct recorder *recorder, struct kv_disk *inner);
struct kv_manifest *recorder_manifest(struct recorder *recorder, struct kv_manifest *inner);

static inline bool record_began(const struct record_event *event, uint64_t tick)
{
    return event->begun < tick;
}

static inline bool record_succeeded(const struct record_event *event, uint64_t tick)
{
    return event->ended < tick && event->result >= 0;
}
