/*
 * What a replay found: by class of turn, what the daemon did and how many tokens it reused beside
 * how many an unlimited cache would have.
 */

#include "tools/cachectl/out.h"
#include "tools/cachectl/replay.h"

#include "kvstore/base/bytes.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>

static double percent(uint64_t part, uint64_t whole)
{
    return whole == 0 ? 0 : 100.0 * (double)part / (double)whole;
}

static double rate(uint64_t tokens, double ms)
{
    return ms > 0 ? (double)tokens * 1000 / ms : 0;
}

static bool failed(const struct replay *replay)
{
    return replay->all.short_turns > 0 || replay->wrong_bytes > 0;
}

static json_t *class_json(const char *name, const struct replay_class *c)
{
    return json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "class", name, "turns",
                     (json_int_t)c->turns, "exact", (json_int_t)c->outcomes[TURN_EXACT], "replay",
                     (json_int_t)c->outcomes[TURN_REPLAY], "miss",
                     (json_int_t)c->outcomes[TURN_MISS], "prompt_tokens",
                     (json_int_t)c->prompt_tokens, "ideal_tokens", (json_int_t)c->ideal_tokens,
                     "hit_tokens", (json_int_t)c->hit_tokens, "replayed_tokens",
                     (json_int_t)c->replayed_tokens, "short_turns", (json_int_t)c->short_turns);
}

static int report_json(const struct replay *replay)
{
    json_t *classes = json_array();

    for (unsigned i = 0; i < TRACE_CLASS_COUNT; i++) {
        if (replay->classes[i].turns == 0) continue;
        (void)json_array_append_new(
            classes, class_json(trace_class_name((enum trace_class)i), &replay->classes[i]));
    }
    json_t *root = json_pack(
        "{s:s, s:o, s:o, s:I, s:I, s:f, s:I, s:f, s:f, s:f, s:b}", "trace",
        replay->trace->header.name, "classes", classes, "all", class_json("all", &replay->all),
        "worst_short_tokens", (json_int_t)replay->worst_tokens, "window_tokens",
        (json_int_t)replay->window_tokens, "elapsed_s", (double)replay->elapsed_ms / 1000,
        "computed_tokens", (json_int_t)replay->computed_tokens, "prefill_tokens_per_s",
        rate(replay->computed_tokens, replay->prefill_ms), "decode_tokens_per_s",
        rate(replay->decoded_tokens, replay->decode_ms), "hit_ratio",
        percent(replay->all.hit_tokens, replay->all.prompt_tokens) / 100, "ok", !failed(replay));
    (void)json_object_set_new(
        root, "wrong_bytes",
        replay->wrong_bytes_known ? json_integer((json_int_t)replay->wrong_bytes) : json_null());
    return out_json_take(root);
}

static void add_row(struct out_table *table, const char *name, const struct replay_class *c)
{
    out_table_cell(table, "%s", name);
    out_table_cell(table, "%" PRIu64, c->turns);
    out_table_cell(table, "%" PRIu64, c->outcomes[TURN_EXACT]);
    out_table_cell(table, "%" PRIu64, c->outcomes[TURN_REPLAY]);
    out_table_cell(table, "%" PRIu64, c->outcomes[TURN_MISS]);
    out_table_cell(table, "%" PRIu64, c->prompt_tokens);
    out_table_cell(table, "%.2f", percent(c->ideal_tokens, c->prompt_tokens));
    out_table_cell(table, "%.2f", percent(c->hit_tokens, c->prompt_tokens));
    out_table_cell(table, "%" PRIu64, c->replayed_tokens);
    out_table_cell(table, "%" PRIu64, c->short_turns);
}

static void report_table(const struct replay *replay)
{
    static const char *const names[] = {"CLASS",  "TURNS",   "EXACT", "REPLAY",   "MISS",
                                        "PROMPT", "IDEAL_%", "HIT_%", "REPLAYED", "SHORT"};
    const struct ctl *ctl = replay->ctl;
    struct out_table table;

    out_table_init(&table, names, KV_ARRAY_COUNT(names), 0x3fe);
    for (unsigned i = 0; i < TRACE_CLASS_COUNT; i++) {
        if (replay->classes[i].turns == 0) continue;
        add_row(&table, trace_class_name((enum trace_class)i), &replay->classes[i]);
    }
    add_row(&table, "all", &replay->all);
    out_table_print(ctl, &table);

    (void)printf("\ntoken hit %.2f %% of prompt tokens, ideal %.2f %%\n",
                 percent(replay->all.hit_tokens, replay->all.prompt_tokens),
                 percent(replay->all.ideal_tokens, replay->all.prompt_tokens));
    (void)printf("prefill %" PRIu64 " tokens computed at %.0f tokens/s, %" PRIu64
                 " answer tokens at %.0f tokens/s\n",
                 replay->computed_tokens, rate(replay->computed_tokens, replay->prefill_ms),
                 replay->decoded_tokens, rate(replay->decoded_tokens, replay->decode_ms));
    (void)printf("elapsed %.1f s\n", (double)replay->elapsed_ms / 1000);
    if (replay->wrong_bytes_known) {
        (void)printf("%s%" PRIu64 " wrong bytes%s\n", replay->wrong_bytes > 0 ? ctl_red(ctl) : "",
                     replay->wrong_bytes, replay->wrong_bytes > 0 ? ctl_plain(ctl) : "");
    }
    if (replay->all.short_turns == 0) {
        (void)printf("no turn reused %u or more tokens less than the trace allows "
                     "(prefixes of up to %u tokens excepted)\n",
                     REPLAY_SHORT_TOKENS, replay->window_tokens);
        return;
    }
    (void)printf("%s%" PRIu64 " turns fell short; the worst: session %" PRIu64
                 " turn %u, %u of %u tokens (%s)%s\n",
                 ctl_red(ctl), replay->all.short_turns, replay->worst_sess, replay->worst_turn,
                 replay->worst_hit, replay->worst_ideal, replay->worst_reason, ctl_plain(ctl));
}

int replay_report(const struct replay *replay)
{
    int code = CLIENT_EXIT_OK;

    if (replay->ctl->json) {
        code = report_json(replay);
    } else {
        report_table(replay);
    }
    return code == CLIENT_EXIT_OK && failed(replay) ? CLIENT_EXIT_FAILED : code;
}
