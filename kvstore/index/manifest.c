/*
 * The door to the manifest: hands each call to whoever keeps the records, and knows the form in
 * which a scan brings them.
 */

#include "kvstore/index/manifest.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <string.h>

#define RECORD_HEAD_BYTES 8u

void kv_manifest_close(struct kv_manifest *manifest)
{
    if (manifest != NULL) manifest->ops->close(manifest);
}

void kv_manifest_write_post(struct kv_manifest *manifest, struct kv_manifest_batch *batch)
{
    assert(batch->reply != NULL);
    assert(batch->msg.run != NULL);
    batch->next = NULL;
    batch->manifest = manifest;
    manifest->ops->write_post(manifest, batch);
}

void kv_manifest_scan_post(struct kv_manifest *manifest, struct kv_manifest_scan *scan)
{
    assert(scan->reply != NULL);
    assert(scan->msg.run != NULL);
    assert(scan->record_max > 0);
    scan->manifest = manifest;
    scan->used_bytes = 0;
    scan->record_count = 0;
    scan->more = false;
    manifest->ops->scan_post(manifest, scan);
}

kv_status kv_manifest_write_now(struct kv_manifest *manifest, const struct kv_manifest_put *puts,
                                uint32_t put_count, struct kv_error *err)
{
    return manifest->ops->write_now(manifest, puts, put_count, err);
}

kv_status kv_manifest_scan_now(struct kv_manifest *manifest, const uint8_t *prefix,
                               uint32_t prefix_bytes, kv_manifest_visit_fn *visit, void *context,
                               struct kv_error *err)
{
    return manifest->ops->scan_now(manifest, prefix, prefix_bytes, visit, context, err);
}

struct kv_manifest_stats kv_manifest_stats(struct kv_manifest *manifest)
{
    return manifest->ops->stats(manifest);
}

void kv_manifest_refuse(struct kv_manifest *manifest)
{
    if (manifest->ops->refuse != NULL) manifest->ops->refuse(manifest);
}

bool kv_manifest_scan_add(struct kv_manifest_scan *scan, const struct kv_manifest_put *record)
{
    const uint64_t bytes = (uint64_t)RECORD_HEAD_BYTES + record->key_bytes + record->value_bytes;
    scan->more =
        scan->record_count == scan->record_max || bytes > scan->buf_bytes - scan->used_bytes;
    if (scan->more) return false;
    uint8_t *at = scan->buf + scan->used_bytes;
    kv_store32(at, record->key_bytes);
    kv_store32(at + 4, record->value_bytes);
    memcpy(at + RECORD_HEAD_BYTES, record->key, record->key_bytes);
    memcpy(at + RECORD_HEAD_BYTES + record->key_bytes, record->value, record->value_bytes);
    scan->used_bytes += (uint32_t)bytes;
    scan->record_count++;
    return true;
}

bool kv_manifest_scan_next(const struct kv_manifest_scan *scan, uint32_t *offset,
                           struct kv_manifest_put *ret_record)
{
    if (*offset >= scan->used_bytes) return false;
    const uint8_t *at = scan->buf + *offset;
    const uint32_t key_bytes = kv_load32(at);
    const uint32_t value_bytes = kv_load32(at + 4);
    *ret_record = (struct kv_manifest_put){
        .key = at + RECORD_HEAD_BYTES,
        .key_bytes = key_bytes,
        .value = at + RECORD_HEAD_BYTES + key_bytes,
        .value_bytes = value_bytes,
    };
    *offset += RECORD_HEAD_BYTES + key_bytes + value_bytes;
    assert(*offset <= scan->used_bytes);
    return true;
}

uint32_t kv_manifest_scan_behind(const struct kv_manifest_put *last, uint8_t *start, uint32_t room)
{
    uint32_t bytes = room;
    if (last->key_bytes < room) {
        memcpy(start, last->key, last->key_bytes);
        start[last->key_bytes] = 0; /* The next key there can be. */
        return last->key_bytes + 1;
    }
    memcpy(start, last->key, room);
    while (bytes > 1 && ++start[bytes - 1] == 0)
        bytes--;
    return bytes;
}
