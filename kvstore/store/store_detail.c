/*
 * What of a session is only in its record: its name, its parent's, and where exactly its head is.
 *
 * A million entries are in memory without them.  Who uses a session has them read by the reader
 * thread, which takes some ten microseconds; behind what is on its way to the writer, where that
 * could be a newer record of it.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/store/store_internal.h"

#include <assert.h>
#include <stdlib.h>

struct detail {
    struct kv_manifest_scan scan;
    struct kv_store *store;
    kv_detail_done_fn *done;
    void *context;
    uint8_t key[KV_RECORD_KEY_MAX];
    uint8_t buf[KV_RECORD_SESSION_MAX + KV_RECORD_KEY_MAX + 8];
};

static void read_done(struct kv_msg *msg)
{
    struct detail *detail = KV_CONTAINER_OF(msg, struct detail, scan.msg);
    struct kv_record_session record;
    struct kv_manifest_put put;
    uint32_t offset = 0;
    kv_status status = detail->scan.status;
    if (status == KV_OK && detail->scan.record_count == 0)
        status = detail->scan.more ? KV_CORRUPT : KV_MISS; /* More: longer than one can be. */
    if (status == KV_OK && kv_manifest_scan_next(&detail->scan, &offset, &put))
        status = kv_record_session_decode(put.value, put.value_bytes, &record);
    detail->store->operations--;
    kv_detail_done_fn *done = detail->done;
    void *context = detail->context;
    free(detail);
    done(context, status, status == KV_OK ? &record : NULL);
}

static void written(void *context, kv_status status)
{
    struct detail *detail = context;
    (void)status; /* Of one that failed the old record is true. */
    kv_manifest_scan_post(detail->store->manifest, &detail->scan);
}

kv_status kv_store_record_start(struct kv_store *store, const struct kv_session_id *id, bool newest,
                                kv_detail_done_fn *done, void *context)
{
    struct kv_batch *barrier = NULL;
    struct detail *detail = calloc(1, sizeof(*detail));
    newest = newest && (store->batches > 0 || store->dead != NULL);
    if (newest) barrier = kv_batch_create(store);
    if (detail == NULL || (newest && barrier == NULL)) {
        free(detail);
        kv_batch_discard(barrier);
        return KV_NOMEM;
    }
    detail->store = store;
    detail->done = done;
    detail->context = context;
    detail->scan = (struct kv_manifest_scan){
        .msg.run = read_done,
        .reply = store->options.mailbox,
        .prefix = detail->key,
        .prefix_bytes = kv_key_session(id, detail->key),
        .record_max = 1,
        .buf = detail->buf,
        .buf_bytes = sizeof(detail->buf),
    };
    store->operations++;
    if (newest) {
        kv_batch_barrier(barrier);
        kv_batch_post(barrier, written, detail);
    } else {
        kv_manifest_scan_post(store->manifest, &detail->scan);
    }
    return KV_OK;
}

kv_status kv_store_detail_take(struct kv_store *store, struct kv_session *session,
                               const struct kv_record_session *record)
{
    if (session->has_details) return KV_OK; /* Somebody else asked, too. */
    if (!kv_index_session_detail(store->index, session, record->name, record->parent_name))
        return KV_NOMEM;
    session->has_head = record->has_head;
    session->head_id = record->head;
    session->claimed_tokens = record->claimed_tokens;
    session->has_origin = record->has_origin;
    session->origin_id = record->origin;
    session->origin_tokens = record->origin_tokens;
    return KV_OK;
}
