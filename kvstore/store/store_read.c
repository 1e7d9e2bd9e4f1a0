/*
 * Pages into memory, and what is done when they are not what the index says.
 *
 * A few reads of each session are with the disk at a time, enough to keep it busy and few enough
 * that a short session is not behind all of a long one.  A page that arrived is checked while the
 * next ones are read (kv_read.arrived), so the checksum costs no time but that of the last page.
 *
 * A page is trusted only after kv_store_read_check(): header, checksum, and token ids.  One that is
 * encrypted is decrypted in the slot where the read landed, and that compares more than a checksum.
 * Until then nobody but its reader knows the slot.  A page whose bytes are wrong is dropped with
 * every checkpoint that needs it; the caller plans again with what is left, so damage costs
 * computing, never an error.  A read that failed says nothing of the bytes: this caller goes on
 * without them, and they stay for the next one.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/format/page.h"
#include "kvstore/store/store_internal.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

struct kv_read_op {
    struct kv_ssd_op op;
    struct kv_read *read; /* NULL: given up. */
    uint32_t at;          /* Index into the read's arrays. */
    uint64_t generation;
    bool settled;
    /* Of one that was given up. */
    struct kv_store *store;
    struct kv_read_op *first; /* Of their array. */
    uint32_t orphans;         /* Of the first: how many of them the kernel still has. */
    uint32_t page, slot;
};

static void op_start(struct kv_read_op *op)
{
    struct kv_store *store = op->read->store;
    const struct kv_page *object = kv_index_page(store->index, op->read->pages[op->at]);
    op->generation = object->generation;
    op->op.page = object->ssd_page;
    op->op.buf = kv_hbm_bytes(store->hbm, op->read->slots[op->at]);
    kv_ssd_read_start(store->ssd, &op->op);
}

/* What came after all is looked at by nobody. */
static void orphan_done(struct kv_read_op *op)
{
    struct kv_store *store = op->store;
    struct kv_read_op *first = op->first;
    kv_hbm_unpin(store->hbm, op->slot);
    kv_index_page_unref(store->index, op->page);
    assert(store->reads_late > 0 && first->orphans > 0);
    store->reads_late--;
    if (--first->orphans > 0) return;
    free(first);
    store->operations--;
}

/* One more page is settled.  The next read is on its way before anybody looks at this one. */
static void read_settle(struct kv_read_op *op)
{
    struct kv_read *read = op->read;
    const uint32_t at = op->at;
    assert(read->waiting > 0);
    op->settled = true;
    read->progress_ns = kv_clock_stopwatch_ns();
    if (read->started < read->missing) op_start(&read->ops[read->started++]);
    if (read->arrived != NULL) read->arrived(read, at);
    if (--read->waiting > 0) return;
    free(read->ops);
    read->ops = NULL;
    read->store->operations--;
    read->done(read);
}

static void tell_unread(struct kv_store *store, const struct kv_page *page, int cause)
{
    if (cause != 0) {
        store->counters.unread_pages++;
        kv_log(store->options.log, KV_LOG_ERROR, "page_read_failed", "ssd_page=%u errno=%d",
               page->ssd_page, cause);
    } else {
        store->counters.missing_pages++;
        kv_log(store->options.log, KV_LOG_ERROR, "page_damaged",
               "where=read ssd_page=%u cause=\"its file ends before it\" action=dropped",
               page->ssd_page);
    }
}

static void op_done(struct kv_ssd_op *ssd_op, kv_status status)
{
    struct kv_read_op *op = KV_CONTAINER_OF(ssd_op, struct kv_read_op, op);
    struct kv_read *read = op->read;
    if (read == NULL) {
        orphan_done(op);
        return;
    }
    struct kv_store *store = read->store;
    const uint32_t page = read->pages[op->at];
    struct kv_page *object = kv_index_page(store->index, page);
    uint32_t *slot = &read->slots[op->at];

    store->counters.bytes_loaded += store->layout.page_bytes;
    read->bytes += store->layout.page_bytes;
    if (object->hbm_slot != KV_HBM_SLOT_NONE) {
        /* Somebody else brought it, or a fuller version was just written: take that one. */
        kv_hbm_unpin(store->hbm, *slot);
        *slot = object->hbm_slot;
        kv_hbm_pin(store->hbm, *slot);
        read->fresh[op->at] = false;
    } else if (object->generation != op->generation) {
        op_start(op); /* It moved while we read its old place. */
        return;
    } else if (status != KV_OK) {
        kv_hbm_unpin(store->hbm, *slot);
        *slot = KV_HBM_SLOT_NONE;
        read->fresh[op->at] = ssd_op->disk_op.sys_errno != 0; /* 0: the file is short. */
        tell_unread(store, object, ssd_op->disk_op.sys_errno);
    }
    kv_index_page_unref(store->index, page);
    read_settle(op);
}

