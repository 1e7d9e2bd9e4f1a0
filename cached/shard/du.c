/*
 * DiskUsage: bytes on SSD by user, or by session of one user.
 *
 * The reader thread brings the records of trees a buffer at a time; one call looks at a bounded
 * number and says where the next one goes on, always between two sessions.  So neither a million
 * sessions nor one that somebody just asked for hold anything up, and progress is the caller's to
 * show.  No tree is loaded: a session in memory is counted from there, any other one from its
 * records.
 *
 * A tree that sessions share is in the rows of those that made some of it: a checkpoint in its
 * maker's, a page in that of who made the first checkpoint that lists it.
 *
 * A page is live while a checkpoint that lists it is.  A checkpoint's record keeps its own last
 * use; that of the ones below it counts as well, as in memory, so it is handed up the tree.  Pages
 * in no session (leaving, or held for a running call) are in nobody's sum.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"
#include "kvstore/format/manifest_record.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define SCAN_BYTES (128u << 10) /* Holds the largest record. */
#define SCAN_RECORDS 2048u
#define SESSION_KEY_BYTES 17u /* T and the tree's id. */
#define MAKERS_MAX 256u       /* Sessions of one tree with a row of their own. */

struct du_node {
    struct kv_checkpoint_id id, parent;
    bool has_parent, live;
    uint32_t tokens, maker;
    uint32_t first_uid, uid_count; /* In uids. */
};

/* A page as an edge lists it: of who made the first one that does. */
struct du_uid {
    uint64_t uid;
    uint32_t tokens, maker;
    bool live;
};

/* A session that made some of a tree; where rows are users the first stands for all. */
struct du_maker {
    struct kv_session_id id;
    uint64_t live_pages, expired_pages, checkpoints;
};

/* The session that is looked at. */
struct du_session {
    struct kv_session_id id; /* Of the tree. */
    /* Of those that have a head in the tree the first; NULL: there is none, or it is not asked for.
     */
    const struct kv_session_entry *session;
    bool begun, skipped; /* skipped: its records need not be read. */
    bool sorted;         /* Its nodes are all there: uids is in order, each once. */
    struct du_maker makers[MAKERS_MAX];
    uint32_t maker_count;
};

struct du {
    struct flow *flow;
    struct kv_manifest_scan scan;
    uint8_t start[SESSION_KEY_BYTES + KV_RECORD_KEY_MAX];
    uint8_t *buf;
    struct du_session at;
    struct du_node *nodes;
    struct du_uid *uids;
    uint32_t node_count, node_capacity, uid_count, uid_capacity;
    uint32_t records;
    struct request_usage *out;
};

static void scan_next(struct du *du);

static void du_free(struct du *du)
{
    free(du->buf);
    free(du->nodes);
    free(du->uids);
    free(du);
}

/* Of a session that went meanwhile the row has no name. */
static void rows_named(struct flow *flow)
{
    struct request_usage *out = flow->req->out.usage;
    for (uint32_t i = 0; i < out->row_count; i++)
        if (flow->names[i].name != NULL) out->rows[i].session = flow->names[i].name;
    flow_finish(flow);
}

static void du_end(struct du *du, kv_status status)
{
    struct flow *flow = du->flow;
    const struct kv_ssd_usage ssd = kv_ssd_usage(flow->shard->store->ssd);
    const struct kv_encryption_facts encryption = kv_store_encryption(flow->shard->store);
    du->out->encryption = encryption.on             ? "on"
                          : encryption.is_encrypted ? "off, and some pages are encrypted"
                                                    : "off";
    du->out->bytes_max = ssd.bytes_max;
    du->out->bytes_files = ssd.bytes_files;
    du->out->page_bytes = flow->shard->layout->page_bytes;
    du->out->pages_free = ssd.pages_free;
    du->out->pages_used = ssd.pages_used;
    du->out->pages_quarantined = ssd.pages_quarantined;
    flow->req->out.usage = du->out;
    du_free(du);
    if (status != KV_OK) flow_fail_status(flow, status);
    if (flow->failed || !flow->req->in.u.usage.has_user)
        flow_finish(flow);
    else
        names_read(flow, flow->names, flow->req->out.usage->row_count, rows_named);
}

