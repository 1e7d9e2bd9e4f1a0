#pragma once

/* From other people's trace files to ours.  One converter per source; each hands its turns to a
 * sink that selects sessions, scales, orders by time and writes. */

#include "tools/cachectl/trace_file.h"
#include "tools/cachectl/trace_input.h"
#include "tools/cachectl/trace_map.h"
#include "tools/cachectl/trace_options.h"

#define TRACE_MOONCAKE_BLOCK_TOKENS 512u

struct trace_sink_turn;

/* Owned by: the convert command. */
struct trace_sink {
    struct trace_header header; /* As recorded, before scaling; filled by the converter. */
    uint32_t scale;
    uint64_t sessions_max;   /* 0: all. */
    struct trace_map wanted; /* Session numbers asked for, value 1 once seen, 0 before; or empty. */
    struct trace_map taken;  /* Main sessions taken. */
    uint64_t users;          /* Made-up users that sessions are dealt to. */
    uint64_t seed;
    bool without_subagents;
    struct trace_progress progress;

    struct trace_sink_turn *turns;
    uint64_t turn_count;
    uint64_t turn_capacity;
    uint64_t main_turn_count;
    uint64_t sub_session_count;
};

/* Whether a main session is to be converted; remembers that it was. */
KV_MUST_CHECK kv_status trace_sink_wants(struct trace_sink *sink, uint64_t sess, bool *ret_wants,
                                         struct kv_error *err);

/* No further session can be wanted: the converter may stop reading. */
bool trace_sink_is_full(const struct trace_sink *sink);

/* The user a session is dealt to: Zipf with exponent 1 over the sink's users.  Depends on seed and
 * session only, so choosing sessions does not move the others. */
uint64_t trace_sink_user(const struct trace_sink *sink, uint64_t sess);

/* Takes the turn over: *turn is empty afterwards. */
KV_MUST_CHECK kv_status trace_sink_take(struct trace_sink *sink, struct trace_turn *turn,
                                        struct kv_error *err);

/* Orders the turns and writes them.  Errors of the stream are left in it. */
void trace_sink_write(struct trace_sink *sink, FILE *out);
void trace_sink_fini(struct trace_sink *sink);

/* The converters.  `first` is the first line, already read, and header.block_tokens is set. */
KV_MUST_CHECK kv_status trace_agentic_convert(struct trace_input *input, const char *first,
                                              size_t first_bytes, struct trace_sink *sink,
                                              struct kv_error *err);
KV_MUST_CHECK kv_status trace_mooncake_convert(struct trace_input *input, const char *first,
                                               size_t first_bytes, struct trace_sink *sink,
                                               struct kv_error *err);
