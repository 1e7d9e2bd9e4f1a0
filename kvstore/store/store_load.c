/*
 * Trees on demand: one prefix scan brings a session's nodes and pages, which are then linked.
 *
 * What does not fit together is left out: a node without its parent or with a page that has no
 * record or no place on SSD is dropped with all below it, counted, and its records are deleted.
 *
 * A tree whose records lie in a damaged part of the manifest's files cannot be read at all, nor
 * would what is saved to it be found again: its session is empty and takes no saves until the next
 * start, and all others are served.  Its records and places stay as they are.
 *
 * A tree that is not in use can be unloaded at any time; its windows go with it.
 *
 * Nodes name the session that made them, pages do not: a page counts as made by who made the first
 * node that lists it.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/format/manifest_record.h"
#include "kvstore/store/store_internal.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define LOAD_BUFFER_FIRST (256u << 10)
#define LOAD_BUFFER_MAX (512u << 20)

struct load {
    struct kv_manifest_scan scan;
    struct kv_store *store;
    struct kv_session *session;  /* That was asked for. */
    struct kv_session *detailed; /* Whose record is being read. */
    kv_load_done_fn *done;
    void *context;
    uint8_t key[KV_RECORD_KEY_MAX];
    /* Decoded records; node page lists point into the scan's buffer. */
    struct kv_record_node *nodes;
    struct kv_record_page *pages;
    uint32_t *page_objects; /* Index of each page, KV_PAGE_INDEX_NONE: not usable. */
    uint32_t node_count, page_count;
    uint32_t incomplete;   /* Nodes that did not fit the rest. */
    bool waited;           /* For what was on its way when it was scanned first. */
    struct kv_node **made; /* Linked already, by id. */
    uint32_t made_mask;
};

static void load_forget_decoded(struct load *load)
{
    free(load->nodes);
    free(load->pages);
    free(load->page_objects);
    free(load->made);
    load->nodes = NULL;
    load->pages = NULL;
    load->page_objects = NULL;
    load->made = NULL;
    load->node_count = load->page_count = 0;
}

static void load_finish(struct load *load, kv_status status)
{
    struct kv_store *store = load->store;
    struct kv_session *session = load->session;
    session->tree->load = status == KV_OK ? KV_LOAD_DONE : KV_LOAD_NONE;
    if (status != KV_OK) kv_index_history_drop(store->index, session->tree);
    session->tree->touched_seq = ++store->touch_seq;
    store->operations--;
    store->counters.loads++;
    kv_load_done_fn *done = load->done;
    void *context = load->context;
    free(load->scan.buf);
    load_forget_decoded(load);
    free(load);
    done(context, session, status);
}

static int compare_nodes(const void *a, const void *b)
{
    const struct kv_record_node *x = a, *y = b;
    return x->tokens < y->tokens ? -1 : x->tokens > y->tokens;
}

static int compare_pages(const void *a, const void *b)
{
    const struct kv_record_page *x = a, *y = b;
    return x->uid < y->uid ? -1 : x->uid > y->uid;
}

/* Deletes the record, and has the next start compare all: what it stood for is not known. */
static void load_forget(struct load *load, const struct kv_manifest_put *put)
{
    const struct kv_manifest_put gone = {.key = put->key, .key_bytes = put->key_bytes};
    struct kv_batch *dead = kv_store_dead_batch(load->store);
    if (dead == NULL || kv_batch_put(dead, &gone) != KV_OK || kv_batch_doubt(dead) != KV_OK)
        kv_log(load->store->options.log, KV_LOG_ERROR, "record_leaked", "kind=damaged");
}

static void load_forget_page(struct load *load, const struct kv_record_page *record)
{
    uint8_t key[KV_RECORD_KEY_MAX];
    const struct kv_manifest_put put = {
        .key = key, .key_bytes = kv_key_page(&load->session->tree->id, record->uid, key)};
    load->store->counters.missing_pages++;
    load_forget(load, &put);
}

