/*
 * Loads a trace and checks what only the earlier lines of a session can show.
 *
 * A line names its parent turn and how much of it is kept; here that becomes the full list of block
 * ids, and the parent learns its first child, from which its answer tokens are taken.  A parent
 * that does not exist, a turn out of order or more kept blocks than the parent has are damage, and
 * reported with the line that says so.
 */

#include "tools/cachectl/trace_load.h"

#include "tools/cachectl/trace_scale.h"

#include <assert.h>
#include <stdlib.h>

/* Room for one more element; doubles.  NULL when there is no memory, the old one is then intact. */
static void *grown(void *memory, uint32_t count, uint32_t *capacity, size_t element_bytes)
{
    if (count < *capacity) return memory;
    const uint32_t bigger = *capacity == 0 ? 16 : 2 * *capacity;
    void *moved = realloc(memory, (size_t)bigger * element_bytes);
    if (moved != NULL) *capacity = bigger;
    return moved;
}

static kv_status session_find(struct trace *trace, const struct trace_turn *turn,
                              uint32_t *ret_session)
{
    const uint32_t found = trace_map_get(&trace->session_of, turn->sess);
    if (found != TRACE_MAP_NONE) {
        *ret_session = found;
        return KV_OK;
    }
    struct trace_session *sessions =
        grown(trace->sessions, trace->session_count, &trace->session_capacity, sizeof(*sessions));
    if (sessions == NULL) return KV_NOMEM;
    trace->sessions = sessions;
    const kv_status status = trace_map_put(&trace->session_of, turn->sess, trace->session_count);
    if (status != KV_OK) return status;
    trace->sessions[trace->session_count] = (struct trace_session){
        .sess = turn->sess, .user = turn->user, .sub = turn->sub, .is_sub = turn->has_sub};
    *ret_session = trace->session_count++;
    return KV_OK;
}

static kv_status item_link(struct trace *trace, uint32_t index, const struct trace_reader *reader,
                           struct kv_error *err)
{
    struct trace_item *item = &trace->items[index];
    struct trace_session *session = &trace->sessions[item->session];
    const uint32_t kept = trace_turn_kept_blocks(trace_reader_header(reader), &item->turn);

    if (item->turn.turn != session->item_count)
        return trace_reader_fail(reader, KV_CORRUPT, err, "turn %u of session %llu, expected %u",
                                 item->turn.turn, (unsigned long long)item->turn.sess,
                                 session->item_count);
    if (item->turn.user != session->user || item->turn.has_sub != session->is_sub ||
        item->turn.sub != session->sub)
        return trace_reader_fail(reader, KV_CORRUPT, err,
                                 "session %llu changes its 'user' or 'sub'",
                                 (unsigned long long)item->turn.sess);
    if (item->turn.par >= 0) {
        item->parent = session->items[item->turn.par];
        struct trace_item *parent = &trace->items[item->parent];
        if (kept > parent->blocks.block_count)
            return trace_reader_fail(reader, KV_CORRUPT, err,
                                     "'keep' is %u blocks, turn %lld has %u", kept,
                                     (long long)item->turn.par, parent->blocks.block_count);
        if (parent->child == TRACE_NO_ITEM) parent->child = index;
        const kv_status status = trace_runs_add_prefix(&item->blocks, &parent->blocks, kept);
        if (status != KV_OK) return trace_reader_fail(reader, status, err, "no memory");
    }
    return KV_OK;
}

static kv_status item_add(struct trace *trace, struct trace_turn *turn,
                          const struct trace_reader *reader, uint32_t scale, struct kv_error *err)
{
    struct trace_item *items =
        grown(trace->items, trace->item_count, &trace->item_capacity, sizeof(*items));
    if (items == NULL) return trace_reader_fail(reader, KV_NOMEM, err, "no memory");
    trace->items = items;

    /* The turn's runs belong to the item from here on. */
    const uint32_t index = trace->item_count++;
    struct trace_item *item = &trace->items[index];
    *item = (struct trace_item){.turn = *turn, .parent = TRACE_NO_ITEM, .child = TRACE_NO_ITEM};
    *turn = (struct trace_turn){0};
    if (!item->turn.has_sub) item->turn.sub = 0;

    kv_status status = session_find(trace, &item->turn, &item->session);
    if (status != KV_OK) return trace_reader_fail(reader, status, err, "no memory");
    status = item_link(trace, index, reader, err);
    if (status != KV_OK) return status;

    struct trace_session *session = &trace->sessions[item->session];
    uint32_t *list =
        grown(session->items, session->item_count, &session->item_capacity, sizeof(*list));
    if (list == NULL) return trace_reader_fail(reader, KV_NOMEM, err, "no memory");
    session->items = list;
    session->items[session->item_count++] = index;

    status = trace_runs_add_prefix(&item->blocks, &item->turn.ids, item->turn.ids.block_count);
    if (status != KV_OK) return trace_reader_fail(reader, status, err, "no memory");
    trace_turn_scale(trace_reader_header(reader), scale, &item->turn);
    return KV_OK;
}

kv_status trace_load(const char *path, uint32_t scale, struct trace **ret_trace,
                     struct kv_error *err)
{
    struct trace_reader *reader = NULL;
    struct trace_turn turn = {0};

    assert(ret_trace != NULL);
    struct trace *trace = calloc(1, sizeof(*trace));
    if (trace == NULL) return KV_FAIL(err, KV_NOMEM, "load trace '%s'", path);
    kv_status status = trace_reader_open(path, &reader, err);
    if (status != KV_OK) goto fail;
    trace->header = *trace_reader_header(reader);
    status = trace_scale_check(&trace->header, scale, err);
    if (status != KV_OK) goto fail;
    trace_header_scale(&trace->header, scale);

    while (status == KV_OK) {
        status = trace_reader_next(reader, &turn, err);
        if (status == KV_OK) status = item_add(trace, &turn, reader, scale, err);
    }
    if (status != KV_MISS) goto fail;
    if (trace->item_count == 0) {
        status = trace_reader_fail(reader, KV_CORRUPT, err, "the trace has no requests");
        goto fail;
    }
    trace_turn_fini(&turn);
    trace_reader_close(reader);
    *ret_trace = trace;
    return KV_OK;

fail:
    trace_turn_fini(&turn);
    trace_reader_close(reader);
    trace_destroy(trace);
    return status;
}

void trace_destroy(struct trace *trace)
{
    if (trace == NULL) return;
    for (uint32_t i = 0; i < trace->item_count; i++) {
        trace_turn_fini(&trace->items[i].turn);
        trace_runs_fini(&trace->items[i].blocks);
    }
    for (uint32_t i = 0; i < trace->session_count; i++)
        free(trace->sessions[i].items);
    trace_map_fini(&trace->session_of);
    free(trace->items);
    free(trace->sessions);
    free(trace);
}
