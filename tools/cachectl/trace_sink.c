/*
 * Where converted turns gather: selection, users, scaling, order.
 *
 * The format wants lines ordered by time while the sources come session by session, so all turns
 * are held (as runs, some 5 MB) and sorted once; equal times keep the order of the source, which
 * keeps the turns of a session in order.  The result depends on the input and the flags only.
 */

#include "tools/cachectl/trace_convert.h"

#include "tools/cachectl/trace_scale.h"

#include <assert.h>
#include <stdlib.h>

struct trace_sink_turn {
    struct trace_turn turn;
    uint64_t order;
};

static uint64_t mix(uint64_t x)
{
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

kv_status trace_sink_wants(struct trace_sink *sink, uint64_t sess, bool *ret_wants,
                           struct kv_error *err)
{
    *ret_wants = false;
    if (sink->wanted.count > 0) {
        if (trace_map_get(&sink->wanted, sess) == TRACE_MAP_NONE) return KV_OK;
        const kv_status status = trace_map_put(&sink->wanted, sess, 1);
        assert(status == KV_OK); /* Replaces: needs no memory. */
    }
    if (trace_map_get(&sink->taken, sess) == TRACE_MAP_NONE) {
        if (sink->sessions_max > 0 && sink->taken.count >= sink->sessions_max) return KV_OK;
        const kv_status status = trace_map_put(&sink->taken, sess, 1);
        if (status != KV_OK) return KV_FAIL(err, status, "no memory for the sessions");
    }
    *ret_wants = true;
    return KV_OK;
}

bool trace_sink_is_full(const struct trace_sink *sink)
{
    if (sink->sessions_max > 0 && sink->taken.count >= sink->sessions_max) return true;
    return sink->wanted.count > 0 && sink->taken.count == sink->wanted.count;
}

uint64_t trace_sink_user(const struct trace_sink *sink, uint64_t sess)
{
    double weights = 0;

    assert(sink->users > 0);
    for (uint64_t i = 1; i <= sink->users; i++)
        weights += 1.0 / (double)i;
    /* 53 bits: what a double holds exactly. */
    double left = (double)(mix(mix(sink->seed) ^ sess) >> 11) / 9007199254740992.0 * weights;
    for (uint64_t i = 1; i < sink->users; i++) {
        left -= 1.0 / (double)i;
        if (left < 0) return i;
    }
    return sink->users;
}

kv_status trace_sink_take(struct trace_sink *sink, struct trace_turn *turn, struct kv_error *err)
{
    if (sink->turn_count == sink->turn_capacity) {
        const uint64_t capacity = sink->turn_capacity == 0 ? 1024 : 2 * sink->turn_capacity;
        struct trace_sink_turn *bigger = realloc(sink->turns, capacity * sizeof(*bigger));
        if (bigger == NULL) return KV_FAIL(err, KV_NOMEM, "no memory for the turns");
        sink->turns = bigger;
        sink->turn_capacity = capacity;
    }
    turn->raw_in_tokens = turn->in_tokens;
    turn->raw_out_tokens = turn->out_tokens;
    trace_turn_scale(&sink->header, sink->scale, turn);
    if (!turn->has_sub) sink->main_turn_count++;
    if (turn->has_sub && turn->turn == 0) sink->sub_session_count++;
    sink->turns[sink->turn_count] = (struct trace_sink_turn){*turn, sink->turn_count};
    sink->turn_count++;
    *turn = (struct trace_turn){0};
    return KV_OK;
}

static int compare_turns(const void *left, const void *right)
{
    const struct trace_sink_turn *a = left;
    const struct trace_sink_turn *b = right;

    if (a->turn.t_ms != b->turn.t_ms) return a->turn.t_ms < b->turn.t_ms ? -1 : 1;
    return a->order < b->order ? -1 : 1;
}

void trace_sink_write(struct trace_sink *sink, FILE *out)
{
    struct trace_header header = sink->header;

    trace_header_scale(&header, sink->scale);
    if (sink->turn_count > 0)
        qsort(sink->turns, sink->turn_count, sizeof(*sink->turns), compare_turns);
    trace_header_write(&header, out);
    for (uint64_t i = 0; i < sink->turn_count; i++)
        trace_turn_write(&header, &sink->turns[i].turn, out);
}

void trace_sink_fini(struct trace_sink *sink)
{
    for (uint64_t i = 0; i < sink->turn_count; i++)
        trace_turn_fini(&sink->turns[i].turn);
    free(sink->turns);
    trace_map_fini(&sink->wanted);
    trace_map_fini(&sink->taken);
    *sink = (struct trace_sink){0};
}
