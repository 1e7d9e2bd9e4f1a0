/*
 * Reads the trace format, one line at a time.
 *
 * Every number of a line is checked against its range and against the others before anyone uses it:
 * a trace decides what a benchmark measures, so a damaged one must stop with the number of the
 * line, and not replay something else.  Unknown fields are skipped, so that later versions may add
 * some.
 */

#include "tools/cachectl/trace_file.h"

#include "tools/cachectl/trace_input.h"

#include <assert.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

struct trace_reader {
    struct trace_input *input;
    struct trace_header header;
    uint64_t t_ms_last;
};

/* One line being decoded. */
struct line {
    struct trace_reader *reader;
    json_t *object;
    struct kv_error *err;
};

#define LINE_FAIL(line, ...)                                                                       \
    trace_input_fail((line)->reader->input, KV_CORRUPT, (line)->err, __VA_ARGS__)

void trace_turn_fini(struct trace_turn *turn)
{
    trace_runs_fini(&turn->ids);
}

uint32_t trace_turn_kept_blocks(const struct trace_header *header, const struct trace_turn *turn)
{
    return turn->keep_tokens / header->block_tokens;
}

static kv_status line_parse(struct trace_reader *reader, struct line *line, struct kv_error *err)
{
    const char *text = NULL;
    size_t bytes = 0;
    json_error_t why;

    const kv_status status = trace_input_line(reader->input, &text, &bytes, err);
    if (status != KV_OK) return status;
    *line = (struct line){.reader = reader, .err = err};
    line->object = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &why);
    if (line->object == NULL) return LINE_FAIL(line, "not JSON: %s", why.text);
    if (!json_is_object(line->object)) {
        json_decref(line->object);
        return LINE_FAIL(line, "not a JSON object");
    }
    return KV_OK;
}

static kv_status json_number(const struct line *line, const json_t *value, const char *name,
                             uint64_t max, uint64_t *ret_number)
{
    if (!json_is_integer(value)) return LINE_FAIL(line, "'%s' is not a whole number", name);
    const json_int_t number = json_integer_value(value);
    if (number < 0 || (uint64_t)number > max)
        return LINE_FAIL(line, "'%s' is %lld, allowed is 0 to %llu", name, (long long)number,
                         (unsigned long long)max);
    *ret_number = (uint64_t)number;
    return KV_OK;
}

static kv_status field_u64(const struct line *line, const char *name, uint64_t *ret_number)
{
    const json_t *value = json_object_get(line->object, name);
    if (value == NULL) return LINE_FAIL(line, "'%s' is missing", name);
    return json_number(line, value, name, INT64_MAX, ret_number);
}

static kv_status field_tokens(const struct line *line, const char *name, uint32_t *ret_tokens)
{
    uint64_t number = 0;
    const json_t *value = json_object_get(line->object, name);

    if (value == NULL) return LINE_FAIL(line, "'%s' is missing", name);
    const kv_status status = json_number(line, value, name, TRACE_TOKENS_MAX, &number);
    if (status == KV_OK) *ret_tokens = (uint32_t)number;
    return status;
}

static kv_status field_optional_u64(const struct line *line, const char *name, bool *ret_has,
                                    uint64_t *ret_number)
{
    *ret_has = json_object_get(line->object, name) != NULL;
    return *ret_has ? field_u64(line, name, ret_number) : KV_OK;
}

/* A pair [a, b] of numbers; *ret_has is false when the field is absent. */
static kv_status field_pair(const struct line *line, const char *name, uint64_t a_max,
                            bool *ret_has, uint64_t *ret_a, uint64_t *ret_b)
{
    const json_t *value = json_object_get(line->object, name);

    *ret_has = value != NULL;
    if (value == NULL) return KV_OK;
    if (json_array_size(value) != 2) return LINE_FAIL(line, "'%s' is not a pair", name);
    const kv_status status = json_number(line, json_array_get(value, 0), name, a_max, ret_a);
    if (status != KV_OK) return status;
    return json_number(line, json_array_get(value, 1), name, TRACE_TOKENS_MAX, ret_b);
}

/* One of two words; the default when the field is absent. */
static kv_status field_choice(const struct line *line, const char *name, const char *no,
                              const char *yes, bool *choice)
{
    const json_t *value = json_object_get(line->object, name);
    if (value == NULL) return KV_OK;
    const char *text = json_string_value(value);
    if (text == NULL || (strcmp(text, yes) != 0 && strcmp(text, no) != 0))
        return LINE_FAIL(line, "'%s' must be \"%s\" or \"%s\"", name, no, yes);
    *choice = strcmp(text, yes) == 0;
    return KV_OK;
}

static kv_status field_text(const struct line *line, const char *name, size_t bytes_max,
                            char *ret_text)
{
    const json_t *value = json_object_get(line->object, name);
    if (value == NULL) return KV_OK;
    if (!json_is_string(value) || json_string_length(value) > bytes_max)
        return LINE_FAIL(line, "'%s' must be a text of at most %zu bytes", name, bytes_max);
    (void)memcpy(ret_text, json_string_value(value), json_string_length(value) + 1);
    return KV_OK;
}

