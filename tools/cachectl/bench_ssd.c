/*
 * A store of one's own, and saves on it.
 *
 * A save does what cached/shard/commit.c does for a history that only grows: nodes and pages in
 * memory, pages sealed, written and flushed, records synced, acknowledged.  The rows of a page do
 * not matter to the disk, so each history writes from the same few pinned pages of random bytes:
 * ids, header and checksum are made anew for every write, as a live session's are.
 */

#include "tools/cachectl/bench_ssd.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/ring.h"
#include "kvstore/format/page.h"
#include "kvstore/format/segment_header.h"
#include "kvstore/index/match.h"
#include "tools/cachectl/bench_engine.h"
#include "tools/cachectl/spawn.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define INDEX_BYTES (64ull << 20)
#define POOL_IMAGES 2u
#define LATENCIES_MAX (1u << 20)
#define RUNNING_MAX 4096u

/* ---- a disk that times reads ---- */

struct running {
    const struct kv_disk_op *op;
    uint64_t begun_ns;
};

struct timer {
    struct kv_disk disk;
    struct kv_disk *inner;
    struct running running[RUNNING_MAX];
    uint32_t running_count;
    uint64_t *latencies; /* LATENCIES_MAX */
    uint32_t count;
};

static struct timer *timer_of(struct kv_disk *disk)
{
    return KV_CONTAINER_OF(disk, struct timer, disk);
}

static void timer_start(struct kv_disk *disk, struct kv_disk_op *op)
{
    struct timer *timer = timer_of(disk);
    if (op->rest.verb == KV_DISK_READ && timer->running_count < RUNNING_MAX)
        timer->running[timer->running_count++] =
            (struct running){.op = op, .begun_ns = kv_clock_stopwatch_ns()};
    timer->inner->ops->start(timer->inner, op);
}

static int64_t timer_passed(struct kv_disk *disk, struct kv_disk_op *op, int64_t result)
{
    struct timer *timer = timer_of(disk);
    for (uint32_t i = 0; op->rest.verb == KV_DISK_READ && i < timer->running_count; i++) {
        if (timer->running[i].op != op) continue;
        if (timer->count < LATENCIES_MAX)
            timer->latencies[timer->count++] = kv_clock_stopwatch_ns() - timer->running[i].begun_ns;
        timer->running[i] = timer->running[--timer->running_count];
        break;
    }
    return kv_disk_passed(timer->inner, op, result);
}

static uint32_t timer_run(struct kv_disk *disk, int wake_fd, int timeout_ms)
{
    struct kv_disk *inner = timer_of(disk)->inner;
    return inner->ops->run(inner, wake_fd, timeout_ms);
}

static int64_t timer_call(struct kv_disk *disk, const struct kv_disk_call *call)
{
    struct kv_disk *inner = timer_of(disk)->inner;
    return inner->ops->call(inner, call);
}

static void timer_register(struct kv_disk *disk, uint8_t *buf, uint64_t bytes)
{
    kv_disk_register(timer_of(disk)->inner, buf, bytes);
}

static void timer_forget(struct kv_disk *disk, const uint8_t *buf)
{
    kv_disk_forget(timer_of(disk)->inner, buf);
}

static void timer_destroy(struct kv_disk *disk)
{
    struct timer *timer = timer_of(disk);
    free(timer->latencies);
    free(timer);
}

static const struct kv_disk_ops timer_ops = {
    .name = "timed",
    .destroy = timer_destroy,
    .start = timer_start,
    .run = timer_run,
    .passed = timer_passed,
    .call = timer_call,
    .register_buffer = timer_register,
    .forget_buffer = timer_forget,
};

static struct kv_disk *timer_make(struct kv_disk *inner)
{
    struct timer *timer = calloc(1, sizeof(*timer));
    uint64_t *latencies = malloc(LATENCIES_MAX * sizeof(*latencies));
    if (timer == NULL || latencies == NULL) {
        free(timer);
        free(latencies);
        return NULL;
    }
    *timer = (struct timer){.disk = {.ops = &timer_ops}, .inner = inner, .latencies = latencies};
    return &timer->disk;
}

