/*
 * PurgeModel: what another model left is dropped now, not when its time is up.
 *
 * A checkpoint of a model that is not served is never matched; it only keeps its place.  The reader
 * thread brings the records of trees a buffer at a time; checkpoints that are asked for are noted,
 * a bounded number, then dropped from their trees like everything else that goes, with the cause
 * MODEL_CHANGED, and the scan goes on.  A tree that a call works on is waited for.  The answer
 * comes when all removals are durable; cut short, it may be repeated.
 *
 * A model is named by the start of its fingerprint, of which a checkpoint's record holds 8 bytes.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"
#include "kvstore/format/manifest_record.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define SCAN_BYTES (128u << 10) /* Holds the largest record. */
#define SCAN_RECORDS 2048u
#define ROUND_MAX 1024u /* Checkpoints noted before they are dropped. */

struct purge_item {
    struct kv_session_id tree;
    struct kv_checkpoint_id id;
};

struct purge {
    struct shard *shard;
    struct flow *flow;
    struct purge *next;
    struct kv_manifest_scan scan;
    uint8_t prefix[1];
    uint8_t start[KV_RECORD_KEY_MAX + 1];
    uint8_t *buf;
    struct purge_item *items; /* Of this round. */
    uint32_t item_count, item_next;
    bool waiting; /* For the session of the next item to be at rest. */
    bool scanned; /* All records were seen. */
    /* Of the session that is counted (dry run): pages of checkpoints that would go. */
    struct kv_session_id counted;
    uint64_t *uids;
    uint32_t uid_count, uid_capacity;
    struct request_purge *out;
};

static void scan_post(struct purge *purge);
static void drop_next(struct purge *purge);

/* ---- the end ---- */

static void purge_free(struct purge *purge)
{
    struct purge **link = &purge->shard->purges;
    while (*link != NULL && *link != purge)
        link = &(*link)->next;
    if (*link == purge) *link = purge->next;
    free(purge->buf);
    free(purge->items);
    free(purge->uids);
    free(purge);
}

static void purge_end(struct purge *purge, kv_status status)
{
    struct flow *flow = purge->flow;
    flow->req->out.purge = purge->out;
    purge_free(purge);
    if (status == KV_IO)
        flow_fail(flow, KV_REASON_SSD_READ_ONLY, "manifest", NULL, NULL);
    else if (status != KV_OK)
        flow_fail_status(flow, status);
    flow_finish(flow);
}

static void purge_durable(void *context, kv_status status)
{
    purge_end(context, status == KV_OK ? KV_OK : KV_IO);
}

static void purge_seal(struct purge *purge)
{
    struct kv_batch *batch = purge->out->dry_run ? NULL : kv_batch_create(purge->shard->store);
    if (purge->out->dry_run || batch == NULL) {
        purge_end(purge, purge->out->dry_run ? KV_OK : KV_NOMEM);
        return;
    }
    kv_batch_barrier(batch);
    kv_batch_post(batch, purge_durable, purge);
}

/* ---- counting ---- */

