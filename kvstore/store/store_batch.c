/*
 * Manifest changes that become durable as one synced write.
 *
 * A batch copies every key and value, so its callers may change the objects at once.  SSD pages
 * named by kv_batch_free_ssd are given back only when the batch is durable: space is never reused
 * while a record still points to it.
 *
 * Every batch has a number, in a record of its own ("C").  What the writer answered is noted in the
 * file `acknowledged` before anybody is told (store_note.c), one note for all that were answered
 * since the last one.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/format/manifest_record.h"
#include "kvstore/store/store_internal.h"
#include "kvstore/tier/tier_ssd.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define PUTS_FIRST 16u /* The first is the batch's number. */

struct kv_batch {
    struct kv_manifest_batch manifest;
    struct kv_store *store;
    struct kv_manifest_put *puts;
    uint32_t put_count, put_capacity;
    uint32_t *freed;
    uint32_t freed_count, freed_capacity;
    bool removes; /* Holds a deletion. */
    kv_batch_done_fn *done;
    void *context;
    uint64_t number;
    uint8_t commit_key[KV_RECORD_KEY_MAX], commit_value[KV_RECORD_COMMIT_BYTES];
    struct kv_batch *next;
};

struct kv_batch *kv_batch_create(struct kv_store *store)
{
    struct kv_batch *batch = calloc(1, sizeof(*batch));
    struct kv_manifest_put *puts = malloc(PUTS_FIRST * sizeof(*puts));
    if (batch == NULL || puts == NULL) {
        free(batch);
        free(puts);
        return NULL;
    }
    batch->store = store;
    batch->puts = puts;
    batch->put_capacity = PUTS_FIRST;
    puts[batch->put_count++] = (struct kv_manifest_put){
        .key = batch->commit_key,
        .key_bytes = kv_key_commit(batch->commit_key),
        .value = batch->commit_value, /* When it is posted. */
        .value_bytes = sizeof(batch->commit_value),
    };
    return batch;
}

void kv_batch_discard(struct kv_batch *batch)
{
    if (batch == NULL) return;
    batch->store->freeing -= batch->freed_count;
    for (uint32_t i = 1; i < batch->put_count; i++)
        free((void *)(uintptr_t)batch->puts[i].key); /* One block holds key and value. */
    free(batch->puts);
    free(batch->freed);
    free(batch);
}

struct kv_batch *kv_store_dead_batch(struct kv_store *store)
{
    if (store->dead == NULL) store->dead = kv_batch_create(store);
    return store->dead;
}

static kv_status batch_put(struct kv_batch *batch, const uint8_t *key, uint32_t key_bytes,
                           const uint8_t *value, uint32_t value_bytes)
{
    if (batch->put_count == batch->put_capacity) {
        const uint32_t capacity = 2 * batch->put_capacity;
        struct kv_manifest_put *puts = realloc(batch->puts, capacity * sizeof(*puts));
        if (puts == NULL) return KV_NOMEM;
        batch->puts = puts;
        batch->put_capacity = capacity;
    }
    uint8_t *block = malloc((size_t)key_bytes + value_bytes);
    if (block == NULL) return KV_NOMEM;
    memcpy(block, key, key_bytes);
    if (value_bytes > 0) memcpy(block + key_bytes, value, value_bytes);
    batch->removes |= value == NULL;
    batch->puts[batch->put_count++] = (struct kv_manifest_put){
        .key = block,
        .key_bytes = key_bytes,
        .value = value == NULL ? NULL : block + key_bytes,
        .value_bytes = value_bytes,
    };
    return KV_OK;
}

kv_status kv_batch_session(struct kv_batch *batch, const struct kv_session *session)
{
    struct kv_record_session record = {
        .user = session->user->id,
        .kind = session->kind,
        .created_ms = session->created_ms,
        .used_ms = session->used_ms,
        .ttl_ms = session->ttl_ms,
        .epoch = session->epoch,
        .has_head = session->has_head,
        .head = session->head_id,
        .head_tokens = session->head_tokens,
        .claimed_tokens = session->claimed_tokens,
        .checkpoints =
            session->load == KV_LOAD_DONE ? session->node_count : session->recorded_nodes,
    };
    uint8_t key[KV_RECORD_KEY_MAX], value[KV_RECORD_SESSION_MAX];
    assert(strlen(session->name) <= KV_SESSION_NAME_MAX);
    assert(strlen(session->parent_name) <= KV_SESSION_NAME_MAX);
    memcpy(record.name, session->name, strlen(session->name));
    memcpy(record.parent_name, session->parent_name, strlen(session->parent_name));
    const uint32_t key_bytes = kv_key_session(&session->id, key);
    return batch_put(batch, key, key_bytes, value, kv_record_session_encode(&record, value));
}

