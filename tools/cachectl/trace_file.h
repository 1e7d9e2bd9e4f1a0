#pragma once

/* The project's trace format, one line at a time: reading, writing, and what a line means.
 *
 * JSON lines: a header, then one line per request, ordered by "t".
 *
 *   header  "trace"   1: the version.
 *           "name"    of the trace.
 *           "block"   tokens per block id.
 *           "clock"   "global" or "session": what "t" counts from.
 *           "users"   "real" or "made-up".
 *           "tail"    trailing prompt tokens that never reappear.
 *   line    "t"       ms.   "dur"  ms until the answer ended; 0: unknown.
 *           "user", "sess"  numbers.   "sub"  optional: the session a sub-agent belongs to.
 *           "turn"    from 0.   "par"  the turn whose prompt this one shares most with; -1: none.
 *           "keep"    tokens shared with prompt and answer of "par".
 *           "in", "out"  tokens.
 *           "ids"     runs [first, count] of the block ids after "keep", full blocks only.
 *           "sys"     optional: [id, tokens] of a prefix shared across sessions.
 *           "kind"    optional: "tool", "text", "other".
 *
 * Fields this tool adds, all optional for a reader:
 *
 *   header  "scope"   "session" or "global": what block ids are relative to.  A sub-agent's chat
 *                     shares the ids of the session it belongs to.
 *           "scale"   recorded tokens per token of this file; absent: 1.
 *           "source"  where the numbers come from.
 *   line    "gap"     ms between the end of the previous answer and this request.
 *           "raw"     [in, out] as recorded, in a scaled file.
 *
 * A scaled file is a trace like any other: its `block` is the recorded block length divided by the
 * scale, and every count is in its own (fewer) tokens.  `raw` keeps what scaling rounds away, so
 * the classes of the turns come out the same. */

#include "kvstore/base/status.h"
#include "tools/cachectl/trace_runs.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#define TRACE_TOKENS_MAX (1u << 30)
#define TRACE_NAME_MAX 127u
#define TRACE_SOURCE_MAX 255u

struct trace_header {
    char name[TRACE_NAME_MAX + 1];
    char source[TRACE_SOURCE_MAX + 1]; /* "" when the file does not say. */
    uint32_t block_tokens;
    uint32_t tail_tokens; /* Trailing prompt tokens that never reappear. */
    uint32_t scale;       /* At least 1. */
    bool global_clock;    /* t counts from the start of the file, else of the session. */
    bool global_scope;    /* Block ids mean the same in every session. */
    bool real_users;
};

enum trace_kind {
    TRACE_KIND_UNKNOWN,
    TRACE_KIND_TOOL,
    TRACE_KIND_TEXT,
    TRACE_KIND_OTHER,
    TRACE_KIND_COUNT,
};

/* Owned by: the caller; trace_turn_fini() frees the runs.  Zero-initialised is empty. */
struct trace_turn {
    uint64_t line; /* In the file it was read from. */
    uint64_t t_ms;
    uint64_t dur_ms; /* 0: unknown. */
    uint64_t gap_ms; /* Only when has_gap. */
    uint64_t user;
    uint64_t sess;
    uint64_t sub;        /* Session this sub-agent belongs to, only when has_sub. */
    uint64_t sys_id;     /* Only when sys_tokens > 0. */
    uint32_t sys_tokens; /* Length of the prefix shared across sessions, 0: none known. */
    uint32_t turn;
    int64_t par; /* -1: none. */
    uint32_t keep_tokens;
    uint32_t in_tokens;
    uint32_t out_tokens;
    uint32_t raw_in_tokens; /* As recorded; the two above when the file is not scaled. */
    uint32_t raw_out_tokens;
    enum trace_kind kind;
    bool has_gap;
    bool has_sub;
    struct trace_runs ids; /* Full blocks after the kept ones. */
};

void trace_turn_fini(struct trace_turn *turn);

/* Whole blocks taken over from `par`.  An exact `keep` inside a block counts as the block edge
 * below it: the block it cuts has its own id in this prompt. */
uint32_t trace_turn_kept_blocks(const struct trace_header *header, const struct trace_turn *turn);

struct trace_reader;

/* Reads the header too.  A damaged line is KV_CORRUPT and *err says "PATH:LINE: what". */
KV_MUST_CHECK kv_status trace_reader_open(const char *path, struct trace_reader **ret_reader,
                                          struct kv_error *err);
void trace_reader_close(struct trace_reader *reader);

const struct trace_header *trace_reader_header(const struct trace_reader *reader);

/* Fills *turn, reusing its memory; KV_MISS after the last line.  Checks what one line can show:
 * types, ranges, order by t, and that ids, keep and in agree.  What needs the session's earlier
 * lines is checked by trace_load(). */
KV_MUST_CHECK kv_status trace_reader_next(struct trace_reader *reader, struct trace_turn *turn,
                                          struct kv_error *err);

/* Fails with "PATH:LINE: text" for the line read last. */
kv_status trace_reader_fail(const struct trace_reader *reader, kv_status status,
                            struct kv_error *err, const char *fmt, ...) KV_PRINTF(4, 5);

/* Part of the file read so far, 0 to 100. */
unsigned trace_reader_percent(const struct trace_reader *reader);

/* Writers leave errors in the stream: the caller checks ferror() once, before fclose(). */
void trace_header_write(const struct trace_header *header, FILE *out);
void trace_turn_write(const struct trace_header *header, const struct trace_turn *turn, FILE *out);