static int compare(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

uint64_t *bench_ssd_latencies(struct bench_ssd *own, uint32_t *ret_count)
{
    struct timer *timer = timer_of(own->timer);
    const uint32_t count = timer->count;
    *ret_count = count;
    timer->count = 0;
    uint64_t *sorted = count == 0 ? NULL : malloc(count * sizeof(*sorted));
    if (sorted == NULL) return NULL;
    memcpy(sorted, timer->latencies, count * sizeof(*sorted));
    qsort(sorted, count, sizeof(*sorted), compare);
    return sorted;
}

/* ---- the store ---- */

/* The shape of DeepSeek-V4.1-Flash: 890 B of rows a token. */
static kv_status make_layout(struct kv_layout *layout, struct kv_error *err)
{
    *layout = (struct kv_layout){
        .vocab_tokens = 129280,
        .context_tokens = KV_PROMPT_TOKENS_MAX,
        .window_tokens = 128,
        .spare_tokens = 16,
        .encoder_layers = 20,
        .decoder_layers = 20,
        .draft_stages = 3,
        .window_row_bytes = 528,
        .source_count = 4,
    };
    for (uint32_t i = 0; i < layout->source_count; i++)
        layout->sources[i] = (struct kv_source){.layer = 2 + 6 * i,
                                                .ratio = i < 3 ? 2 : 1,
                                                .main_bytes = 288,
                                                .index_bytes = 68,
                                                .tail_bytes = i < 3 ? 4096 : 0};
    return kv_layout_finish(layout, err);
}

static kv_status open_parts(struct bench_ssd *own, const struct bench_ssd_options *options,
                            struct kv_error *err)
{
    static const uint8_t master[KV_KEY_BYTES] = {0xbe, 0x9c}; /* Nothing here is a secret. */
    char path[BENCH_SSD_DIR_BYTES + 16];
    kv_status status = make_layout(&own->layout, err);
    if (status == KV_OK) status = kv_mailbox_create(&own->mailbox, err);
    if (status == KV_OK) status = kv_ring_create(KV_RING_DEPTH, KV_RING_AUTO, &own->ring, err);
    if (status != KV_OK) return status;
    own->clock = kv_clock_create_real();
    if (options->timed) own->timer = timer_make(own->ring);
    if (own->clock == NULL || (options->timed && own->timer == NULL))
        return KV_FAIL(err, KV_NOMEM, "open a store");
    memset(own->model.bytes, 0x4d, sizeof(own->model.bytes));
    const uint64_t segment_bytes =
        KV_SEGMENT_HEADER_BYTES + options->ssd_pages * own->layout.page_bytes;
    struct kv_store_options store = {
        .dir = own->dir,
        .layout = &own->layout,
        .model = own->model,
        .kernels = 1,
        .kernels_made = 1,
        .clock = own->clock,
        .disk = own->timer != NULL ? own->timer : own->ring,
        .mailbox = own->mailbox,
        .hbm_bytes = options->hbm_pages * own->layout.page_bytes,
        .pool_bytes = POOL_IMAGES * (own->layout.image_bytes + 4096ull),
        .ssd_bytes = segment_bytes,
        .segment_bytes = segment_bytes,
        .index_bytes = INDEX_BYTES,
        .pool_ttl_ms = 60000,
        .rows_ttl_ms = KV_TTL_MS_MAX,
        .sessions_max = options->sessions,
        .encryption = {.on = options->encrypt, .master = options->encrypt ? master : NULL},
    };
    status = kv_store_directory(&store, err);
    if (status != KV_OK) return status;
    (void)snprintf(path, sizeof(path), "%s/manifest", own->dir);
    status = kv_manifest_open(path, &own->manifest, err);
    if (status != KV_OK) return status;
    store.manifest = own->manifest;
    return kv_store_open(&store, &own->store, err);
}

int bench_ssd_open(struct bench_ssd *own, const struct bench_ssd_options *options,
                   struct bench_progress *progress)
{
    struct kv_error err = {0};
    *own = (struct bench_ssd){.progress = progress};
    (void)snprintf(own->dir, sizeof(own->dir), "%.120s/cachectl.XXXXXX", bench_tmp_dir());
    if (mkdtemp(own->dir) == NULL) {
        ctl_error("cannot make a directory in %s: %s", bench_tmp_dir(), strerror(errno));
        own->dir[0] = '\0';
        return CLIENT_EXIT_FAILED;
    }
    if (open_parts(own, options, &err) == KV_OK) {
        const struct kv_user_id id = kv_user_id_of("bench");
        own->user = kv_index_user_add(own->store->index, &id, NULL);
        if (own->user != NULL) return CLIENT_EXIT_OK;
        (void)KV_FAIL(&err, KV_NOMEM, "open a store");
    }
    ctl_error("%s", err.text);
    return CLIENT_EXIT_FAILED;
}

void bench_ssd_close(struct bench_ssd *own)
{
    if (own->store != NULL) bench_ssd_settle(own);
    kv_store_close(own->store);
    kv_manifest_close(own->manifest);
    if (own->timer != NULL) kv_disk_destroy(own->timer);
    if (own->ring != NULL) kv_disk_destroy(own->ring);
    kv_clock_destroy(own->clock);
    kv_mailbox_destroy(own->mailbox);
    if (own->dir[0] != '\0') spawn_remove_tree(own->dir, 2);
    *own = (struct bench_ssd){.progress = own->progress};
}

void bench_ssd_turn(struct bench_ssd *own)
{
    struct kv_disk *disk = own->store->options.disk;
    (void)kv_mailbox_run(own->mailbox, UINT32_MAX);
    kv_store_tick(own->store);
    const int wait_ms = own->store->operations > 0 || kv_disk_inflight(disk) > 0 ? 100 : 0;
    (void)kv_disk_run(disk, kv_mailbox_fd(own->mailbox), wait_ms);
}

void bench_ssd_settle(struct bench_ssd *own)
{
    const struct kv_disk *disk = own->store->options.disk;
    while (own->store->operations > 0 || own->store->dead != NULL || kv_disk_inflight(disk) > 0)
        bench_ssd_turn(own);
}

/* ---- histories ---- */

static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

static bool take_slots(struct bench_history *history, uint32_t number)
{
    struct kv_store *store = history->own->store;
    for (uint32_t i = 0; i < history->slots_max; i++) {
        history->slots[i] = KV_HBM_SLOT_NONE;
        if (kv_hbm_alloc(store->hbm, &history->slots[i]) != KV_OK) return false;
        uint8_t *page = kv_hbm_bytes(store->hbm, history->slots[i]);
        for (uint32_t at = KV_PAGE_ROWS_OFFSET; at < store->layout.page_bytes; at += 8)
            kv_store64(page + at, mix(((uint64_t)number << 40) + ((uint64_t)i << 20) + at));
    }
    return true;
}

bool bench_history_init(struct bench_history *history, struct bench_ssd *own, uint32_t number,
                        uint32_t token_max, uint32_t pages_max)
{
    char name[32];
    struct kv_index *index = own->store->index;
    *history = (struct bench_history){.own = own, .token_max = token_max, .slots_max = pages_max};
    (void)snprintf(name, sizeof(name), "s%u", number);
    const struct kv_session_id id = kv_session_id_of(&own->user->id, name);
    history->session = kv_index_session_add(index, &id, own->user, name, "");
    history->ids = malloc(token_max * sizeof(*history->ids));
    history->chain = malloc((token_max / KV_PAGE_TOKENS + 1) * sizeof(*history->chain));
    history->slots = malloc(KV_MAX(pages_max, 1u) * sizeof(*history->slots));
    if (history->session == NULL || history->ids == NULL || history->chain == NULL ||
        history->slots == NULL) {
        ctl_error("no memory for a session of %u tokens", token_max);
        return false;
    }
    for (uint32_t i = 0; i < token_max; i++)
        history->ids[i] = (uint32_t)(mix(((uint64_t)number << 32) + i) % own->layout.vocab_tokens);
    const struct kv_digest root = kv_digest_root(&own->model, own->user->salt);
    kv_match_chain(&root, history->ids, token_max, history->chain);
    history->session->ttl_ms = KV_TTL_MS_MAX;
    history->session->tree->load = KV_LOAD_DONE;
    if (take_slots(history, number)) return true;
    ctl_error("no room in memory for the pages of a save");
    return false;
}

/* The page object that was last written from the slot must not keep it. */
static void let_go(struct kv_store *store, const struct kv_node *node)
{
    for (uint32_t i = 0; i < node->page_count; i++) {
        struct kv_page *object = kv_index_page(store->index, node->pages[i]);
        if (object->hbm_slot == KV_HBM_SLOT_NONE) continue;
        kv_hbm_set_owner(store->hbm, object->hbm_slot, KV_HBM_OWNER_NONE);
        object->hbm_slot = KV_HBM_SLOT_NONE;
    }
}

void bench_history_seal(struct bench_history *history)
{
    assert(!history->busy);
    for (uint32_t i = 0; history->slots != NULL && i < history->slots_max; i++) {
        if (history->slots[i] == KV_HBM_SLOT_NONE) break;
        kv_hbm_unpin(history->own->store->hbm, history->slots[i]);
    }
    history->slots_max = 0;
}

void bench_history_fini(struct bench_history *history)
{
    bench_history_seal(history);
    free(history->slots);
    free(history->ids);
    free(history->chain);
    *history = (struct bench_history){.own = history->own};
}

uint32_t bench_history_tokens(const struct bench_history *history)
{
    return history->session->head == NULL ? 0 : history->session->head->tokens;
}

void bench_history_drop(struct bench_history *history)
{
    struct kv_session *session = history->session;
    session->head = NULL;
    session->has_head = false;
    while (session->tree->roots != NULL)
        kv_store_drop_node(history->own->store, session->tree->roots, KV_REASON_DELETED);
}

static void save_end(struct bench_history *history, kv_status status)
{
    struct kv_store *store = history->own->store;
    struct kv_node *node = history->node;
    history->failed = status != KV_OK;
    if (history->failed) ctl_error("a save failed: %s", kv_status_name(status));
    for (uint32_t i = 0; !history->failed && i < history->write->count; i++)
        kv_index_page(store->index, history->write->items[i].page)->durable = true;
    if (!history->failed) {
        node->durable = true;
        store->checkpoints++;
        history->own->user_recorded = true;
        let_go(store, node);
    }
    kv_write_destroy(history->write);
    history->write = NULL;
    history->busy = false;
    history->saved(history);
}

static void save_recorded(void *context, kv_status status)
{
    save_end(context, status);
}

static kv_status fill_batch(struct bench_history *history, struct kv_batch *batch)
{
    struct kv_index *index = history->own->store->index;
    kv_status status = KV_OK;
    if (!history->own->user_recorded)
        status = kv_batch_user(batch, history->session->user, "bench");
    if (status == KV_OK) status = kv_batch_session(batch, history->session);
    for (uint32_t i = 0; status == KV_OK && i < history->write->count; i++) {
        const struct kv_write_item *item = &history->write->items[i];
        status = kv_batch_page(batch, kv_index_page(index, item->page));
        if (status == KV_OK && item->old_ssd != KV_SSD_PAGE_NONE)
            status = kv_batch_free_ssd(batch, item->old_ssd);
    }
    return status == KV_OK ? kv_batch_node(batch, history->node) : status;
}

static void save_written(struct kv_write *write, kv_status status)
{
    struct bench_history *history = write->context;
    struct kv_batch *batch = status == KV_OK ? kv_batch_create(history->own->store) : NULL;
    if (status == KV_OK) status = batch == NULL ? KV_NOMEM : fill_batch(history, batch);
    if (status != KV_OK) {
        kv_batch_discard(batch);
        save_end(history, status);
        return;
    }
    kv_batch_post(batch, save_recorded, history);
}

/* The object of page k: the head's last one while it is not full, or a new one. */
static uint32_t edge_page(struct bench_history *history, const struct kv_node *parent, uint32_t k)
{
    struct kv_store *store = history->own->store;
    if (parent != NULL && parent->tokens > k * KV_PAGE_TOKENS) {
        const uint32_t last = parent->pages[parent->page_count - 1];
        kv_index_page_ref(store->index, last);
        return last;
    }
    const uint32_t page = kv_index_page_add(store->index, history->session);
    if (page == KV_PAGE_INDEX_NONE) return page;
    struct kv_page *object = kv_index_page(store->index, page);
    object->uid = kv_store_next_generation(store);
    object->position = k * KV_PAGE_TOKENS;
    object->tag = kv_load64(history->chain[k].bytes);
    return page;
}

static struct kv_node *add_node(struct bench_history *history, struct kv_node *parent,
                                uint32_t tokens, const uint32_t *pages, uint32_t count)
{
    struct kv_store *store = history->own->store;
    const uint32_t full = tokens / KV_PAGE_TOKENS;
    struct kv_node *node =
        kv_index_node_add(store->index, history->session, parent, tokens, pages, count);
    if (node == NULL) return NULL;
    node->digest =
        kv_digest_at(&history->chain[full], tokens, history->ids + full * KV_PAGE_TOKENS);
    memcpy(node->id.bytes, node->digest.bytes, sizeof(node->id.bytes));
    node->kernels = 1;
    node->created_ms = kv_store_now_ms(store);
    kv_index_node_mark(node, NULL, 0);
    kv_index_renew(node, node->created_ms);
    history->session->head = node;
    history->session->has_head = true;
    history->session->head_id = node->id;
    history->session->head_tokens = tokens;
    return node;
}

static void add_page(struct bench_history *history, uint32_t i, uint32_t page, uint32_t k,
                     uint32_t tokens)
{
    struct kv_store *store = history->own->store;
    uint8_t *bytes = kv_hbm_bytes(store->hbm, history->slots[i]);
    const uint32_t start = k * KV_PAGE_TOKENS;
    const uint32_t count = KV_MIN(KV_PAGE_TOKENS, tokens - start);
    for (uint32_t id = 0; id < KV_PAGE_TOKENS; id++)
        kv_page_set_id(bytes, id, id < count ? history->ids[start + id] : 0);
    kv_write_add(history->write, page, history->slots[i], count, &history->chain[k]);
}

bool bench_history_save(struct bench_history *history, uint32_t tokens)
{
    struct kv_store *store = history->own->store;
    struct kv_node *parent = history->session->head;
    const uint32_t first = bench_history_tokens(history) / KV_PAGE_TOKENS;
    const uint32_t count = kv_pages_for(tokens) - first;
    uint32_t *pages = malloc(count * sizeof(*pages));
    struct kv_error err = {0};
    bool ok = pages != NULL;

    assert(!history->busy && tokens <= history->token_max);
    assert(count <= history->slots_max);
    for (uint32_t i = 0; ok && i < count; i++)
        ok = (pages[i] = edge_page(history, parent, first + i)) != KV_PAGE_INDEX_NONE;
    if (ok) history->node = add_node(history, parent, tokens, pages, count);
    history->write = ok && history->node != NULL ? kv_write_create(store, count) : NULL;
    if (history->write == NULL) {
        ctl_error("no memory for a save of %u pages", count);
        free(pages);
        return false;
    }
    for (uint32_t i = 0; i < count; i++) {
        add_page(history, i, pages[i], first + i, tokens);
        kv_index_page_unref(store->index, pages[i]); /* The edge holds its own. */
    }
    free(pages);
    history->write->done = save_written;
    history->write->context = history;
    history->busy = true;
    if (kv_write_start(history->write, &err) == KV_OK) return true;
    ctl_error("a save could not be started: %s", err.text);
    kv_write_destroy(history->write);
    history->write = NULL;
    history->busy = false;
    return false;
}