/* ---- one session ---- */

static bool grow(void **items, uint32_t *capacity, uint32_t need, size_t item_bytes)
{
    if (need <= *capacity) return true;
    const uint32_t more = KV_MAX(need, KV_MAX(2 * *capacity, 256u));
    void *grown = realloc(*items, more * item_bytes);
    if (grown == NULL) return false;
    *items = grown;
    *capacity = more;
    return true;
}

/* By page, then whose edge came first. */
static int compare_uids(const void *a, const void *b)
{
    const struct du_uid *x = a, *y = b;
    if (x->uid != y->uid) return x->uid < y->uid ? -1 : 1;
    return x->tokens < y->tokens ? -1 : x->tokens > y->tokens;
}

static int compare_uid(const void *a, const void *b)
{
    const struct du_uid *x = a, *y = b;
    return x->uid < y->uid ? -1 : x->uid > y->uid;
}

static int compare_ids(const void *a, const void *b)
{
    const struct du_node *x = a, *y = b;
    return memcmp(x->id.bytes, y->id.bytes, sizeof(x->id.bytes));
}

/* Each page once: of its first edge, and live if one of them is. */
static void sort_uids(struct du *du)
{
    uint32_t kept = 0;
    if (du->uid_count > 0) qsort(du->uids, du->uid_count, sizeof(*du->uids), compare_uids);
    for (uint32_t i = 0; i < du->uid_count; i++) {
        if (kept > 0 && du->uids[kept - 1].uid == du->uids[i].uid)
            du->uids[kept - 1].live |= du->uids[i].live;
        else
            du->uids[kept++] = du->uids[i];
    }
    du->uid_count = kept;
    du->at.sorted = true;
}

/* Its place among those of the tree; of more than there is room for, the first one's. */
static uint32_t maker_of(struct du *du, const struct kv_session_id *id)
{
    struct du_session *at = &du->at;
    if (!du->flow->req->in.u.usage.has_user) id = &at->id;
    for (uint32_t i = 0; i < at->maker_count; i++)
        if (kv_id_equal(at->makers[i].id.bytes, id->bytes)) return i;
    if (at->maker_count == MAKERS_MAX) return 0;
    at->makers[at->maker_count] = (struct du_maker){.id = *id};
    return at->maker_count++;
}

/* Of what nobody says who made it. */
static uint32_t any_maker(struct du *du)
{
    return du->at.maker_count > 0 ? 0 : maker_of(du, &du->at.session->id);
}

static void count_page(struct du *du, const struct du_uid *uid)
{
    struct du_maker *maker = &du->at.makers[uid->maker];
    if (uid->live)
        maker->live_pages++;
    else
        maker->expired_pages++;
}

/* From memory: pages with a place. */
static kv_status take_loaded(struct du *du)
{
    struct kv_store *store = du->flow->shard->store;
    const uint64_t now_ms = kv_store_now_ms(store);
    struct kv_session shape;
    struct kv_session *session =
        (struct kv_session *)(uintptr_t)kv_index_look(du->at.session, &shape);
    struct kv_node *node = NULL;
    while ((node = kv_index_node_next(session, node)) != NULL) {
        const uint32_t maker = maker_of(du, &node->session->id);
        const bool live = !kv_index_expired(node, now_ms);
        du->at.makers[maker].checkpoints++;
        if (!grow((void **)&du->uids, &du->uid_capacity, du->uid_count + node->page_count,
                  sizeof(*du->uids)))
            return KV_NOMEM;
        for (uint32_t i = 0; i < node->page_count; i++) {
            const struct kv_page *page = kv_index_page(store->index, node->pages[i]);
            if (page->ssd_page == KV_SSD_PAGE_NONE || !kv_ssd_claimed(store->ssd, page->ssd_page))
                continue;
            du->uids[du->uid_count++] = (struct du_uid){page->uid, node->tokens, maker, live};
        }
    }
    sort_uids(du);
    for (uint32_t i = 0; i < du->uid_count; i++)
        count_page(du, &du->uids[i]);
    du->uid_count = 0;
    return KV_OK;
}

