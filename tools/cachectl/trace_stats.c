/*
 * cachectl trace stats: what a converted trace holds.
 *
 * Counts how the turns join their sessions' history, by the rules of trace_classes.h, so that a
 * trace can be compared with the published numbers before anything is replayed.  All counts are as
 * recorded; what a scaled file leaves to a replay stands apart.
 */

#include "tools/cachectl/trace.h"
#include "tools/cachectl/trace_classes.h"
#include "tools/cachectl/trace_options.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>

static const char command_name[] = "cachectl trace stats";

static const char help_text[] =
    "Usage: cachectl trace stats FILE [--json]\n"
    "\n"
    "Prints what a converted trace holds: sessions, turns, tokens, how turns join the history\n"
    "of their session, and the share of prompt tokens an unlimited cache would reuse.  FILE may\n"
    "be compressed with zstd or gzip.\n"
    "\n"
    "  --json       print JSON\n"
    "  -q, --quiet  no progress on stderr\n"
    "\n"
    "Classes, of the turns after the first of each session:\n"
    "  extend        goes on from the last turn's prompt\n"
    "  tail          the last turn's prompt except its last full block\n"
    "  older         goes on from an older turn: rollback or fork\n"
    "  fall-back     at most tools + system + 1,024 tokens reused: compaction, clear\n"
    "  cut           cut inside the last turn's prompt\n"
    "  cut in older  cut inside an older turn's prompt\n"
    "\n"
    "Exit codes: 0 ok, 1 failed (the message names file and line), 2 wrong usage\n"
    "\n"
    "Example:\n"
    "  cachectl trace stats agentic.jsonl\n";

static double share(uint64_t part, uint64_t whole)
{
    return whole == 0 ? 0 : (double)part / (double)whole;
}

/* The names of the classes in JSON. */
static const char *json_name(enum trace_class class)
{
    static const char *const names[TRACE_CLASS_COUNT] = {
        [TRACE_CLASS_FIRST] = "first",        [TRACE_CLASS_EXTEND] = "extend",
        [TRACE_CLASS_TAIL] = "tail",          [TRACE_CLASS_OLDER] = "older",
        [TRACE_CLASS_FALLBACK] = "fallback",  [TRACE_CLASS_CUT] = "cut",
        [TRACE_CLASS_CUT_OLDER] = "cut_older"};
    return names[class];
}

static json_t *counts_json(const struct trace_counts *counts)
{
    json_t *classes = json_object();

    for (int class = 0; class < TRACE_CLASS_COUNT; class ++)
        (void)json_object_set_new(classes, json_name((enum trace_class) class),
                                  json_integer((json_int_t)counts->classes[class]));
    return json_pack("{s:I,s:I,s:I,s:I,s:o,s:{s:I,s:f},s:{s:I,s:f}}", "sessions",
                     (json_int_t)counts->sessions, "turns", (json_int_t)counts->turns, "in_tokens",
                     (json_int_t)counts->in_tokens, "out_tokens", (json_int_t)counts->out_tokens,
                     "classes", classes, "ideal", "tokens", (json_int_t)counts->ideal_tokens,
                     "share", share(counts->ideal_tokens, counts->in_tokens), "blocks", "tokens",
                     (json_int_t)counts->joined_tokens, "share",
                     share(counts->joined_tokens, counts->in_tokens));
}

static int print_json(const struct trace *trace, const struct trace_summary *summary)
{
    const struct trace_header *header = &trace->header;
    json_t *root = json_pack(
        "{s:i,s:s,s:I,s:I,s:I,s:s,s:s,s:s,s:o,s:o,s:{s:I,s:I,s:I,s:I}}", "schema", 1, "name",
        header->name, "block", (json_int_t)header->block_tokens, "scale", (json_int_t)header->scale,
        "tail", (json_int_t)header->tail_tokens, "clock",
        header->global_clock ? "global" : "session", "scope",
        header->global_scope ? "global" : "session", "users",
        header->real_users ? "real" : "made-up", "main", counts_json(&summary->main), "subagents",
        counts_json(&summary->sub), "replay", "in_tokens", (json_int_t)summary->scaled_in_tokens,
        "out_tokens", (json_int_t)summary->scaled_out_tokens, "new_tokens",
        (json_int_t)summary->scaled_new_tokens, "prompt_tokens_max",
        (json_int_t)summary->scaled_prompt_max);
    if (root == NULL) return TRACE_EXIT_FAILED;
    const int failed = json_dumpf(root, stdout, JSON_INDENT(2));
    (void)putchar('\n');
    json_decref(root);
    return failed == 0 ? TRACE_EXIT_OK : TRACE_EXIT_FAILED;
}

