/*
 * Converter for the Mooncake conversation trace (kvcache-ai/Mooncake).
 *
 * The file has neither sessions nor parents; they are derived.  Request j goes on
 * from i when all full blocks of i lead j's list, beyond the blocks that 120 or more requests have
 * (a shared system prompt); i is the newest request that holds the deepest shared block; and j is
 * at least as long as i's prompt and answer.  Everything else starts a session.  Ids are global, so
 * prompts of different sessions that share blocks get equal tokens.
 */

#include "tools/cachectl/trace_convert.h"

#include <assert.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK_TOKENS = TRACE_MOONCAKE_BLOCK_TOKENS, SHARED_REQUESTS = 120 };

struct request {
    uint64_t t_ms;
    uint32_t in_tokens;
    uint32_t out_tokens;
    uint64_t *ids; /* Of the full blocks. */
    uint32_t id_count;
    uint32_t session;
    uint32_t turn;
};

struct requests {
    struct request *list;
    uint32_t count;
    uint32_t capacity;
    struct trace_map users_of; /* Block id -> number of requests that name it. */
    struct trace_map holders;  /* Full block id -> newest request that holds it. */
};

struct session_list {
    uint32_t *turn_counts;
    uint32_t count;
};

static void requests_fini(struct requests *requests)
{
    for (uint32_t i = 0; i < requests->count; i++)
        free(requests->list[i].ids);
    free(requests->list);
    trace_map_fini(&requests->users_of);
    trace_map_fini(&requests->holders);
}

static kv_status field(struct trace_input *input, const json_t *object, const char *name,
                       uint64_t max, uint64_t *ret_number, struct kv_error *err)
{
    const json_t *value = json_object_get(object, name);
    if (!json_is_integer(value) || json_integer_value(value) < 0 ||
        (uint64_t)json_integer_value(value) > max)
        return trace_input_fail(input, KV_CORRUPT, err,
                                "'%s' is missing or not a number from 0 to %llu", name,
                                (unsigned long long)max);
    *ret_number = (uint64_t)json_integer_value(value);
    return KV_OK;
}

/* Keeps the ids of full blocks; counts the last, partial one too: it may be a whole system prompt
 * of somebody else. */
static kv_status ids_read(struct trace_input *input, struct requests *requests, const json_t *ids,
                          struct request *request, struct kv_error *err)
{
    const size_t full = request->in_tokens / BLOCK_TOKENS;
    const size_t all = full + (request->in_tokens % BLOCK_TOKENS != 0 ? 1 : 0);

    if (!json_is_array(ids) || json_array_size(ids) != all)
        return trace_input_fail(input, KV_CORRUPT, err,
                                "'hash_ids' does not hold the blocks of %u tokens",
                                request->in_tokens);
    request->ids = calloc(full + 1, sizeof(*request->ids));
    if (request->ids == NULL) return trace_input_fail(input, KV_NOMEM, err, "no memory");
    for (size_t i = 0; i < all; i++) {
        const json_t *value = json_array_get(ids, i);
        if (!json_is_integer(value) || json_integer_value(value) < 0)
            return trace_input_fail(input, KV_CORRUPT, err, "a block id is not a whole number");
        const uint64_t id = (uint64_t)json_integer_value(value);
        const uint32_t before = trace_map_get(&requests->users_of, id);
        const kv_status status =
            trace_map_put(&requests->users_of, id, before == TRACE_MAP_NONE ? 1 : before + 1);
        if (status != KV_OK) return trace_input_fail(input, status, err, "no memory");
        if (i < full) request->ids[request->id_count++] = id;
    }
    return KV_OK;
}

static kv_status request_read(struct trace_input *input, struct requests *requests,
                              const char *text, size_t bytes, struct kv_error *err)
{
    uint64_t in = 0;
    uint64_t out = 0;
    json_error_t why;

    if (requests->count == requests->capacity) {
        const uint32_t capacity = requests->capacity == 0 ? 1024 : 2 * requests->capacity;
        struct request *bigger = realloc(requests->list, capacity * sizeof(*bigger));
        if (bigger == NULL) return trace_input_fail(input, KV_NOMEM, err, "no memory");
        requests->list = bigger;
        requests->capacity = capacity;
    }
    json_t *object = json_loadb(text, bytes, 0, &why);
    if (object == NULL) return trace_input_fail(input, KV_CORRUPT, err, "not JSON: %s", why.text);

    struct request *request = &requests->list[requests->count++];
    *request = (struct request){0};
    kv_status status = field(input, object, "timestamp", INT64_MAX, &request->t_ms, err);
    if (status == KV_OK) status = field(input, object, "input_length", TRACE_TOKENS_MAX, &in, err);
    if (status == KV_OK)
        status = field(input, object, "output_length", TRACE_TOKENS_MAX, &out, err);
    request->in_tokens = (uint32_t)in;
    request->out_tokens = (uint32_t)out;
    if (status == KV_OK && in == 0)
        status = trace_input_fail(input, KV_CORRUPT, err, "'input_length' is 0");
    if (status == KV_OK)
        status = ids_read(input, requests, json_object_get(object, "hash_ids"), request, err);
    json_decref(object);
    return status;
}