static kv_status take_node(struct du *du, const struct kv_manifest_put *put)
{
    const uint64_t now_ms = kv_store_now_ms(du->flow->shard->store);
    struct kv_record_node record;
    if (kv_record_node_decode(put->value, put->value_bytes, &record) != KV_OK) {
        du->at.makers[any_maker(du)].checkpoints++;
        return KV_OK;
    }
    const uint32_t maker = maker_of(du, record.has_maker ? &record.maker : &du->at.id);
    du->at.makers[maker].checkpoints++;
    if (!grow((void **)&du->nodes, &du->node_capacity, du->node_count + 1, sizeof(*du->nodes)) ||
        !grow((void **)&du->uids, &du->uid_capacity, du->uid_count + record.page_count,
              sizeof(*du->uids)))
        return KV_NOMEM;
    const uint64_t age_ms = now_ms > record.used_ms ? now_ms - record.used_ms : 0;
    du->nodes[du->node_count++] = (struct du_node){
        .id = record.id,
        .parent = record.parent,
        .has_parent = record.has_parent,
        .live = age_ms <= kv_index_session_ttl_ms(du->at.session),
        .tokens = record.tokens,
        .maker = maker,
        .first_uid = du->uid_count,
        .uid_count = record.page_count,
    };
    for (uint32_t i = 0; i < record.page_count; i++)
        du->uids[du->uid_count++] = (struct du_uid){
            .uid = kv_load64(record.page_uids + 8u * i), .tokens = record.tokens, .maker = maker};
    return KV_OK;
}

/* A checkpoint lives while one below it does; then its pages do.  The loop ends: every step marks
 * one more. */
static void sort_live(struct du *du)
{
    if (du->node_count > 0) qsort(du->nodes, du->node_count, sizeof(*du->nodes), compare_ids);
    for (uint32_t i = 0; i < du->node_count; i++) {
        const struct du_node *node = &du->nodes[i];
        while (node->live && node->has_parent) {
            const struct du_node key = {.id = node->parent};
            struct du_node *parent =
                bsearch(&key, du->nodes, du->node_count, sizeof(key), compare_ids);
            if (parent == NULL || parent->live) break;
            parent->live = true;
            node = parent;
        }
    }
    for (uint32_t i = 0; i < du->node_count; i++) {
        const struct du_node *node = &du->nodes[i];
        for (uint32_t k = 0; k < node->uid_count; k++)
            du->uids[node->first_uid + k].live = node->live;
    }
    sort_uids(du);
}

static void take_page(struct du *du, const struct kv_manifest_put *put)
{
    struct kv_record_page record;
    if (kv_record_page_decode(put->value, put->value_bytes, &record) != KV_OK) return;
    if (!kv_ssd_claimed(du->flow->shard->store->ssd, record.ssd_page)) return;
    if (!du->at.sorted) sort_live(du);
    const struct du_uid key = {.uid = record.uid};
    const struct du_uid *found =
        du->uid_count == 0 ? NULL
                           : bsearch(&key, du->uids, du->uid_count, sizeof(key), compare_uid);
    const struct du_uid unlisted = {.maker = any_maker(du)};
    count_page(du, found != NULL ? found : &unlisted);
}

static kv_status session_begin(struct du *du, const uint8_t *id)
{
    struct kv_store *store = du->flow->shard->store;
    const struct request_in *in = &du->flow->req->in;
    du->at = (struct du_session){.begun = true};
    du->node_count = du->uid_count = 0;
    memcpy(du->at.id.bytes, id, sizeof(du->at.id.bytes));
    const struct kv_session_entry *session = kv_index_tree_entry(store->index, &du->at.id);
    const bool asked =
        session != NULL &&
        (!in->u.usage.has_user || kv_id_equal(session->user->id.bytes, in->u.usage.user.bytes));
    du->at.skipped = !asked || (session->tree != NULL && session->tree->load == KV_LOAD_DONE);
    if (!asked) return KV_OK;
    du->at.session = session;
    return du->at.skipped ? take_loaded(du) : KV_OK;
}

