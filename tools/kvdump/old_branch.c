/*
 * Branches that a compaction left, and when they go: read from their records.
 *
 * One whose checkpoint is not there any more is no damage: the daemon deletes its record when its
 * time comes.
 */

#include "tools/kvdump/kvdump.h"

#include "kvstore/base/bytes.h"

#include <stdlib.h>

static kv_status visit(void *context, const struct kv_manifest_put *put)
{
    struct dump *dump = context;
    struct kv_record_old_branch record;
    if (kv_record_old_branch_decode(put->key, put->key_bytes, put->value, put->value_bytes,
                                    &record) != KV_OK) {
        dump_damage(dump, "manifest: the record of a branch that was left is damaged");
        return KV_OK;
    }
    if ((dump->superblock.features & KV_FEATURE_HISTORY) == 0)
        dump_damage(dump, "superblock: a left branch is recorded, its features lack bit 5");
    if (dump->old_branch_count == dump->old_branch_capacity) {
        const uint32_t capacity = KV_MAX(16u, 2 * dump->old_branch_capacity);
        struct kv_record_old_branch *more = realloc(dump->old_branches, capacity * sizeof(*more));
        if (more == NULL) return KV_NOMEM;
        dump->old_branches = more;
        dump->old_branch_capacity = capacity;
    }
    dump->old_branches[dump->old_branch_count++] = record;
    return KV_OK;
}

kv_status dump_old_branches_read(struct dump *dump, struct kv_error *err)
{
    return kv_manifest_scan_now(dump->manifest, (const uint8_t *)"L", 1, visit, dump, err);
}
