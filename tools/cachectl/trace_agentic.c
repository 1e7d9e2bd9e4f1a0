/*
 * Converter for the agentic coding sessions (callanjfox/kv-cache-tester).
 *
 * An id stands for the whole prefix up to its block, so the longest prefix a prompt shares with its
 * session ends at the last leading id already seen, and the newest prompt that holds that id is the
 * parent.  Sub-agents become sessions of their own, named 1,000,000 + 1,000 x parent + number, and
 * start at their marker's time.  The gap before a request is the smaller of think_time and the
 * difference of the two times, because think_time counts double after a row without answer time.
 */

#include "tools/cachectl/trace_convert.h"

#include <assert.h>
#include <jansson.h>
#include <string.h>

enum {
    SESSIONS_MAX = 1000000,
    SUBAGENTS_MAX = 1000,
    TAIL_TOKENS = 2, /* The last 2 prompt tokens never come back. */
    SECONDS_MAX = 1000000000,
};

/* One chat being converted: a session or a sub-agent. */
struct chat {
    struct trace_input *input;
    struct trace_sink *sink;
    struct kv_error *err;
    struct trace_map holders; /* Block id -> newest turn whose prompt holds it. */
    struct trace_turn turn;
    uint64_t sess;
    uint64_t user;
    uint64_t sub;
    bool is_sub;
    uint64_t start_ms;
    uint64_t sys_id;
    uint32_t sys_tokens;
    uint32_t turns;
    uint64_t t_ms_last; /* Of the previous turn. */
};

#define CHAT_FAIL(chat, ...) trace_input_fail((chat)->input, KV_CORRUPT, (chat)->err, __VA_ARGS__)

static kv_status number_of(const struct chat *chat, const json_t *object, const char *name,
                           uint64_t max, uint64_t *ret_number)
{
    const json_t *value = json_object_get(object, name);
    if (!json_is_integer(value) || json_integer_value(value) < 0 ||
        (uint64_t)json_integer_value(value) > max)
        return CHAT_FAIL(chat, "'%s' is missing or not a number from 0 to %llu", name,
                         (unsigned long long)max);
    *ret_number = (uint64_t)json_integer_value(value);
    return KV_OK;
}

/* Seconds, whole or not, as ms.  *ret_has is false when the field is absent or null. */
static kv_status seconds_of(const struct chat *chat, const json_t *object, const char *name,
                            bool *ret_has, uint64_t *ret_ms)
{
    const json_t *value = json_object_get(object, name);
    *ret_has = value != NULL && !json_is_null(value);
    if (!*ret_has) return KV_OK;
    const double seconds = json_number_value(value);
    if (!json_is_number(value) || !(seconds >= 0) || seconds > SECONDS_MAX)
        return CHAT_FAIL(chat, "'%s' is not a time in seconds", name);
    *ret_ms = (uint64_t)(seconds * 1000 + 0.5);
    return KV_OK;
}

static kv_status times_convert(struct chat *chat, const json_t *request)
{
    struct trace_turn *turn = &chat->turn;
    uint64_t t_ms = 0;
    uint64_t think_ms = 0;
    bool has_t = false;
    bool has_think = false;
    bool has_answer = false;

    kv_status status = seconds_of(chat, request, "t", &has_t, &t_ms);
    if (status == KV_OK && !has_t) status = CHAT_FAIL(chat, "'t' is missing");
    if (status == KV_OK) status = seconds_of(chat, request, "api_time", &has_answer, &turn->dur_ms);
    if (status == KV_OK) status = seconds_of(chat, request, "think_time", &has_think, &think_ms);
    if (status != KV_OK) return status;

    turn->t_ms = chat->start_ms + t_ms;
    /* A session's turns stay in their order whatever the clock says. */
    if (turn->t_ms < chat->t_ms_last) turn->t_ms = chat->t_ms_last;
    turn->has_gap = has_think && chat->turns > 0;
    if (turn->has_gap) {
        const uint64_t difference_ms = turn->t_ms - chat->t_ms_last;
        turn->gap_ms = think_ms < difference_ms ? think_ms : difference_ms;
    }
    chat->t_ms_last = turn->t_ms;
    return KV_OK;
}

static enum trace_kind kind_of(const json_t *request)
{
    const json_t *types = json_object_get(request, "input_types");
    const char *first = json_string_value(json_array_get(types, 0));