/* One explanation less: nothing else depends on it. */
static void load_forget_history(struct load *load, const struct kv_manifest_put *put)
{
    const struct kv_manifest_put gone = {.key = put->key, .key_bytes = put->key_bytes};
    struct kv_batch *dead = kv_store_dead_batch(load->store);
    kv_log(load->store->options.log, KV_LOG_ERROR, "record_damaged", "kind=history");
    if (dead == NULL || kv_batch_put(dead, &gone) != KV_OK)
        kv_log(load->store->options.log, KV_LOG_ERROR, "record_leaked", "kind=history");
}

/* What needed it was to be dropped when its place was quarantined, and was in use then. */
static void load_forget_bad(struct load *load, const struct kv_record_page *record)
{
    struct kv_store *store = load->store;
    struct kv_batch *dead = kv_store_dead_batch(store);
    kv_status status = dead == NULL ? KV_NOMEM : KV_OK;
    if (status == KV_OK) status = kv_batch_delete_page(dead, &load->session->tree->id, record->uid);
    if (status == KV_OK && kv_store_segment_recorded(store, record->ssd_page))
        status = kv_batch_free_ssd(dead, record->ssd_page);
    if (status != KV_OK)
        kv_log(store->options.log, KV_LOG_ERROR, "record_leaked", "kind=quarantined");
}

static kv_status load_decode(struct load *load)
{
    const uint32_t count = load->scan.record_count;
    load->nodes = calloc(KV_MAX(count, 1u), sizeof(*load->nodes));
    load->pages = calloc(KV_MAX(count, 1u), sizeof(*load->pages));
    load->page_objects = calloc(KV_MAX(count, 1u), sizeof(*load->page_objects));
    load->made_mask = 1;
    while (load->made_mask < 2u * count)
        load->made_mask = 2 * load->made_mask + 1;
    load->made = calloc((size_t)load->made_mask + 1, sizeof(*load->made));
    if (load->nodes == NULL || load->pages == NULL || load->page_objects == NULL ||
        load->made == NULL)
        return KV_NOMEM;

    uint32_t offset = 0;
    struct kv_manifest_put put;
    while (kv_manifest_scan_next(&load->scan, &offset, &put)) {
        if (put.key_bytes < 18) continue;
        if (put.key[17] == 'H') {
            const kv_status status = kv_store_take_history(load->store, load->session->tree, &put);
            if (status == KV_NOMEM) return status;
            if (status == KV_CORRUPT) load_forget_history(load, &put);
            continue;
        }
        const bool is_node = put.key[17] == 'N';
        const kv_status status =
            is_node
                ? kv_record_node_decode(put.value, put.value_bytes, &load->nodes[load->node_count])
                : kv_record_page_decode(put.value, put.value_bytes, &load->pages[load->page_count]);
        if (status != KV_OK) {
            load->store->counters.corrupt_pages++;
            kv_log(load->store->options.log, KV_LOG_ERROR, "record_damaged", "kind=%s",
                   is_node ? "node" : "page");
            load_forget(load, &put);
            continue;
        }
        if (is_node)
            load->node_count++;
        else
            load->page_count++;
    }
    qsort(load->nodes, load->node_count, sizeof(*load->nodes), compare_nodes);
    qsort(load->pages, load->page_count, sizeof(*load->pages), compare_pages);
    return KV_OK;
}

static void load_pages(struct load *load)
{
    struct kv_store *store = load->store;
    for (uint32_t i = 0; i < load->page_count; i++) {
        const struct kv_record_page *record = &load->pages[i];
        load->page_objects[i] = KV_PAGE_INDEX_NONE;
        if (kv_ssd_quarantined(store->ssd, record->ssd_page)) {
            load_forget_bad(load, record);
            continue;
        }
        if (!kv_store_segment_recorded(store, record->ssd_page)) {
            load_forget_page(load, record); /* Its place may become somebody else's. */
            continue;
        }
        const uint32_t page = kv_index_page_add(store->index, load->session);
        if (page == KV_PAGE_INDEX_NONE) continue;
        struct kv_page *object = kv_index_page(store->index, page);
        object->uid = record->uid;
        object->generation = record->generation;
        object->tag = record->tag;
        object->position = record->position;
        object->count = record->count;
        object->ssd_page = record->ssd_page;
        object->durable = true;
        load->page_objects[i] = page;
    }
}