void kv_store_read_give_up(struct kv_read *read)
{
    struct kv_store *store = read->store;
    struct kv_read_op *ops = read->ops;
    const uint32_t late = read->waiting;
    assert(late > 0);
    for (uint32_t i = 0; i < read->missing; i++) {
        struct kv_read_op *op = &ops[i];
        if (op->settled) continue;
        op->read = NULL;
        op->store = store;
        op->first = ops;
        op->page = read->pages[op->at];
        op->slot = read->slots[op->at];
        read->slots[op->at] = KV_HBM_SLOT_NONE;
        read->fresh[op->at] = true; /* Not there, and not wrong either. */
        ops->orphans++;
    }
    assert(ops->orphans == late);
    store->reads_late += late;
    store->counters.late_reads += late;
    store->counters.unread_pages += late;
    kv_log(store->options.log, KV_LOG_ERROR, "page_read_late",
           "pages=%u of=%u text=\"the device gave none of them for a while: this call goes on "
           "without\"",
           late, read->count);
    for (uint32_t i = read->started; i < read->missing; i++)
        orphan_done(&ops[i]); /* Never asked for; some that were keep the array alive. */
    read->ops = NULL;
    read->waiting = 0;
    read->done(read);
}

/* Slots for everything missing, before anything is started: nothing to undo later. */
static kv_status take_slots(struct kv_store *store, struct kv_read *read, uint32_t *ret_missing)
{
    uint32_t missing = 0;
    for (uint32_t i = 0; i < read->count; i++) {
        const struct kv_page *object = kv_index_page(store->index, read->pages[i]);
        read->fresh[i] = false;
        read->slots[i] = object->hbm_slot;
        if (object->hbm_slot != KV_HBM_SLOT_NONE) kv_hbm_pin(store->hbm, object->hbm_slot);
    }
    for (uint32_t i = 0; i < read->count; i++) {
        if (read->slots[i] != KV_HBM_SLOT_NONE) continue;
        if (kv_hbm_alloc_to_read(store->hbm, &read->slots[i]) != KV_OK) {
            read->slots[i] = KV_HBM_SLOT_NONE;
            for (uint32_t j = 0; j < read->count; j++) {
                if (read->slots[j] != KV_HBM_SLOT_NONE) kv_hbm_unpin(store->hbm, read->slots[j]);
                read->slots[j] = KV_HBM_SLOT_NONE;
            }
            return KV_BUSY;
        }
        read->fresh[i] = true;
        missing++;
    }
    *ret_missing = missing;
    return KV_OK;
}

/* The device has not answered others yet: it is not asked for these. */
static void leave_out(struct kv_store *store, struct kv_read *read)
{
    for (uint32_t i = 0; i < read->count; i++) {
        if (!read->fresh[i]) continue;
        kv_hbm_unpin(store->hbm, read->slots[i]);
        read->slots[i] = KV_HBM_SLOT_NONE;
        store->counters.late_reads++;
        store->counters.unread_pages++;
    }
}

kv_status kv_store_read_start(struct kv_store *store, struct kv_read *read)
{
    uint32_t missing = 0;
    const kv_status status = take_slots(store, read, &missing);
    if (status != KV_OK) return status;
    read->store = store;
    read->bytes = 0;
    read->waiting = 0;
    if (missing > 0 && store->reads_late > 0) leave_out(store, read);
    if (missing == 0 || store->reads_late > 0) return KV_MISS;

    read->ops = calloc(missing, sizeof(*read->ops));
    if (read->ops == NULL) {
        for (uint32_t i = 0; i < read->count; i++)
            kv_hbm_unpin(store->hbm, read->slots[i]);
        return KV_NOMEM;
    }
    read->waiting = read->missing = missing;
    read->progress_ns = kv_clock_stopwatch_ns();
    store->operations++;
    uint32_t used = 0;
    for (uint32_t i = 0; i < read->count; i++) {
        if (!read->fresh[i]) continue;
        struct kv_read_op *op = &read->ops[used++];
        op->read = read;
        op->at = i;
        op->op.done = op_done;
        kv_index_page_ref(store->index, read->pages[i]);
    }
    for (read->started = 0; read->started < KV_MIN(missing, KV_READ_DEPTH); read->started++)
        op_start(&read->ops[read->started]);
    return KV_OK;
}