static void print_classes(const struct trace_counts *counts)
{
    const uint64_t later = counts->turns - counts->classes[TRACE_CLASS_FIRST];

    (void)printf("\n%-14s %10s %9s\n", "class", "turns", "share");
    for (int class = TRACE_CLASS_EXTEND; class < TRACE_CLASS_COUNT; class ++)
        (void)printf("%-14s %10" PRIu64 " %8.2f%%\n", trace_class_name((enum trace_class) class),
                     counts->classes[class], 100 * share(counts->classes[class], later));
}

static void print_text(const struct trace *trace, const struct trace_summary *summary)
{
    const struct trace_header *header = &trace->header;
    const struct trace_counts *counts = &summary->main;

    (void)printf("trace          %s: block %u, scale %u, tail %u, clock %s, users %s\n",
                 header->name, header->block_tokens, header->scale, header->tail_tokens,
                 header->global_clock ? "global" : "session",
                 header->real_users ? "real" : "made-up");
    (void)printf("sessions       %" PRIu64 "\n", counts->sessions);
    (void)printf("turns          %" PRIu64 "\n", counts->turns);
    (void)printf("prompt tokens  %" PRIu64 "\n", counts->in_tokens);
    (void)printf("answer tokens  %" PRIu64 "\n", counts->out_tokens);
    (void)printf("sub-agents     %" PRIu64 " chats, %" PRIu64 " turns, %" PRIu64
                 " prompt tokens; not in the other counts\n",
                 summary->sub.sessions, summary->sub.turns, summary->sub.in_tokens);
    print_classes(counts);
    (void)printf("\nideal token hit          %6.2f%%  any cut point, answers where they fit\n",
                 100 * share(counts->ideal_tokens, counts->in_tokens));
    (void)printf("ideal hit, prompt blocks %6.2f%%  what a replay of the block ids can reach\n",
                 100 * share(counts->joined_tokens, counts->in_tokens));
    (void)printf("to replay                %" PRIu64 " prompt tokens, %" PRIu64
                 " of them new, and %" PRIu64 " answer tokens; longest prompt %" PRIu64 "\n",
                 summary->scaled_in_tokens, summary->scaled_new_tokens, summary->scaled_out_tokens,
                 summary->scaled_prompt_max);
}

int cachectl_trace_stats(int argc, char **argv)
{
    struct trace *trace = NULL;
    struct trace_summary summary;
    struct kv_error err = {0};
    bool json = false;
    bool quiet = false;
    bool no_color = false;
    bool help = false;
    const struct trace_flag flags[] = {
        {"--json", NULL, TRACE_FLAG_SWITCH, &json, 0, 0},
        {"--quiet", "-q", TRACE_FLAG_SWITCH, &quiet, 0, 0},
        {"--no-color", NULL, TRACE_FLAG_SWITCH, &no_color, 0, 0},
        {"--help", "-h", TRACE_FLAG_SWITCH, &help, 0, 0},
    };

    const int files =
        trace_flags_parse(command_name, flags, sizeof(flags) / sizeof(flags[0]), argc, argv);
    if (files < 0) return TRACE_EXIT_USAGE;
    if (help) {
        (void)fputs(help_text, stdout);
        return TRACE_EXIT_OK;
    }
    if (files != 1) {
        (void)fprintf(stderr, "%s: one FILE is needed; --help has an example\n", command_name);
        return TRACE_EXIT_USAGE;
    }

    kv_status status = trace_load(argv[1], 1, &trace, &err);
    if (status == KV_OK) status = trace_summarize(trace, &summary, &err);
    int code = TRACE_EXIT_FAILED;
    if (status != KV_OK) {
        (void)fprintf(stderr, "%s: %s\n", command_name, err.text);
    } else if (json) {
        code = print_json(trace, &summary);
    } else {
        print_text(trace, &summary);
        code = TRACE_EXIT_OK;
    }
    trace_destroy(trace);
    return code;
}
