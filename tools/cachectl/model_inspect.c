/*
 * `cachectl model inspect`: what a model is made of and what it costs, from its config alone.
 *
 * Every number is counted over the engine's own list of tensors and the layout of the state, so a
 * changed config changes them.  One figure per line, a word and a number, so that grep finds it.
 */

#include "engine/model/checkpoint.h"
#include "engine/model/inspect.h"
#include "engine/model/model_limits.h"
#include "kvstore/base/bytes.h"
#include "tools/cachectl/commands.h"
#include "tools/cachectl/model_common.h"
#include "tools/cachectl/out.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

/* 2703360 as "2,703,360"; `text` holds it. */
static const char *grouped(char text[OUT_TEXT_BYTES], uint64_t value)
{
    char digits[OUT_TEXT_BYTES];
    size_t used = 0;
    const int count = snprintf(digits, sizeof(digits), "%llu", (unsigned long long)value);

    for (int i = 0; i < count; i++) {
        if (i > 0 && (count - i) % 3 == 0) text[used++] = ',';
        text[used++] = digits[i];
    }
    text[used] = '\0';
    return text;
}

/* Parameters in the units people speak of. */
static const char *amount(char text[OUT_TEXT_BYTES], uint64_t values)
{
    const double value = (double)values;
    if (value >= 1e9)
        (void)snprintf(text, OUT_TEXT_BYTES, "%.2f B", value / 1e9);
    else if (value >= 1e6)
        (void)snprintf(text, OUT_TEXT_BYTES, "%.2f M", value / 1e6);
    else
        (void)snprintf(text, OUT_TEXT_BYTES, "%.2f K", value / 1e3);
    return text;
}

static double bytes_per_token(const struct eng_inspect *inspect)
{
    return (double)inspect->layout.rows_bytes_per_page / KV_PAGE_TOKENS;
}

static json_t *parts_json(const struct eng_inspect *inspect)
{
    json_t *parts = json_array();
    for (int part = 0; part < ENG_PART_COUNT; part++)
        (void)json_array_append_new(
            parts, json_pack("{s:s, s:I, s:I}", "name", eng_part_name((enum eng_part)part),
                             "parameters", (json_int_t)inspect->values[part], "bytes",
                             (json_int_t)inspect->bytes[part]));
    return parts;
}

static int print_json(const struct eng_inspect *inspect)
{
    const struct eng_config *c = &inspect->config;
    json_t *shape = json_pack(
        "{s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:I, s:I}", "vocab",
        (int)c->vocab, "hidden", (int)c->hidden, "layers", (int)c->layers, "encoder_layers",
        (int)c->encoder_layers, "draft_stages", (int)c->draft_stages, "heads", (int)c->heads,
        "head_dim", (int)c->head_dim, "window_tokens", (int)c->window, "experts", (int)c->experts,
        "experts_active", (int)c->experts_active, "index_topk", (int)c->index_topk, "engram_layers",
        (int)c->engram_count, "positions", (json_int_t)c->positions, "context_tokens",
        (json_int_t)inspect->layout.context_tokens);
    json_t *parameters = json_pack(
        "{s:I, s:I, s:I, s:I, s:I, s:I}", "backbone", (json_int_t)inspect->backbone,
        "engram_projections", (json_int_t)inspect->values[ENG_PART_ENGRAM], "engram_rows",
        (json_int_t)inspect->values[ENG_PART_TABLES], "draft",
        (json_int_t)inspect->values[ENG_PART_DRAFT], "active_decode",
        (json_int_t)inspect->active_decode, "active_prefill", (json_int_t)inspect->active_prefill);
    json_t *state = json_pack(
        "{s:f, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "bytes_per_token",
        bytes_per_token(inspect), "window_bytes", (json_int_t)inspect->window_bytes,
        "image_window_bytes", (json_int_t)inspect->image_window_bytes, "draft_window_bytes",
        (json_int_t)inspect->draft_window_bytes, "image_draft_bytes",
        (json_int_t)inspect->image_draft_bytes, "tail_bytes", (json_int_t)inspect->tail_bytes,
        "sampler_bytes", (json_int_t)4, "image_bytes", (json_int_t)inspect->layout.image_bytes,
        "page_bytes", (json_int_t)inspect->layout.page_bytes, "spare_tokens",
        (json_int_t)ENG_INSPECT_SPARE, "engram_read_bytes_per_token",
        (json_int_t)inspect->engram_read_bytes);
    return out_json_take(json_pack("{s:s, s:o, s:o, s:o, s:o, s:I, s:I}", "model", c->name, "shape",
                                   shape, "parameters", parameters, "state", state, "parts",
                                   parts_json(inspect), "tensors", (json_int_t)inspect->tensors,
                                   "weight_bytes", (json_int_t)inspect->total_bytes));
}

