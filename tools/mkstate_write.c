/*
 * Saves sessions through the store, as a shard does, with the synthetic engine's rows.
 *
 * Many sessions are on their way at a time, so that one flush and one synced batch serve many of
 * them.  A session's tree leaves memory as soon as it is durable: what stays is its entry.
 */

#include "tools/mkstate.h"

#include "engine/engine.h"
#include "kvstore/base/bytes.h"
#include "kvstore/base/key_file.h"
#include "kvstore/base/ring.h"
#include "kvstore/base/secret.h"
#include "kvstore/format/segment_header.h"
#include "kvstore/store/store.h"
#include "tools/mkstate_content.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>

#define SEGMENT_BYTES (64u << 20) /* A daemon's default. */
#define TTL_MS (72ull * 3600 * 1000)
#define RUNNING_MAX 256u
#define HBM_BYTES (64ull << 20)
#define INDEX_BYTES (256ull << 20) /* Of the trees on their way. */
#define ROOM_BYTES (64ull << 20)   /* Left to the file system beside what is written. */
#define RECORD_BYTES 400ull        /* Of a checkpoint, with what RocksDB keeps beside it. */
#define TELL_NS 2000000000ull
#define WAIT_MS 10

enum { KIND_MAIN = 1, PREFILL_END = 1, DECODE_END = 2 };

struct make {
    const struct mkstate_plan *plan;
    struct mkstate_made *made;
    struct eng_model *model;
    struct eng_session *engine;
    const struct kv_layout *layout;
    struct kv_clock *clock;
    struct kv_mailbox *mailbox;
    struct kv_disk *disk;
    struct kv_manifest *manifest;
    struct kv_store *store;
    uint32_t running, running_max;
    kv_status failed; /* Of the first save that did. */
    uint32_t *ids;    /* Of the session being made. */
    struct kv_digest *chain;
    uint64_t begun_ns, told_ns;
};

/* One session on its way.  Owned by: itself, until its records are answered. */
struct save {
    struct make *make;
    struct kv_session *session;
    struct kv_write *write;
    uint32_t user, nodes, first_of_user;
};

uint32_t mkstate_checkpoints_of(const struct mkstate_plan *plan, uint64_t session)
{
    const uint64_t sessions = (uint64_t)plan->users * plan->sessions;
    const uint32_t each = (uint32_t)(plan->checkpoints / sessions);
    const uint32_t more = session < plan->checkpoints % sessions;
    const uint64_t pair = session / 2;
    if (pair * 2 + 1 >= sessions) return each + more; /* The last of an odd number. */
    const uint32_t shift = (uint32_t)((pair * 0x9e3779b97f4a7c15u >> 32) % (each / 4 + 1));
    return (session % 2 == 0 ? each + shift : each - shift) + more;
}

/* They stand as far apart as one page allows, or at each token of several. */
static uint32_t step_of(uint32_t checkpoints)
{
    return KV_MAX(KV_PAGE_TOKENS / checkpoints, 1u);
}

static uint32_t pages_of(const struct mkstate_plan *plan, uint64_t session)
{
    const uint32_t checkpoints = mkstate_checkpoints_of(plan, session);
    return kv_pages_for(checkpoints * step_of(checkpoints));
}

static void tell(struct make *make)
{
    const uint64_t now = kv_clock_stopwatch_ns();
    if (now - make->told_ns < TELL_NS) return;
    make->told_ns = now;
    (void)fprintf(stderr, "mkstate: %" PRIu64 " of %" PRIu64 " checkpoints, %.0f a second\n",
                  make->made->checkpoints, make->plan->checkpoints,
                  (double)make->made->checkpoints * 1e9 / (double)(now - make->begun_ns));
}

/* ---- one session ---- */

static void save_end(struct save *save, kv_status status)
{
    struct make *make = save->make;
    if (status != KV_OK && make->failed == KV_OK) make->failed = status;
    kv_write_destroy(save->write);
    if (status == KV_OK) kv_store_unload(make->store, save->session);
    make->running--;
    free(save);
}