static uint32_t load_find_page(const struct load *load, uint64_t uid)
{
    const struct kv_record_page key = {.uid = uid};
    const struct kv_record_page *found =
        bsearch(&key, load->pages, load->page_count, sizeof(key), compare_pages);
    return found == NULL ? KV_PAGE_INDEX_NONE : load->page_objects[found - load->pages];
}

/* The objects of a node's edge, checked against its positions; false: something is missing. */
static bool load_edge(const struct load *load, const struct kv_record_node *record,
                      uint32_t parent_tokens, uint32_t *ret_pages)
{
    const uint32_t first = parent_tokens / KV_PAGE_TOKENS;
    if (record->tokens <= parent_tokens) return false;
    if (record->page_count != kv_pages_for(record->tokens) - first) return false;
    for (uint32_t i = 0; i < record->page_count; i++) {
        ret_pages[i] = load_find_page(load, kv_load64(record->page_uids + 8u * i));
        if (ret_pages[i] == KV_PAGE_INDEX_NONE) return false;
        const struct kv_page *page = kv_index_page(load->store->index, ret_pages[i]);
        const uint32_t end = KV_MIN(record->tokens, (first + i + 1) * KV_PAGE_TOKENS);
        if (page->position != (first + i) * KV_PAGE_TOKENS) return false;
        if (page->position + page->count < end && !KV_PLANTED(load->store, TORN_RECORD))
            return false;
    }
    return true;
}

/* Nodes made so far, by id: open addressing in a table twice their number. */
static struct kv_node **load_slot(const struct load *load, const struct kv_checkpoint_id *id)
{
    uint32_t at = kv_load32(id->bytes) & load->made_mask;
    while (load->made[at] != NULL && !kv_id_equal(load->made[at]->id.bytes, id->bytes))
        at = (at + 1) & load->made_mask;
    return &load->made[at];
}

static struct kv_node *load_find_node(const struct load *load, const struct kv_checkpoint_id *id)
{
    return *load_slot(load, id);
}

static void load_note_node(struct load *load, struct kv_node *node)
{
    *load_slot(load, &node->id) = node;
}

/* One that is not in the tree any more cannot have left a node there; if it did all the same, the
 * node is another one's now. */
static struct kv_session *load_maker(const struct load *load, const struct kv_record_node *record)
{
    const struct kv_tree *tree = load->session->tree;
    const struct kv_session_id *id = record->has_maker ? &record->maker : &tree->id;
    for (struct kv_session *at = kv_index_head_next(tree, NULL); at != NULL;
         at = kv_index_head_next(tree, at))
        if (kv_id_equal(at->id.bytes, id->bytes)) return at;
    return load->session;
}

/* A page is of who made the first node that lists it. */
static void load_own_pages(const struct load *load, const uint32_t *pages, uint32_t count,
                           struct kv_session *maker)
{
    struct kv_index *index = load->store->index;
    for (uint32_t i = 0; i < count; i++) {
        struct kv_page *page = kv_index_page(index, pages[i]);
        if (page->refs > 1 || page->session == maker) continue;
        kv_index_page_give(index, pages[i], maker);
    }
}

static bool load_node(struct load *load, const struct kv_record_node *record)
{
    struct kv_store *store = load->store;
    struct kv_node *parent = NULL;
    if (record->has_parent) {
        parent = load_find_node(load, &record->parent);
        if (parent == NULL) return false;
    }
    struct kv_session *maker = load_maker(load, record);
    uint32_t *pages = malloc(sizeof(uint32_t) * KV_MAX(record->page_count, 1u));
    struct kv_node *node = NULL;
    if (pages != NULL && load_edge(load, record, parent == NULL ? 0 : parent->tokens, pages)) {
        load_own_pages(load, pages, record->page_count, maker);
        node = kv_index_node_add(store->index, maker, parent, record->tokens, pages,
                                 record->page_count);
    }
    free(pages);
    if (node == NULL) return false;
    node->id = record->id;
    node->digest = record->digest;
    node->kind = record->kind;
    node->created_ms = record->created_ms;
    kv_index_node_mark(node, record->replays, record->replay_count);
    node->kernels = record->kernels;
    node->durable = true;
    kv_index_node_recorded(node);
    node->foreign = record->model_tag != kv_index_model_tag(store->index);
    node->image.lost = KV_REASON_LOST_NODE; /* Windows die with the process. */
    kv_index_renew(node, kv_timeline_used_ms(&store->time, record->used_ms));
    load_note_node(load, node);
    return true;
}

