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
 *
 * Every batch carries the records of the segments whose places it takes or gives back
 * (store_segments.c), written when it is posted.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/format/manifest_record.h"
#include "kvstore/store/store_internal.h"
#include "kvstore/tier/tier_ssd.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define PUTS_FIRST 16u /* The first is the batch's number. */

/* A segment's record in a batch: its bytes are filled in when the batch is posted. */
struct batch_segment {
    uint32_t number;
    uint8_t *value;
};

struct kv_batch {
    struct kv_manifest_batch manifest;
    struct kv_store *store;
    struct kv_manifest_put *puts;
    uint32_t put_count, put_capacity;
    uint32_t *freed;
    uint32_t freed_count, freed_capacity;
    uint32_t *taken; /* Places that its page records name. */
    uint32_t taken_count, taken_capacity;
    struct batch_segment *segments;
    uint32_t segment_count, segment_capacity;
    uint32_t history_put; /* In puts: the last history; 0: none. */
    bool removes;         /* Holds a deletion. */
    bool is_barrier, sealed;
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
    free(batch->taken);
    free(batch->segments);
    free(batch);
}

struct kv_store *kv_batch_store(const struct kv_batch *batch)
{
    return batch->store;
}

struct kv_batch *kv_store_dead_batch(struct kv_store *store)
{
    if (store->dead == NULL) store->dead = kv_batch_create(store);
    return store->dead;
}

struct kv_batch *kv_store_take_removals(struct kv_store *store)
{
    struct kv_batch *dead = kv_store_dead_batch(store);
    store->dead = NULL;
    return dead;
}

/* *ret_value: where the copy of the value lies. */
static kv_status batch_put_at(struct kv_batch *batch, const uint8_t *key, uint32_t key_bytes,
                              const uint8_t *value, uint32_t value_bytes, uint8_t **ret_value)
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
    *ret_value = block + key_bytes;
    return KV_OK;
}

static kv_status batch_put(struct kv_batch *batch, const uint8_t *key, uint32_t key_bytes,
                           const uint8_t *value, uint32_t value_bytes)
{
    uint8_t *unused;
    return batch_put_at(batch, key, key_bytes, value, value_bytes, &unused);
}

kv_status kv_batch_put(struct kv_batch *batch, const struct kv_manifest_put *put)
{
    return batch_put(batch, put->key, put->key_bytes, put->value, put->value_bytes);
}

/* Room for one more of `size` bytes. */
static kv_status grow(void **array, uint32_t count, uint32_t *capacity, size_t size)
{
    if (count < *capacity) return KV_OK;
    const uint32_t more = *capacity == 0 ? 16 : 2 * *capacity;
    void *grown = realloc(*array, more * size);
    if (grown == NULL) return KV_NOMEM;
    *array = grown;
    *capacity = more;
    return KV_OK;
}

kv_status kv_batch_segment(struct kv_batch *batch, uint32_t number)
{
    for (uint32_t i = batch->segment_count; i-- > 0;)
        if (batch->segments[i].number == number) return KV_OK;
    const uint32_t bytes = kv_record_segment_bytes(kv_store_segment_pages(batch->store));
    uint8_t key[KV_RECORD_KEY_MAX];
    uint8_t *value = calloc(1, bytes);
    if (value == NULL) return KV_NOMEM;
    struct batch_segment *segment;
    kv_status status = grow((void **)&batch->segments, batch->segment_count,
                            &batch->segment_capacity, sizeof(*segment));
    if (status == KV_OK) {
        segment = &batch->segments[batch->segment_count];
        segment->number = number;
        status =
            batch_put_at(batch, key, kv_key_segment(number, key), value, bytes, &segment->value);
    }
    if (status == KV_OK) batch->segment_count++;
    free(value);
    return status;
}

kv_status kv_batch_doubt(struct kv_batch *batch)
{
    uint8_t key[KV_RECORD_KEY_MAX], value[KV_RECORD_DOUBT_BYTES];
    const uint32_t key_bytes = kv_key_doubt(key);
    return batch_put(batch, key, key_bytes, value, kv_record_doubt_encode(value));
}

/* All that the checkpoint needs is used when it is, also what those above it list: the segments
 * whose records do not know it yet get new ones. */