static bool is_shared(const struct requests *requests, uint64_t id)
{
    const uint32_t users = trace_map_get(&requests->users_of, id);
    return users != TRACE_MAP_NONE && users >= SHARED_REQUESTS;
}

/* The request that j goes on from; requests->count: none. */
static uint32_t parent_of(const struct requests *requests, uint32_t j)
{
    const struct request *request = &requests->list[j];
    uint32_t parent = requests->count;
    uint32_t joined = 0;
    bool beyond_shared = false;

    for (; joined < request->id_count; joined++) {
        const uint32_t holder = trace_map_get(&requests->holders, request->ids[joined]);
        if (holder == TRACE_MAP_NONE) break;
        parent = holder;
        if (!is_shared(requests, request->ids[joined])) beyond_shared = true;
    }
    if (!beyond_shared) return requests->count;
    const struct request *before = &requests->list[parent];
    if (joined != before->id_count) return requests->count;
    if (request->in_tokens < (uint64_t)before->in_tokens + before->out_tokens)
        return requests->count;
    return parent;
}

static kv_status turn_emit(struct requests *requests, uint32_t j, uint32_t parent,
                           struct trace_sink *sink, struct kv_error *err)
{
    const struct request *request = &requests->list[j];
    const bool has_parent = parent != requests->count;
    const uint32_t kept = has_parent ? requests->list[parent].id_count : 0;
    uint32_t shared = 0;
    bool wanted = false;

    kv_status status = trace_sink_wants(sink, request->session, &wanted, err);
    if (status != KV_OK || !wanted) return status;
    while (shared < request->id_count && is_shared(requests, request->ids[shared]))
        shared++;
    struct trace_turn turn = {
        .t_ms = request->t_ms,
        .user = request->session,
        .sess = request->session,
        .turn = request->turn,
        .par = has_parent ? (int64_t)requests->list[parent].turn : -1,
        .keep_tokens = kept * BLOCK_TOKENS,
        .in_tokens = request->in_tokens,
        .out_tokens = request->out_tokens,
        .sys_id = shared > 0 ? request->ids[shared - 1] : 0,
        .sys_tokens = shared * BLOCK_TOKENS,
    };
    for (uint32_t i = kept; i < request->id_count && status == KV_OK; i++)
        status = trace_runs_add(&turn.ids, request->ids[i], 1);
    if (status != KV_OK) status = KV_FAIL(err, status, "no memory for the turns");
    if (status == KV_OK) status = trace_sink_take(sink, &turn, err);
    trace_turn_fini(&turn);
    return status;
}

/* Sessions are numbered from 1 in the order they start. */
static kv_status sessions_derive(struct requests *requests, struct session_list *sessions,
                                 struct trace_sink *sink, struct kv_error *err)
{
    for (uint32_t j = 0; j < requests->count; j++) {
        struct request *request = &requests->list[j];
        const uint32_t parent = parent_of(requests, j);
        const bool goes_on = parent != requests->count;

        request->session = goes_on ? requests->list[parent].session : ++sessions->count;
        request->turn = sessions->turn_counts[request->session]++;
        kv_status status = turn_emit(requests, j, parent, sink, err);
        for (uint32_t i = 0; i < request->id_count && status == KV_OK; i++)
            status = trace_map_put(&requests->holders, request->ids[i], j);
        if (status == KV_NOMEM) return KV_FAIL(err, status, "no memory for the sessions");
        if (status != KV_OK) return status;
    }
    return KV_OK;
}

kv_status trace_mooncake_convert(struct trace_input *input, const char *first, size_t first_bytes,
                                 struct trace_sink *sink, struct kv_error *err)
{
    struct requests requests = {0};
    struct session_list sessions = {0};
    const char *text = first;
    size_t bytes = first_bytes;
    kv_status status = KV_OK;

    assert(sink->header.block_tokens == BLOCK_TOKENS);
    while (status == KV_OK) {
        status = request_read(input, &requests, text, bytes, err);
        trace_progress_tick(&sink->progress, trace_input_percent(input));
        if (status == KV_OK) status = trace_input_line(input, &text, &bytes, err);
    }
    if (status == KV_MISS) {
        sink->header.global_clock = true;
        sink->header.global_scope = true;
        sessions.turn_counts = calloc((size_t)requests.count + 1, sizeof(*sessions.turn_counts));
        status = sessions.turn_counts == NULL ? KV_FAIL(err, KV_NOMEM, "no memory for the sessions")
                                              : sessions_derive(&requests, &sessions, sink, err);
    }
    free(sessions.turn_counts);
    requests_fini(&requests);
    return status;
}
