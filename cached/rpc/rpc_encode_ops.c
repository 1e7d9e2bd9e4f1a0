/*
 * Answers of the admin calls that look after what is stored.
 */

#include "cached/rpc/rpc_encode.h"

#include "admin.pb-c.h"
#include "kvstore/base/bytes.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>

#define FILL(message, init)                                                                        \
    do {                                                                                           \
        if ((message) == NULL) return NULL;                                                        \
        *(message) = (__typeof__(*(message)))init;                                                 \
    } while (0)

static char *text(const char *value)
{
    return (char *)(uintptr_t)(value == NULL ? "" : value);
}

static Cached__Admin__V1__QuarantinedPage *quarantined(struct kv_arena *arena,
                                                       const struct request_quarantined *q)
{
    Cached__Admin__V1__QuarantinedPage *m = kv_arena_alloc(arena, sizeof(*m));
    char file[32];
    const int used = snprintf(file, sizeof(file), "segment-%06" PRIu32 ".kv", q->segment);
    FILL(m, CACHED__ADMIN__V1__QUARANTINED_PAGE__INIT);
    m->file = kv_arena_strdup(arena, file, (size_t)used);
    if (m->file == NULL) return NULL;
    m->offset = q->offset;
    m->page = q->ssd_page;
    m->cause = text(q->cause);
    m->owners = q->owners;
    m->found_by = text(q->found_by);
    m->age_ms = q->age_ms;
    m->generation = q->generation;
    return m;
}

const ProtobufCMessage *rpc_encode_scrub(struct request *req)
{
    const struct request_scrub *scrub = req->out.scrub;
    assert(scrub != NULL);
    Cached__Admin__V1__ScrubResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__ADMIN__V1__SCRUB_RESPONSE__INIT);
    m->running = scrub->running;
    m->changed = scrub->changed;
    m->failure = (char *)(scrub->failure == NULL ? "" : scrub->failure);
    m->stopping = scrub->stopping;
    m->rate_bytes = scrub->rate_bytes;
    m->elapsed_ms = scrub->elapsed_ms;
    m->pages_total = scrub->pages_total;
    m->pages = scrub->pages;
    m->bytes = scrub->bytes;
    m->damaged = scrub->damaged;
    m->unread = scrub->unread;
    m->waiting = scrub->waiting;
    m->checkpoints_dropped = scrub->checkpoints_dropped;
    m->passes = scrub->passes;
    m->full_age_ms = scrub->full_age_ms;
    m->quarantined_pages = scrub->quarantined_pages;
    m->plain = scrub->plain;
    m->released = scrub->released;
    m->still_bad = scrub->still_bad;
    m->still_named = scrub->still_named;
    m->quarantined =
        kv_arena_alloc(req->arena, sizeof(*m->quarantined) * (scrub->listed_count + 1u));
    if (m->quarantined == NULL) return NULL;
    for (uint32_t i = 0; i < scrub->listed_count; i++) {
        m->quarantined[i] = quarantined(req->arena, &scrub->listed[i]);
        if (m->quarantined[i] == NULL) return NULL;
    }
    m->n_quarantined = scrub->listed_count;
    return &m->base;
}

static Cached__Admin__V1__UsageRow *usage_row(struct kv_arena *arena, uint64_t page_bytes,
                                              const struct request_usage_row *row)
{
    Cached__Admin__V1__UsageRow *m = kv_arena_alloc(arena, sizeof(*m));
    FILL(m, CACHED__ADMIN__V1__USAGE_ROW__INIT);
    m->user = text(row->user);
    m->session_id = text(row->session);
    m->sessions = row->sessions;
    m->checkpoints = row->checkpoints;
    m->live_bytes = row->live_pages * page_bytes;
    m->expired_bytes = row->expired_pages * page_bytes;
    return m;
}

const ProtobufCMessage *rpc_encode_usage(struct request *req)
{
    const struct request_usage *usage = req->out.usage;
    assert(usage != NULL);
    Cached__Admin__V1__DiskUsageResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__ADMIN__V1__DISK_USAGE_RESPONSE__INIT);
    if (!usage->own) {
        m->bytes_max = usage->bytes_max;
        m->bytes_files = usage->bytes_files;
        m->free_bytes = usage->pages_free * usage->page_bytes;
        m->used_bytes = usage->pages_used * usage->page_bytes;
        m->quarantined_bytes = usage->pages_quarantined * usage->page_bytes;
    }
    m->page_bytes = usage->page_bytes;
    m->encryption = text(usage->encryption);
    m->rows = kv_arena_alloc(req->arena, sizeof(*m->rows) * (usage->row_count + 1u));
    if (m->rows == NULL) return NULL;
    for (uint32_t i = 0; i < usage->row_count; i++) {
        m->rows[i] = usage_row(req->arena, usage->page_bytes, &usage->rows[i]);
        if (m->rows[i] == NULL) return NULL;
    }
    m->n_rows = usage->row_count;
    if (!usage->more) return &m->base;
    m->next_page_token = rpc_page_token(req->arena, &usage->after);
    return m->next_page_token == NULL ? NULL : &m->base;
}