/* Where its edge begins is known from its pages, if not from its parent. */
static void note_incomplete(struct kv_store *store, struct kv_tree *tree,
                            const struct kv_record_node *record)
{
    const struct kv_loss loss = {.cause = KV_REASON_CORRUPT};
    const uint32_t last = kv_pages_for(record->tokens);
    const uint32_t first = last - KV_MIN(last, record->page_count);
    kv_store_note_removed(store, tree, &record->id, first * KV_PAGE_TOKENS, record->tokens, &loss);
}

/* The number of checkpoints in the session's record, where that was another one. */
static void load_counted(struct load *load, struct kv_session *session)
{
    struct kv_store *store = load->store;
    session->head = session->has_head ? kv_index_node_find(load->session, &session->head_id) : NULL;
    if (session->recorded_nodes == session->before.recorded_nodes) return;
    store->checkpoints += session->recorded_nodes;
    store->checkpoints -= session->before.recorded_nodes;
    kv_store_record_count(store, session);
}

static void load_link(struct load *load)
{
    struct kv_store *store = load->store;
    struct kv_session *session = load->session;
    struct kv_session *at = NULL;
    /* Counted while they are linked. */
    while ((at = kv_index_head_next(session->tree, at)) != NULL) {
        at->before.recorded_nodes = at->recorded_nodes;
        at->recorded_nodes = 0;
        kv_index_session_pages(store->index, &at->entry, 0);
    }
    load_pages(load);
    for (uint32_t i = 0; i < load->node_count; i++) {
        if (load_node(load, &load->nodes[i])) continue;
        store->counters.nodes_dropped++;
        note_incomplete(store, session->tree, &load->nodes[i]);
        load->incomplete++;
        struct kv_batch *dead = kv_store_dead_batch(store);
        if (dead != NULL) (void)!kv_batch_delete_node(dead, &session->tree->id, &load->nodes[i].id);
        kv_log(store->options.log, KV_LOG_WARN, "checkpoint_dropped",
               "position=%u why=incomplete_record", load->nodes[i].tokens);
    }
    /* The edges hold the pages now; what no edge lists is deleted here. */
    for (uint32_t i = 0; i < load->page_count; i++) {
        if (load->page_objects[i] != KV_PAGE_INDEX_NONE)
            kv_index_page_unref(store->index, load->page_objects[i]);
    }
    while ((at = kv_index_head_next(session->tree, at)) != NULL)
        load_counted(load, at);
    if (session->tree->history != NULL && load->incomplete > 0)
        kv_store_record_history(store, session->tree);
}

static void removals_done(void *context, kv_status status);

/* A page that has moved is recorded at its new place from the moment that was posted, and the scan
 * may have come before it was durable: then what it read is read again behind it. */
static bool load_waits(struct load *load)
{
    struct kv_store *store = load->store;
    bool all = true;
    for (uint32_t i = 0; i < load->page_count; i++)
        all &= kv_store_segment_recorded(store, load->pages[i].ssd_page);
    if (all || load->waited) return false;
    struct kv_batch *barrier = kv_batch_create(store);
    if (barrier == NULL) {
        load_finish(load, KV_NOMEM);
        return true;
    }
    load->waited = true;
    load_forget_decoded(load);
    kv_batch_post(barrier, removals_done, load);
    return true;
}

