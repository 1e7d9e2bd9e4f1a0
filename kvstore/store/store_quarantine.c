/*
 * Quarantine: a place whose bytes were wrong once is given to nobody.
 *
 * It is taken out of the space at once and recorded in the batch that removes what needed it, so
 * that after a restart it is as before: a record Q with the checkpoints gone, or neither.  The bit
 * of the superblock comes first (docs/format.md): an older build must not take the record for
 * damage.  Where the bit cannot be set nothing is recorded, and the quarantine lasts until the next
 * start.  Whether the device or the kernel was at fault cannot be told from here, so the way out of
 * it is an operator's word (store_release.c); until then a bad place costs one page.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/format/manifest_record.h"
#include "kvstore/store/directory.h"
#include "kvstore/store/store_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* The page that `node` takes for position k * 128; KV_PAGE_INDEX_NONE: it is shorter. */
static uint32_t page_at(const struct kv_node *node, uint32_t k)
{
    for (; node != NULL; node = node->parent) {
        const uint32_t first = (node->parent == NULL ? 0 : node->parent->tokens) / KV_PAGE_TOKENS;
        if (k < first) continue;
        return k - first < node->page_count ? node->pages[k - first] : KV_PAGE_INDEX_NONE;
    }
    return KV_PAGE_INDEX_NONE;
}

uint32_t kv_store_page_owners(const struct kv_store *store, uint32_t page)
{
    const struct kv_page *object = kv_index_page(store->index, page);
    struct kv_node *node = NULL;
    uint32_t count = 0;
    while ((node = kv_index_node_next(object->session, node)) != NULL)
        count += page_at(node, object->position / KV_PAGE_TOKENS) == page;
    return count;
}

/* Only for telling: what does not fit is counted by the tier. */
static void remember(struct kv_store *store, const struct kv_record_quarantine *record)
{
    if (store->quarantined == NULL)
        store->quarantined = calloc(KV_QUARANTINE_LISTED_MAX, sizeof(*store->quarantined));
    if (store->quarantined == NULL || store->quarantined_count == KV_QUARANTINE_LISTED_MAX) return;
    store->quarantined[store->quarantined_count++] = *record;
}

static void record_it(struct kv_store *store, const struct kv_record_quarantine *record)
{
    struct kv_error err = {0};
    kv_status status = KV_OK;
    if ((store->options.superblock.features & KV_FEATURE_QUARANTINE) == 0)
        status = kv_directory_add_feature(store->options.disk, store->options.dir,
                                          KV_FEATURE_QUARANTINE, &store->options.superblock, &err);
    struct kv_batch *dead = status == KV_OK ? kv_store_dead_batch(store) : NULL;
    if (status == KV_OK && dead == NULL) status = KV_NOMEM;
    if (status == KV_OK) status = kv_batch_quarantine(dead, record);
    if (status != KV_OK)
        kv_log(store->options.log, KV_LOG_ERROR, "quarantine_unrecorded",
               "ssd_page=%u cause=\"%s\" text=\"the place is left alone until the next start\"",
               record->ssd_page, err.text[0] == '\0' ? kv_status_name(status) : err.text);
}

void kv_store_quarantine(struct kv_store *store, uint32_t page, enum kv_found_by found_by,
                         const char *cause)
{
    static const char prefix[] = "page: ";
    const struct kv_page *object = kv_index_page(store->index, page);
    struct kv_record_quarantine record = {
        .ssd_page = object->ssd_page,
        .generation = object->generation,
        .found_ms = kv_store_now_ms(store),
        .owners = kv_store_page_owners(store, page),
        .found_by = (uint8_t)found_by,
    };
    uint32_t segment;
    uint64_t offset;
    if (object->ssd_page == KV_SSD_PAGE_NONE) return;
    if (kv_ssd_quarantined(store->ssd, object->ssd_page)) return; /* Told already. */
    if (strncmp(cause, prefix, sizeof(prefix) - 1) == 0) cause += sizeof(prefix) - 1;
    kv_quarantine_cause(cause, record.cause);
    kv_ssd_place(store->ssd, object->ssd_page, &segment, &offset);
    kv_log(store->options.log, KV_LOG_ERROR, "page_damaged",
           "where=%s file=segment-%06" PRIu32 ".kv offset=%" PRIu64 " ssd_page=%" PRIu32
           " position=%" PRIu32 " owners=%" PRIu32 " cause=\"%s\" action=quarantined",
           kv_found_by_name(record.found_by), segment, offset, object->ssd_page, object->position,
           record.owners, record.cause);
    if (kv_ssd_quarantine(store->ssd, object->ssd_page) != KV_OK) {
        kv_log(store->options.log, KV_LOG_ERROR, "quarantine_failed",
               "ssd_page=%" PRIu32 " text=\"no memory: the place will be used again\"",
               object->ssd_page);
        return;
    }
    store->counters.quarantined++;
    remember(store, &record);
    record_it(store, &record);
}

static kv_status visit(void *context, const struct kv_manifest_put *put)
{
    struct kv_store *store = context;
    struct kv_record_quarantine record;
    uint8_t key[KV_KEY_QUARANTINE_BYTES];
    if (kv_record_quarantine_decode(put->value, put->value_bytes, &record) != KV_OK ||
        put->key_bytes != kv_key_quarantine(record.ssd_page, key) ||
        memcmp(put->key, key, sizeof(key)) != 0) {
        store->counters.corrupt_pages++;
        kv_log(store->options.log, KV_LOG_ERROR, "record_damaged", "kind=quarantine");
        return KV_OK;
    }
    const kv_status status = kv_ssd_quarantine(store->ssd, record.ssd_page);
    if (status == KV_MISS) return KV_OK; /* The tier was made smaller: nobody can get it. */
    if (status == KV_OK) remember(store, &record);
    return status;
}

kv_status kv_store_recover_quarantine(struct kv_store *store, struct kv_error *err)
{
    if ((store->options.superblock.features & KV_FEATURE_QUARANTINE) == 0) return KV_OK;
    const kv_status status =
        kv_manifest_scan_now(store->manifest, (const uint8_t *)"Q", 1, visit, store, err);
    if (status == KV_NOMEM) return KV_FAIL(err, KV_NOMEM, "read what is quarantined");
    return status;
}