const ProtobufCMessage *rpc_encode_erase(struct request *req)
{
    const struct request_receipt *receipt = &req->out.receipt;
    Cached__Admin__V1__EraseUserResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__ADMIN__V1__ERASE_USER_RESPONSE__INIT);
    m->found = receipt->found;
    m->sessions = receipt->sessions;
    m->checkpoints = receipt->checkpoints;
    m->bytes = receipt->bytes;
    return &m->base;
}

const ProtobufCMessage *rpc_encode_rotate(struct request *req)
{
    const struct request_rotation *rotation = &req->out.rotation;
    Cached__Admin__V1__RotateKeyResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__ADMIN__V1__ROTATE_KEY_RESPONSE__INIT);
    m->rotated = rotation->rotated;
    m->master_key = text(rotation->master);
    m->before = text(rotation->before);
    m->keys = rotation->keys;
    return &m->base;
}

static Cached__Admin__V1__WhyRemoval *why_removal(struct kv_arena *arena,
                                                  const struct kv_removal *r)
{
    Cached__Admin__V1__WhyRemoval *m = kv_arena_alloc(arena, sizeof(*m));
    FILL(m, CACHED__ADMIN__V1__WHY_REMOVAL__INIT);
    m->cause = text(kv_reason_info(r->cause)->name);
    m->rows_kept = r->part == KV_REMOVED_CHECKPOINT;
    m->from = r->from;
    m->to = r->to;
    m->checkpoints = r->checkpoints;
    m->removed_ms = r->removed_ms;
    m->limit_name = text(kv_limit_name(r->limit_of));
    m->limit = r->limit;
    m->value = r->value;
    return m;
}

const ProtobufCMessage *rpc_encode_why(struct request *req)
{
    const struct request_out *out = &req->out;
    const struct request_why *why = out->why;
    assert(why != NULL);
    Cached__Admin__V1__WhyResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__ADMIN__V1__WHY_RESPONSE__INIT);
    m->found = why->is_there;
    m->reason = text(why->reason == KV_REASON_NONE ? "" : kv_reason_info(why->reason)->name);
    m->stored = why->is_stored;
    m->head_position = why->head_position;
    m->checkpoints = why->checkpoints;
    m->idle_ms = why->idle_ms;
    m->ttl_ms = why->ttl_ms;
    m->removals_cut = out->removals_cut;
    if (out->has_removed) {
        m->removed = why_removal(req->arena, &out->removed);
        if (m->removed == NULL) return NULL;
    }
    m->removals = kv_arena_alloc(req->arena, (out->removal_count + 1u) * sizeof(*m->removals));
    if (m->removals == NULL) return NULL;
    for (uint32_t i = 0; i < out->removal_count; i++) {
        m->removals[i] = why_removal(req->arena, &out->removals[i]);
        if (m->removals[i] == NULL) return NULL;
    }
    m->n_removals = out->removal_count;
    return &m->base;
}

static Cached__Admin__V1__PurgeModel *purged_model(struct kv_arena *arena,
                                                   const struct request_purge_model *model)
{
    Cached__Admin__V1__PurgeModel *m = kv_arena_alloc(arena, sizeof(*m));
    uint8_t bytes[8];
    char name[17];
    FILL(m, CACHED__ADMIN__V1__PURGE_MODEL__INIT);
    kv_store64(bytes, model->tag);
    for (uint32_t i = 0; i < 8; i++)
        (void)snprintf(name + (size_t)2 * i, 3, "%02x", bytes[i]);
    m->model = kv_arena_strdup(arena, name, 16);
    m->checkpoints = model->checkpoints;
    m->served = model->is_served;
    m->asked = model->is_asked;
    return m->model == NULL ? NULL : m;
}

const ProtobufCMessage *rpc_encode_purge(struct request *req)
{
    const struct request_purge *purge = req->out.purge;
    assert(purge != NULL);
    Cached__Admin__V1__PurgeModelResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__ADMIN__V1__PURGE_MODEL_RESPONSE__INIT);
    m->checkpoints = purge->checkpoints;
    m->bytes = purge->pages * purge->page_bytes;
    m->models = kv_arena_alloc(req->arena, (purge->model_count + 1u) * sizeof(*m->models));
    if (m->models == NULL) return NULL;
    for (uint32_t i = 0; i < purge->model_count; i++) {
        m->models[i] = purged_model(req->arena, &purge->models[i]);
        if (m->models[i] == NULL) return NULL;
    }
    m->n_models = purge->model_count;
    return &m->base;
}