static kv_status load_unreadable(struct load *load)
{
    struct kv_store *store = load->store;
    struct kv_tree *tree = load->session->tree;
    const uint8_t *id = load->session->id.bytes;
    uint32_t checkpoints = 0;
    for (struct kv_session *at = kv_index_head_next(tree, NULL); at != NULL;
         at = kv_index_head_next(tree, at)) {
        checkpoints += at->recorded_nodes;
        at->head = NULL;
    }
    kv_log(
        store->options.log, KV_LOG_ERROR, "tree_unreadable",
        "session=%02x%02x%02x%02x%02x%02x%02x%02x checkpoints=%u text=\"the manifest's files are "
        "damaged where its records are; nothing of it is served or saved\"",
        id[0], id[1], id[2], id[3], id[4], id[5], id[6], id[7], checkpoints);
    store->counters.unreadable_trees++;
    store->checkpoints -= checkpoints;
    tree->unreadable = true;
    /* Not recorded: its records stay as they are. */
    kv_store_note_removed(store, tree, &load->session->head_id, 0,
                          KV_MAX(load->session->head_tokens, 1u),
                          &(struct kv_loss){.cause = KV_REASON_CORRUPT});
    return KV_OK;
}

static void load_scanned(struct kv_msg *msg)
{
    struct load *load = KV_CONTAINER_OF(msg, struct load, scan.msg);
    struct kv_store *store = load->store;
    kv_status status = load->scan.status;

    if (status == KV_OK && load->scan.more) {
        /* Bigger buffer, from the start: a tree is read twice at most a few times in its life. */
        const uint64_t bytes = 4ull * load->scan.buf_bytes;
        uint8_t *buf = bytes > LOAD_BUFFER_MAX ? NULL : realloc(load->scan.buf, bytes);
        if (buf != NULL) {
            load->scan.buf = buf;
            load->scan.buf_bytes = (uint32_t)bytes;
            kv_manifest_scan_post(store->manifest, &load->scan);
            return;
        }
        status = KV_NOMEM;
    }
    if (status == KV_CORRUPT) {
        load_finish(load, load_unreadable(load));
        return;
    }
    if (status == KV_OK) status = load_decode(load);
    if (status == KV_OK && load_waits(load)) return;
    if (status == KV_OK && !kv_store_make_room(store, load->node_count, load->page_count))
        status = KV_BUSY;
    if (status == KV_OK) load_link(load);
    load_finish(load, status);
}

static void removals_done(void *context, kv_status status)
{
    struct load *load = context;
    (void)status; /* A failed one leaves its records: they are still true. */
    kv_manifest_scan_post(load->store->manifest, &load->scan);
}

/* Reader and writer are two threads: a scan must not see records whose removal is on its way. */
static void load_scan(struct load *load)
{
    struct kv_store *store = load->store;
    struct kv_batch *barrier = NULL;
    if (store->removals > 0 || store->dead != NULL) barrier = kv_batch_create(store);
    if (barrier != NULL) {
        kv_batch_barrier(barrier);
        kv_batch_post(barrier, removals_done, load);
    } else {
        kv_manifest_scan_post(store->manifest, &load->scan);
    }
}

/* ---- what is in the records of its sessions ---- */

static void load_details(struct load *load);

static void detailed(void *context, kv_status status, const struct kv_record_session *record)
{
    struct load *load = context;
    if (status == KV_OK)
        status = kv_store_detail_take(load->store, load->detailed, record);
    else if (status == KV_MISS || status == KV_CORRUPT) {
        load_finish(load, load_unreadable(load));
        return;
    }
    if (status == KV_OK)
        load_details(load);
    else
        load_finish(load, status);
}

/* One after the other; then the tree. */
static void load_details(struct load *load)
{
    struct kv_session *at = kv_index_head_next(load->session->tree, NULL);
    while (at != NULL && at->has_details)
        at = kv_index_head_next(load->session->tree, at);
    if (at == NULL) {
        load_scan(load);
        return;
    }
    load->detailed = at;
    if (kv_store_record_start(load->store, &at->id, true, detailed, load) != KV_OK)
        load_finish(load, KV_NOMEM);
}

