/*
 * Pages to SSD: allocate, write, flush.
 *
 * Where no segment has room a save waits for the next one, which is made in the background, and
 * nobody else with it.
 *
 * kv_write_add() moves the object to its new place at once (generation, count), because the next
 * reader must find the fuller page; until the write is durable that reader is served from memory,
 * where the slot stays pinned.  Where pages are encrypted, it is on their way out
 * (store_encrypt.c): the slot keeps the plain page, without a checksum.  If the save fails,
 * kv_write_undo() puts the object back.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/format/page.h"
#include "kvstore/store/store_internal.h"

#include <assert.h>
#include <stdlib.h>

struct kv_write *kv_write_create(struct kv_store *store, uint32_t capacity)
{
    struct kv_write *write = calloc(1, sizeof(*write));
    if (write == NULL) return NULL;
    write->store = store;
    write->capacity = capacity;
    write->items = calloc(KV_MAX(capacity, 1u), sizeof(*write->items));
    if (write->items == NULL) {
        free(write);
        return NULL;
    }
    return write;
}

void kv_write_add(struct kv_write *write, uint32_t page, uint32_t slot, uint32_t count,
                  const struct kv_digest *chain)
{
    struct kv_store *store = write->store;
    struct kv_page *object = kv_index_page(store->index, page);
    assert(write->count < write->capacity);
    assert(count >= object->count && count <= KV_PAGE_TOKENS);
    struct kv_write_item *item = &write->items[write->count++];

    *item = (struct kv_write_item){
        .page = page,
        .slot = slot,
        .old_ssd = object->ssd_page,
        .old_generation = object->generation,
        .old_count = object->count,
    };
    object->generation = kv_store_next_generation(store);
    object->count = count;
    object->durable = false;
    kv_hbm_pin(store->hbm, slot);
    if (object->hbm_slot != slot) {
        if (object->hbm_slot != KV_HBM_SLOT_NONE)
            kv_hbm_set_owner(store->hbm, object->hbm_slot, KV_HBM_OWNER_NONE);
        kv_hbm_set_owner(store->hbm, slot, page);
        object->hbm_slot = slot;
    }
    kv_index_page_ref(store->index, page);
    const struct kv_page_header header = {
        .count = count,
        .position = object->position,
        .generation = object->generation,
        .user = object->session->user->id,
        .model = store->options.model,
        .chain = *chain,
        .directory = store->options.superblock.id,
    };
    if (store->encrypter != NULL)
        kv_page_stamp(&store->layout, kv_hbm_bytes(store->hbm, slot), &header);
    else
        kv_page_seal(&store->layout, kv_hbm_bytes(store->hbm, slot), &header);
}

static void write_flushed(struct kv_ssd_flush *flush, kv_status status)
{
    struct kv_write *write = KV_CONTAINER_OF(flush, struct kv_write, flush);
    write->store->operations--;
    write->done(write, status);
}

static void item_written(struct kv_ssd_op *op, kv_status status)
{
    struct kv_write_item *item = KV_CONTAINER_OF(op, struct kv_write_item, op);
    struct kv_write *write = item->op.context;
    kv_encrypter_written(write->store, item);
    if (status != KV_OK) write->status = status;
    assert(write->waiting > 0);
    if (--write->waiting > 0) return;
    if (write->status == KV_OK)
        write->status = kv_ssd_flush_start(write->store->ssd, &write->flush);
    if (write->status == KV_OK) return; /* The flush goes on from here. */
    write->store->operations--;
    write->done(write, write->status);
}

/* KV_MISS: there is no place yet. */
static kv_status take_places(struct kv_write *write, struct kv_error *err)
{
    struct kv_store *store = write->store;
    uint32_t *places = malloc(sizeof(uint32_t) * write->count);
    if (places == NULL) return KV_FAIL(err, KV_NOMEM, "save %u pages", write->count);
    const kv_status status = kv_ssd_alloc(store->ssd, write->count, places, err);
    for (uint32_t i = 0; status == KV_OK && i < write->count; i++)
        kv_index_page(store->index, write->items[i].page)->ssd_page = places[i];
    free(places);
    return status;
}