static void print_shape(const struct ctl *ctl, const struct eng_inspect *inspect)
{
    const struct eng_config *c = &inspect->config;
    char a[OUT_TEXT_BYTES], b[OUT_TEXT_BYTES];

    (void)printf("%s%s%s\n", ctl_bold(ctl), c->name, ctl_plain(ctl));
    (void)printf("layers %u: %u encoder, %u decoder; draft stages %u\n", c->layers,
                 c->encoder_layers, c->layers - c->encoder_layers, c->draft_stages);
    (void)printf("hidden %u, vocabulary %u, heads %u of %u (%u rotated), window %u tokens\n",
                 c->hidden, c->vocab, c->heads, c->head_dim, c->rope_dim, c->window);
    (void)printf("context %s tokens of %s positions\n", grouped(a, inspect->layout.context_tokens),
                 grouped(b, c->positions));
    (void)printf("experts %u, %u active, width %u, and one shared\n", c->experts, c->experts_active,
                 c->moe_width);
    (void)printf("rows from layers");
    for (uint32_t i = 0; i < c->source_count; i++)
        (void)printf(" %u (1 per %u)", c->source_layers[i], c->ratio[c->source_layers[i]]);
    (void)printf("\nlists from layers");
    for (uint32_t layer = 0; layer < c->layers; layer++)
        if (eng_config_owns_list(c, layer)) (void)printf(" %u", layer);
    (void)printf(": %u index heads of %u, top %u; from layer %u on among %u x %u candidates\n",
                 c->index_heads, c->index_dim, c->index_topk, c->candidate_source,
                 c->candidate_blocks, c->candidate_block);
    if (c->engram_count > 0) {
        (void)printf("engram layers");
        for (uint32_t i = 0; i < c->engram_count; i++)
            (void)printf(" %u", c->engram_layers[i]);
        (void)printf(": %u rows of %u per token, %u compressed ids\n", eng_config_engram_columns(c),
                     c->engram_dim, c->engram_compressed);
    }
    if (c->draft_stages > 0)
        (void)printf("draft blocks of %u tokens, rank %u, experts %u, %u active\n", c->draft_block,
                     c->draft_rank, c->draft_experts, c->draft_active);
}

static void print_parameters(const struct ctl *ctl, const struct eng_inspect *inspect)
{
    char a[OUT_TEXT_BYTES], b[OUT_TEXT_BYTES];
    const uint64_t engram = inspect->values[ENG_PART_ENGRAM];

    (void)printf("\n%sparameters%s\n", ctl_bold(ctl), ctl_plain(ctl));
    (void)printf("backbone %s without the Engram projections, %s with\n",
                 amount(a, inspect->backbone), amount(b, inspect->backbone + engram));
    (void)printf("active decode %s\n", amount(a, inspect->active_decode));
    (void)printf("active prefill %s\n", amount(a, inspect->active_prefill));
    if (inspect->config.engram_count > 0)
        (void)printf("engram rows %s\n", amount(a, inspect->values[ENG_PART_TABLES]));
    if (inspect->config.draft_stages > 0)
        (void)printf("draft %s, active %s\n", amount(a, inspect->values[ENG_PART_DRAFT]),
                     amount(b, inspect->active_draft));
}

