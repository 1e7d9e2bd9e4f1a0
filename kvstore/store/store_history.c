/*
 * What was removed and why, where a miss can tell it (format/removal.h).
 *
 * A tree's history is in memory while its nodes are, is read with it, and is written in the batch
 * that deletes the records of what goes: after a restart either both are there or neither.  The bit
 * of the superblock is set by the first start of a build that knows it, so no removal waits for it;
 * where that failed, histories last as long as the process.
 *
 * Of sessions that are gone as a whole the last KV_DELETED_MAX say so, in records of their own.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/store/directory.h"
#include "kvstore/store/store_internal.h"

#include <stdlib.h>
#include <string.h>

static bool is_recorded(const struct kv_store *store)
{
    return (store->options.superblock.features & KV_FEATURE_HISTORY) != 0;
}

void kv_store_history_feature(struct kv_store *store)
{
    struct kv_store_options *options = &store->options;
    struct kv_error err = {0};
    if (is_recorded(store)) return;
    if (kv_directory_add_feature(options->disk, options->dir, KV_FEATURE_HISTORY,
                                 &options->superblock, &err) != KV_OK)
        kv_log(options->log, KV_LOG_WARN, "history_not_kept",
               "cause=\"%s\" text=\"why something was removed is forgotten at the next start\"",
               err.text);
}

/* ---- of one tree ---- */

void kv_store_note_removed(struct kv_store *store, struct kv_tree *tree,
                           const struct kv_checkpoint_id *id, uint32_t from, uint32_t to,
                           const struct kv_loss *loss)
{
    /* A session that leaves a tree takes what nobody else has a part in. */
    if (loss->cause == KV_REASON_DELETED || from >= to) return;
    struct kv_history *history = kv_index_history(store->index, tree);
    if (history == NULL) return;
    const struct kv_removal removal = {
        .cause = loss->cause,
        .part = loss->keeps_rows ? KV_REMOVED_CHECKPOINT : KV_REMOVED_ROWS,
        .limit_of = loss->limit_of,
        .from = from,
        .to = to,
        .checkpoints = 1,
        .removed_ms = kv_store_now_ms(store),
        .limit = loss->limit,
        .value = loss->value,
    };
    kv_history_add(history, &removal, id);
}

struct kv_loss kv_store_loss(const struct kv_store *store, const struct kv_node *node,
                             enum kv_reason cause)
{
    struct kv_loss loss = {.cause = cause};
    if (cause == KV_REASON_EXPIRED) {
        const uint64_t now_ms = kv_store_now_ms(store);
        loss.limit_of = KV_LIMIT_TTL_MS;
        loss.limit = kv_index_ttl_ms(node);
        loss.value = now_ms > node->used_ms ? now_ms - node->used_ms : 0;
    }
    if (cause == KV_REASON_CAPACITY) {
        const struct kv_ssd_usage usage = kv_ssd_usage(store->ssd);
        loss.limit_of = KV_LIMIT_SSD_BYTES;
        loss.limit = usage.bytes_limit;
        loss.value = (uint64_t)usage.pages_used * store->layout.page_bytes;
    }
    return loss;
}

void kv_store_note_node(struct kv_store *store, const struct kv_node *node,
                        const struct kv_loss *loss)
{
    const struct kv_loss own =
        loss->limit_of == KV_LIMIT_NONE ? kv_store_loss(store, node, loss->cause) : *loss;
    const uint32_t from = node->parent == NULL ? 0 : node->parent->tokens;
    kv_store_note_removed(store, node->session->tree, &node->id, from, node->tokens, &own);
}

/* In the batch of removals, as it is now. */
void kv_store_record_history(struct kv_store *store, const struct kv_tree *tree)
{
    if (tree->history == NULL || !is_recorded(store)) return;
    struct kv_batch *dead = kv_store_dead_batch(store);
    if (dead == NULL || kv_batch_history(dead, &tree->id, tree->history) != KV_OK)
        kv_log(store->options.log, KV_LOG_ERROR, "record_leaked", "kind=history");
}

kv_status kv_store_take_history(struct kv_store *store, struct kv_tree *tree,
                                const struct kv_manifest_put *put)
{
    struct kv_history *history = kv_index_history(store->index, tree);
    if (history == NULL) return KV_NOMEM;
    const kv_status status = kv_record_history_decode(put->value, put->value_bytes, history);
    if (status != KV_OK) kv_index_history_drop(store->index, tree);
    return status;
}

/* ---- sessions that are gone ---- */

