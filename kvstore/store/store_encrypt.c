/*
 * Pages on their way to SSD, encrypted.
 *
 * A page in memory is plain and may be in use while it is written, so what goes to the device lies
 * in a buffer of its own: a few of them, registered with the disk like the arena.  A page is
 * encrypted when a buffer is free for it, in the order of the saves; what waits costs no memory.
 * There are enough buffers to keep a device busy, and no save can take them from another for good:
 * each comes back when its write is over.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/store/store_internal.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

struct kv_encrypter {
    uint8_t *base;
    uint32_t count, free_count;
    uint8_t *free[KV_ENCRYPT_PAGES_MAX];
    struct kv_write_item *first, *last; /* Waiting. */
};

kv_status kv_encrypter_open(struct kv_store *store, struct kv_error *err)
{
    const uint32_t page_bytes = store->layout.page_bytes;
    struct kv_encrypter *encrypter = calloc(1, sizeof(*encrypter));
    if (encrypter == NULL) return KV_FAIL(err, KV_NOMEM, "make room for pages to encrypt");
    encrypter->count =
        KV_MAX(4u, KV_MIN(KV_ENCRYPT_PAGES_MAX, KV_ENCRYPT_BUFFER_BYTES / page_bytes));
    encrypter->base = aligned_alloc(KV_IO_ALIGN, (size_t)encrypter->count * page_bytes);
    if (encrypter->base == NULL) {
        free(encrypter);
        return KV_FAIL(err, KV_NOMEM, "make room for pages to encrypt");
    }
    memset(encrypter->base, 0, (size_t)encrypter->count * page_bytes);
    kv_disk_register(store->options.disk, encrypter->base, (uint64_t)encrypter->count * page_bytes);
    while (encrypter->free_count < encrypter->count) {
        encrypter->free[encrypter->free_count] =
            encrypter->base + (size_t)encrypter->free_count * page_bytes;
        encrypter->free_count++;
    }
    store->encrypter = encrypter;
    return KV_OK;
}

void kv_encrypter_close(struct kv_store *store)
{
    struct kv_encrypter *encrypter = store->encrypter;
    if (encrypter == NULL) return;
    assert(encrypter->first == NULL && encrypter->free_count == encrypter->count);
    kv_disk_forget(store->options.disk, encrypter->base);
    free(encrypter->base);
    free(encrypter);
    store->encrypter = NULL;
}

static void start(struct kv_store *store, struct kv_write_item *item)
{
    struct kv_encrypter *encrypter = store->encrypter;
    const struct kv_page *object = kv_index_page(store->index, item->page);
    item->buffer = encrypter->free[--encrypter->free_count];
    kv_keys_encrypt(store, object->session->user, item->op.page,
                    kv_hbm_bytes(store->hbm, item->slot), item->buffer);
    item->op.buf = item->buffer;
    kv_ssd_write_start(store->ssd, &item->op);
}

void kv_encrypter_write(struct kv_store *store, struct kv_write_item *item)
{
    struct kv_encrypter *encrypter = store->encrypter;
    item->next = NULL;
    if (encrypter->first == NULL && encrypter->free_count > 0) {
        start(store, item);
        return;
    }
    if (encrypter->first == NULL)
        encrypter->first = item;
    else
        encrypter->last->next = item;
    encrypter->last = item;
}

void kv_encrypter_written(struct kv_store *store, struct kv_write_item *item)
{
    struct kv_encrypter *encrypter = store->encrypter;
    if (item->buffer == NULL) return;
    encrypter->free[encrypter->free_count++] = item->buffer;
    item->buffer = NULL;
    while (encrypter->first != NULL && encrypter->free_count > 0) {
        struct kv_write_item *next = encrypter->first;
        encrypter->first = next->next;
        start(store, next);
    }
}
