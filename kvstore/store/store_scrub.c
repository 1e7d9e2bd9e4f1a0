/*
 * The scrub: one pass over every page that has a record.
 *
 * The reader thread brings the records a buffer at a time, in key order, so memory does not grow
 * with the store, and a page's record is at hand when its bytes are.  Pages of one buffer are read
 * in the order they lie on disk.  Every page that had a record when the pass began is seen, unless
 * it goes meanwhile: a page that is written again keeps its key.
 *
 * Between record and read a page may move or go and its place may be somebody else's.  So bytes
 * that do not fit are only a finding here; whoever is told compares it with the tree, which is
 * always right (kv_scrub_current): another generation there means that the page was not damaged but
 * written again.
 *
 * Reads take buffers of their own and pass the page cache by, so neither the HBM tier nor the
 * kernel's memory is turned over by a pass.  The position is not kept: a restart stops it.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/format/manifest_record.h"
#include "kvstore/format/page.h"
#include "kvstore/plan/pace.h"
#include "kvstore/store/store_internal.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define SCAN_BYTES (128u << 10) /* Holds the largest record, a node of 8,192 pages. */
#define SCAN_RECORDS 1024u
#define UNREAD_LOGGED_MAX 16u /* Of one pass; all are counted. */

struct entry {
    struct kv_session_id tree;
    struct kv_record_page record;
};

struct scrub_op {
    struct kv_ssd_op op;
    struct kv_scrub *scrub;
    struct entry entry;
    bool busy;
};

struct kv_scrub {
    struct kv_scrub_options options;
    struct kv_pace pace;
    struct kv_manifest_scan scan;
    bool scanning, scanned; /* A scan is on its way; the last record was seen. */
    uint8_t start[KV_RECORD_KEY_MAX + 1];
    uint8_t *records;
    struct entry *entries; /* Of the last scan, by place. */
    uint32_t entry_count, entry_next;
    uint8_t *buffers;
    struct scrub_op ops[KV_SCRUB_DEPTH_MAX];
    uint32_t depth, in_flight;
    struct kv_scrub_progress progress;
};

kv_status kv_scrub_create(const struct kv_scrub_options *options, struct kv_scrub **ret_scrub)
{
    const uint32_t page_bytes = options->store->layout.page_bytes;
    struct kv_scrub *scrub = calloc(1, sizeof(*scrub));
    assert(options->rate_bytes > 0);
    if (scrub == NULL) return KV_NOMEM;
    scrub->options = *options;
    scrub->pace.rate_bytes = options->rate_bytes;
    scrub->pace.next_ns = kv_clock_stopwatch_ns(); /* Nothing to catch up with. */
    scrub->depth = KV_MAX(2u, KV_MIN(KV_SCRUB_DEPTH_MAX, KV_SCRUB_BUFFER_BYTES / page_bytes));
    scrub->records = malloc(SCAN_BYTES);
    scrub->entries = malloc(SCAN_RECORDS * sizeof(*scrub->entries));
    scrub->buffers = aligned_alloc(KV_IO_ALIGN, (size_t)scrub->depth * page_bytes);
    if (scrub->records == NULL || scrub->entries == NULL || scrub->buffers == NULL) {
        kv_scrub_destroy(scrub);
        return KV_NOMEM;
    }
    for (uint32_t i = 0; i < scrub->depth; i++) {
        scrub->ops[i].scrub = scrub;
        scrub->ops[i].op.buf = scrub->buffers + (size_t)i * page_bytes;
    }
    scrub->progress.pages_total = kv_ssd_usage(options->store->ssd).pages_used;
    *ret_scrub = scrub;
    return KV_OK;
}

void kv_scrub_destroy(struct kv_scrub *scrub)
{
    if (scrub == NULL) return;
    assert(!kv_scrub_in_flight(scrub));
    free(scrub->records);
    free(scrub->entries);
    free(scrub->buffers);
    free(scrub);
}

void kv_scrub_set_rate(struct kv_scrub *scrub, uint64_t rate_bytes)
{
    assert(rate_bytes > 0);
    scrub->pace.rate_bytes = rate_bytes;
}

bool kv_scrub_in_flight(const struct kv_scrub *scrub)
{
    return scrub->in_flight > 0 || scrub->scanning;
}

bool kv_scrub_is_between(const struct kv_scrub *scrub)
{
    return scrub->entry_next == scrub->entry_count && scrub->in_flight == 0;
}

struct kv_scrub_progress kv_scrub_progress(const struct kv_scrub *scrub)
{
    return scrub->progress;
}