static void print_bytes(const struct ctl *ctl, const struct eng_inspect *inspect)
{
    static const char *const names[] = {"part", "parameters", "bytes"};
    struct out_table table;
    char text[OUT_TEXT_BYTES];

    (void)printf("\n%sbytes%s of %llu tensors, scales included\n", ctl_bold(ctl), ctl_plain(ctl),
                 (unsigned long long)inspect->tensors);
    out_table_init(&table, names, KV_ARRAY_COUNT(names), 6);
    for (int part = 0; part < ENG_PART_COUNT; part++) {
        if (inspect->bytes[part] == 0) continue;
        out_table_cell(&table, "%s", eng_part_name((enum eng_part)part));
        out_table_cell(&table, "%s", grouped(text, inspect->values[part]));
        out_table_cell(&table, "%s", grouped(text, inspect->bytes[part]));
    }
    out_table_cell(&table, "all");
    out_table_cell(&table, "%s",
                   grouped(text, inspect->backbone + inspect->values[ENG_PART_ENGRAM] +
                                     inspect->values[ENG_PART_TABLES] +
                                     inspect->values[ENG_PART_DRAFT]));
    out_table_cell(&table, "%s", grouped(text, inspect->total_bytes));
    out_table_print(ctl, &table);
}

static void print_state(const struct ctl *ctl, const struct eng_inspect *inspect)
{
    char a[OUT_TEXT_BYTES], b[OUT_TEXT_BYTES];

    (void)printf("\n%sstate of a session%s\n", ctl_bold(ctl), ctl_plain(ctl));
    (void)printf("rows %g B/token, in pages of %u tokens and %s B\n", bytes_per_token(inspect),
                 KV_PAGE_TOKENS, grouped(a, inspect->layout.page_bytes));
    (void)printf("windows %s B\n", grouped(a, inspect->window_bytes));
    (void)printf("stored image %s B with %u spare rows, and beside the windows:\n",
                 grouped(a, inspect->image_window_bytes), ENG_INSPECT_SPARE);
    (void)printf("  draft windows %s B, stored %s B\n", grouped(a, inspect->draft_window_bytes),
                 grouped(b, inspect->image_draft_bytes));
    (void)printf("  tails %s B\n", grouped(a, inspect->tail_bytes));
    (void)printf("  sampler 4 B: the pending token, in the header of %u B\n",
                 KV_IMAGE_HEADER_BYTES);
    (void)printf("  all together %s B\n", grouped(a, inspect->layout.image_bytes));
    if (inspect->config.engram_count > 0)
        (void)printf("engram reads %s B/token of its tables\n",
                     grouped(a, inspect->engram_read_bytes));
}

static kv_status read_config(const char *path, struct eng_config *config, struct kv_error *err)
{
    struct stat found;
    uint8_t *text = NULL;
    size_t count = 0;

    if (stat(path, &found) == 0 && S_ISDIR(found.st_mode))
        return eng_checkpoint_config_read(path, config, NULL, err);
    kv_status status = eng_file_read(path, ENG_CONFIG_BYTES_MAX, &text, &count, err);
    if (status == KV_OK) status = eng_config_parse(path, (const char *)text, count, config, err);
    free(text);
    return status;
}

static int run(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    struct eng_config config;
    struct eng_inspect inspect;
    struct kv_error err = {0};
    int code = CLIENT_EXIT_OK;

    if (ctl_parse(ctl, command, NULL, 0, argc, argv, &code) < 0) return code;
    kv_status status = read_config(argv[0], &config, &err);
    if (status == KV_OK) status = eng_inspect(&config, &inspect, &err);
    if (status != KV_OK) return model_failure(&err, CLIENT_EXIT_FAILED);
    if (ctl->json) return print_json(&inspect);
    print_shape(ctl, &inspect);
    print_parameters(ctl, &inspect);
    print_bytes(ctl, &inspect);
    print_state(ctl, &inspect);
    return CLIENT_EXIT_OK;
}

const struct command command_model_inspect = {
    .name = "model inspect",
    .arguments = "DIR|CONFIG.json",
    .summary = "shape, parameters, bytes and state of a model, from its config",
    .details = "Needs no weights and no daemon: everything is computed from config.json.",
    .example = "cachectl model inspect engine/model/configs/v41-flash.json",
    .arguments_min = 1,
    .arguments_max = 1,
    .run = run,
};