static kv_status batch_touch(struct kv_batch *batch, const struct kv_node *node)
{
    struct kv_store *store = batch->store;
    const uint64_t used_ms = node->used_ms;
    uint32_t last = UINT32_MAX;
    kv_status status = KV_OK;
    for (; status == KV_OK && node != NULL; node = node->parent) {
        for (uint32_t i = 0; status == KV_OK && i < node->page_count; i++) {
            const uint32_t ssd_page = kv_index_page(store->index, node->pages[i])->ssd_page;
            if (ssd_page == KV_SSD_PAGE_NONE) continue;
            const uint32_t number = kv_segments_number(store->segments, ssd_page);
            if (number == last) continue;
            last = number;
            if (kv_segments_touch(store->segments, number, used_ms))
                status = kv_batch_segment(batch, number);
        }
    }
    return status;
}

kv_status kv_batch_session(struct kv_batch *batch, const struct kv_session *session)
{
    batch->store->life_max_ms =
        KV_MAX(batch->store->life_max_ms, kv_index_session_ttl_ms(&session->entry));
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
        .checkpoints = session->recorded_nodes,
        .has_tree = !kv_id_equal(session->tree->id.bytes, session->id.bytes),
        .tree = session->tree->id,
        .has_origin = session->has_origin,
        .origin = session->origin_id,
        .origin_tokens = session->origin_tokens,
    };
    assert(session->has_details);
    uint8_t key[KV_RECORD_KEY_MAX], value[KV_RECORD_SESSION_MAX];
    assert(strlen(session->name) <= KV_SESSION_NAME_MAX);
    assert(strlen(session->parent_name) <= KV_SESSION_NAME_MAX);
    memcpy(record.name, session->name, strlen(session->name));
    memcpy(record.parent_name, session->parent_name, strlen(session->parent_name));
    const uint32_t key_bytes = kv_key_session(&session->id, key);
    return batch_put(batch, key, key_bytes, value, kv_record_session_encode(&record, value));
}

kv_status kv_batch_user(struct kv_batch *batch, struct kv_user *user, const char *name)
{
    struct kv_record_user record = {0};
    uint8_t key[KV_RECORD_KEY_MAX], value[KV_RECORD_USER_MAX];
    assert(strlen(name) <= KV_USER_NAME_MAX);
    memcpy(record.name, name, strlen(name));
    kv_status status = kv_keys_make(batch->store, user);
    if (status == KV_OK) status = kv_keys_seal_user(batch->store, user, &record);
    if (status != KV_OK) return status;
    const uint32_t key_bytes = kv_key_user(&user->id, key);
    status = batch_put(batch, key, key_bytes, value, kv_record_user_encode(&record, value));
    if (status != KV_OK || user->keys == NULL) return status;
    return kv_keys_put(batch, user, kv_keys_master(batch->store));
}

kv_status kv_batch_clock(struct kv_batch *batch, const struct kv_timeline *line)
{
    const struct kv_record_clock record = {.floor_ms = line->floor_ms,
                                           .before_ms = line->before_ms};
    uint8_t key[KV_RECORD_KEY_MAX], value[KV_RECORD_CLOCK_BYTES];
    const uint32_t key_bytes = kv_key_clock(key);
    return batch_put(batch, key, key_bytes, value, kv_record_clock_encode(&record, value));
}

kv_status kv_batch_node(struct kv_batch *batch, struct kv_node *node)
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
            .has_maker = !kv_id_equal(node->session->tree->id.bytes, node->session->id.bytes),
            .maker = node->session->id,
            .page_count = node->page_count,
            .page_uids = uids,
        };
        if (node->parent != NULL) record.parent = node->parent->id;
        memcpy(record.replays, node->replays, sizeof(record.replays));
        const uint32_t key_bytes = kv_key_node(&node->session->tree->id, &node->id, key);
        status = batch_put(batch, key, key_bytes, value, kv_record_node_encode(&record, value));
        if (status == KV_OK) status = batch_touch(batch, node);
        if (status == KV_OK) kv_index_node_recorded(node);
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
    kv_status status = grow((void **)&batch->taken, batch->taken_count, &batch->taken_capacity,
                            sizeof(*batch->taken));
    if (status == KV_OK)
        status =
            kv_batch_segment(batch, kv_segments_number(batch->store->segments, page->ssd_page));
    if (status != KV_OK) return status;
    const uint32_t key_bytes = kv_key_page(&page->session->tree->id, page->uid, key);
    status = batch_put(batch, key, key_bytes, value, kv_record_page_encode(&record, value));
    if (status == KV_OK) batch->taken[batch->taken_count++] = page->ssd_page;
    return status;
}

