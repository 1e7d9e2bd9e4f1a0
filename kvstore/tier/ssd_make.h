#pragma once

/* Making a segment file, the only way to one, without waiting for it: each step is an
 * op of the disk.  Owned by: shard. */

#include "kvstore/tier/ssd_segment.h"

enum kv_ssd_make_step {
    KV_SSD_MAKE_CREATE,
    KV_SSD_MAKE_RESERVE,
    KV_SSD_MAKE_HEADER,
    KV_SSD_MAKE_SYNC,
    KV_SSD_MAKE_SYNC_DIR,
    KV_SSD_MAKE_UNLINK, /* After a failure. */
};

struct kv_ssd_make {
    /* Set by the owner, who leaves it alone until done ran. */
    const struct kv_ssd_place *place;
    uint32_t number;
    void (*done)(struct kv_ssd_make *make);
    /* Results. */
    kv_status status; /* KV_OK; KV_IO, and nothing is left behind. */
    int fd;
    struct kv_error err;
    /* Its own. */
    enum kv_ssd_make_step step;
    struct kv_disk_op op;
    char name[KV_SSD_SEGMENT_NAME_BYTES];
    uint8_t *header;
};

/* done() never runs inside of it.  False: out of memory, and it will not run. */
bool kv_ssd_make_start(struct kv_ssd_make *make) KV_MUST_CHECK;
