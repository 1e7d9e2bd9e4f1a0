/*
 * Planted bugs between a store and its disk.
 *
 * Above recording and faults: the log says what happened to the disk, the store hears what a store
 * with that bug would have believed.
 */

#include "tests/seam/plant.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static enum kv_plant planted;

struct disk {
    struct kv_disk disk;
    struct kv_disk *inner;
};

static const char *const names[] = {[KV_PLANT_NONE] = "none",
#define PLANT_NAME(id, name) [KV_PLANT_##id] = name,
                                    KV_PLANTS(PLANT_NAME)
#undef PLANT_NAME
};

const char *plant_name(enum kv_plant plant)
{
    return (unsigned)plant < KV_ARRAY_COUNT(names) ? names[plant] : NULL;
}

bool plant_find(const char *name, enum kv_plant *ret_plant)
{
    for (unsigned i = 0; i < KV_ARRAY_COUNT(names); i++) {
        if (strcmp(names[i], name) != 0) continue;
        *ret_plant = (enum kv_plant)i;
        return true;
    }
    return false;
}

void plant_set(enum kv_plant plant)
{
    planted = plant;
}

enum kv_plant plant_now(void)
{
    return planted;
}

static struct disk *disk_of(struct kv_disk *disk)
{
    return KV_CONTAINER_OF(disk, struct disk, disk);
}

static void plant_start(struct kv_disk *base, struct kv_disk_op *op)
{
    struct kv_disk *inner = disk_of(base)->inner;
    inner->ops->start(inner, op);
}

static uint32_t plant_run(struct kv_disk *base, int wake_fd, int timeout_ms)
{
    struct kv_disk *inner = disk_of(base)->inner;
    return inner->ops->run(inner, wake_fd, timeout_ms);
}

static int64_t believed(const struct kv_disk_call *call, int64_t result)
{
    const bool moves = call->verb == KV_DISK_READ || call->verb == KV_DISK_WRITE;
    const bool failed_sync = call->verb == KV_DISK_SYNC && result < 0;
    if (planted == KV_PLANT_SHORT_ACCEPTED && moves && result > 0) return (int64_t)call->bytes;
    return planted == KV_PLANT_FLUSH_IGNORED && failed_sync ? 0 : result;
}

static int64_t plant_passed(struct kv_disk *base, struct kv_disk_op *op, int64_t result)
{
    return believed(&op->rest, kv_disk_passed(disk_of(base)->inner, op, result));
}

static int64_t plant_call(struct kv_disk *base, const struct kv_disk_call *call)
{
    struct kv_disk *inner = disk_of(base)->inner;
    if (planted == KV_PLANT_NAMES_NOT_FLUSHED && call->verb == KV_DISK_SYNC_DIR) return 0;
    return believed(call, inner->ops->call(inner, call));
}

static void plant_destroy(struct kv_disk *base)
{
    free(disk_of(base));
}

static const struct kv_disk_ops disk_ops = {
    .name = "planted",
    .destroy = plant_destroy,
    .start = plant_start,
    .run = plant_run,
    .passed = plant_passed,
    .call = plant_call,
};

struct kv_disk *plant_disk(struct kv_disk *inner)
{
    struct disk *disk = calloc(1, sizeof(*disk));
    assert(disk != NULL);
    disk->disk.ops = &disk_ops;
    disk->inner = inner;
    return &disk->disk;
}
