/*
 * Measures pairs and prints their ratios.
 *
 * The order inside a pair alternates, so that a machine that grows slower or faster during the run
 * pushes neighbouring ratios to opposite sides; the median then stands still.
 */

#include "tools/cachectl/bench_pairs.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/clock.h"
#include "tools/cachectl/out.h"

#include <assert.h>
#include <jansson.h>
#include <stdio.h>

struct bench_ratio bench_pairs_ratio(const struct bench_pairs *pairs)
{
    double ratios[BENCH_PAIRS_MAX];
    assert(pairs->count >= 1);
    for (uint32_t i = 0; i < pairs->count; i++) {
        ratios[i] = pairs->seconds[i] / pairs->anchor_seconds[i];
        if (pairs->speed)
            ratios[i] =
                (pairs->unit / pairs->seconds[i]) / (pairs->anchor_unit / pairs->anchor_seconds[i]);
    }
    return bench_ratio_of(ratios, pairs->seconds, pairs->anchor_seconds, pairs->count);
}

/* After `count` pairs: one more like them would end too late. */
static bool is_late(uint64_t began, uint64_t until, uint32_t count)
{
    const uint64_t now = kv_clock_stopwatch_ns();
    return until != 0 && count >= BENCH_PAIRS_MIN && now + (now - began) / count > until;
}

int bench_pairs_measure(struct bench_progress *progress, struct bench_pairs *pairs, uint32_t count,
                        bench_run run, void *run_context, bench_run anchor, void *anchor_context)
{
    assert(count >= 1 && count <= BENCH_PAIRS_MAX);
    const uint32_t note = progress->note_count;
    const uint64_t began = kv_clock_stopwatch_ns(), until = bench_line_end(progress, began);
    pairs->count = 0;
    pairs->planned = count;
    progress->doing = pairs->what;
    for (uint32_t i = 0; i < count; i++) {
        double *mine = &pairs->seconds[i], *other = &pairs->anchor_seconds[i];
        const bool ok = i % 2 == 0 ? anchor(anchor_context, other) && run(run_context, mine)
                                   : run(run_context, mine) && anchor(anchor_context, other);
        if (!ok) return CLIENT_EXIT_FAILED;
        pairs->count++;
        const struct bench_ratio ratio = bench_pairs_ratio(pairs);
        if (ratio.measurable)
            bench_note(progress, note, "%s beside %s: ratio %.3f (%.3f to %.3f), %u of %u pairs",
                       pairs->what, pairs->anchor, ratio.median, ratio.min, ratio.max, i + 1,
                       count);
        else
            bench_note(progress, note, "%s beside %s: not measurable so far, %u of %u pairs",
                       pairs->what, pairs->anchor, i + 1, count);
        bench_say(progress, "%s, pair %u of %u: %.3f s beside %.3f s", pairs->what, i + 1, count,
                  *mine, *other);
        if (!bench_go_on(progress)) return CLIENT_EXIT_FAILED;
        if (i + 1 < count && is_late(began, until, i + 1)) {
            bench_say(progress, "%s: %u pairs instead of %u, to be done within a minute",
                      pairs->what, i + 1, count);
            break;
        }
    }
    return CLIENT_EXIT_OK;
}

static json_t *pairs_json(const struct bench_pairs *pairs)
{
    const struct bench_ratio ratio = bench_pairs_ratio(pairs);
    json_t *object =
        json_pack("{s:s, s:s, s:i, s:i, s:f, s:f, s:f, s:f, s:f}", "what", pairs->what, "anchor",
                  pairs->anchor, "pairs", (int)pairs->count, "pairs_planned", (int)pairs->planned,
                  "seconds", bench_median(pairs->seconds, pairs->count), "anchor_seconds",
                  bench_median(pairs->anchor_seconds, pairs->count), "ratio", ratio.median,
                  "ratio_min", ratio.min, "ratio_max", ratio.max);
    if (object != NULL)
        (void)json_object_set_new(object, "measurable", json_boolean(ratio.measurable));
    if (object != NULL && pairs->target > 0)
        (void)json_object_update_new(
            object, json_pack("{s:s, s:f, s:b}", "bound", pairs->at_least ? "at least" : "at most",
                              "target", pairs->target, "met",
                              bench_ratio_met(&ratio, pairs->target, pairs->at_least)));
    return object;
}

static void add_measured(struct out_table *table, const double *seconds, uint32_t count,
                         double unit, const char *unit_name)
{
    const double middle = bench_median(seconds, count);
    if (unit > 0)
        out_table_cell(table, "%.0f %s", unit / middle, unit_name != NULL ? unit_name : "tok/s");
    else
        out_table_cell(table, "%.2f ms", middle * 1000);
}

static void add_ratio(struct out_table *table, const struct bench_ratio *ratio)
{
    const double shown[] = {ratio->median, ratio->min, ratio->max};
    for (size_t i = 0; i < KV_ARRAY_COUNT(shown); i++) {
        if (ratio->measurable)
            out_table_cell(table, "%.3f", shown[i]);
        else
            out_table_cell(table, "-");
    }
}

static void print_table(const struct ctl *ctl, const struct bench_pairs *pairs, size_t count)
{
    static const char *const names[] = {"WHAT", "MEASURED", "ANCHOR", "ANCHOR_MEASURED", "RATIO",
                                        "MIN",  "MAX",      "PAIRS",  "TARGET",          ""};
    struct out_table table;

    out_table_init(&table, names, KV_ARRAY_COUNT(names), 0xfa);
    for (size_t i = 0; i < count; i++) {
        const struct bench_pairs *line = &pairs[i];
        const struct bench_ratio ratio = bench_pairs_ratio(line);
        out_table_cell(&table, "%s", line->what);
        add_measured(&table, line->seconds, line->count, line->unit, line->unit_name);
        out_table_cell(&table, "%s", line->anchor);
        add_measured(&table, line->anchor_seconds, line->count, line->anchor_unit, line->unit_name);
        add_ratio(&table, &ratio);
        if (line->count < line->planned)
            out_table_cell(&table, "%u of %u", line->count, line->planned);
        else
            out_table_cell(&table, "%u", line->count);
        if (line->target > 0)
            out_table_cell(&table, "%s %.2f", line->at_least ? ">=" : "<=", line->target);
        else
            out_table_cell(&table, "-");
        out_table_cell(&table, "%s", bench_ratio_verdict(&ratio, line->target, line->at_least));
    }
    out_table_print(ctl, &table);
}

static void print_facts(json_t *facts)
{
    const char *name;
    json_t *value;

    json_object_foreach(facts, name, value)
    {
        if (json_is_string(value))
            (void)printf("%s: %s\n", name, json_string_value(value));
        else if (json_is_integer(value))
            (void)printf("%s: %" JSON_INTEGER_FORMAT "\n", name, json_integer_value(value));
        else
            (void)printf("%s: %.4g\n", name, json_number_value(value));
    }
}

int bench_pairs_report(const struct ctl *ctl, const char *name, const struct bench_pairs *pairs,
                       size_t count, json_t *facts)
{
    if (!ctl->json) {
        print_table(ctl, pairs, count);
        if (facts != NULL) print_facts(facts);
        json_decref(facts);
        return CLIENT_EXIT_OK;
    }
    json_t *lines = json_array();
    for (size_t i = 0; i < count; i++)
        (void)json_array_append_new(lines, pairs_json(&pairs[i]));
    return out_json_take(json_pack("{s:s, s:o, s:o}", "benchmark", name, "comparisons", lines,
                                   "facts", facts != NULL ? facts : json_object()));
}