static kv_status verify(const struct kv_store *store, const uint8_t *bytes,
                        const struct kv_page_header *want, struct kv_error *err)
{
    /* Its tag is compared next, and says more than a checksum. */
    const bool is_encrypted = store->keys != NULL && kv_page_is_encrypted(bytes);
#ifdef CACHED_TEST_HOOKS
    struct kv_page_header planted = *want, found;
    const bool whole = kv_page_decode(&store->layout, bytes, &found, NULL) == KV_OK;
    if (whole && KV_PLANTED(store, NO_GENERATION)) planted.generation = found.generation;
    if (whole && KV_PLANTED(store, HEADER_UNBOUND)) {
        planted.user = found.user;
        planted.position = found.position;
        planted.chain = found.chain; /* It follows from both. */
    }
    const kv_status status = is_encrypted ? kv_page_compare(&store->layout, bytes, &planted, err)
                                          : kv_page_verify(&store->layout, bytes, &planted, err);
    /* It is the last thing compared. */
    if (KV_PLANTED(store, CHECKSUM_OFF) && strstr(err->text, "page: checksum") != NULL)
        return KV_OK;
    return status;
#else
    return is_encrypted ? kv_page_compare(&store->layout, bytes, want, err)
                        : kv_page_verify(&store->layout, bytes, want, err);
#endif
}

static kv_status page_check(struct kv_store *store, uint32_t page, uint32_t slot, bool fresh,
                            const struct kv_digest *chain, const uint32_t *ids, uint32_t id_count)
{
    struct kv_page *object = kv_index_page(store->index, page);
    uint8_t *bytes = kv_hbm_bytes(store->hbm, slot);
    struct kv_error err = {0};
    kv_status status = KV_OK;

    if (fresh) {
        const struct kv_page_header want = {
            .count = object->count,
            .position = object->position,
            .generation = object->generation,
            .user = object->session->user->id,
            .model = store->options.model,
            .chain = *chain,
            .directory = store->options.superblock.id,
        };
        store->counters.pages_verified++;
        status = verify(store, bytes, &want, &err);
        if (status == KV_OK)
            status = kv_keys_decrypt(store, object->session->user, object->ssd_page, bytes, &err);
    }
    for (uint32_t i = 0; status == KV_OK && i < id_count; i++) {
        if (kv_page_id(bytes, i) != ids[i])
            status =
                KV_FAIL(&err, KV_CORRUPT, "token ids differ at position %u", object->position + i);
    }
    if (status != KV_OK) {
        store->counters.corrupt_pages++;
        if (fresh) {
            kv_store_quarantine(store, page, KV_FOUND_BY_READ, err.text);
        } else {
            kv_log(store->options.log, KV_LOG_ERROR, "page_damaged",
                   "where=memory position=%u cause=\"%s\"", object->position, err.text);
        }
        return status;
    }
    if (fresh && object->hbm_slot == KV_HBM_SLOT_NONE) {
        object->hbm_slot = slot;
        kv_hbm_set_owner(store->hbm, slot, page);
    }
    return KV_OK;
}

kv_status kv_store_read_check(const struct kv_read *read, uint32_t i, const struct kv_digest *chain,
                              const uint32_t *ids, uint32_t id_count)
{
    if (read->slots[i] == KV_HBM_SLOT_NONE) return read->fresh[i] ? KV_IO : KV_CORRUPT;
    return page_check(read->store, read->pages[i], read->slots[i], read->fresh[i], chain, ids,
                      id_count);
}

void kv_store_record_count(struct kv_store *store, const struct kv_session *session)
{
    struct kv_batch *dead = kv_store_dead_batch(store);
    if (dead == NULL || kv_batch_session(dead, session) != KV_OK)
        kv_log(store->options.log, KV_LOG_ERROR, "record_leaked", "kind=session");
}

void kv_store_drop_leaf(struct kv_store *store, struct kv_node *leaf, const struct kv_loss *loss)
{
    struct kv_batch *dead = kv_store_dead_batch(store);
    if (dead == NULL || kv_batch_delete_node(dead, &leaf->session->tree->id, &leaf->id) != KV_OK)
        kv_log(store->options.log, KV_LOG_ERROR, "record_leaked", "kind=node");
    kv_store_note_node(store, leaf, loss);
    kv_pool_drop(store->pool, &leaf->image, loss->cause);
    store->counters.nodes_dropped++;
    store->counters.removed_nodes[loss->cause]++;
    if (leaf->durable) store->checkpoints--;
    store->removing = loss->cause;
    kv_index_node_remove(store->index, leaf);
    store->removing = KV_REASON_NONE;
}