/* ---- records ---- */

static int compare_places(const void *a, const void *b)
{
    const struct entry *x = a, *y = b;
    return x->record.ssd_page < y->record.ssd_page ? -1 : x->record.ssd_page > y->record.ssd_page;
}

static void take_record(struct kv_scrub *scrub, const struct kv_manifest_put *put)
{
    struct kv_store *store = scrub->options.store;
    struct entry *entry = &scrub->entries[scrub->entry_count];
    if (put->key_bytes != 26 || put->key[17] != 'P') return;
    if (kv_record_page_decode(put->value, put->value_bytes, &entry->record) != KV_OK) {
        /* Whoever loads the tree drops what needs it. */
        store->counters.scrub_corrupt_pages++;
        scrub->progress.bad++;
        kv_log(store->options.log, KV_LOG_ERROR, "record_damaged", "kind=page where=scrub");
        return;
    }
    memcpy(entry->tree.bytes, put->key + 1, sizeof(entry->tree.bytes));
    scrub->entry_count++;
}

static void scanned(struct kv_msg *msg)
{
    struct kv_scrub *scrub = KV_CONTAINER_OF(msg, struct kv_scrub, scan.msg);
    struct kv_manifest_put put, last = {0};
    uint32_t offset = 0;
    scrub->scanning = false;
    scrub->options.store->operations--;
    scrub->entry_count = scrub->entry_next = 0;
    scrub->progress.status = scrub->scan.status;
    if (scrub->scan.status != KV_OK) {
        scrub->scanned = true;
        return;
    }
    while (kv_manifest_scan_next(&scrub->scan, &offset, &put)) {
        take_record(scrub, &put);
        last = put;
    }
    if (scrub->entry_count > 0)
        qsort(scrub->entries, scrub->entry_count, sizeof(*scrub->entries), compare_places);
    scrub->scanned = !scrub->scan.more || last.key == NULL;
    if (!scrub->scanned)
        scrub->scan.start_bytes =
            kv_manifest_scan_behind(&last, scrub->start, sizeof(scrub->start));
}

static void scan_next(struct kv_scrub *scrub)
{
    static const uint8_t prefix[1] = {'T'};
    const uint32_t start_bytes = scrub->scan.start_bytes;
    scrub->scan = (struct kv_manifest_scan){
        .msg.run = scanned,
        .reply = scrub->options.store->options.mailbox,
        .prefix = prefix,
        .prefix_bytes = sizeof(prefix),
        .start = start_bytes == 0 ? NULL : scrub->start,
        .start_bytes = start_bytes,
        .record_max = SCAN_RECORDS,
        .buf = scrub->records,
        .buf_bytes = SCAN_BYTES,
    };
    scrub->scanning = true;
    scrub->options.store->operations++;
    kv_manifest_scan_post(scrub->options.store->manifest, &scrub->scan);
}

/* ---- pages ---- */

/* Against what record and session say; the chain as far as the record knows it. */
static kv_status compare(struct kv_scrub *scrub, struct scrub_op *op, struct kv_error *err)
{
    struct kv_store *store = scrub->options.store;
    const struct kv_record_page *record = &op->entry.record;
    const struct kv_session_entry *session = kv_index_tree_entry(store->index, &op->entry.tree);
    struct kv_page_header header;
    kv_status status = kv_page_decode(&store->layout, op->op.buf, &header, err);
    if (status != KV_OK) return status;
    if (kv_load64(header.chain.bytes) != record->tag)
        return KV_FAIL(err, KV_CORRUPT, "page: stands after other tokens");
    struct kv_page_header want = header;
    want.count = record->count;
    want.position = record->position;
    want.generation = record->generation;
    want.directory = store->options.superblock.id;
    if (session != NULL) want.user = session->user->id;
    status = kv_page_verify(&store->layout, op->op.buf, &want, err);
    scrub->progress.plain += status == KV_OK && header.cipher.key_id == 0;
    if (status != KV_OK || session == NULL) return status;
    return kv_keys_decrypt(store, session->user, op->entry.record.ssd_page, op->op.buf, err);
}

static void tell(struct kv_scrub *scrub, const struct scrub_op *op, bool missing, const char *cause)
{
    struct kv_scrub_finding finding = {
        .tree = op->entry.tree,
        .uid = op->entry.record.uid,
        .generation = op->entry.record.generation,
        .ssd_page = op->entry.record.ssd_page,
        .missing = missing,
    };
    kv_quarantine_cause(cause, finding.cause);
    scrub->progress.bad++;
    scrub->options.found(scrub->options.context, &finding);
}