kv_status kv_batch_user(struct kv_batch *batch, const struct kv_user *user, const char *name)
{
    struct kv_record_user record = {0};
    uint8_t key[KV_RECORD_KEY_MAX], value[KV_RECORD_USER_MAX];
    assert(strlen(name) <= KV_USER_NAME_MAX);
    memcpy(record.name, name, strlen(name));
    memcpy(record.salt, user->salt, sizeof(record.salt));
    const uint32_t key_bytes = kv_key_user(&user->id, key);
    return batch_put(batch, key, key_bytes, value, kv_record_user_encode(&record, value));
}

kv_status kv_batch_node(struct kv_batch *batch, const struct kv_node *node)
{
    struct kv_index *index = batch->store->index;
    uint8_t key[KV_RECORD_KEY_MAX];
    uint8_t *uids = malloc(8u * KV_MAX(node->page_count, 1u));
    uint8_t *value = malloc(kv_record_node_max(node->page_count));
    kv_status status = KV_NOMEM;
    if (uids != NULL && value != NULL) {
        for (uint32_t i = 0; i < node->page_count; i++)
            kv_store64(uids + 8u * i, kv_index_page(index, node->pages[i])->uid);
        struct kv_record_node record = {
            .id = node->id,
            .has_parent = node->parent != NULL,
            .model_tag = kv_index_model_tag(index),
            .kernels = node->kernels,
            .tokens = node->tokens,
            .digest = node->digest,
            .kind = node->kind,
            .created_ms = node->created_ms,
            .used_ms = node->used_ms,
            .replay_count = node->replay_count,
            .page_count = node->page_count,
            .page_uids = uids,
        };
        if (node->parent != NULL) record.parent = node->parent->id;
        memcpy(record.replays, node->replays, sizeof(record.replays));
        const uint32_t key_bytes = kv_key_node(&node->session->id, &node->id, key);
        status = batch_put(batch, key, key_bytes, value, kv_record_node_encode(&record, value));
    }
    free(uids);
    free(value);
    return status;
}

kv_status kv_batch_page(struct kv_batch *batch, const struct kv_page *page)
{
    const struct kv_record_page record = {
        .uid = page->uid,
        .ssd_page = page->ssd_page,
        .generation = page->generation,
        .position = page->position,
        .count = page->count,
        .tag = page->tag,
    };
    uint8_t key[KV_RECORD_KEY_MAX], value[KV_RECORD_PAGE_MAX];
    const uint32_t key_bytes = kv_key_page(&page->session->id, page->uid, key);
    return batch_put(batch, key, key_bytes, value, kv_record_page_encode(&record, value));
}

kv_status kv_batch_delete_node(struct kv_batch *batch, const struct kv_session_id *session,
                               const struct kv_checkpoint_id *id)
{
    uint8_t key[KV_RECORD_KEY_MAX];
    const uint32_t key_bytes = kv_key_node(session, id, key);
    return batch_put(batch, key, key_bytes, NULL, 0);
}

kv_status kv_batch_delete_page(struct kv_batch *batch, const struct kv_session_id *session,
                               uint64_t uid)
{
    uint8_t key[KV_RECORD_KEY_MAX];
    const uint32_t key_bytes = kv_key_page(session, uid, key);
    return batch_put(batch, key, key_bytes, NULL, 0);
}

kv_status kv_batch_delete_session(struct kv_batch *batch, const struct kv_session_id *session)
{
    uint8_t key[KV_RECORD_KEY_MAX];
    const uint32_t key_bytes = kv_key_session(session, key);
    return batch_put(batch, key, key_bytes, NULL, 0);
}