const struct kv_deleted *kv_store_deleted_find(const struct kv_store *store,
                                               const struct kv_session_id *id)
{
    for (uint32_t i = 0; i < store->deleted_count; i++)
        if (kv_id_equal(store->deleted[i].id.bytes, id->bytes)) return &store->deleted[i];
    return NULL;
}

static void take_out(struct kv_store *store, uint32_t at)
{
    store->deleted_count--;
    memmove(store->deleted + at, store->deleted + at + 1,
            sizeof(*store->deleted) * (store->deleted_count - at));
}

/* Its record goes with the batch. */
static kv_status forget(struct kv_store *store, struct kv_batch *batch, uint32_t at)
{
    uint8_t key[KV_KEY_DELETED_BYTES];
    const struct kv_manifest_put gone = {.key = key,
                                         .key_bytes = kv_key_deleted(&store->deleted[at].id, key)};
    take_out(store, at);
    return is_recorded(store) ? kv_batch_put(batch, &gone) : KV_OK;
}

kv_status kv_store_deleted_note(struct kv_store *store, struct kv_batch *batch,
                                const struct kv_session_id *id,
                                const struct kv_record_deleted *record)
{
    uint8_t key[KV_KEY_DELETED_BYTES], value[KV_RECORD_DELETED_BYTES];
    kv_status status = KV_OK;
    if (store->deleted == NULL) store->deleted = malloc(sizeof(*store->deleted) * KV_DELETED_MAX);
    if (store->deleted == NULL) return KV_NOMEM;
    const struct kv_deleted *known = kv_store_deleted_find(store, id);
    if (known != NULL) take_out(store, (uint32_t)(known - store->deleted));
    if (store->deleted_count == KV_DELETED_MAX) status = forget(store, batch, 0);
    store->deleted[store->deleted_count++] = (struct kv_deleted){.id = *id, .record = *record};
    if (status != KV_OK || !is_recorded(store)) return status;
    const struct kv_manifest_put put = {.key = key,
                                        .key_bytes = kv_key_deleted(id, key),
                                        .value = value,
                                        .value_bytes = kv_record_deleted_encode(record, value)};
    return kv_batch_put(batch, &put);
}

kv_status kv_store_deleted_forget(struct kv_store *store, struct kv_batch *batch,
                                  const struct kv_session_id *id)
{
    const struct kv_deleted *known = kv_store_deleted_find(store, id);
    return known == NULL ? KV_OK : forget(store, batch, (uint32_t)(known - store->deleted));
}

kv_status kv_store_deleted_erase(struct kv_store *store, struct kv_batch *batch,
                                 const struct kv_user_id *user)
{
    kv_status status = KV_OK;
    for (uint32_t i = store->deleted_count; status == KV_OK && i-- > 0;)
        if (kv_id_equal(store->deleted[i].record.user.bytes, user->bytes))
            status = forget(store, batch, i);
    return status;
}

/* ---- start ---- */

static kv_status visit(void *context, const struct kv_manifest_put *put)
{
    struct kv_store *store = context;
    struct kv_deleted deleted;
    if (put->key_bytes != KV_KEY_DELETED_BYTES || store->deleted_count == KV_DELETED_MAX ||
        kv_record_deleted_decode(put->value, put->value_bytes, &deleted.record) != KV_OK) {
        kv_log(store->options.log, KV_LOG_ERROR, "record_damaged", "kind=deleted");
        return KV_OK; /* One explanation less. */
    }
    memcpy(deleted.id.bytes, put->key + 1, sizeof(deleted.id.bytes));
    store->deleted[store->deleted_count++] = deleted;
    return KV_OK;
}

static int compare(const void *a, const void *b)
{
    const struct kv_deleted *x = a, *y = b;
    if (x->record.removed_ms != y->record.removed_ms)
        return x->record.removed_ms < y->record.removed_ms ? -1 : 1;
    return memcmp(x->id.bytes, y->id.bytes, sizeof(x->id.bytes));
}

kv_status kv_store_recover_deleted(struct kv_store *store, struct kv_error *err)
{
    if (!is_recorded(store)) return KV_OK;
    if (store->deleted == NULL) store->deleted = malloc(sizeof(*store->deleted) * KV_DELETED_MAX);
    if (store->deleted == NULL) return KV_FAIL(err, KV_NOMEM, "note what was deleted");
    const kv_status status =
        kv_manifest_scan_now(store->manifest, (const uint8_t *)"D", 1, visit, store, err);
    if (store->deleted_count > 1)
        qsort(store->deleted, store->deleted_count, sizeof(*store->deleted), compare);
    return status;
}
