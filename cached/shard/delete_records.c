/*
 * Removal of a session: its records, read a part at a time, and the batch that takes them away.
 */

#include "cached/shard/delete_internal.h"

#include "kvstore/base/bytes.h"
#include "kvstore/format/manifest_record.h"
#include "kvstore/store/segments.h"

#include <string.h>

#define SCAN_RECORDS 2048u
#define PLANT_HELD_NS 20000000u

void removal_session_gone(void *context, kv_status status)
{
    struct removal *removal = context;
    struct shard *shard = removal->shard;
    struct kv_session *session = removal->session;
    if (status != KV_OK) {
        /* Its places were not freed: until a restart shows what became of it, it is as before. */
        removal_unrecorded(removal, status);
        return;
    }
    kv_log(shard->options.log, KV_LOG_INFO, "session_deleted", "checkpoints=%llu pages=%llu",
           (unsigned long long)removal->nodes, (unsigned long long)removal->pages);
    /* What left a tree that stays is not in the sum any more. */
    if (!removal->leaves)
        shard->store->checkpoints -= KV_MIN(removal->nodes, shard->store->checkpoints);
    shard->counters.sessions_deleted++;
    answers_forget_session(shard, &session->id);
    kv_index_session_remove(shard->store->index, session);
    removal->session = NULL;
    removal_next(removal);
}

void removal_count(struct removal *removal)
{
    removal->receipt.sessions++;
    removal->receipt.checkpoints += removal->nodes;
    removal->receipt.bytes += removal->pages * removal->shard->layout->page_bytes;
}

/* Of an erased user nothing is left, not even that. */
struct kv_record_deleted removal_record(const struct removal *removal)
{
    return (struct kv_record_deleted){
        .user = removal->session->user->id,
        .cause = removal->loss.cause == KV_REASON_QUOTA ? KV_REASON_QUOTA : KV_REASON_DELETED,
        .limit_of = removal->loss.limit_of,
        .limit = removal->loss.limit,
        .value = removal->loss.value,
        .removed_ms = kv_store_now_ms(removal->shard->store),
        .checkpoints = (uint32_t)KV_MIN(removal->nodes, (uint64_t)UINT32_MAX),
        .bytes = removal->pages * removal->shard->layout->page_bytes,
    };
}

static void records_read(struct removal *removal)
{
    removal_count(removal);
    if (removal->dry_run) {
        removal_let_go(removal);
        removal_next(removal);
        return;
    }
    struct kv_batch *batch = removal->batch;
    kv_status status = kv_batch_delete_session(batch, &removal->session->id);
    if (status == KV_OK)
        status = kv_batch_delete_old_branches(batch, removal->shard->store, &removal->session->id);
    const struct kv_record_deleted record = removal_record(removal);
    if (status == KV_OK && removal->user == NULL)
        status =
            kv_store_deleted_note(removal->shard->store, batch, &removal->session->id, &record);
    if (status != KV_OK) {
        removal_fail(removal, status);
        return;
    }
#ifdef CACHED_TEST_HOOKS
    if (KV_PLANTED(removal->shard->store, ACK_BEFORE_DELETE) && removal->user == NULL) {
        struct flow *flow = removal->flow;
        removal->flow = NULL;
        removal->held_ns = kv_clock_stopwatch_ns() + PLANT_HELD_NS;
        flow->req->out.receipt = removal->receipt;
        flow_finish(flow);
        return;
    }
#endif
    removal->batch = NULL; /* The store's from here on. */
    kv_batch_post(batch, removal_session_gone, removal);
}

#ifdef CACHED_TEST_HOOKS
/* The planted bug: answered long ago. */
void removal_post_held(struct removal *removal)
{
    struct kv_batch *batch = removal->batch;
    if (removal->held_ns == 0 || kv_clock_stopwatch_ns() < removal->held_ns) return;
    removal->held_ns = 0;
    removal->batch = NULL;
    kv_batch_post(batch, removal_session_gone, removal);
}
#endif