    if (json_array_size(types) != 1 || first == NULL) return TRACE_KIND_OTHER;
    if (strcmp(first, "tool_result") == 0) return TRACE_KIND_TOOL;
    if (strcmp(first, "text") == 0) return TRACE_KIND_TEXT;
    return TRACE_KIND_OTHER;
}

/* Splits the prompt's blocks into kept and new ones, and remembers this turn as their holder. */
static kv_status blocks_convert(struct chat *chat, const json_t *ids)
{
    struct trace_turn *turn = &chat->turn;
    const size_t count = json_array_size(ids);
    uint32_t kept = 0;
    bool joined = true;

    turn->par = -1;
    for (size_t i = 0; i < count; i++) {
        const json_t *value = json_array_get(ids, i);
        if (!json_is_integer(value) || json_integer_value(value) < 0)
            return CHAT_FAIL(chat, "a block id is not a whole number");
        const uint64_t id = (uint64_t)json_integer_value(value);
        const uint32_t holder = joined ? trace_map_get(&chat->holders, id) : TRACE_MAP_NONE;
        kv_status status = KV_OK;
        if (holder == TRACE_MAP_NONE || holder == chat->turns) {
            joined = false;
            status = trace_runs_add(&turn->ids, id, 1);
        } else {
            turn->par = holder;
            kept++;
        }
        if (status == KV_OK) status = trace_map_put(&chat->holders, id, chat->turns);
        if (status != KV_OK) return trace_input_fail(chat->input, status, chat->err, "no memory");
    }
    turn->keep_tokens = kept * chat->sink->header.block_tokens;
    return KV_OK;
}

static kv_status request_convert(struct chat *chat, const json_t *request)
{
    struct trace_turn *turn = &chat->turn;
    const json_t *ids = json_object_get(request, "hash_ids");
    uint64_t in = 0;
    uint64_t out = 0;

    *turn = (struct trace_turn){.user = chat->user,
                                .sess = chat->sess,
                                .sub = chat->sub,
                                .has_sub = chat->is_sub,
                                .turn = chat->turns,
                                .sys_id = chat->sys_id,
                                .sys_tokens = chat->sys_tokens};
    kv_status status = number_of(chat, request, "in", TRACE_TOKENS_MAX, &in);
    if (status == KV_OK) status = number_of(chat, request, "out", TRACE_TOKENS_MAX, &out);
    if (status == KV_OK) status = times_convert(chat, request);
    if (status != KV_OK) return status;
    turn->in_tokens = (uint32_t)in;
    turn->out_tokens = (uint32_t)out;
    turn->kind = kind_of(request);
    if (in == 0) return CHAT_FAIL(chat, "'in' is 0");
    if (!json_is_array(ids) || json_array_size(ids) != in / chat->sink->header.block_tokens)
        return CHAT_FAIL(chat, "'hash_ids' does not hold the full blocks of %llu tokens",
                         (unsigned long long)in);
    status = blocks_convert(chat, ids);
    if (status == KV_OK) status = trace_sink_take(chat->sink, turn, chat->err);
    trace_turn_fini(turn);
    chat->turns++;
    return status;
}

/* tools and system length, which come first in every prompt: the guess for a shared prefix. */
static kv_status prefix_convert(struct chat *chat, const json_t *object)
{
    uint64_t tools = 0;
    uint64_t system = 0;

    kv_status status = number_of(chat, object, "tool_tokens", 999999, &tools);
    if (status == KV_OK) status = number_of(chat, object, "system_tokens", 999999, &system);
    if (status != KV_OK) return status;
    chat->sys_id = tools * 1000000 + system;
    chat->sys_tokens = (uint32_t)(tools + system);
    return KV_OK;
}

static kv_status subagent_convert(const struct chat *parent, const json_t *marker, uint64_t number)
{
    const json_t *requests = json_object_get(marker, "requests");
    struct chat chat = {.input = parent->input,
                        .sink = parent->sink,
                        .err = parent->err,
                        .sess = 1000000 + 1000 * parent->sess + number,
                        .user = parent->user,
                        .sub = parent->sess,
                        .is_sub = true};
    bool has_t = false;

    if (number >= SUBAGENTS_MAX) return CHAT_FAIL(parent, "more than 1,000 sub-agents");
    kv_status status = prefix_convert(&chat, marker);
    if (status == KV_OK) status = seconds_of(&chat, marker, "t", &has_t, &chat.start_ms);
    if (status == KV_OK && !has_t) status = CHAT_FAIL(parent, "'t' of a sub-agent is missing");
    if (status == KV_OK && !json_is_array(requests))
        status = CHAT_FAIL(parent, "'requests' of a sub-agent is not a list");
    for (size_t i = 0; i < json_array_size(requests) && status == KV_OK; i++)
        status = request_convert(&chat, json_array_get(requests, i));
    trace_map_fini(&chat.holders);
    return status;
}