static void recorded(void *context, kv_status status)
{
    struct save *save = context;
    struct make *make = save->make;
    struct kv_store *store = make->store;
    if (status == KV_OK) {
        for (uint32_t i = 0; i < save->write->count; i++)
            kv_index_page(store->index, save->write->items[i].page)->durable = true;
        struct kv_node *node = NULL;
        while ((node = kv_index_node_next(save->session, node)) != NULL)
            node->durable = true;
        store->checkpoints += save->nodes;
        make->made->checkpoints += save->nodes;
        make->made->sessions++;
        make->made->users += save->first_of_user;
        make->made->pages += save->write->count;
        tell(make);
    }
    save_end(save, status);
}

static kv_status fill_batch(struct save *save, struct kv_batch *batch)
{
    struct kv_index *index = save->make->store->index;
    char name[MKSTATE_NAME_BYTES];
    kv_status status = KV_OK;
    if (save->first_of_user)
        status = kv_batch_user(batch, save->session->user, mkstate_user(save->user, name));
    for (uint32_t i = 0; status == KV_OK && i < save->write->count; i++)
        status = kv_batch_page(batch, kv_index_page(index, save->write->items[i].page));
    struct kv_node *node = NULL;
    while (status == KV_OK && (node = kv_index_node_next(save->session, node)) != NULL)
        status = kv_batch_node(batch, node);
    return status == KV_OK ? kv_batch_session(batch, save->session) : status;
}

static void written(struct kv_write *write, kv_status status)
{
    struct save *save = write->context;
    struct kv_batch *batch = status == KV_OK ? kv_batch_create(save->make->store) : NULL;
    if (status == KV_OK) status = batch == NULL ? KV_NOMEM : fill_batch(save, batch);
    if (status == KV_OK) {
        kv_batch_post(batch, recorded, save);
        return;
    }
    kv_batch_discard(batch);
    save_end(save, status);
}

/* The engine's rows of the first `tokens` tokens, into the slots. */
static void compute(struct make *make, uint8_t *const *pages, uint32_t page_count, uint32_t tokens)
{
    eng_session_reset(make->engine);
    eng_session_set_pages(make->engine, pages, page_count);
    eng_prefill_begin(make->engine, make->ids, 0, tokens);
    const uint32_t rows = eng_model_pass_rows(make->model);
    struct eng_run_left left = eng_run_left(make->engine);
    while (left.encode > 0 || left.decode > 0) {
        struct eng_piece piece = {.session = make->engine, .encode = KV_MIN(left.encode, rows)};
        if (piece.encode == left.encode) piece.decode = KV_MIN(left.decode, rows);
        eng_pass(make->model, &piece, 1);
        left = eng_run_left(make->engine);
    }
}

/* Objects and bytes of all pages; the caller lets go of the objects. */
static kv_status make_pages(struct save *save, uint32_t *pages, uint32_t count, uint32_t tokens)
{
    struct make *make = save->make;
    struct kv_store *store = make->store;
    uint8_t *bytes[MKSTATE_PER_SESSION_MAX / KV_PAGE_TOKENS + 1];
    uint32_t slots[MKSTATE_PER_SESSION_MAX / KV_PAGE_TOKENS + 1];
    assert(count <= KV_ARRAY_COUNT(slots));
    for (uint32_t k = 0; k < count; k++) {
        if (kv_hbm_alloc(store->hbm, &slots[k]) != KV_OK) return KV_NOMEM;
        pages[k] = kv_index_page_add(store->index, save->session);
        if (pages[k] == KV_PAGE_INDEX_NONE) return KV_NOMEM;
        struct kv_page *object = kv_index_page(store->index, pages[k]);
        object->uid = kv_store_next_generation(store);
        object->position = k * KV_PAGE_TOKENS;
        object->tag = kv_load64(make->chain[k].bytes);
        bytes[k] = kv_hbm_bytes(store->hbm, slots[k]);
    }
    compute(make, bytes, count, tokens);
    for (uint32_t k = 0; k < count; k++) {
        const uint32_t here = KV_MIN(KV_PAGE_TOKENS, tokens - k * KV_PAGE_TOKENS);
        kv_write_add(save->write, pages[k], slots[k], here, &make->chain[k]);
        kv_hbm_unpin(store->hbm, slots[k]); /* The write has its own pin. */
    }
    return KV_OK;
}