kv_status kv_batch_delete_node(struct kv_batch *batch, const struct kv_session_id *tree,
                               const struct kv_checkpoint_id *id)
{
    uint8_t key[KV_RECORD_KEY_MAX];
    const uint32_t key_bytes = kv_key_node(tree, id, key);
    return batch_put(batch, key, key_bytes, NULL, 0);
}

kv_status kv_batch_delete_page(struct kv_batch *batch, const struct kv_session_id *tree,
                               uint64_t uid)
{
    uint8_t key[KV_RECORD_KEY_MAX];
    const uint32_t key_bytes = kv_key_page(tree, uid, key);
    return batch_put(batch, key, key_bytes, NULL, 0);
}

kv_status kv_batch_delete_session(struct kv_batch *batch, const struct kv_session_id *session)
{
    uint8_t key[KV_RECORD_KEY_MAX];
    const uint32_t key_bytes = kv_key_session(session, key);
    return batch_put(batch, key, key_bytes, NULL, 0);
}

kv_status kv_batch_delete_user(struct kv_batch *batch, const struct kv_user_id *user)
{
    uint8_t key[KV_RECORD_KEY_MAX];
    const uint32_t key_bytes = kv_key_user(user, key);
    struct kv_user *known = kv_index_user_find(batch->store->index, user);
    const kv_status status = batch_put(batch, key, key_bytes, NULL, 0);
    return status != KV_OK || known == NULL ? status : kv_keys_delete(batch, known);
}

kv_status kv_batch_quarantine(struct kv_batch *batch, const struct kv_record_quarantine *record)
{
    uint8_t key[KV_KEY_QUARANTINE_BYTES], value[KV_RECORD_QUARANTINE_MAX];
    const uint32_t key_bytes = kv_key_quarantine(record->ssd_page, key);
    return batch_put(batch, key, key_bytes, value, kv_record_quarantine_encode(record, value));
}

/* A tree goes leaf by leaf, in one batch: the value before is replaced, not followed. */
kv_status kv_batch_history(struct kv_batch *batch, const struct kv_session_id *session,
                           const struct kv_history *history)
{
    uint8_t key[KV_KEY_HISTORY_BYTES], value[KV_RECORD_HISTORY_MAX];
    const uint32_t key_bytes = kv_key_history(session, key);
    const uint32_t value_bytes = kv_record_history_encode(history, value);
    struct kv_manifest_put *last = &batch->puts[batch->history_put];
    const bool again = batch->history_put != 0 && last->key_bytes == key_bytes &&
                       memcmp(last->key, key, key_bytes) == 0;
    const kv_status status = batch_put(batch, key, key_bytes, value, value_bytes);
    if (status != KV_OK) return status;
    if (!again) {
        batch->history_put = batch->put_count - 1;
        return KV_OK;
    }
    last = &batch->puts[batch->history_put]; /* The array may have moved. */
    free((void *)(uintptr_t)last->key);
    *last = batch->puts[--batch->put_count];
    return KV_OK;
}

kv_status kv_batch_delete_history(struct kv_batch *batch, const struct kv_session_id *session)
{
    uint8_t key[KV_KEY_HISTORY_BYTES];
    const uint32_t key_bytes = kv_key_history(session, key);
    return batch_put(batch, key, key_bytes, NULL, 0);
}

kv_status kv_batch_free_ssd(struct kv_batch *batch, uint32_t ssd_page)
{
    kv_status status = grow((void **)&batch->freed, batch->freed_count, &batch->freed_capacity,
                            sizeof(*batch->freed));
    if (status == KV_OK)
        status = kv_batch_segment(batch, kv_segments_number(batch->store->segments, ssd_page));
    if (status != KV_OK) return status;
    batch->freed[batch->freed_count++] = ssd_page;
    batch->store->freeing++;
    return KV_OK;
}