static kv_status take_record(struct removal *removal, const struct kv_manifest_put *put)
{
    struct kv_store *store = removal->shard->store;
    const struct kv_session_id *id = &removal->session->tree->id;
    struct kv_record_page page;
    struct kv_checkpoint_id checkpoint;
    if (put->key_bytes == 34 && put->key[17] == 'N') {
        memcpy(checkpoint.bytes, put->key + 18, sizeof(checkpoint.bytes));
        removal->nodes++;
        return removal->dry_run ? KV_OK : kv_batch_delete_node(removal->batch, id, &checkpoint);
    }
    if (put->key_bytes == KV_KEY_HISTORY_BYTES && put->key[17] == 'H')
        return removal->dry_run ? KV_OK : kv_batch_delete_history(removal->batch, id);
    if (put->key_bytes != 26 || put->key[17] != 'P') return KV_OK; /* Not one of ours. */
    uint64_t uid = 0;
    for (uint32_t i = 0; i < 8; i++)
        uid = uid << 8 | put->key[18 + i];
    kv_status status = removal->dry_run ? KV_OK : kv_batch_delete_page(removal->batch, id, uid);
    if (status != KV_OK || kv_record_page_decode(put->value, put->value_bytes, &page) != KV_OK ||
        !kv_store_segment_recorded(store, page.ssd_page))
        return status;
    removal->pages++;
    return removal->dry_run ? KV_OK : kv_batch_free_ssd(removal->batch, page.ssd_page);
}

static void scan_post(struct removal *removal);

static void scanned(struct kv_msg *msg)
{
    struct removal *removal = KV_CONTAINER_OF(msg, struct removal, scan.msg);
    struct kv_manifest_put put, last = {0};
    uint32_t offset = 0;
    kv_status status = removal->scan.status;
    removal->shard->store->operations--;
    if (flow_cancelled(removal->flow)) {
        removal_fail(removal, KV_OK);
        return;
    }
    while (status == KV_OK && kv_manifest_scan_next(&removal->scan, &offset, &put)) {
        last = put;
        status = take_record(removal, &put);
    }
    if (status != KV_OK) {
        removal_fail(removal, status);
    } else if (removal->scan.more && last.key != NULL) {
        removal->scan.start_bytes =
            kv_manifest_scan_behind(&last, removal->start, sizeof(removal->start));
        scan_post(removal);
    } else {
        records_read(removal);
    }
}

static void scan_post(struct removal *removal)
{
    struct kv_store *store = removal->shard->store;
    const uint32_t start_bytes = removal->scan.start_bytes;
    removal->scan = (struct kv_manifest_scan){
        .msg.run = scanned,
        .reply = store->options.mailbox,
        .prefix = removal->key,
        .prefix_bytes = kv_key_tree(&removal->session->tree->id, removal->key),
        .start = start_bytes == 0 ? NULL : removal->start,
        .start_bytes = start_bytes,
        .record_max = SCAN_RECORDS,
        .buf = removal->buf,
        .buf_bytes = REMOVAL_SCAN_BYTES,
    };
    store->operations++;
    kv_manifest_scan_post(store->manifest, &removal->scan);
}

static void removals_durable(void *context, kv_status status)
{
    struct removal *removal = context;
    if (status == KV_OK)
        scan_post(removal);
    else /* Nothing of this removal was written yet. */
        removal_unrecorded(removal, status == KV_IO ? KV_INVALID : status);
}

static void post_barrier(struct removal *removal, struct kv_batch *barrier)
{
    kv_batch_barrier(barrier);
    kv_batch_post(barrier, removals_durable, removal);
}

/* Reader and writer are two threads: no record may be seen whose removal is on its way, or its
 * place would be freed twice. */
void removal_read(struct removal *removal)
{
    struct kv_store *store = removal->shard->store;
    removal->nodes = removal->pages = 0;
    removal->leaves = false;
    removal->scan.start_bytes = 0;
    if (removal->dry_run) {
        scan_post(removal);
        return;
    }
    removal->batch = kv_batch_create(store);
    struct kv_batch *barrier = NULL;
    if (store->removals > 0 || store->dead != NULL) barrier = kv_batch_create(store);
    if (removal->batch == NULL || (barrier == NULL && (store->removals > 0 || store->dead != NULL)))
        removal_fail(removal, KV_NOMEM);
    else if (barrier != NULL)
        post_barrier(removal, barrier);
    else
        scan_post(removal);
}