static kv_status make_node(struct save *save, struct kv_node **parent, const uint32_t *pages,
                           uint32_t tokens)
{
    struct make *make = save->make;
    const uint32_t k = tokens / KV_PAGE_TOKENS;
    const uint32_t first = *parent == NULL ? 0 : (*parent)->tokens / KV_PAGE_TOKENS;
    struct kv_digest hash;
    struct kv_node *node = kv_index_node_add(make->store->index, save->session, *parent, tokens,
                                             pages + first, kv_pages_for(tokens) - first);
    if (node == NULL) return KV_NOMEM;
    node->digest = kv_digest_at(&make->chain[k], tokens, make->ids + (size_t)k * KV_PAGE_TOKENS);
    kv_sha256(node->digest.bytes, sizeof(node->digest.bytes), &hash);
    memcpy(node->id.bytes, hash.bytes, sizeof(node->id.bytes));
    node->kind = save->nodes % 2 == 0 ? PREFILL_END : DECODE_END;
    node->created_ms = save->session->created_ms;
    kv_index_node_mark(node, NULL, 0);
    kv_index_renew(node, node->created_ms);
    save->nodes++;
    *parent = node;
    return KV_OK;
}

static struct kv_session *add_session(struct make *make, uint64_t number, bool *ret_first)
{
    const uint32_t user_number = (uint32_t)(number / make->plan->sessions);
    char name[MKSTATE_NAME_BYTES];
    struct kv_index *index = make->store->index;
    const struct kv_user_id user_id = kv_user_id_of(mkstate_user(user_number, name));
    struct kv_user *user = kv_index_user_find(index, &user_id);
    *ret_first = user == NULL;
    if (user == NULL) user = kv_index_user_add(index, &user_id, NULL);
    if (user == NULL) return NULL;
    (void)mkstate_session((uint32_t)(number % make->plan->sessions), name);
    const struct kv_session_id id = kv_session_id_of(&user_id, name);
    struct kv_session *session = kv_index_session_add(index, &id, user, name, "");
    if (session == NULL) return NULL;
    session->kind = KIND_MAIN;
    session->created_ms = session->used_ms = kv_store_now_ms(make->store);
    session->ttl_ms = TTL_MS;
    session->epoch = 1;
    session->tree->load = KV_LOAD_DONE;
    return session;
}

/* Nodes and pages in memory; the rest is the store's and the engine's. */
static kv_status make_tree(struct save *save, uint64_t number)
{
    struct make *make = save->make;
    const uint32_t checkpoints = mkstate_checkpoints_of(make->plan, number);
    const uint32_t step = step_of(checkpoints), tokens = checkpoints * step;
    const uint32_t count = kv_pages_for(tokens);
    uint32_t pages[MKSTATE_PER_SESSION_MAX / KV_PAGE_TOKENS + 1];
    struct kv_node *node = NULL;
    mkstate_tokens(make->plan->seed, save->user, (uint32_t)(number % make->plan->sessions),
                   make->layout->vocab_tokens, make->ids, tokens);
    kv_match_chain(&save->session->user->root, make->ids, tokens, make->chain);
    save->write = kv_write_create(make->store, count);
    if (save->write == NULL) return KV_NOMEM;
    kv_status status = make_pages(save, pages, count, tokens);
    for (uint32_t at = step; status == KV_OK && at <= tokens; at += step)
        status = make_node(save, &node, pages, at);
    for (uint32_t k = 0; status == KV_OK && k < count; k++)
        kv_index_page_unref(make->store->index, pages[k]); /* The edges hold their own. */
    if (status != KV_OK) return status;
    save->session->head = node;
    save->session->has_head = true;
    save->session->head_id = node->id;
    save->session->head_tokens = save->session->claimed_tokens = tokens;
    return KV_OK;
}