/* It is not there after all, or nobody knows: the table of segments says what records said before.
 * That may stand in segment records of other batches by now, so the next start counts again. */
static void batch_unseal(struct kv_batch *batch)
{
    struct kv_store *store = batch->store;
    if (!batch->sealed) return;
    for (uint32_t i = 0; i < batch->freed_count; i++)
        kv_segments_set(store->segments, batch->freed[i], true);
    for (uint32_t i = 0; i < batch->taken_count; i++)
        kv_segments_set(store->segments, batch->taken[i], false);
    store->must_resume = true;
}

static void batch_tell(struct kv_batch *batch)
{
    struct kv_store *store = batch->store;
    const kv_status status = batch->manifest.status;
    if (status == KV_OK) {
        for (uint32_t i = 0; i < batch->freed_count; i++)
            kv_ssd_free(store->ssd, batch->freed[i]);
    } else {
        kv_log(store->options.log, KV_LOG_ERROR, "manifest_write_failed", "records=%u status=%s",
               batch->put_count, kv_status_name(status));
        batch_unseal(batch);
    }
    assert(store->operations > 0);
    store->operations--;
    store->batches--;
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

/* Its turn has come: numbered behind all others, with segment records that say what holds once it
 * is durable. */
static void batch_seal(struct kv_batch *batch)
{
    struct kv_store *store = batch->store;
    number_next(store, batch->commit_value);
    batch->number = store->commit;
    for (uint32_t i = 0; i < batch->freed_count; i++)
        kv_segments_set(store->segments, batch->freed[i], false);
    for (uint32_t i = 0; i < batch->taken_count && !KV_PLANTED(store, SEGMENTS_BEHIND); i++)
        kv_segments_set(store->segments, batch->taken[i], true);
    for (uint32_t i = 0; i < batch->segment_count; i++)
        (void)kv_segments_encode(store->segments, batch->segments[i].number,
                                 batch->segments[i].value);
}

kv_status kv_batch_commit_now(struct kv_batch *batch, struct kv_error *err)
{
    struct kv_store *store = batch->store;
    assert(batch->freed_count == 0);
    batch_seal(batch);
    const kv_status status =
        kv_manifest_write_now(store->manifest, batch->puts, batch->put_count, err);
    kv_batch_discard(batch);
    return status;
}

void kv_batch_barrier(struct kv_batch *batch)
{
    batch->is_barrier = true;
}

/* After failures on a full file system, all of which are known by now or come before it. */
void kv_store_resume(struct kv_store *store)
{
    if (!store->must_resume || !kv_manifest_stats(store->manifest).may_resume) return;
    struct kv_batch *batch = kv_batch_create(store);
    if (batch == NULL || kv_batch_doubt(batch) != KV_OK) {
        kv_batch_discard(batch); /* Next time. */
        return;
    }
    store->must_resume = false;
    batch->manifest.resumes = true;
    batch->is_barrier = true;
    kv_log(store->options.log, KV_LOG_INFO, "manifest_resumes", "text=\"there is room again\"");
    kv_batch_post(batch, NULL, NULL);
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
    batch->done = done;
    batch->context = context;
    store->operations++;
    store->batches++;
    /* Refused before anything relies on it, where only what makes room should be written. */
    if (!batch->removes && !batch->is_barrier && kv_manifest_stats(store->manifest).no_room) {
        batch->manifest.status = KV_BUSY;
        batch_answered(&batch->manifest.msg);
        return;
    }
    batch_seal(batch);
    batch->sealed = true;
    if (KV_PLANTED(store, REUSE_BEFORE_DELETE)) {
        store->freeing -= batch->freed_count;
        while (batch->freed_count > 0)
            kv_ssd_free(store->ssd, batch->freed[--batch->freed_count]);
    }
    if (batch->removes) store->removals++;
    batch->manifest.msg.run = batch_answered;
    batch->manifest.reply = batch->store->options.mailbox;
    batch->manifest.puts = batch->puts;
    batch->manifest.put_count = batch->put_count;
    kv_manifest_write_post(batch->store->manifest, &batch->manifest);
}
