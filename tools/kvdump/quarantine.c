/*
 * Quarantined places: read from their records, printed, and looked up by page.
 *
 * A place in quarantine is no damage: it was found, what needed it is gone, nobody gets it.  Damage
 * is a record that is not whole, one without its bit in the superblock, and a checkpoint that still
 * lists a page in such a place (check.c).
 */

#include "tools/kvdump/kvdump.h"

#include "kvstore/base/bytes.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static kv_status visit(void *context, const struct kv_manifest_put *put)
{
    struct dump *dump = context;
    struct kv_record_quarantine record;
    uint8_t key[KV_KEY_QUARANTINE_BYTES];
    if (kv_record_quarantine_decode(put->value, put->value_bytes, &record) != KV_OK) {
        dump_damage(dump, "manifest: the record of a quarantined place is damaged");
        return KV_OK;
    }
    if (put->key_bytes != kv_key_quarantine(record.ssd_page, key) ||
        memcmp(put->key, key, sizeof(key)) != 0) {
        dump_damage(dump, "manifest: the record of a quarantined place is another's");
        return KV_OK;
    }
    if (dump->quarantined_count == dump->quarantined_capacity) {
        const uint32_t capacity =
            dump->quarantined_capacity == 0 ? 16 : 2 * dump->quarantined_capacity;
        struct kv_record_quarantine *more = realloc(dump->quarantined, capacity * sizeof(*more));
        if (more == NULL) return KV_NOMEM;
        dump->quarantined = more;
        dump->quarantined_capacity = capacity;
    }
    dump->quarantined[dump->quarantined_count++] = record; /* Keys are sorted, so these are. */
    return KV_OK;
}

kv_status dump_quarantine_read(struct dump *dump, struct kv_error *err)
{
    const kv_status status =
        kv_manifest_scan_now(dump->manifest, (const uint8_t *)"Q", 1, visit, dump, err);
    const bool is_known = (dump->superblock.features & KV_FEATURE_QUARANTINE) != 0;
    if (status == KV_OK && dump->quarantined_count > 0 && !is_known)
        dump_damage(dump, "superblock: quarantined places are recorded, its features lack bit 2");
    return status;
}

static int compare(const void *a, const void *b)
{
    const struct kv_record_quarantine *x = a, *y = b;
    return x->ssd_page < y->ssd_page ? -1 : x->ssd_page > y->ssd_page;
}

const struct kv_record_quarantine *dump_quarantine_find(const struct dump *dump, uint32_t ssd_page)
{
    const struct kv_record_quarantine key = {.ssd_page = ssd_page};
    if (dump->quarantined_count == 0) return NULL;
    return bsearch(&key, dump->quarantined, dump->quarantined_count, sizeof(key), compare);
}

uint32_t dump_quarantine_count(const struct dump *dump, uint32_t segment)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < dump->quarantined_count; i++) {
        const uint32_t place = dump->quarantined[i].ssd_page;
        if (place / dump->pages_per_segment == segment) count += dump->claims[place] == 0;
    }
    return count;
}

void dump_quarantine_print(const struct dump *dump)
{
    for (uint32_t i = 0; i < dump->quarantined_count; i++) {
        const struct kv_record_quarantine *record = &dump->quarantined[i];
        (void)printf("quarantined: segment-%06" PRIu32 ".kv page %" PRIu32 " (offset %" PRIu64
                     "): %s, owners: %" PRIu32 ", found by %s\n",
                     record->ssd_page / dump->pages_per_segment,
                     record->ssd_page % dump->pages_per_segment,
                     dump_offset(dump, record->ssd_page), record->cause, record->owners,
                     record->found_by == KV_FOUND_BY_SCRUB ? "scrub" : "a read");
    }
}