static int compare_uids(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* A page that two checkpoints list is one page. */
static void count_pages(struct purge *purge)
{
    uint64_t last = 0;
    if (purge->uid_count > 0)
        qsort(purge->uids, purge->uid_count, sizeof(*purge->uids), compare_uids);
    for (uint32_t i = 0; i < purge->uid_count; i++) {
        if (i == 0 || purge->uids[i] != last) purge->out->pages++;
        last = purge->uids[i];
    }
    purge->uid_count = 0;
}

static kv_status note_pages(struct purge *purge, const struct kv_record_node *record)
{
    const uint32_t need = purge->uid_count + record->page_count;
    if (need > purge->uid_capacity) {
        const uint32_t capacity = KV_MAX(need, KV_MAX(2 * purge->uid_capacity, 256u));
        uint64_t *uids = realloc(purge->uids, capacity * sizeof(*uids));
        if (uids == NULL) return KV_NOMEM;
        purge->uids = uids;
        purge->uid_capacity = capacity;
    }
    for (uint32_t i = 0; i < record->page_count; i++)
        purge->uids[purge->uid_count++] = kv_load64(record->page_uids + 8u * i);
    return KV_OK;
}

static struct request_purge_model *model_of(struct purge *purge, uint64_t tag)
{
    struct request_purge *out = purge->out;
    for (uint32_t i = 0; i < out->model_count; i++)
        if (out->models[i].tag == tag) return &out->models[i];
    if (out->model_count == KV_PURGE_MODELS_MAX) return &out->models[KV_PURGE_MODELS_MAX - 1];
    struct request_purge_model *model = &out->models[out->model_count++];
    model->tag = tag;
    model->is_served = tag == kv_index_model_tag(purge->shard->store->index);
    return model;
}

/* By the digits that were said; the bytes of a tag are those of the fingerprint. */
static bool has_digits(const struct request_in *in, uint64_t tag)
{
    static const char digits[] = "0123456789abcdef";
    uint8_t bytes[8];
    kv_store64(bytes, tag);
    for (uint32_t i = 0; i < KV_MIN(in->u.purge.digit_count, 16u); i++) {
        const uint8_t nibble = i % 2 == 0 ? bytes[i / 2] >> 4 : bytes[i / 2] & 15;
        if (in->u.purge.digits[i] != digits[nibble]) return false;
    }
    return true;
}

static bool is_asked(const struct purge *purge, uint64_t tag)
{
    if (tag == kv_index_model_tag(purge->shard->store->index)) return false;
    return has_digits(&purge->flow->req->in, tag);
}

static bool names_served(const struct flow *flow)
{
    return flow->req->in.u.purge.digit_count > 0 &&
           has_digits(&flow->req->in, kv_index_model_tag(flow->shard->store->index));
}

static kv_status take_record(struct purge *purge, const struct kv_manifest_put *put)
{
    struct kv_record_node record;
    if (put->key_bytes != 34 || put->key[17] != 'N') return KV_OK;
    if (kv_record_node_decode(put->value, put->value_bytes, &record) != KV_OK) return KV_OK;
    struct request_purge_model *model = model_of(purge, record.model_tag);
    model->checkpoints++;
    if (!is_asked(purge, record.model_tag)) return KV_OK;
    model->is_asked = true;
    if (purge->out->dry_run) {
        if (!kv_id_equal(purge->counted.bytes, put->key + 1)) count_pages(purge);
        memcpy(purge->counted.bytes, put->key + 1, sizeof(purge->counted.bytes));
        purge->out->checkpoints++;
        return note_pages(purge, &record);
    }
    struct purge_item *item = &purge->items[purge->item_count++];
    memcpy(item->tree.bytes, put->key + 1, sizeof(item->tree.bytes));
    item->id = record.id;
    return KV_OK;
}

static void scanned(struct kv_msg *msg)
{
    struct purge *purge = KV_CONTAINER_OF(msg, struct purge, scan.msg);
    struct kv_manifest_put put, last = {0};
    uint32_t offset = 0;
    kv_status status = purge->scan.status;
    purge->shard->store->operations--;
    if (flow_cancelled(purge->flow)) {
        purge_end(purge, KV_OK);
        return;
    }
    while (status == KV_OK && purge->item_count < ROUND_MAX &&
           kv_manifest_scan_next(&purge->scan, &offset, &put)) {
        last = put;
        status = take_record(purge, &put);
    }
    if (status != KV_OK) {
        purge_end(purge, status);
        return;
    }
    purge->scanned = !purge->scan.more && purge->item_count < ROUND_MAX;
    if (last.key != NULL)
        purge->scan.start_bytes =
            kv_manifest_scan_behind(&last, purge->start, sizeof(purge->start));
    if (purge->scanned) count_pages(purge);
    drop_next(purge);
}

static void scan_post(struct purge *purge)
{
    struct kv_store *store = purge->shard->store;
    const uint32_t start_bytes = purge->scan.start_bytes;
    purge->prefix[0] = 'T';
    purge->scan = (struct kv_manifest_scan){
        .msg.run = scanned,
        .reply = store->options.mailbox,
        .prefix = purge->prefix,
        .prefix_bytes = sizeof(purge->prefix),
        .start = start_bytes == 0 ? NULL : purge->start,
        .start_bytes = start_bytes,
        .record_max = SCAN_RECORDS,
        .buf = purge->buf,
        .buf_bytes = SCAN_BYTES,
    };
    store->operations++;
    kv_manifest_scan_post(store->manifest, &purge->scan);
}

/* ---- dropping ---- */

static bool is_at_rest(const struct kv_tree *tree)
{
    for (const struct kv_session *at = kv_index_head_next(tree, NULL); at != NULL;
         at = kv_index_head_next(tree, at))
        if (at->busy != NULL || at->flows > 0 || at->deleting) return false;
    return tree->commits == 0 && tree->load != KV_LOAD_RUNNING;
}

static void drop_item(struct purge *purge, struct kv_session *session)
{
    struct shard *shard = purge->shard;
    struct kv_store *store = shard->store;
    struct kv_node *node = kv_index_node_find(session, &purge->items[purge->item_next].id);
    const uint64_t before = store->counters.nodes_dropped;
    const uint32_t freeing = store->freeing;
    /* It went meanwhile, or with the one above it. */
    if (node == NULL || !node->foreign) return;
    shard_before_drop(session, node);
    kv_store_drop_node(store, node, KV_REASON_MODEL_CHANGED);
    purge->out->checkpoints += store->counters.nodes_dropped - before;
    purge->out->pages += store->freeing - freeing;
}

static void item_loaded(void *context, struct kv_session *session, kv_status status)
{
    struct purge *purge = context;
    /* What came for it meanwhile waited for the same load. */
    flow_wake_loaded(session, status);
    if (status != KV_OK) {
        purge_end(purge, status);
        return;
    }
    drop_next(purge);
}

/* False: it goes on later. */
static bool drop_one(struct purge *purge)
{
    struct shard *shard = purge->shard;
    const struct kv_session_id *id = &purge->items[purge->item_next].tree;
    struct kv_session *session = kv_index_tree_session(shard->store->index, id);
    if (session == NULL) return true; /* It went, or there is no memory: it may be repeated. */
    if (!is_at_rest(session->tree)) {
        purge->waiting = true;
        return false;
    }
    if (session->tree->load == KV_LOAD_NONE) {
        kv_store_load_start(shard->store, session, item_loaded, purge);
        return false;
    }
    drop_item(purge, session);
    return true;
}

static void drop_next(struct purge *purge)
{
    purge->waiting = false;
    if (flow_cancelled(purge->flow)) {
        purge_end(purge, KV_OK);
        return;
    }
    for (; purge->item_next < purge->item_count; purge->item_next++)
        if (!drop_one(purge)) return;
    purge->item_count = purge->item_next = 0;
    if (purge->scanned)
        purge_seal(purge);
    else
        scan_post(purge);
}

void purge_tick(struct shard *shard)
{
    struct purge *next = NULL;
    for (struct purge *purge = shard->purges; purge != NULL; purge = next) {
        next = purge->next;
        if (purge->waiting) drop_next(purge);
    }
}

/* ---- the call ---- */

void flow_purge_model(struct flow *flow)
{
    struct request *req = flow->req;
    struct kv_arena *arena = req->arena;
    if (names_served(flow)) {
        flow_fail(flow, KV_REASON_MODEL_IN_USE, "model", NULL, req->in.u.purge.digits);
        flow_finish(flow);
        return;
    }
    struct purge *purge = calloc(1, sizeof(*purge));
    struct request_purge *out = kv_arena_alloc(arena, sizeof(*out));
    if (out != NULL)
        *out = (struct request_purge){.dry_run = req->in.u.purge.dry_run,
                                      .page_bytes = flow->shard->layout->page_bytes};
    if (purge != NULL) {
        purge->buf = malloc(SCAN_BYTES);
        purge->items = malloc(sizeof(*purge->items) * ROUND_MAX);
    }
    if (purge == NULL || out == NULL || purge->buf == NULL || purge->items == NULL) {
        if (purge != NULL) {
            free(purge->buf);
            free(purge->items);
        }
        free(purge);
        flow_fail_status(flow, KV_NOMEM);
        flow_finish(flow);
        return;
    }
    purge->shard = flow->shard;
    purge->flow = flow;
    purge->out = out;
    purge->next = flow->shard->purges;
    flow->shard->purges = purge;
    scan_post(purge);
}