/* After a failure the program ends, so nothing is put back. */
static kv_status save_start(struct make *make, uint64_t number, struct kv_error *err)
{
    struct save *save = calloc(1, sizeof(*save));
    bool first = false;
    if (save == NULL) return KV_FAIL(err, KV_NOMEM, "save a session: no memory");
    save->make = make;
    save->user = (uint32_t)(number / make->plan->sessions);
    save->session = add_session(make, number, &first);
    save->first_of_user = first;
    const kv_status status = save->session == NULL ? KV_NOMEM : make_tree(save, number);
    if (status != KV_OK) {
        free(save);
        return KV_FAIL(err, status, "save a session: no memory");
    }
    save->write->done = written;
    save->write->context = save;
    make->running++;
    return kv_write_start(save->write, err);
}

/* ---- all of them ---- */

static kv_status save_all(struct make *make, struct kv_error *err)
{
    const uint64_t sessions = (uint64_t)make->plan->users * make->plan->sessions;
    uint64_t next = 0;
    make->begun_ns = make->told_ns = kv_clock_stopwatch_ns();
    while (next < sessions || make->running > 0 || make->store->operations > 0) {
        while (next < sessions && make->running < make->running_max && make->failed == KV_OK) {
            const kv_status status = save_start(make, next, err);
            if (status != KV_OK) return status;
            next++;
        }
        if (make->failed != KV_OK && make->running == 0 && make->store->operations == 0)
            return KV_FAIL(err, make->failed, "a save failed: %s", kv_status_name(make->failed));
        (void)kv_mailbox_run(make->mailbox, UINT32_MAX);
        kv_store_tick(make->store);
        (void)kv_disk_run(make->disk, kv_mailbox_fd(make->mailbox), WAIT_MS);
    }
    return KV_OK;
}

static uint64_t segments_of(const struct make *make)
{
    const uint64_t sessions = (uint64_t)make->plan->users * make->plan->sessions;
    const uint64_t each = (SEGMENT_BYTES - KV_SEGMENT_HEADER_BYTES) / make->layout->page_bytes;
    uint64_t pages = 0;
    for (uint64_t i = 0; i < sessions; i++)
        pages += pages_of(make->plan, i);
    return pages / each + 2; /* One is made ahead. */
}

static kv_status check_room(const struct make *make, uint64_t segments, struct kv_error *err)
{
    struct statvfs system;
    if (statvfs(make->plan->dir, &system) != 0)
        return KV_FAIL_ERRNO(err, KV_IO, "look at the file system of %s", make->plan->dir);
    const uint64_t have = (uint64_t)system.f_bavail * system.f_frsize;
    const uint64_t need =
        segments * SEGMENT_BYTES + make->plan->checkpoints * RECORD_BYTES + ROOM_BYTES;
    if (have >= need) return KV_OK;
    return KV_FAIL(err, KV_IO,
                   "%s: %" PRIu64 " bytes are free on its file system, %" PRIu64 " are needed",
                   make->plan->dir, have, need);
}

static kv_status open_engine(struct make *make, struct kv_error *err)
{
    const struct eng_options options = {.backend = ENG_BACKEND_SYNTHETIC,
                                        .spare_tokens = KV_SPARE_TOKENS_MIN};
    kv_status status = eng_model_open(&options, &make->model, err);
    if (status != KV_OK) return status;
    make->layout = eng_model_layout(make->model);
    make->ids = calloc(MKSTATE_PER_SESSION_MAX + KV_PAGE_TOKENS, sizeof(*make->ids));
    make->chain = calloc(MKSTATE_PER_SESSION_MAX / KV_PAGE_TOKENS + 2, sizeof(*make->chain));
    if (make->ids == NULL || make->chain == NULL)
        return KV_FAIL(err, KV_NOMEM, "no memory for the tokens of a session");
    return eng_session_create(make->model, &make->engine, err);
}

static kv_status open_with(struct make *make, struct kv_store_options *options,
                           struct kv_error *err)
{
    char path[4096];
    kv_status status = kv_store_directory(options, err);
    (void)snprintf(path, sizeof(path), "%s/manifest", make->plan->dir);
    if (status == KV_OK) status = kv_manifest_open(path, &make->manifest, err);
    options->manifest = make->manifest;
    return status == KV_OK ? kv_store_open(options, &make->store, err) : status;
}