kv_status kv_batch_free_ssd(struct kv_batch *batch, uint32_t ssd_page)
{
    if (batch->freed_count == batch->freed_capacity) {
        const uint32_t capacity = batch->freed_capacity == 0 ? 16 : 2 * batch->freed_capacity;
        uint32_t *freed = realloc(batch->freed, capacity * sizeof(*freed));
        if (freed == NULL) return KV_NOMEM;
        batch->freed = freed;
        batch->freed_capacity = capacity;
    }
    batch->freed[batch->freed_count++] = ssd_page;
    batch->store->freeing++;
    return KV_OK;
}

static void batch_tell(struct kv_batch *batch)
{
    struct kv_store *store = batch->store;
    const kv_status status = batch->manifest.status;
    if (status == KV_OK) {
        for (uint32_t i = 0; i < batch->freed_count; i++)
            kv_ssd_free(store->ssd, batch->freed[i]);
    } else {
        kv_log(store->options.log, KV_LOG_ERROR, "manifest_write_failed", "records=%u",
               batch->put_count);
    }
    assert(store->operations > 0);
    store->operations--;
    if (batch->removes) store->removals--;
    if (batch->done != NULL) batch->done(batch->context, status);
    kv_batch_discard(batch);
}

static void tell_noted(struct kv_store *store)
{
    struct kv_batch *batch = store->noting.first;
    store->noting = (struct kv_batches){0};
    while (batch != NULL) {
        struct kv_batch *next = batch->next;
        batch_tell(batch);
        batch = next;
    }
}

void kv_store_tell(struct kv_store *store)
{
    uint64_t number = 0;
    if (store->answered.first == NULL || store->noting.first != NULL) return;
    store->noting = store->answered;
    store->answered = (struct kv_batches){0};
    for (const struct kv_batch *batch = store->noting.first; batch != NULL; batch = batch->next)
        if (batch->manifest.status == KV_OK) number = batch->number;
    if (number == 0 || !kv_note_start(store, number, tell_noted)) tell_noted(store);
}

static void batch_answered(struct kv_msg *msg)
{
    struct kv_batch *batch = KV_CONTAINER_OF(msg, struct kv_batch, manifest.msg);
    struct kv_batches *answered = &batch->store->answered;
    batch->next = NULL;
    if (answered->first == NULL)
        answered->first = batch;
    else
        answered->last->next = batch;
    answered->last = batch;
}

static void number_next(struct kv_store *store, uint8_t value[KV_RECORD_COMMIT_BYTES])
{
    const struct kv_record_commit record = {.number = ++store->commit};
    (void)kv_record_commit_encode(&record, value);
}

kv_status kv_store_commit_now(struct kv_store *store, const struct kv_manifest_put *puts,
                              uint32_t put_count, struct kv_error *err)
{
    uint8_t key[KV_RECORD_KEY_MAX], value[KV_RECORD_COMMIT_BYTES];
    struct kv_manifest_put *all = malloc((put_count + 1u) * sizeof(*all));
    if (all == NULL) return KV_FAIL(err, KV_NOMEM, "write %u records", put_count);
    number_next(store, value);
    all[0] = (struct kv_manifest_put){key, kv_key_commit(key), value, sizeof(value)};
    if (put_count > 0) memcpy(all + 1, puts, put_count * sizeof(*all));
    const kv_status status = kv_manifest_write_now(store->manifest, all, put_count + 1, err);
    free(all);
    return status;
}

void kv_batch_post(struct kv_batch *batch, kv_batch_done_fn *done, void *context)
{
    struct kv_store *store = batch->store;
    /* Removals decided before this batch was made durable before it, too. */
    if (store->dead != NULL && store->dead != batch) {
        struct kv_batch *dead = store->dead;
        store->dead = NULL;
        kv_batch_post(dead, NULL, NULL);
    }
    if (KV_PLANTED(store, REUSE_BEFORE_DELETE)) {
        store->freeing -= batch->freed_count;
        while (batch->freed_count > 0)
            kv_ssd_free(store->ssd, batch->freed[--batch->freed_count]);
    }
    if (batch->removes) store->removals++;
    batch->done = done;
    batch->context = context;
    number_next(store, batch->commit_value);
    batch->number = store->commit;
    batch->manifest.msg.run = batch_answered;
    batch->manifest.reply = batch->store->options.mailbox;
    batch->manifest.puts = batch->puts;
    batch->manifest.put_count = batch->put_count;
    batch->store->operations++;
    kv_manifest_write_post(batch->store->manifest, &batch->manifest);
}
