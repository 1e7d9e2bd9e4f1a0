/*
 * Planted bugs.
 *
 * Above recording and faults: the log says what happened to the disk, the store hears what a store
 * with that bug would have believed.
 */

#include "tests/seam/plant.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/format/page.h"
#include "kvstore/store/store_internal.h"
#include "kvstore/tier/tier_ssd.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define PAGE_CHECKSUM_AT 8u
#define PAGE_CHECKED_AT 12u
#define PAGE_GENERATION_AT 24u

static enum plant planted;
static struct kv_store *store_in_use; /* Of the last batch made. */

struct disk {
    struct kv_disk disk;
    enum plant plant;
    struct kv_disk *inner;
};

struct manifest {
    struct kv_manifest manifest;
    enum plant plant;
    struct kv_manifest *inner;
};

static void *must(void *memory)
{
    assert(memory != NULL);
    return memory;
}

const char *plant_name(enum plant plant)
{
    static const char *const names[PLANT_COUNT] = {"none",
                                                   "short_ok",
                                                   "flush_ignored",
                                                   "ack_before_flush",
                                                   "ack_before_manifest_sync",
                                                   "names_not_flushed",
                                                   "reuse_before_delete",
                                                   "no_generation",
                                                   "no_checksum",
                                                   "segments_behind"};
    return names[plant];
}

enum plant plant_of(const char *name)
{
    unsigned plant = PLANT_NONE;
    while (plant < PLANT_COUNT && strcmp(plant_name((enum plant)plant), name) != 0)
        plant++;
    return (enum plant)plant;
}

void plant_set(enum plant plant)
{
    planted = plant;
}

/* ---- disk ---- */

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

static int64_t believed(enum plant plant, const struct kv_disk_call *call, int64_t result)
{
    const bool moves = call->verb == KV_DISK_READ || call->verb == KV_DISK_WRITE;
    if (plant == PLANT_SHORT_OK && moves && result > 0) return (int64_t)call->bytes;
    if (plant == PLANT_FLUSH_IGNORED && call->verb == KV_DISK_SYNC && result < 0) return 0;
    return result;
}

static int64_t plant_passed(struct kv_disk *base, struct kv_disk_op *op, int64_t result)
{
    const struct disk *disk = disk_of(base);
    return believed(disk->plant, &op->rest, kv_disk_passed(disk->inner, op, result));
}

