/*
 * A manifest in memory: records in an array, in key order.
 *
 * It takes the two steps of the real one on one thread, so that a test sees the time between post,
 * effect and answer, and sees it the same each time.
 */

#include "tests/seam/mem_manifest.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

struct record {
    uint8_t *bytes; /* Key, then value; heap. */
    uint32_t key_bytes, value_bytes;
};

struct mem_manifest {
    struct kv_manifest manifest;
    struct record *records;
    uint32_t count, capacity;
    uint64_t batches;
};

static struct mem_manifest *mem_of(struct kv_manifest *manifest)
{
    return KV_CONTAINER_OF(manifest, struct mem_manifest, manifest);
}

static int compare(const struct record *record, const uint8_t *key, uint32_t key_bytes)
{
    const uint32_t both = KV_MIN(record->key_bytes, key_bytes);
    const int order = both == 0 ? 0 : memcmp(record->bytes, key, both);
    if (order != 0) return order;
    return record->key_bytes < key_bytes ? -1 : record->key_bytes > key_bytes;
}

/* First record that is not below the key. */
static uint32_t lower_bound(const struct mem_manifest *mem, const uint8_t *key, uint32_t key_bytes)
{
    uint32_t low = 0, high = mem->count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (compare(&mem->records[middle], key, key_bytes) < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static void apply(struct mem_manifest *mem, const struct kv_manifest_put *put)
{
    const uint32_t at = lower_bound(mem, put->key, put->key_bytes);
    const bool found = at < mem->count && compare(&mem->records[at], put->key, put->key_bytes) == 0;
    if (found) {
        free(mem->records[at].bytes);
        mem->count--;
        memmove(&mem->records[at], &mem->records[at + 1],
                (mem->count - at) * sizeof(mem->records[0]));
    }
    if (put->value == NULL) return;
    if (mem->count == mem->capacity) {
        mem->capacity = mem->capacity == 0 ? 64 : 2 * mem->capacity;
        mem->records = realloc(mem->records, mem->capacity * sizeof(mem->records[0]));
        assert(mem->records != NULL);
    }
    memmove(&mem->records[at + 1], &mem->records[at], (mem->count - at) * sizeof(mem->records[0]));
    uint8_t *bytes = malloc((size_t)put->key_bytes + put->value_bytes);
    assert(bytes != NULL);
    memcpy(bytes, put->key, put->key_bytes);
    memcpy(bytes + put->key_bytes, put->value, put->value_bytes);
    mem->records[at] = (struct record){bytes, put->key_bytes, put->value_bytes};
    mem->count++;
}

static bool record_at(const struct mem_manifest *mem, uint32_t at, const uint8_t *prefix,
                      uint32_t prefix_bytes, struct kv_manifest_put *ret_put)
{
    if (at >= mem->count) return false;
    const struct record *record = &mem->records[at];
    if (record->key_bytes < prefix_bytes) return false;
    if (prefix_bytes > 0 && memcmp(record->bytes, prefix, prefix_bytes) != 0) return false;
    *ret_put = (struct kv_manifest_put){
        .key = record->bytes,
        .key_bytes = record->key_bytes,
        .value = record->bytes + record->key_bytes,
        .value_bytes = record->value_bytes,
    };
    return true;
}

static void mem_close(struct kv_manifest *manifest)
{
    struct mem_manifest *mem = mem_of(manifest);
    for (uint32_t i = 0; i < mem->count; i++)
        free(mem->records[i].bytes);
    free(mem->records);
    free(mem);
}

static kv_status mem_write_now(struct kv_manifest *manifest, const struct kv_manifest_put *puts,
                               uint32_t put_count, struct kv_error *err)
{
    struct mem_manifest *mem = mem_of(manifest);
    (void)err;
    mem->batches++;
    for (uint32_t i = 0; i < put_count; i++)
        apply(mem, &puts[i]);
    return KV_OK;
}

static void batch_received(struct kv_msg *msg)
{
    struct kv_manifest_batch *batch = KV_CONTAINER_OF(msg, struct kv_manifest_batch, inbox);
    batch->status = mem_write_now(batch->manifest, batch->puts, batch->put_count, NULL);
    kv_mailbox_post(batch->reply, &batch->msg);
}

static void mem_write_post(struct kv_manifest *manifest, struct kv_manifest_batch *batch)
{
    (void)manifest;
    batch->inbox.run = batch_received;
    kv_mailbox_post(batch->reply, &batch->inbox);
}

static void scan_received(struct kv_msg *msg)
{
    struct kv_manifest_scan *scan = KV_CONTAINER_OF(msg, struct kv_manifest_scan, inbox);
    const struct mem_manifest *mem = mem_of(scan->manifest);
    const uint8_t *start = scan->start != NULL ? scan->start : scan->prefix;
    uint32_t at =
        lower_bound(mem, start, scan->start != NULL ? scan->start_bytes : scan->prefix_bytes);
    struct kv_manifest_put record;
    while (record_at(mem, at, scan->prefix, scan->prefix_bytes, &record) &&
           kv_manifest_scan_add(scan, &record))
        at++;
    scan->status = KV_OK;
    kv_mailbox_post(scan->reply, &scan->msg);
}

static void mem_scan_post(struct kv_manifest *manifest, struct kv_manifest_scan *scan)
{
    (void)manifest;
    scan->inbox.run = scan_received;
    kv_mailbox_post(scan->reply, &scan->inbox);
}

static kv_status mem_scan_now(struct kv_manifest *manifest, const uint8_t *prefix,
                              uint32_t prefix_bytes, kv_manifest_visit_fn *visit, void *context,
                              struct kv_error *err)
{
    const struct mem_manifest *mem = mem_of(manifest);
    struct kv_manifest_put record;
    kv_status status = KV_OK;
    (void)err;
    for (uint32_t at = lower_bound(mem, prefix, prefix_bytes);
         status == KV_OK && record_at(mem, at, prefix, prefix_bytes, &record); at++)
        status = visit(context, &record);
    return status;
}

static struct kv_manifest_stats mem_stats(struct kv_manifest *manifest)
{
    const struct mem_manifest *mem = mem_of(manifest);
    return (struct kv_manifest_stats){
        .batches = mem->batches, .syncs = mem->batches, .records = mem->count};
}

static const struct kv_manifest_ops mem_ops = {
    .close = mem_close,
    .write_post = mem_write_post,
    .scan_post = mem_scan_post,
    .write_now = mem_write_now,
    .scan_now = mem_scan_now,
    .stats = mem_stats,
};

struct kv_manifest *mem_manifest_create(void)
{
    struct mem_manifest *mem = calloc(1, sizeof(*mem));
    assert(mem != NULL);
    mem->manifest.ops = &mem_ops;
    return &mem->manifest;
}