static void write_pages(struct kv_write *write)
{
    struct kv_store *store = write->store;
    write->flush.done = write_flushed;
    write->waiting = write->count;
    store->counters.bytes_saved += (uint64_t)write->count * store->layout.page_bytes;
    for (uint32_t i = 0; i < write->count; i++) {
        struct kv_write_item *item = &write->items[i];
        item->op.page = kv_index_page(store->index, item->page)->ssd_page;
        item->op.done = item_written;
        item->op.context = write;
        if (store->encrypter != NULL) {
            kv_encrypter_write(store, item);
            continue;
        }
        item->op.buf = kv_hbm_bytes(store->hbm, item->slot);
        kv_ssd_write_start(store->ssd, &item->op);
    }
}

/* Records of users come before their pages, or with them. */
static kv_status make_keys(struct kv_write *write, struct kv_error *err)
{
    struct kv_store *store = write->store;
    kv_status status = KV_OK;
    for (uint32_t i = 0; status == KV_OK && i < write->count; i++)
        status =
            kv_keys_make(store, kv_index_page(store->index, write->items[i].page)->session->user);
    return status == KV_OK ? KV_OK : KV_FAIL(err, status, "make a key to encrypt pages with");
}

/* Until then the objects have their old places; whoever reads them finds them in memory. */
static void space_ready(struct kv_ssd_wait *wait)
{
    struct kv_write *write = KV_CONTAINER_OF(wait, struct kv_write, space);
    kv_status status = take_places(write, &write->err);
    if (status == KV_OK) {
        write_pages(write);
        return;
    }
    if (status == KV_MISS && wait->status == KV_OK) {
        kv_ssd_wait(write->store->ssd, wait);
        return;
    }
    if (status == KV_MISS) {
        status = wait->status;
        write->err = wait->err;
    }
    write->store->operations--;
    write->done(write, status);
}

kv_status kv_write_start(struct kv_write *write, struct kv_error *err)
{
    struct kv_store *store = write->store;
    assert(write->count > 0);
    const struct kv_manifest_stats manifest = kv_manifest_stats(store->manifest);
    if (manifest.failed)
        return KV_FAIL(err, KV_INVALID, "the manifest refuses writes after a failed sync");
    if (manifest.no_room) {
        errno = ENOSPC;
        return KV_FAIL_ERRNO(err, KV_IO, "the manifest writes nothing");
    }
    write->err = (struct kv_error){0};
    write->status = KV_OK;
    kv_status status = make_keys(write, err);
    if (status == KV_OK) status = take_places(write, err);
    if (status != KV_OK && status != KV_MISS) return status;
    store->operations++;
    if (status == KV_OK) {
        write_pages(write);
        return KV_OK;
    }
    write->space.ready = space_ready;
    kv_ssd_wait(store->ssd, &write->space);
    return KV_OK;
}

void kv_write_undo(struct kv_write *write, bool free_space)
{
    struct kv_store *store = write->store;
    for (uint32_t i = write->count; i-- > 0;) {
        const struct kv_write_item *item = &write->items[i];
        struct kv_page *object = kv_index_page(store->index, item->page);
        if (object->ssd_page != item->old_ssd && free_space)
            kv_ssd_free(store->ssd, object->ssd_page);
        object->ssd_page = item->old_ssd;
        object->generation = item->old_generation;
        object->count = item->old_count;
        object->durable = item->old_ssd != KV_SSD_PAGE_NONE;
        /* The copy in memory is sealed under the generation that failed. */
        if (object->hbm_slot != KV_HBM_SLOT_NONE) {
            kv_hbm_set_owner(store->hbm, object->hbm_slot, KV_HBM_OWNER_NONE);
            object->hbm_slot = KV_HBM_SLOT_NONE;
        }
    }
}

void kv_write_destroy(struct kv_write *write)
{
    if (write == NULL) return;
    for (uint32_t i = 0; i < write->count; i++) {
        kv_hbm_unpin(write->store->hbm, write->items[i].slot);
        kv_index_page_unref(write->store->index, write->items[i].page);
    }
    free(write->items);
    free(write);
}