/* ---- rows ---- */

static struct request_usage_row *row_of(struct du *du, const struct kv_session_id *id)
{
    struct request_usage *out = du->out;
    const bool by_user = !du->flow->req->in.u.usage.has_user;
    const struct kv_user *user = du->at.session->user;
    for (uint32_t i = 0; by_user && i < out->row_count; i++)
        if (kv_id_equal(out->rows[i].user_id.bytes, user->id.bytes)) return &out->rows[i];
    struct request_usage_row *row = &out->rows[out->row_count];
    row->user_id = user->id;
    row->user = kv_arena_strdup(du->flow->req->arena, user->name, strlen(user->name));
    row->session = "";
    if (row->user == NULL) return NULL;
    du->flow->names[out->row_count++] = (struct session_name){.id = *id};
    return row;
}

static kv_status session_end(struct du *du)
{
    const bool by_user = !du->flow->req->in.u.usage.has_user;
    if (!du->at.begun || du->at.session == NULL) return KV_OK;
    const struct kv_tree *tree = du->at.session->tree;
    (void)any_maker(du); /* A session has a row, whatever its records say. */
    for (uint32_t i = 0; i < du->at.maker_count; i++) {
        const struct du_maker *maker = &du->at.makers[i];
        struct request_usage_row *row = row_of(du, &maker->id);
        if (row == NULL) return KV_NOMEM;
        row->sessions += by_user && tree != NULL ? tree->session_count : 1;
        row->checkpoints += maker->checkpoints;
        row->live_pages += maker->live_pages;
        row->expired_pages += maker->expired_pages;
    }
    return KV_OK;
}

/* ---- the walk ---- */

/* Also where the rows of the next tree might not all fit. */
static bool is_enough(const struct du *du, const uint8_t *next)
{
    struct kv_session_id id;
    memcpy(id.bytes, next, sizeof(id.bytes));
    const struct kv_session_entry *entry = kv_index_tree_entry(du->flow->shard->store->index, &id);
    const uint32_t heads =
        entry == NULL || entry->tree == NULL ? 1 : KV_MIN(entry->tree->session_count, MAKERS_MAX);
    return du->records >= KV_USAGE_RECORDS_MAX || du->out->row_count + heads > KV_USAGE_ROWS_MAX;
}

/* True: the call has seen enough, and this session is the next one's first. */
static bool take_record(struct du *du, const struct kv_manifest_put *put, kv_status *status)
{
    const uint8_t *id = put->key + 1;
    if (put->key_bytes < SESSION_KEY_BYTES + 1) return false;
    if (put->key[SESSION_KEY_BYTES] == 'H') return false; /* What was, holds no page. */
    if (!du->at.begun || memcmp(du->at.id.bytes, id, sizeof(du->at.id.bytes)) != 0) {
        *status = session_end(du);
        const bool enough = du->at.begun && is_enough(du, id);
        if (enough) du->out->after = du->at.id;
        if (enough || *status != KV_OK) {
            du->out->more = enough;
            du->at.begun = false;
            return true;
        }
        *status = session_begin(du, id);
    }
    du->records++;
    if (du->at.skipped || *status != KV_OK) return *status != KV_OK;
    if (put->key[SESSION_KEY_BYTES] == 'N')
        *status = take_node(du, put);
    else
        take_page(du, put);
    return *status != KV_OK;
}

/* While records were on their way the session may have gone. */
static void find_again(struct du *du)
{
    if (!du->at.begun || du->at.session == NULL) return;
    du->at.session = kv_index_tree_entry(du->flow->shard->store->index, &du->at.id);
    if (du->at.session == NULL) du->at.skipped = true;
}

