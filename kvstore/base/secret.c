/*
 * Memory for keys.
 *
 * Mapped in chunks of its own, so that locking it and leaving it out of dumps touches nothing else,
 * and a chunk never moves.  Free items form a list through their first bytes; the rest of a free
 * item is zeros.
 */

#include "kvstore/base/secret.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define CHUNK_BYTES (64u << 10)
#define ITEM_ALIGN 16u

struct chunk {
    struct chunk *next;
};

struct item {
    struct item *next;
};

struct kv_secrets {
    struct chunk *chunks;
    struct item *free;
    size_t item_bytes;
    int unlocked_errno;
};

kv_status kv_secrets_create(size_t item_bytes, struct kv_secrets **ret_secrets,
                            struct kv_error *err)
{
    struct kv_secrets *secrets = calloc(1, sizeof(*secrets));
    if (secrets == NULL) return KV_FAIL(err, KV_NOMEM, "make room for keys");
    secrets->item_bytes =
        (KV_MAX(item_bytes, sizeof(struct item)) + ITEM_ALIGN - 1) / ITEM_ALIGN * ITEM_ALIGN;
    assert(secrets->item_bytes + ITEM_ALIGN <= CHUNK_BYTES);
    *ret_secrets = secrets;
    return KV_OK;
}

void kv_secrets_destroy(struct kv_secrets *secrets)
{
    if (secrets == NULL) return;
    while (secrets->chunks != NULL) {
        struct chunk *chunk = secrets->chunks;
        secrets->chunks = chunk->next;
        explicit_bzero(chunk, CHUNK_BYTES);
        (void)munmap(chunk, CHUNK_BYTES);
    }
    free(secrets);
}

static void give(struct kv_secrets *secrets, void *bytes)
{
    struct item *item = bytes;
    item->next = secrets->free;
    secrets->free = item;
}

static bool chunk_add(struct kv_secrets *secrets)
{
    uint8_t *bytes =
        mmap(NULL, CHUNK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (bytes == MAP_FAILED) return false;
    if ((mlock(bytes, CHUNK_BYTES) != 0 || madvise(bytes, CHUNK_BYTES, MADV_DONTDUMP) != 0) &&
        secrets->unlocked_errno == 0)
        secrets->unlocked_errno = errno;
    struct chunk *chunk = (struct chunk *)bytes;
    chunk->next = secrets->chunks;
    secrets->chunks = chunk;
    for (size_t at = ITEM_ALIGN; at + secrets->item_bytes <= CHUNK_BYTES; at += secrets->item_bytes)
        give(secrets, bytes + at);
    return true;
}

void *kv_secrets_alloc(struct kv_secrets *secrets)
{
    if (secrets->free == NULL && !chunk_add(secrets)) return NULL;
    struct item *item = secrets->free;
    secrets->free = item->next;
    item->next = NULL;
    return item;
}

void kv_secrets_free(struct kv_secrets *secrets, void *item)
{
    if (item == NULL) return;
    explicit_bzero(item, secrets->item_bytes);
    give(secrets, item);
}

int kv_secrets_unlocked_errno(const struct kv_secrets *secrets)
{
    return secrets->unlocked_errno;
}
