/*
 * The store's time and its clocks.
 *
 * plan/timeline.h decides; here the clocks are read, a jump is told, and a clock that was believed
 * is written down before any row can be judged by it after a restart.  Until that record is durable
 * a crash leaves the old one, and the next start sees the same jump again.
 */

#include "kvstore/format/manifest_record.h"
#include "kvstore/store/store_internal.h"

#include <inttypes.h>

static kv_status visit_clock(void *context, const struct kv_manifest_put *put)
{
    struct kv_store *store = context;
    struct kv_record_clock record;
    if (kv_record_clock_decode(put->value, put->value_bytes, &record) == KV_OK) {
        store->time.floor_ms = record.floor_ms;
        store->time.before_ms = record.before_ms;
        return KV_OK;
    }
    /* Rather too long a life than none. */
    store->time.floor_ms = kv_clock_wall_ms(store->options.clock);
    kv_log(store->options.log, KV_LOG_ERROR, "record_damaged", "kind=clock");
    return KV_OK;
}

kv_status kv_store_time_begin(struct kv_store *store, struct kv_error *err)
{
    uint8_t key[KV_RECORD_KEY_MAX];
    const uint32_t key_bytes = kv_key_clock(key);
    struct kv_clock *clock = store->options.clock;
    const kv_status status =
        kv_manifest_scan_now(store->manifest, key, key_bytes, visit_clock, store, err);
    kv_timeline_begin(&store->time, kv_clock_wall_ms(clock), kv_clock_mono_ns(clock),
                      store->time.floor_ms, store->time.before_ms);
    return status;
}

/* Sessions and what is loaded of their trees: as they would be read now. */
static void age_all(struct kv_store *store)
{
    struct kv_session_entry *entry = NULL;
    struct kv_session *session = NULL;
    uint32_t bucket = 0;
    while ((entry = kv_index_entry_next(store->index, &bucket, entry)) != NULL)
        entry->used_ms = kv_timeline_used_ms(&store->time, entry->used_ms);
    while ((session = kv_index_open_next(store->index, session)) != NULL) {
        if (session->tree->sessions != &session->entry) continue; /* Each tree once. */
        struct kv_node *node = NULL;
        while ((node = kv_index_node_next(session, node)) != NULL)
            node->used_ms = kv_timeline_used_ms(&store->time, node->used_ms);
    }
}

static void tell_jump(const struct kv_store *store)
{
    kv_log(store->options.log, KV_LOG_WARN, "clock_jumped",
           "off_s=%" PRId64 " text=\"the wall clock is off by that much from where the time since "
           "boot, or the last use on record, puts it; ages go on from there, nothing expires for "
           "it; if it stays, it is believed in an hour; see docs/operations.md\"",
           store->time.off_ms / 1000);
}

void kv_store_time_judge(struct kv_store *store)
{
    struct kv_timeline *line = &store->time;
    /* Such a clock says nothing of real time: it goes on where the last run was. */
    if (kv_clock_is_virtual(store->options.clock) && line->last_ms > line->now_ms) {
        kv_clock_advance(store->options.clock, (line->last_ms - line->now_ms) * 1000000u);
        line->now_ms = line->begun_ms = line->last_ms;
        line->mono_ns = kv_clock_mono_ns(store->options.clock);
    }
    if (kv_timeline_judge(line) == KV_TIMELINE_JUMPED) tell_jump(store);
    if (line->floor_ms > 0) age_all(store);
}

static void believed(struct kv_store *store)
{
    struct kv_batch *batch = kv_batch_create(store);
    age_all(store);
    kv_log(store->options.log, KV_LOG_WARN, "clock_believed",
           "text=\"the wall clock stayed where it had jumped to for an hour: it is followed again, "
           "and what was used before counts as used now\"");
    if (batch != NULL && kv_batch_clock(batch, &store->time) == KV_OK) {
        kv_batch_post(batch, NULL, NULL);
        return;
    }
    kv_batch_discard(batch);
    kv_log(store->options.log, KV_LOG_ERROR, "record_leaked", "kind=clock");
}

void kv_store_time_tick(struct kv_store *store)
{
    struct kv_clock *clock = store->options.clock;
    switch (kv_timeline_look(&store->time, kv_clock_wall_ms(clock), kv_clock_mono_ns(clock))) {
    case KV_TIMELINE_NONE:
        break;
    case KV_TIMELINE_JUMPED:
        tell_jump(store);
        break;
    case KV_TIMELINE_BACK:
        kv_log(store->options.log, KV_LOG_INFO, "clock_back",
               "text=\"the wall clock agrees again; nothing was lost\"");
        break;
    case KV_TIMELINE_BELIEVED:
        believed(store);
        break;
    }
}
