/*
 * cachectl trace convert: other people's trace files into ours.
 *
 * Which converter runs is told from the first line and never from the name.  The output appears
 * under its name only when it is whole: it is written beside it and renamed, so a failed run leaves
 * no half trace that would replay.
 */

#include "tools/cachectl/trace_convert.h"

#include "tools/cachectl/trace.h"
#include "tools/cachectl/trace_scale.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char command_name[] = "cachectl trace convert";

static const char help_text[] =
    "Usage: cachectl trace convert FILE -o OUT [flags]\n"
    "\n"
    "Converts a recorded trace to the format `cachectl trace replay` reads.  FILE is the\n"
    "agentic coding sessions (JSON Lines, one session a line) or the Mooncake conversation\n"
    "trace, plain or compressed with zstd or gzip; which one is told from its content.\n"
    "\n"
    "  -o, --output OUT     where to write; - is stdout\n"
    "  --scale N            N recorded tokens become one; N divides the block length.  With\n"
    "                       64, a block of 64 tokens is one token; the tail is kept (default 1)\n"
    "  --sessions N         only the first N sessions\n"
    "  --session-ids A,B    only these sessions\n"
    "  --no-subagents       without the chats of sub-agents\n"
    "  --users N            deal the sessions to N made-up users, unequally (default 50)\n"
    "  --seed N             seed of that (default 1)\n"
    "  --name NAME          name in the header (default: from FILE)\n"
    "  --source TEXT        where the numbers come from, for the header\n"
    "  --json               say on stdout, as JSON, what was written\n"
    "  -q, --quiet          no progress on stderr\n"
    "\n"
    "Exit codes: 0 ok, 1 failed (the message names file and line), 2 wrong usage\n"
    "\n"
    "Example:\n"
    "  cachectl trace convert agentic_coding_sessions_0001-0600.jsonl.zst -o agentic.jsonl "
    "--scale 64\n";

struct convert_options {
    const char *file;
    const char *output;
    const char *session_ids;
    const char *name;
    const char *source;
    uint64_t scale;
    uint64_t sessions;
    uint64_t users;
    uint64_t seed;
    bool without_subagents;
    bool json;
    bool quiet;
    bool no_color; /* Accepted everywhere; nothing here is coloured. */
    bool help;
};

/* TRACE_EXIT_OK, or the usage error after saying it. */
static int options_parse(int argc, char **argv, struct convert_options *options)
{
    const struct trace_flag flags[] = {
        {"--output", "-o", TRACE_FLAG_TEXT, &options->output, 0, 0},
        {"--scale", NULL, TRACE_FLAG_COUNT, &options->scale, 1, TRACE_TOKENS_MAX},
        {"--sessions", NULL, TRACE_FLAG_COUNT, &options->sessions, 1, UINT32_MAX / 4},
        {"--session-ids", NULL, TRACE_FLAG_TEXT, &options->session_ids, 0, 0},
        {"--no-subagents", NULL, TRACE_FLAG_SWITCH, &options->without_subagents, 0, 0},
        {"--users", NULL, TRACE_FLAG_COUNT, &options->users, 1, 100000},
        {"--seed", NULL, TRACE_FLAG_COUNT, &options->seed, 0, UINT64_MAX},
        {"--name", NULL, TRACE_FLAG_TEXT, &options->name, 0, 0},
        {"--source", NULL, TRACE_FLAG_TEXT, &options->source, 0, 0},
        {"--json", NULL, TRACE_FLAG_SWITCH, &options->json, 0, 0},
        {"--no-color", NULL, TRACE_FLAG_SWITCH, &options->no_color, 0, 0},
        {"--quiet", "-q", TRACE_FLAG_SWITCH, &options->quiet, 0, 0},
        {"--help", "-h", TRACE_FLAG_SWITCH, &options->help, 0, 0},
    };
    const char *wrong = NULL;

    const int files =
        trace_flags_parse(command_name, flags, sizeof(flags) / sizeof(flags[0]), argc, argv);
    if (files < 0) return TRACE_EXIT_USAGE;
    if (options->help) return TRACE_EXIT_OK;
    options->file = argv[1];
    if (files != 1) wrong = "one FILE is needed";
    if (wrong == NULL && options->output == NULL) wrong = "-o OUT is missing";
    if (wrong == NULL && options->name != NULL && strlen(options->name) > TRACE_NAME_MAX)
        wrong = "--name is too long";
    if (wrong == NULL && options->source != NULL && strlen(options->source) > TRACE_SOURCE_MAX)
        wrong = "--source is too long";
    if (wrong == NULL && options->json && strcmp(options->output, "-") == 0)
        wrong = "--json and -o - both write to stdout";
    if (wrong == NULL) return TRACE_EXIT_OK;
    (void)fprintf(stderr, "%s: %s; --help has an example\n", command_name, wrong);
    return TRACE_EXIT_USAGE;
}