static int64_t plant_call(struct kv_disk *base, const struct kv_disk_call *call)
{
    const struct disk *disk = disk_of(base);
    if (disk->plant == PLANT_NAMES && call->verb == KV_DISK_SYNC_DIR) return 0;
    return believed(disk->plant, call, disk->inner->ops->call(disk->inner, call));
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

struct kv_disk *plant_disk(enum plant plant, struct kv_disk *inner)
{
    struct disk *disk = must(calloc(1, sizeof(*disk)));
    disk->disk.ops = &disk_ops;
    disk->plant = plant;
    disk->inner = inner;
    return &disk->disk;
}

/* ---- manifest ---- */

static struct manifest *manifest_of(struct kv_manifest *manifest)
{
    return KV_CONTAINER_OF(manifest, struct manifest, manifest);
}

static void *copy(const void *bytes, uint32_t count)
{
    return bytes == NULL ? NULL : memcpy(must(malloc(KV_MAX(count, 1u))), bytes, count);
}

static void late_done(struct kv_msg *msg)
{
    struct kv_manifest_batch *late = KV_CONTAINER_OF(msg, struct kv_manifest_batch, msg);
    for (uint32_t i = 0; i < late->put_count; i++) {
        free((void *)(uintptr_t)late->puts[i].key);
        free((void *)(uintptr_t)late->puts[i].value);
    }
    free((void *)(uintptr_t)late->puts);
    free(late);
}

static void plant_write_post(struct kv_manifest *base, struct kv_manifest_batch *batch)
{
    const struct manifest *manifest = manifest_of(base);
    if (manifest->plant != PLANT_ACK_MANIFEST) {
        kv_manifest_write_post(manifest->inner, batch);
        return;
    }
    struct kv_manifest_batch *late = must(malloc(sizeof(*late)));
    struct kv_manifest_put *puts = must(calloc(KV_MAX(batch->put_count, 1u), sizeof(*puts)));
    *late = *batch;
    for (uint32_t i = 0; i < batch->put_count; i++) {
        puts[i] = batch->puts[i];
        puts[i].key = copy(puts[i].key, puts[i].key_bytes);
        puts[i].value = copy(puts[i].value, puts[i].value_bytes);
    }
    late->puts = puts;
    late->msg.run = late_done;
    batch->status = KV_OK;
    kv_mailbox_post(batch->reply, &batch->msg);
    kv_manifest_write_post(manifest->inner, late);
}

static kv_status plant_write_now(struct kv_manifest *base, const struct kv_manifest_put *puts,
                                 uint32_t put_count, struct kv_error *err)
{
    return kv_manifest_write_now(manifest_of(base)->inner, puts, put_count, err);
}

static void plant_scan_post(struct kv_manifest *base, struct kv_manifest_scan *scan)
{
    kv_manifest_scan_post(manifest_of(base)->inner, scan);
}

static kv_status plant_scan_now(struct kv_manifest *base, const uint8_t *prefix,
                                uint32_t prefix_bytes, kv_manifest_visit_fn *visit, void *context,
                                struct kv_error *err)
{
    return kv_manifest_scan_now(manifest_of(base)->inner, prefix, prefix_bytes, visit, context,
                                err);
}

static struct kv_manifest_stats plant_stats(struct kv_manifest *base)
{
    return kv_manifest_stats(manifest_of(base)->inner);
}

static void plant_close(struct kv_manifest *base)
{
    free(manifest_of(base));
}

static const struct kv_manifest_ops manifest_ops = {
    .close = plant_close,
    .write_post = plant_write_post,
    .scan_post = plant_scan_post,
    .write_now = plant_write_now,
    .scan_now = plant_scan_now,
    .stats = plant_stats,
};

struct kv_manifest *plant_manifest(enum plant plant, struct kv_manifest *inner)
{
    struct manifest *manifest = must(calloc(1, sizeof(*manifest)));
    manifest->manifest.ops = &manifest_ops;
    manifest->plant = plant;
    manifest->inner = inner;
    return &manifest->manifest;
}

/* ---- functions of kvstore, replaced when linked with --wrap ---- */

kv_status __real_kv_ssd_flush_start(struct kv_ssd *ssd, struct kv_ssd_flush *flush);
kv_status __wrap_kv_ssd_flush_start(struct kv_ssd *ssd, struct kv_ssd_flush *flush);
kv_status __real_kv_page_verify(const struct kv_layout *layout, const uint8_t *page,
                                const struct kv_page_header *want, struct kv_error *err);
kv_status __wrap_kv_page_verify(const struct kv_layout *layout, const uint8_t *page,
                                const struct kv_page_header *want, struct kv_error *err);

struct kv_batch *__real_kv_store_dead_batch(struct kv_store *store);
struct kv_batch *__wrap_kv_store_dead_batch(struct kv_store *store);
struct kv_batch *__real_kv_batch_create(struct kv_store *store);
struct kv_batch *__wrap_kv_batch_create(struct kv_store *store);
kv_status __real_kv_batch_free_ssd(struct kv_batch *batch, uint32_t ssd_page);
kv_status __wrap_kv_batch_free_ssd(struct kv_batch *batch, uint32_t ssd_page);

void __real_kv_segments_set(struct kv_segments *segments, uint32_t ssd_page, bool used);
void __wrap_kv_segments_set(struct kv_segments *segments, uint32_t ssd_page, bool used);

void __wrap_kv_segments_set(struct kv_segments *segments, uint32_t ssd_page, bool used)
{
    if (planted != PLANT_SEGMENTS || !used) __real_kv_segments_set(segments, ssd_page, used);
}

struct kv_batch *__wrap_kv_batch_create(struct kv_store *store)
{
    store_in_use = store;
    return __real_kv_batch_create(store);
}

struct kv_batch *__wrap_kv_store_dead_batch(struct kv_store *store)
{
    store_in_use = store;
    return __real_kv_store_dead_batch(store);
}

kv_status __wrap_kv_batch_free_ssd(struct kv_batch *batch, uint32_t ssd_page)
{
    if (planted != PLANT_REUSE) return __real_kv_batch_free_ssd(batch, ssd_page);
    kv_ssd_free(store_in_use->ssd, ssd_page);
    return KV_OK;
}

static void late_flushed(struct kv_ssd_flush *flush, kv_status status)
{
    (void)status;
    free(flush);
}

kv_status __wrap_kv_ssd_flush_start(struct kv_ssd *ssd, struct kv_ssd_flush *flush)
{
    if (planted != PLANT_ACK_FLUSH) return __real_kv_ssd_flush_start(ssd, flush);
    struct kv_ssd_flush *late = must(calloc(1, sizeof(*late)));
    late->done = late_flushed;
    if (__real_kv_ssd_flush_start(ssd, late) != KV_OK) free(late);
    flush->done(flush, KV_OK);
    return KV_OK;
}

kv_status __wrap_kv_page_verify(const struct kv_layout *layout, const uint8_t *page,
                                const struct kv_page_header *want, struct kv_error *err)
{
    struct kv_page_header wanted = *want;
    if (planted == PLANT_GENERATION) wanted.generation = kv_load64(page + PAGE_GENERATION_AT);
    if (planted != PLANT_CHECKSUM) return __real_kv_page_verify(layout, page, &wanted, err);

    uint8_t *sealed = copy(page, layout->page_bytes);
    kv_store32(sealed + PAGE_CHECKSUM_AT,
               kv_checksum(sealed + PAGE_CHECKED_AT, layout->page_bytes - PAGE_CHECKED_AT));
    const kv_status status = __real_kv_page_verify(layout, sealed, &wanted, err);
    free(sealed);
    return status;
}