static kv_status session_convert(struct chat *chat, const json_t *object)
{
    const json_t *requests = json_object_get(object, "requests");
    uint64_t subagents = 0;

    kv_status status = prefix_convert(chat, object);
    if (status == KV_OK && !json_is_array(requests))
        status = CHAT_FAIL(chat, "'requests' is missing or not a list");
    for (size_t i = 0; i < json_array_size(requests) && status == KV_OK; i++) {
        const json_t *request = json_array_get(requests, i);
        const char *type = json_string_value(json_object_get(request, "type"));
        if (type == NULL || strcmp(type, "subagent") != 0) {
            status = request_convert(chat, request);
        } else if (!chat->sink->without_subagents) {
            status = subagent_convert(chat, request, subagents++);
        }
    }
    trace_map_fini(&chat->holders);
    return status;
}

/* "trace_0042" is session 42. */
static kv_status session_number(const struct chat *chat, const json_t *object, uint64_t *ret_sess)
{
    const char *id = json_string_value(json_object_get(object, "id"));
    uint64_t number = 0;

    if (id == NULL) return CHAT_FAIL(chat, "'id' is missing");
    const size_t digits_at = strcspn(id, "0123456789");
    for (const char *c = id + digits_at; *c != '\0'; c++) {
        if (*c < '0' || *c > '9' || number >= SESSIONS_MAX)
            return CHAT_FAIL(chat, "'id' does not end in a session number below 1,000,000");
        number = 10 * number + (uint64_t)(*c - '0');
    }
    if (id[digits_at] == '\0' || number >= SESSIONS_MAX)
        return CHAT_FAIL(chat, "'id' does not end in a session number below 1,000,000");
    *ret_sess = number;
    return KV_OK;
}

static kv_status line_convert(struct chat *chat, const char *text, size_t bytes,
                              struct trace_map *seen)
{
    json_error_t why;
    uint64_t block = 0;
    bool wanted = false;

    json_t *object = json_loadb(text, bytes, 0, &why);
    if (object == NULL) return CHAT_FAIL(chat, "not JSON: %s", why.text);
    kv_status status = number_of(chat, object, "block_size", TRACE_TOKENS_MAX, &block);
    if (status == KV_OK && block != chat->sink->header.block_tokens)
        status = CHAT_FAIL(chat, "'block_size' is %llu, in the first line it is %u",
                           (unsigned long long)block, chat->sink->header.block_tokens);
    if (status == KV_OK) status = session_number(chat, object, &chat->sess);
    if (status == KV_OK && trace_map_get(seen, chat->sess) != TRACE_MAP_NONE)
        status = CHAT_FAIL(chat, "session %llu appears twice", (unsigned long long)chat->sess);
    if (status == KV_OK) status = trace_map_put(seen, chat->sess, 1);
    if (status == KV_OK) status = trace_sink_wants(chat->sink, chat->sess, &wanted, chat->err);
    if (status == KV_OK && wanted) {
        chat->user = trace_sink_user(chat->sink, chat->sess);
        status = session_convert(chat, object);
    }
    json_decref(object);
    return status;
}

kv_status trace_agentic_convert(struct trace_input *input, const char *first, size_t first_bytes,
                                struct trace_sink *sink, struct kv_error *err)
{
    struct trace_map seen = {0};
    const char *text = first;
    size_t bytes = first_bytes;
    kv_status status = KV_OK;

    assert(sink->header.block_tokens > 0); /* Read from the first line by the caller. */
    sink->header.tail_tokens = TAIL_TOKENS;
    while (status == KV_OK) {
        struct chat chat = {.input = input, .sink = sink, .err = err};
        status = line_convert(&chat, text, bytes, &seen);
        trace_progress_tick(&sink->progress, trace_input_percent(input));
        if (status != KV_OK || trace_sink_is_full(sink)) break;
        status = trace_input_line(input, &text, &bytes, err);
    }
    trace_map_fini(&seen);
    return status == KV_MISS ? KV_OK : status;
}
