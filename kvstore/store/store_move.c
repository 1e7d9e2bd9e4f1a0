/*
 * Pages of one tree to other places: read, verified, written under a new generation, recorded.
 *
 * It is a save of pages that are stored already, with the order of every save: written, flushed,
 * one synced batch that moves their records and gives the old places back, and only then are these
 * free. Until the batch is durable the objects can be put back, as after any save that failed.  A
 * page that is not what its record says stays where it is: whoever reads it next finds out, and it
 * is not made to look right by a fresh checksum.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/format/manifest_record.h"
#include "kvstore/format/page.h"
#include "kvstore/store/store_internal.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

struct kv_move {
    struct kv_store *store;
    struct kv_read read;
    struct kv_write *write;
    uint32_t pages[KV_MOVE_PAGES_MAX], slots[KV_MOVE_PAGES_MAX];
    bool fresh[KV_MOVE_PAGES_MAX];
    kv_move_done_fn *done;
    void *context;
};

static void move_end(struct kv_move *move, kv_status status)
{
    struct kv_store *store = move->store;
    for (uint32_t i = 0; i < move->read.count; i++) {
        if (move->slots[i] != KV_HBM_SLOT_NONE) kv_hbm_unpin(store->hbm, move->slots[i]);
        kv_index_page_unref(store->index, move->pages[i]);
    }
    const uint32_t moved = status == KV_OK ? move->write->count : 0;
    kv_move_done_fn *done = move->done;
    void *context = move->context;
    store->counters.moved_pages += moved;
    kv_write_destroy(move->write);
    free(move);
    done(context, moved, status);
}

static void move_recorded(void *context, kv_status status)
{
    struct kv_move *move = context;
    struct kv_store *store = move->store;
    if (status != KV_OK) kv_write_undo(move->write, status == KV_BUSY);
    for (uint32_t i = 0; status == KV_OK && i < move->write->count; i++)
        kv_index_page(store->index, move->write->items[i].page)->durable = true;
    move_end(move, status);
}

static void move_written(struct kv_write *write, kv_status status)
{
    struct kv_move *move = write->context;
    struct kv_store *store = move->store;
    struct kv_batch *batch = status == KV_OK ? kv_batch_create(store) : NULL;
    if (status == KV_OK && batch == NULL) status = KV_NOMEM;
    for (uint32_t i = 0; status == KV_OK && i < write->count; i++) {
        const struct kv_write_item *item = &write->items[i];
        status = kv_batch_page(batch, kv_index_page(store->index, item->page));
        if (status == KV_OK) status = kv_batch_free_ssd(batch, item->old_ssd);
    }
    if (status == KV_OK) {
        kv_batch_post(batch, move_recorded, move);
        return;
    }
    kv_batch_discard(batch);
    kv_write_undo(write, true);
    move_end(move, status);
}

/* What its header says of the tokens before it; the record knows the first 8 bytes of that. */
static bool chain_of(const struct kv_move *move, uint32_t i, struct kv_digest *ret_chain)
{
    struct kv_store *store = move->store;
    const struct kv_page *object = kv_index_page(store->index, move->pages[i]);
    struct kv_page_header header;
    if (move->slots[i] == KV_HBM_SLOT_NONE) return false;
    const uint8_t *bytes = kv_hbm_bytes(store->hbm, move->slots[i]);
    /* What was encrypted has no checksum in memory; it was verified when it came there. */
    if (store->keys != NULL && !move->fresh[i])
        kv_page_peek(bytes, &header);
    else if (kv_page_decode(&store->layout, bytes, &header, NULL) != KV_OK)
        return false;
    *ret_chain = header.chain;
    return kv_load64(header.chain.bytes) == object->tag;
}

static void move_read(struct kv_read *read)
{
    struct kv_move *move = KV_CONTAINER_OF(read, struct kv_move, read);
    for (uint32_t i = 0; i < read->count; i++) {
        struct kv_digest chain;
        if (!chain_of(move, i, &chain)) continue;
        if (kv_store_read_check(read, i, &chain, NULL, 0) != KV_OK) continue;
        const struct kv_page *object = kv_index_page(move->store->index, move->pages[i]);
        kv_write_add(move->write, move->pages[i], move->slots[i], object->count, &chain);
    }
    if (move->write->count == 0) {
        move_end(move, KV_CORRUPT);
        return;
    }
    move->write->done = move_written;
    move->write->context = move;
    const kv_status status = kv_write_start(move->write, NULL);
    if (status == KV_OK) return;
    kv_write_undo(move->write, true);
    move_end(move, status);
}