static kv_status header_decode(const struct line *line, struct trace_header *header)
{
    kv_status status;
    uint64_t version = 0;

    if (json_object_get(line->object, "trace") == NULL)
        return LINE_FAIL(line, "not a trace header: 'trace' is missing");
    status = field_u64(line, "trace", &version);
    if (status != KV_OK) return status;
    if (version != 1)
        return LINE_FAIL(line, "trace version %llu is not supported, only 1 is",
                         (unsigned long long)version);
    status = field_tokens(line, "block", &header->block_tokens);
    if (status != KV_OK) return status;
    if (header->block_tokens == 0) return LINE_FAIL(line, "'block' is 0");
    if (json_object_get(line->object, "tail") != NULL) {
        status = field_tokens(line, "tail", &header->tail_tokens);
        if (status != KV_OK) return status;
    }
    header->scale = 1;
    if (json_object_get(line->object, "scale") != NULL) {
        status = field_tokens(line, "scale", &header->scale);
        if (status != KV_OK) return status;
        if (header->scale == 0) return LINE_FAIL(line, "'scale' is 0");
    }
    status = field_text(line, "name", TRACE_NAME_MAX, header->name);
    if (status != KV_OK) return status;
    status = field_text(line, "source", TRACE_SOURCE_MAX, header->source);
    if (status != KV_OK) return status;
    status = field_choice(line, "clock", "session", "global", &header->global_clock);
    if (status != KV_OK) return status;
    status = field_choice(line, "scope", "session", "global", &header->global_scope);
    if (status != KV_OK) return status;
    return field_choice(line, "users", "made-up", "real", &header->real_users);
}

static kv_status ids_decode(const struct line *line, struct trace_turn *turn)
{
    const json_t *ids = json_object_get(line->object, "ids");

    trace_runs_clear(&turn->ids);
    if (ids == NULL) return LINE_FAIL(line, "'ids' is missing");
    if (!json_is_array(ids)) return LINE_FAIL(line, "'ids' is not a list");
    for (size_t i = 0; i < json_array_size(ids); i++) {
        const json_t *run = json_array_get(ids, i);
        uint64_t first = 0;
        uint64_t count = 0;
        if (json_array_size(run) != 2) return LINE_FAIL(line, "a run of 'ids' is not a pair");
        kv_status status = json_number(line, json_array_get(run, 0), "ids", INT64_MAX, &first);
        if (status != KV_OK) return status;
        status = json_number(line, json_array_get(run, 1), "ids", TRACE_TOKENS_MAX, &count);
        if (status != KV_OK) return status;
        if (count == 0) return LINE_FAIL(line, "a run of 'ids' is empty");
        if (turn->ids.block_count + count > TRACE_TOKENS_MAX)
            return LINE_FAIL(line, "'ids' names too many blocks");
        status = trace_runs_add(&turn->ids, first, (uint32_t)count);
        if (status != KV_OK)
            return trace_input_fail(line->reader->input, status, line->err, "no memory");
    }
    return KV_OK;
}

static kv_status kind_decode(const struct line *line, struct trace_turn *turn)
{
    static const char *const names[TRACE_KIND_COUNT] = {
        [TRACE_KIND_TOOL] = "tool", [TRACE_KIND_TEXT] = "text", [TRACE_KIND_OTHER] = "other"};
    const json_t *value = json_object_get(line->object, "kind");

    turn->kind = TRACE_KIND_UNKNOWN;
    if (value == NULL) return KV_OK;
    for (int kind = TRACE_KIND_TOOL; kind < TRACE_KIND_COUNT; kind++) {
        if (json_is_string(value) && strcmp(json_string_value(value), names[kind]) == 0)
            turn->kind = (enum trace_kind)kind;
    }
    if (turn->kind == TRACE_KIND_UNKNOWN)
        return LINE_FAIL(line, "'kind' must be \"tool\", \"text\" or \"other\"");
    return KV_OK;
}

static kv_status optional_decode(const struct line *line, struct trace_turn *turn)
{
    uint64_t a = 0;
    uint64_t b = 0;
    bool has = false;

    kv_status status = field_optional_u64(line, "gap", &turn->has_gap, &turn->gap_ms);
    if (status != KV_OK) return status;
    status = field_optional_u64(line, "sub", &turn->has_sub, &turn->sub);
    if (status != KV_OK) return status;

    status = field_pair(line, "sys", INT64_MAX, &has, &a, &b);
    if (status != KV_OK) return status;
    turn->sys_id = has ? a : 0;
    turn->sys_tokens = has ? (uint32_t)b : 0;

    status = field_pair(line, "raw", TRACE_TOKENS_MAX, &has, &a, &b);
    if (status != KV_OK) return status;
    turn->raw_in_tokens = has ? (uint32_t)a : turn->in_tokens;
    turn->raw_out_tokens = has ? (uint32_t)b : turn->out_tokens;
    if (!has && line->reader->header.scale > 1)
        return LINE_FAIL(line, "'raw' is missing in a scaled trace");
    return kind_decode(line, turn);
}