/* Without the records of sessions.  From the leaves up; the way down is gone once, not again from
 * the top for each leaf: a tree may be as deep as its session has checkpoints. */
static void drop_node(struct kv_store *store, struct kv_node *node, const struct kv_loss *loss)
{
    struct kv_node *leaf = node;
    for (;;) {
        while (leaf->child != NULL)
            leaf = leaf->child;
        struct kv_node *const above = leaf == node ? NULL : leaf->parent;
        kv_store_drop_leaf(store, leaf, loss);
        if (above == NULL) break;
        leaf = above;
    }
}

static void counts_before(const struct kv_tree *tree)
{
    for (struct kv_session *at = kv_index_head_next(tree, NULL); at != NULL;
         at = kv_index_head_next(tree, at))
        at->before.recorded_nodes = at->recorded_nodes;
}

/* Sessions that made some of what went say so in their records, and the tree why it went. */
static void counts_after(struct kv_store *store, const struct kv_tree *tree)
{
    bool changed = false;
    for (const struct kv_session *at = kv_index_head_next(tree, NULL); at != NULL;
         at = kv_index_head_next(tree, at)) {
        if (at->before.recorded_nodes == at->recorded_nodes) continue;
        kv_store_record_count(store, at);
        changed = true;
    }
    if (changed) kv_store_record_history(store, tree);
}

void kv_store_drop_node_for(struct kv_store *store, struct kv_node *node,
                            const struct kv_loss *loss)
{
    const struct kv_tree *tree = node->session->tree;
    counts_before(tree);
    drop_node(store, node, loss);
    counts_after(store, tree);
}

void kv_store_drop_node(struct kv_store *store, struct kv_node *node, enum kv_reason why)
{
    kv_store_drop_node_for(store, node, &(struct kv_loss){.cause = why});
}

void kv_store_drop_page(struct kv_store *store, struct kv_session *session, uint32_t page,
                        enum kv_reason why)
{
    const struct kv_loss loss = {.cause = why};
    struct kv_node *node = kv_index_node_next(session, NULL);
    counts_before(session->tree);
    while (node != NULL) {
        bool lists = false;
        for (uint32_t i = 0; i < node->page_count; i++)
            lists |= node->pages[i] == page;
        if (lists) {
            drop_node(store, node, &loss);
            node = kv_index_node_next(session, NULL); /* The tree changed: from the start. */
        } else {
            node = kv_index_node_next(session, node);
        }
    }
    counts_after(store, session->tree);
}

static struct kv_node *first_leaf(struct kv_node *node)
{
    while (node != NULL && node->child != NULL)
        node = node->child;
    return node;
}

void kv_store_drop_expired(struct kv_store *store, struct kv_session *session)
{
    const struct kv_loss loss = {.cause = KV_REASON_EXPIRED};
    const uint64_t now_ms = kv_store_now_ms(store);
    struct kv_node *node = first_leaf(session->tree->roots);
    counts_before(session->tree);
    while (node != NULL) { /* Children before their parent, which is a leaf when they went. */
        struct kv_node *next = node->sibling != NULL ? first_leaf(node->sibling) : node->parent;
        if (node->child == NULL && kv_index_expired(node, now_ms)) drop_node(store, node, &loss);
        node = next;
    }
    counts_after(store, session->tree);
}

void kv_store_join_node(struct kv_store *store, struct kv_node *node, const struct kv_loss *loss)
{
    struct kv_tree *tree = node->session->tree;
    struct kv_node *below = node->child;
    const struct kv_checkpoint_id id = node->id;
    const uint32_t from = node->parent == NULL ? 0 : node->parent->tokens;
    const uint32_t to = node->tokens;
    struct kv_batch *dead = kv_store_dead_batch(store);
    if (dead == NULL) return;
    counts_before(tree);
    kv_pool_drop(store->pool, &node->image, loss->cause);
    store->removing = loss->cause;
    const bool joined = kv_index_node_join(store->index, node);
    store->removing = KV_REASON_NONE;
    if (!joined) return;
    /* In one batch: the longer edge, and the node that is part of it gone. */
    if (kv_batch_node(dead, below) != KV_OK ||
        kv_batch_delete_node(dead, &tree->id, &id) != KV_OK)
        kv_log(store->options.log, KV_LOG_ERROR, "record_leaked", "kind=node");
    store->counters.nodes_dropped++;
    store->counters.removed_nodes[loss->cause]++;
    store->checkpoints--;
    kv_store_note_removed(store, tree, &id, from, to, loss);
    counts_after(store, tree);
}