static void unread(struct kv_scrub *scrub, const struct scrub_op *op)
{
    struct kv_store *store = scrub->options.store;
    store->counters.scrub_unread_pages++;
    if (scrub->progress.unread++ >= UNREAD_LOGGED_MAX) return;
    kv_log(store->options.log, KV_LOG_ERROR, "page_read_failed", "where=scrub ssd_page=%u errno=%d",
           op->entry.record.ssd_page, op->op.disk_op.sys_errno);
}

static void page_read(struct kv_ssd_op *ssd_op, kv_status status)
{
    struct scrub_op *op = KV_CONTAINER_OF(ssd_op, struct scrub_op, op);
    struct kv_scrub *scrub = op->scrub;
    struct kv_store *store = scrub->options.store;
    struct kv_error err = {0};
    scrub->in_flight--;
    op->busy = false;
    store->operations--;
    if (status != KV_OK) {
        if (ssd_op->disk_op.sys_errno != 0)
            unread(scrub, op);
        else
            tell(scrub, op, true, "its file ends before it");
        return;
    }
    scrub->progress.pages++;
    scrub->progress.bytes += store->layout.page_bytes;
    store->counters.scrubbed_pages++;
    store->counters.scrubbed_bytes += store->layout.page_bytes;
    if (compare(scrub, op, &err) != KV_OK) tell(scrub, op, false, err.text);
}

static struct scrub_op *free_op(struct kv_scrub *scrub)
{
    for (uint32_t i = 0; i < scrub->depth; i++)
        if (!scrub->ops[i].busy) return &scrub->ops[i];
    return NULL;
}

static void read_start(struct kv_scrub *scrub, const struct entry *entry)
{
    struct scrub_op *op = free_op(scrub);
    assert(op != NULL);
    op->busy = true;
    op->entry = *entry;
    op->op.page = entry->record.ssd_page;
    op->op.done = page_read;
    scrub->in_flight++;
    scrub->options.store->operations++;
    kv_ssd_read_start(scrub->options.store->ssd, &op->op);
}

/* What somebody waits for goes first. */
static uint32_t depth_now(const struct kv_scrub *scrub)
{
    const uint32_t ops = kv_ssd_usage(scrub->options.store->ssd).ops_inflight;
    return kv_pace_depth(scrub->depth, ops - KV_MIN(ops, scrub->in_flight));
}

void kv_scrub_step(struct kv_scrub *scrub, uint64_t now_ns, bool hold)
{
    struct kv_store *store = scrub->options.store;
    const uint32_t depth = depth_now(scrub);
    while (!hold && scrub->entry_next < scrub->entry_count && scrub->in_flight < depth) {
        const struct entry *entry = &scrub->entries[scrub->entry_next];
        if (!kv_ssd_claimed(store->ssd, entry->record.ssd_page)) {
            scrub->progress.leaving++;
            scrub->entry_next++;
            continue;
        }
        if (!kv_pace_take(&scrub->pace, now_ns, store->layout.page_bytes)) break;
        scrub->entry_next++;
        read_start(scrub, entry);
    }
    if (!kv_scrub_is_between(scrub) || scrub->scanning) return;
    if (!scrub->scanned && !hold)
        scan_next(scrub);
    else if (scrub->scanned)
        scrub->progress.done = true;
}

uint64_t kv_scrub_wait_ns(const struct kv_scrub *scrub, uint64_t now_ns)
{
    if (scrub->scanning || scrub->in_flight >= depth_now(scrub)) return UINT64_MAX;
    if (scrub->entry_next == scrub->entry_count) return scrub->in_flight > 0 ? UINT64_MAX : 0;
    return kv_pace_wait_ns(&scrub->pace, now_ns);
}

uint32_t kv_scrub_current(struct kv_store *store, struct kv_session *session,
                          const struct kv_scrub_finding *finding)
{
    assert(session->tree->load == KV_LOAD_DONE);
    struct kv_node *node = NULL;
    while ((node = kv_index_node_next(session, node)) != NULL) {
        for (uint32_t i = 0; i < node->page_count; i++) {
            const struct kv_page *page = kv_index_page(store->index, node->pages[i]);
            if (page->uid == finding->uid && page->generation == finding->generation &&
                page->ssd_page == finding->ssd_page && page->durable)
                return node->pages[i];
        }
    }
    return KV_PAGE_INDEX_NONE;
}