static void scanned(struct kv_msg *msg)
{
    struct du *du = KV_CONTAINER_OF(msg, struct du, scan.msg);
    struct kv_manifest_put put, last = {0};
    uint32_t offset = 0;
    kv_status status = du->scan.status;
    bool enough = false;
    du->flow->shard->store->operations--;
    find_again(du);
    if (status == KV_OK && flow_cancelled(du->flow)) {
        du_end(du, KV_OK); /* It has failed already, with the right reason. */
        return;
    }
    while (status == KV_OK && !enough && kv_manifest_scan_next(&du->scan, &offset, &put)) {
        last = put;
        enough = take_record(du, &put, &status);
    }
    if (status == KV_OK && !enough && du->scan.more && last.key != NULL) {
        du->scan.start_bytes = kv_manifest_scan_behind(&last, du->start, sizeof(du->start));
        const bool same = du->at.begun && memcmp(du->at.id.bytes, last.key + 1, 16) == 0;
        if (du->at.skipped && same) { /* Or the next session. */
            du->start[SESSION_KEY_BYTES] = UINT8_MAX;
            du->scan.start_bytes = SESSION_KEY_BYTES + 1;
        }
        scan_next(du);
        return;
    }
    if (status == KV_OK && !enough) status = session_end(du);
    du_end(du, status);
}

static void scan_next(struct du *du)
{
    static const uint8_t prefix[1] = {'T'};
    struct kv_store *store = du->flow->shard->store;
    const uint32_t start_bytes = du->scan.start_bytes;
    du->scan = (struct kv_manifest_scan){
        .msg.run = scanned,
        .reply = store->options.mailbox,
        .prefix = prefix,
        .prefix_bytes = sizeof(prefix),
        .start = start_bytes == 0 ? NULL : du->start,
        .start_bytes = start_bytes,
        .record_max = SCAN_RECORDS,
        .buf = du->buf,
        .buf_bytes = SCAN_BYTES,
    };
    store->operations++;
    kv_manifest_scan_post(store->manifest, &du->scan);
}

/* Whose bytes may be looked at: everybody's by ops, one's own by a harness. */
static bool is_allowed(struct flow *flow)
{
    struct request *req = flow->req;
    struct request_in *in = &req->in;
    if (!req->is_ops) {
        if (in->u.usage.has_user && !kv_id_equal(in->u.usage.user.bytes, req->user.bytes)) {
            flow_fail(flow, KV_REASON_ROLE_DENIED, "user", "ops", "harness");
            return false;
        }
        in->u.usage.has_user = true;
        in->u.usage.user = req->user;
        return true;
    }
    if (!in->u.usage.has_user ||
        kv_index_user_find(flow->shard->store->index, &in->u.usage.user) != NULL)
        return true;
    flow_fail(flow, KV_REASON_USER_NOT_FOUND, "user", NULL, in->u.usage.user_name);
    return false;
}

void flow_disk_usage(struct flow *flow)
{
    const struct request_in *in = &flow->req->in;
    struct kv_arena *arena = flow->req->arena;
    if (!is_allowed(flow)) {
        flow_finish(flow);
        return;
    }
    struct du *du = calloc(1, sizeof(*du));
    struct request_usage *out = kv_arena_alloc(arena, sizeof(*out));
    flow->names = kv_arena_alloc(arena, sizeof(*flow->names) * KV_USAGE_ROWS_MAX);
    if (out != NULL) out->rows = kv_arena_alloc(arena, sizeof(*out->rows) * KV_USAGE_ROWS_MAX);
    if (du != NULL) du->buf = malloc(SCAN_BYTES);
    if (du == NULL || du->buf == NULL || out == NULL || out->rows == NULL || flow->names == NULL) {
        if (du != NULL) du_free(du);
        flow_fail_status(flow, KV_NOMEM);
        flow_finish(flow);
        return;
    }
    du->flow = flow;
    du->out = out;
    out->own = !flow->req->is_ops;
    if (in->u.usage.has_after) {
        du->start[0] = 'T';
        memcpy(du->start + 1, in->u.usage.after.bytes, sizeof(in->u.usage.after.bytes));
        du->start[SESSION_KEY_BYTES] = UINT8_MAX; /* Behind all records of that session. */
        du->scan.start_bytes = SESSION_KEY_BYTES + 1;
    }
    scan_next(du);
}