/* "19,21,22" */
static bool session_ids_parse(const char *text, struct trace_map *wanted)
{
    const char *at = text;

    while (*at != '\0') {
        char *end = NULL;
        errno = 0;
        const unsigned long long sess = strtoull(at, &end, 10);
        if (*at < '0' || *at > '9' || errno != 0 || (*end != ',' && *end != '\0')) return false;
        if (*end == ',' && end[1] == '\0') return false;
        if (trace_map_put(wanted, sess, 0) != KV_OK) return false;
        at = *end == ',' ? end + 1 : end;
    }
    return wanted->count > 0;
}

/* The file's name without folder and endings. */
static void name_of_file(const char *path, char name[TRACE_NAME_MAX + 1])
{
    const char *slash = strrchr(path, '/');
    const char *base = slash == NULL ? path : slash + 1;
    const int bytes = (int)strcspn(base, ".");

    (void)snprintf(name, TRACE_NAME_MAX + 1, "%.*s", bytes, base);
}

typedef kv_status converter_fn(struct trace_input *input, const char *first, size_t first_bytes,
                               struct trace_sink *sink, struct kv_error *err);

/* Which converter reads this file, and its block length. */
static kv_status converter_find(const struct trace_input *input, const char *first, size_t bytes,
                                struct trace_header *header, converter_fn **ret_converter,
                                struct kv_error *err)
{
    json_error_t why;
    kv_status status = KV_OK;

    json_t *object = json_loadb(first, bytes, 0, &why);
    if (object == NULL) return trace_input_fail(input, KV_CORRUPT, err, "not JSON: %s", why.text);
    const json_int_t block = json_integer_value(json_object_get(object, "block_size"));
    if (json_object_get(object, "trace") != NULL) {
        status = trace_input_fail(input, KV_INVALID, err, "this is a converted trace already");
    } else if (json_object_get(object, "requests") != NULL) {
        *ret_converter = trace_agentic_convert;
        if (block < 1 || block > TRACE_TOKENS_MAX)
            status = trace_input_fail(input, KV_CORRUPT, err, "'block_size' is missing or wrong");
        header->block_tokens = (uint32_t)block;
    } else if (json_object_get(object, "input_length") != NULL) {
        *ret_converter = trace_mooncake_convert;
        header->block_tokens = TRACE_MOONCAKE_BLOCK_TOKENS;
    } else {
        status =
            trace_input_fail(input, KV_INVALID, err, "neither the agentic nor the Mooncake format");
    }
    json_decref(object);
    return status;
}

static kv_status input_convert(const char *path, struct trace_sink *sink, struct kv_error *err)
{
    struct trace_input *input = NULL;
    converter_fn *converter = NULL;
    const char *first = NULL;
    size_t bytes = 0;

    kv_status status = trace_input_open(path, &input, err);
    if (status != KV_OK) return status;
    status = trace_input_line(input, &first, &bytes, err);
    if (status == KV_MISS) status = KV_FAIL(err, KV_CORRUPT, "%s:1: the file is empty", path);
    if (status == KV_OK)
        status = converter_find(input, first, bytes, &sink->header, &converter, err);
    if (status == KV_OK) status = trace_scale_check(&sink->header, sink->scale, err);
    if (status == KV_OK) status = converter(input, first, bytes, sink, err);
    trace_input_close(input);
    return status;
}