static kv_status open_encrypted(struct make *make, struct kv_store_options *options,
                                struct kv_error *err)
{
    struct kv_secrets *secrets = NULL;
    kv_status status = kv_secrets_create(KV_KEY_BYTES, &secrets, err);
    uint8_t *key = status == KV_OK ? kv_secrets_alloc(secrets) : NULL;
    if (status == KV_OK && key == NULL) status = KV_FAIL(err, KV_NOMEM, "keep the master key");
    if (status == KV_OK) status = kv_key_file_read(make->plan->master_key, NULL, key, err);
    options->encryption = (struct kv_encryption){.on = true, .master = key};
    if (status == KV_OK) status = open_with(make, options, err);
    kv_secrets_destroy(secrets);
    return status;
}

static kv_status open_store(struct make *make, struct kv_error *err)
{
    const struct mkstate_plan *plan = make->plan;
    const uint64_t family = kv_kernels_tag(eng_model_family(make->model));
    const uint64_t segments = segments_of(make);
    kv_status status = check_room(make, segments, err);
    if (status != KV_OK) return status;
    make->clock = kv_clock_create_real();
    if (make->clock == NULL) return KV_FAIL(err, KV_NOMEM, "create the clock");
    status = kv_mailbox_create(&make->mailbox, err);
    if (status == KV_OK) status = kv_ring_create(KV_RING_DEPTH, KV_RING_AUTO, &make->disk, err);
    if (status != KV_OK) return status;
    struct kv_store_options options = {
        .dir = plan->dir,
        .layout = make->layout,
        .model = eng_model_fingerprint(make->model),
        .kernels = family,
        .kernels_made = family,
        .clock = make->clock,
        .disk = make->disk,
        .mailbox = make->mailbox,
        .hbm_bytes = HBM_BYTES,
        .pool_bytes = make->layout->image_bytes * UINT64_C(2),
        .ssd_bytes = segments * SEGMENT_BYTES,
        .segment_bytes = SEGMENT_BYTES,
        .index_bytes = INDEX_BYTES,
        .pool_ttl_ms = 1000,
        .rows_ttl_ms = TTL_MS,
        .sessions_max = KV_SESSIONS_MAX,
    };
    return plan->master_key == NULL ? open_with(make, &options, err)
                                    : open_encrypted(make, &options, err);
}

static uint32_t running_max_of(const struct make *make)
{
    const uint64_t each = KV_MAX(pages_of(make->plan, 0), 1u) + 1; /* Some have a quarter more. */
    const uint64_t slots = HBM_BYTES / make->layout->page_bytes;
    return (uint32_t)KV_MAX(KV_MIN(slots / (2 * each), (uint64_t)RUNNING_MAX), UINT64_C(1));
}

kv_status mkstate_write(const struct mkstate_plan *plan, struct mkstate_made *ret_made,
                        struct kv_error *err)
{
    struct make make = {.plan = plan, .made = ret_made};
    kv_status status = open_engine(&make, err);
    if (status == KV_OK) status = open_store(&make, err);
    if (status == KV_OK) {
        make.running_max = running_max_of(&make);
        status = save_all(&make, err);
        const struct kv_ssd_usage usage = kv_ssd_usage(make.store->ssd);
        ret_made->bytes = usage.bytes_used;
        ret_made->segments = (uint32_t)(usage.bytes_files / SEGMENT_BYTES);
    }
    /* With saves on their way the process ends without closing: they belong to nobody then. */
    if (make.store != NULL && make.store->operations > 0) return status;
    kv_store_close(make.store);
    kv_manifest_close(make.manifest);
    kv_disk_destroy(make.disk);
    kv_mailbox_destroy(make.mailbox);
    kv_clock_destroy(make.clock);
    eng_session_destroy(make.engine);
    eng_model_close(make.model);
    free(make.ids);
    free(make.chain);
    return status;
}