void kv_store_load_start(struct kv_store *store, struct kv_session *session, kv_load_done_fn *done,
                         void *context)
{
    struct kv_tree *tree = session->tree;
    assert(tree->load == KV_LOAD_NONE);
    struct load *load = calloc(1, sizeof(*load));
    uint8_t *buf = malloc(LOAD_BUFFER_FIRST);
    if (load == NULL || buf == NULL || !kv_index_tree_open(store->index, tree)) {
        free(load);
        free(buf);
        done(context, session, KV_NOMEM);
        return;
    }
    tree->load = KV_LOAD_RUNNING;
    load->store = store;
    load->session = session;
    load->done = done;
    load->context = context;
    load->scan.msg.run = load_scanned;
    load->scan.reply = store->options.mailbox;
    load->scan.prefix = load->key;
    load->scan.prefix_bytes = kv_key_tree(&tree->id, load->key);
    load->scan.record_max = UINT32_MAX;
    load->scan.buf = buf;
    load->scan.buf_bytes = LOAD_BUFFER_FIRST;
    store->operations++;
    load_details(load);
}

bool kv_store_tree_in_use(const struct kv_tree *tree)
{
    if (tree->commits > 0) return true;
    for (const struct kv_session *at = kv_index_head_next(tree, NULL); at != NULL;
         at = kv_index_head_next(tree, at))
        if (at->live != NULL || at->busy != NULL || at->flows > 0 || at->deleting) return true;
    return false;
}

void kv_store_unload(struct kv_store *store, struct kv_session *session)
{
    struct kv_tree *tree = session->tree;
    struct kv_session *at = NULL;
    assert(tree->load == KV_LOAD_DONE && tree->commits == 0);
    while ((at = kv_index_head_next(tree, at)) != NULL) {
        assert(at->live == NULL && at->busy == NULL);
        at->before.recorded_nodes = at->recorded_nodes;
        at->before.pages = at->pages;
    }
    store->unloading = true;
    for (struct kv_node *node = tree->roots; node != NULL;) {
        while (node->child != NULL)
            node = node->child;
        struct kv_node *const above = node->parent;
        kv_pool_drop(store->pool, &node->image, KV_REASON_LOST_NODE);
        kv_index_node_remove(store->index, node);
        node = above != NULL ? above : tree->roots;
    }
    store->unloading = false;
    while ((at = kv_index_head_next(tree, at)) != NULL) {
        at->head = NULL;
        at->recorded_nodes = at->before.recorded_nodes;
        kv_index_session_pages(store->index, &at->entry, at->before.pages);
    }
    kv_index_history_drop(store->index, tree);
    tree->load = KV_LOAD_NONE;
    store->counters.unloads++;
}

static struct kv_session *least_recent_idle(struct kv_store *store)
{
    struct kv_session *victim = NULL, *session = NULL;
    while ((session = kv_index_open_next(store->index, session)) != NULL) {
        const struct kv_tree *tree = session->tree;
        if (tree->load != KV_LOAD_DONE || tree->roots == NULL || kv_store_tree_in_use(tree) ||
            kv_store_pin_holds(store, tree))
            continue;
        if (victim == NULL || tree->touched_seq < victim->tree->touched_seq) victim = session;
    }
    return victim;
}

bool kv_store_make_room(struct kv_store *store, uint32_t nodes, uint32_t pages)
{
    for (;;) {
        if (kv_index_has_room(store->index, nodes, pages)) return true;
        struct kv_session *victim = least_recent_idle(store);
        if (victim == NULL) return false;
        kv_store_unload(store, victim);
    }
}

void kv_store_renew(struct kv_store *store, struct kv_node *node)
{
    const uint64_t now_ms = kv_store_now_ms(store);
    kv_index_renew(node, now_ms);
    for (; node != NULL; node = node->parent) {
        for (uint32_t i = 0; i < node->page_count; i++) {
            const uint32_t ssd_page = kv_index_page(store->index, node->pages[i])->ssd_page;
            if (ssd_page != KV_SSD_PAGE_NONE) kv_store_segment_touch(store, ssd_page, now_ms);
        }
    }
}