static kv_status wanted_check(const struct trace_sink *sink, struct kv_error *err)
{
    for (uint32_t i = 0; i < sink->wanted.capacity; i++) {
        if (sink->wanted.slots[i].value != 0) continue;
        return KV_FAIL(err, KV_INVALID, "session %llu of --session-ids is not in the file",
                       (unsigned long long)sink->wanted.slots[i].key);
    }
    return KV_OK;
}

static kv_status file_write(struct trace_sink *sink, const char *path, struct kv_error *err)
{
    char temporary[4096];
    const bool to_stdout = strcmp(path, "-") == 0;

    if (to_stdout) {
        trace_sink_write(sink, stdout);
        if (fflush(stdout) != 0 || ferror(stdout) != 0)
            return KV_FAIL_ERRNO(err, KV_IO, "write to stdout");
        return KV_OK;
    }
    const int bytes = snprintf(temporary, sizeof(temporary), "%s.%ld.tmp", path, (long)getpid());
    if (bytes < 0 || (size_t)bytes >= sizeof(temporary))
        return KV_FAIL(err, KV_INVALID, "the output path is too long");
    FILE *out = fopen(temporary, "wxe");
    if (out == NULL) return KV_FAIL_ERRNO(err, KV_IO, "create '%s'", temporary);
    trace_sink_write(sink, out);
    bool failed = ferror(out) != 0;
    failed = fclose(out) != 0 || failed;
    if (!failed && rename(temporary, path) == 0) return KV_OK;
    const kv_status status = KV_FAIL_ERRNO(err, KV_IO, "write '%s'", path);
    (void)unlink(temporary);
    return status;
}

static void result_print(const struct convert_options *options, const struct trace_sink *sink)
{
    const unsigned long long sessions = sink->taken.count;
    const unsigned long long turns = sink->main_turn_count;
    const unsigned long long chats = sink->sub_session_count;
    const unsigned long long chat_turns = sink->turn_count - sink->main_turn_count;

    if (!options->quiet)
        (void)fprintf(stderr, "%s: %llu sessions, %llu turns; %llu sub-agent chats, %llu turns\n",
                      options->output, sessions, turns, chats, chat_turns);
    if (options->json)
        (void)printf("{\"schema\":1,\"sessions\":%llu,\"turns\":%llu,\"subagent_sessions\":%llu,"
                     "\"subagent_turns\":%llu}\n",
                     sessions, turns, chats, chat_turns);
}

int cachectl_trace_convert(int argc, char **argv)
{
    struct convert_options options = {.scale = 1, .users = 50, .seed = 1};
    struct trace_sink sink = {0};
    struct kv_error err = {0};

    const int usage = options_parse(argc, argv, &options);
    if (usage != TRACE_EXIT_OK) return usage;
    if (options.help) {
        (void)fputs(help_text, stdout);
        return TRACE_EXIT_OK;
    }
    if (options.session_ids != NULL && !session_ids_parse(options.session_ids, &sink.wanted)) {
        (void)fprintf(stderr, "%s: --session-ids takes numbers with commas between them\n",
                      command_name);
        trace_sink_fini(&sink);
        return TRACE_EXIT_USAGE;
    }
    sink.scale = (uint32_t)options.scale;
    sink.sessions_max = options.sessions;
    sink.users = options.users;
    sink.seed = options.seed;
    sink.without_subagents = options.without_subagents;
    name_of_file(options.file, sink.header.name);
    if (options.name != NULL)
        (void)snprintf(sink.header.name, sizeof(sink.header.name), "%s", options.name);
    if (options.source != NULL)
        (void)snprintf(sink.header.source, sizeof(sink.header.source), "%s", options.source);
    sink.header.scale = 1;
    trace_progress_start(&sink.progress, command_name, options.quiet);

    kv_status status = input_convert(options.file, &sink, &err);
    if (status == KV_OK) status = wanted_check(&sink, &err);
    if (status == KV_OK) status = file_write(&sink, options.output, &err);
    if (status == KV_OK) result_print(&options, &sink);
    trace_sink_fini(&sink);
    if (status == KV_OK) return TRACE_EXIT_OK;
    (void)fprintf(stderr, "%s: %s\n", command_name, err.text);
    return TRACE_EXIT_FAILED;
}