static kv_status required_decode(const struct line *line, struct trace_turn *turn)
{
    uint64_t turn_number = 0;
    const json_t *par = json_object_get(line->object, "par");

    kv_status status = field_u64(line, "t", &turn->t_ms);
    if (status == KV_OK) status = field_u64(line, "dur", &turn->dur_ms);
    if (status == KV_OK) status = field_u64(line, "user", &turn->user);
    if (status == KV_OK) status = field_u64(line, "sess", &turn->sess);
    if (status == KV_OK) status = field_u64(line, "turn", &turn_number);
    if (status == KV_OK) status = field_tokens(line, "keep", &turn->keep_tokens);
    if (status == KV_OK) status = field_tokens(line, "in", &turn->in_tokens);
    if (status == KV_OK) status = field_tokens(line, "out", &turn->out_tokens);
    if (status != KV_OK) return status;
    if (turn_number >= UINT32_MAX) return LINE_FAIL(line, "'turn' is too large");
    turn->turn = (uint32_t)turn_number;
    if (!json_is_integer(par)) return LINE_FAIL(line, "'par' is missing or not a whole number");
    turn->par = json_integer_value(par);
    if (turn->par < -1 || turn->par >= (int64_t)turn->turn)
        return LINE_FAIL(line, "'par' is %lld in turn %u", (long long)turn->par, turn->turn);
    return KV_OK;
}

/* What the fields of one line must be to each other. */
static kv_status line_check(const struct line *line, const struct trace_turn *turn)
{
    const struct trace_header *header = &line->reader->header;
    const uint64_t blocks = (uint64_t)trace_turn_kept_blocks(header, turn) + turn->ids.block_count;

    if (turn->t_ms < line->reader->t_ms_last)
        return LINE_FAIL(line, "'t' goes back: lines must be ordered by t");
    if (turn->in_tokens == 0) return LINE_FAIL(line, "'in' is 0");
    if (turn->par < 0 && turn->keep_tokens > 0)
        return LINE_FAIL(line, "'keep' is %u without a parent", turn->keep_tokens);
    if (turn->keep_tokens > turn->in_tokens)
        return LINE_FAIL(line, "'keep' is %u, more than 'in'", turn->keep_tokens);
    if (blocks * header->block_tokens > turn->in_tokens)
        return LINE_FAIL(line, "'keep' and 'ids' name %llu blocks, more than 'in' holds",
                         (unsigned long long)blocks);
    /* A scaled file drops the part of a block, so only a file as recorded must add up. */
    if (header->scale == 1 && blocks != turn->in_tokens / header->block_tokens)
        return LINE_FAIL(line, "'keep' and 'ids' name %llu blocks, 'in' holds %u",
                         (unsigned long long)blocks, turn->in_tokens / header->block_tokens);
    return KV_OK;
}

kv_status trace_reader_open(const char *path, struct trace_reader **ret_reader,
                            struct kv_error *err)
{
    struct line line = {0};

    assert(ret_reader != NULL);
    struct trace_reader *reader = calloc(1, sizeof(*reader));
    if (reader == NULL) return KV_FAIL(err, KV_NOMEM, "open trace '%s'", path);
    kv_status status = trace_input_open(path, &reader->input, err);
    if (status != KV_OK) goto fail;
    status = line_parse(reader, &line, err);
    if (status == KV_MISS) status = KV_FAIL(err, KV_CORRUPT, "%s:1: the file is empty", path);
    if (status != KV_OK) goto fail;
    status = header_decode(&line, &reader->header);
    json_decref(line.object);
    if (status != KV_OK) goto fail;

    *ret_reader = reader;
    return KV_OK;

fail:
    trace_reader_close(reader);
    return status;
}

void trace_reader_close(struct trace_reader *reader)
{
    if (reader == NULL) return;
    trace_input_close(reader->input);
    free(reader);
}

const struct trace_header *trace_reader_header(const struct trace_reader *reader)
{
    return &reader->header;
}

kv_status trace_reader_next(struct trace_reader *reader, struct trace_turn *turn,
                            struct kv_error *err)
{
    struct line line = {0};

    kv_status status = line_parse(reader, &line, err);
    if (status != KV_OK) return status;
    turn->line = trace_input_line_number(reader->input);
    status = required_decode(&line, turn);
    if (status == KV_OK) status = ids_decode(&line, turn);
    if (status == KV_OK) status = optional_decode(&line, turn);
    if (status == KV_OK) status = line_check(&line, turn);
    if (status == KV_OK) reader->t_ms_last = turn->t_ms;
    json_decref(line.object);
    return status;
}

kv_status trace_reader_fail(const struct trace_reader *reader, kv_status status,
                            struct kv_error *err, const char *fmt, ...)
{
    char text[160];
    va_list args;

    va_start(args, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    return trace_input_fail(reader->input, status, err, "%s", text);
}

unsigned trace_reader_percent(const struct trace_reader *reader)
{
    return trace_input_percent(reader->input);
}
