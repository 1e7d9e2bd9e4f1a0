/*
 * Names of sessions that nobody uses, for lists: they stand in records only.
 */

#include "cached/shard/shard_internal.h"

#include <string.h>

/* One that is asked for.  In the request's arena. */
struct name_read {
    struct names *names;
    struct session_name *out;
};

struct names {
    struct flow *flow;
    void (*done)(struct flow *flow);
    uint32_t waiting;
    kv_status status;
};

static kv_status name_put(struct flow *flow, struct session_name *out, const char *name,
                          const char *parent_name)
{
    out->name = kv_arena_strdup(flow->req->arena, name, strlen(name));
    out->parent_name = kv_arena_strdup(flow->req->arena, parent_name, strlen(parent_name));
    return out->name == NULL || out->parent_name == NULL ? KV_NOMEM : KV_OK;
}

static void names_end(struct names *names)
{
    struct flow *flow = names->flow;
    if (--names->waiting > 0) return;
    if (names->status != KV_OK) flow_fail_status(flow, names->status);
    names->done(flow);
}

static void name_known(void *context, kv_status status, const struct kv_record_session *record)
{
    struct name_read *read = context;
    struct names *names = read->names;
    if (status == KV_OK)
        status = name_put(names->flow, read->out, record->name, record->parent_name);
    /* It was deleted meanwhile, or its record is damaged, which the next start tells. */
    if (status == KV_MISS || status == KV_CORRUPT) status = KV_OK;
    if (status != KV_OK) names->status = status;
    names_end(names);
}

void names_read(struct flow *flow, struct session_name *list, uint32_t count,
                void (*done)(struct flow *flow))
{
    struct kv_store *store = flow->shard->store;
    struct names *names = kv_arena_alloc(flow->req->arena, sizeof(*names));
    struct name_read *reads = kv_arena_alloc(flow->req->arena, sizeof(*reads) * (count + 1u));
    if (names == NULL || reads == NULL) {
        flow_fail_status(flow, KV_NOMEM);
        done(flow);
        return;
    }
    /* One more than is read: it ends when all were asked for. */
    *names = (struct names){.flow = flow, .done = done, .waiting = 1, .status = KV_OK};
    for (uint32_t i = 0; i < count; i++) {
        const struct kv_session_entry *entry = kv_index_entry_find(store->index, &list[i].id);
        struct kv_session shape;
        kv_status status = KV_OK;
        if (entry == NULL) continue;
        const struct kv_session *session = kv_index_look(entry, &shape);
        reads[i] = (struct name_read){names, &list[i]};
        names->waiting++;
        if (session->has_details)
            status = name_put(flow, &list[i], session->name, session->parent_name);
        else
            status = kv_store_record_start(store, &list[i].id, false, name_known, &reads[i]);
        if (status != KV_OK) names->status = status;
        if (status != KV_OK || session->has_details) names->waiting--;
    }
    names_end(names);
}