kv_status kv_store_move_start(struct kv_store *store, const uint32_t *pages, uint32_t count,
                              kv_move_done_fn *done, void *context)
{
    assert(count > 0 && count <= KV_MOVE_PAGES_MAX);
    struct kv_move *move = calloc(1, sizeof(*move));
    if (move == NULL) return KV_NOMEM;
    move->write = kv_write_create(store, count);
    if (move->write == NULL) {
        free(move);
        return KV_NOMEM;
    }
    memcpy(move->pages, pages, sizeof(*pages) * count);
    move->store = store;
    move->done = done;
    move->context = context;
    move->read = (struct kv_read){.count = count,
                                  .pages = move->pages,
                                  .slots = move->slots,
                                  .fresh = move->fresh,
                                  .done = move_read};
    const kv_status status = kv_store_read_start(store, &move->read);
    if (status != KV_OK && status != KV_MISS) {
        kv_write_destroy(move->write);
        free(move);
        return status;
    }
    for (uint32_t i = 0; i < count; i++) {
        assert(kv_index_page(store->index, pages[i])->durable);
        kv_index_page_ref(store->index, pages[i]);
    }
    if (status == KV_MISS) move_read(&move->read);
    return KV_OK;
}

/* ---- who has pages in closed segments ---- */

struct kv_places {
    struct kv_manifest_scan scan;
    struct kv_store *store;
    struct kv_session_id *trees;
    uint32_t count, max;
    uint8_t start[KV_RECORD_KEY_MAX];
    uint32_t start_bytes;
    kv_places_done_fn *done;
    void *context;
};

static void places_end(struct kv_places *places, kv_status status)
{
    kv_places_done_fn *done = places->done;
    void *context = places->context;
    const uint32_t count = places->count;
    places->store->operations--;
    free(places->scan.buf);
    free(places);
    done(context, count, status);
}

static void note_tree(struct kv_places *places, const uint8_t *key)
{
    struct kv_session_id id;
    memcpy(id.bytes, key + 1, sizeof(id.bytes));
    if (places->count > 0 && kv_id_equal(places->trees[places->count - 1].bytes, id.bytes))
        return; /* Keys of one tree stand together. */
    if (places->count < places->max) places->trees[places->count++] = id;
}

static void places_scanned(struct kv_msg *msg)
{
    struct kv_places *places = KV_CONTAINER_OF(msg, struct kv_places, scan.msg);
    struct kv_manifest_put put;
    uint32_t offset = 0;
    places->start_bytes = 0;
    while (places->scan.status == KV_OK && kv_manifest_scan_next(&places->scan, &offset, &put)) {
        struct kv_record_page record;
        if (put.key_bytes <= sizeof(places->start)) {
            memcpy(places->start, put.key, put.key_bytes);
            places->start_bytes = put.key_bytes;
        }
        if (put.key_bytes < 18 || put.key[17] != 'P') continue;
        if (kv_record_page_decode(put.value, put.value_bytes, &record) != KV_OK) continue;
        if (kv_ssd_closed(places->store->ssd, record.ssd_page)) note_tree(places, put.key);
    }
    const bool more = places->scan.status == KV_OK && places->scan.more &&
                      places->start_bytes > 0 && places->start_bytes < sizeof(places->start) &&
                      places->count < places->max;
    if (!more) {
        places_end(places, places->scan.status);
        return;
    }
    places->start[places->start_bytes++] = 0; /* The key behind it. */
    places->scan.start_bytes = places->start_bytes;
    kv_manifest_scan_post(places->store->manifest, &places->scan);
}

kv_status kv_store_places_start(struct kv_store *store, struct kv_session_id *trees, uint32_t max,
                                kv_places_done_fn *done, void *context)
{
    static const uint8_t prefix[] = {'T'};
    struct kv_places *places = calloc(1, sizeof(*places));
    uint8_t *buf = malloc(KV_PLACES_SCAN_BYTES);
    if (places == NULL || buf == NULL) {
        free(places);
        free(buf);
        return KV_NOMEM;
    }
    places->store = store;
    places->trees = trees;
    places->max = max;
    places->done = done;
    places->context = context;
    memcpy(places->start, prefix, sizeof(prefix));
    places->start_bytes = sizeof(prefix);
    places->scan = (struct kv_manifest_scan){
        .msg.run = places_scanned,
        .reply = store->options.mailbox,
        .prefix = prefix,
        .prefix_bytes = sizeof(prefix),
        .start = places->start,
        .start_bytes = sizeof(prefix),
        .record_max = KV_PLACES_SCAN_RECORDS,
        .buf = buf,
        .buf_bytes = KV_PLACES_SCAN_BYTES,
    };
    store->operations++;
    kv_manifest_scan_post(store->manifest, &places->scan);
    return KV_OK;
}
