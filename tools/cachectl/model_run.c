/*
 * `cachectl model run`: the engine without a daemon, and everything it computed on the way.
 *
 * For people who check the engine: each tensor of the dump is what a layer really produced, so that
 * another implementation can be fed with this one's inputs and choices, layer by layer.  This file
 * reads the arguments and drives the run; model_run_tensors.c decides what is written.
 */

#include "tools/cachectl/model_run.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/limits.h"
#include "kvstore/format/image.h"
#include "tools/cachectl/commands.h"
#include "tools/cachectl/model_common.h"
#include "tools/cachectl/model_run_tensors.h"
#include "tools/cachectl/out.h"
#include "tools/cachectl/spawn.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NOT_GIVEN UINT64_MAX
#define SPARE_TOKENS 16u
#define PROGRESS_EVERY_MS 2000u

/* A model, one session and its pages.  Owned by: run()'s stack. */
struct runner {
    struct ctl *ctl;
    const struct model_run_options *options;
    struct eng_model *model;
    struct eng_session *session;
    uint8_t **pages;
    uint32_t page_count;
    const uint32_t *ids;
    uint32_t count;
    uint64_t began_ms;
};

static const char details[] =
    "Runs the tokens of FILE (unsigned 32-bit little endian ids) through the model in DIR and\n"
    "writes one safetensors file.  Needs no daemon.\n"
    "\n"
    "A tensor with one row per position has a sibling NAME.pos, I32 [n]: the absolute positions,\n"
    "ascending.  L is a layer as the checkpoint numbers it, draft stage s being layer\n"
    "num_hidden_layers + s; S is a layer that owns rows.  Encoder layers have a row for every\n"
    "position computed, decoder layers for those the decoder ran over: the last window of them, "
    "or\n"
    "all with --prefill all.\n"
    "\n"
    "  tokens            I32 [N]             the ids given\n"
    "  stream.L          BF16 [n,4,hidden]   residual streams after layer L\n"
    "  premix.L          F32 [n,4]           pre-mix that layer L hands on\n"
    "  win.L             U8 [n,bytes]        window rows, draft stages too\n"
    "  rows.S            U8 [entries,bytes]  main rows from entry 0 on\n"
    "  keys.S            U8 [entries,bytes]  index keys from entry 0 on\n"
    "  topk.L            I32 [n,index_topk]  entries chosen by layer L, ascending, then -1\n"
    "  candidates        I32 [n,blocks]      candidate blocks, ascending, then -1\n"
    "  experts.L         I32 [n,active]      experts chosen, ascending\n"
    "  experts.L.weight  F32 [n,active]      and their weights\n"
    "  engram.L          I64 [n,columns]     rows read of layer L's table\n"
    "  logits            F32 [n,vocabulary]  wherever the decoder ran\n"
    "  draft             I32 [block]         greedy drafts behind the last token\n"
    "  draft.token       I32 [1]             the token they follow: argmax of the last logits\n"
    "  draft.logits      F32 [block,vocabulary]\n"
    "  draft.confidence  F32 [block]         before the sigmoid\n"
    "\n"
    "A packed row is all codes, then all scales: win one e4m3 a value and one ue8m0 for 32; rows\n"
    "e2m1 pairs (even element low) and one e4m3 for 16; keys e2m1 pairs and one ue8m0 for 32.\n"
    "\n"
    "With --quant off no activation is rounded: stream.L is F32, and rows are the values, F32\n"
    "[n,head_dim] or [entries,index_dim].  __metadata__ says model, isa, family, prefill, chunk,\n"
    "resume_at, replay and quant.\n"
    "\n"
    "--resume-at N runs [0,N), takes the image of that state, and continues from the image in a\n"
    "fresh session; the dump then begins at the first position computed after it.  With --replay\n"
    "the fresh session has the rows only and reruns the last window before N.\n"
    "\n"
    "A line on stderr says what was written; --json prints one document instead: what was run,\n"
    "and the dump's path, tensors and bytes.  Exit codes as those of `model verify`: 7 the model\n"
    "is damaged, 3 there is none; 1 everything else, 2 wrong usage.";

static bool parse_choice(const char *flag, const char *text, const char *yes, const char *no,
                         bool *ret_value)
{
    const bool is_yes = strcmp(text, yes) == 0;
    if (!is_yes && strcmp(text, no) != 0) {
        ctl_error("%s takes %s or %s", flag, no, yes);
        return false;
    }
    *ret_value = is_yes;
    return true;
}

static bool parse_isa(const char *text, enum eng_isa *ret_isa)
{
    if (eng_isa_parse(text, ret_isa)) return true;
    ctl_error("--isa takes auto, portable, avx2, avx512 or amx");
    return false;
}

static bool check_options(const struct model_run_options *options, uint64_t chunk, uint64_t threads)
{
    if (options->tokens == NULL || options->dump == NULL) {
        ctl_error("%s is missing; `cachectl model run --help` says more",
                  options->tokens == NULL ? "--tokens FILE" : "--dump OUT.safetensors");
        return false;
    }
    if (options->tokens[0] == '\0' || options->dump[0] == '\0') {
        ctl_error("%s is empty: it takes the name of a file",
                  options->tokens[0] == '\0' ? "--tokens" : "--dump");
        return false;
    }
    if (options->replay && !options->resumes) {
        ctl_error("--replay needs --resume-at N");
        return false;
    }
    if (chunk > KV_PASS_ROWS_MAX) {
        ctl_error("--chunk must be at most %u, the most tokens of a pass; found %llu",
                  KV_PASS_ROWS_MAX, (unsigned long long)chunk);
        return false;
    }
    if (threads > KV_ENGINE_THREADS_MAX) {
        ctl_error("--threads must be at most %u, found %llu", KV_ENGINE_THREADS_MAX,
                  (unsigned long long)threads);
        return false;
    }
    return true;
}

/* A document has no place for a name that is not UTF-8. */
static bool check_names(const struct ctl *ctl, const struct model_run_options *options)
{
    if (!ctl->json) return true;
    json_t *names = json_pack("[s, s]", options->dir, options->dump);
    if (names == NULL) ctl_error("--json needs names in UTF-8: DIR and --dump");
    json_decref(names);
    return names != NULL;
}

/* The ids of FILE.  NULL: the sentence is printed. */
static uint32_t *read_tokens(const char *path, uint32_t *ret_count)
{
    FILE *file = fopen(path, "rb");
    uint8_t bytes[4];
    uint32_t count = 0, max = 0;
    uint32_t *ids = NULL;
    size_t got = 0;

    if (file == NULL) {
        ctl_error("%s: %s", path, strerror(errno));
        return NULL;
    }
    while ((got = fread(bytes, 1, 4, file)) == 4) {
        if (count == KV_PROMPT_TOKENS_MAX) {
            ctl_error("%s: more than %u tokens, which is the longest context", path,
                      KV_PROMPT_TOKENS_MAX);
            goto fail;
        }
        if (count == max) {
            max = max == 0 ? 4096 : 2 * max;
            uint32_t *more = realloc(ids, max * sizeof(*ids));
            if (more == NULL) {
                ctl_error("%s: no memory for %u tokens", path, max);
                goto fail;
            }
            ids = more;
        }
        ids[count++] = kv_load32(bytes);
    }
    if (ferror(file)) {
        ctl_error("%s: %s", path, strerror(errno));
    } else if (got != 0) {
        ctl_error("%s: not a multiple of 4 bytes: ids are unsigned 32-bit little endian", path);
    } else if (count == 0) {
        ctl_error("%s: no tokens", path);
    } else {
        (void)fclose(file);
        *ret_count = count;
        return ids;
    }

fail:
    (void)fclose(file);
    free(ids);
    return NULL;
}

static bool check_tokens(const struct runner *runner)
{
    const uint32_t vocab = eng_model_layout(runner->model)->vocab_tokens;
    const uint32_t context = eng_model_layout(runner->model)->context_tokens;
    uint32_t good = 0;
    if (runner->count > context) {
        ctl_error("%s: %u tokens, the model takes at most %u (max_position_embeddings)",
                  runner->options->tokens, runner->count, context);
        return false;
    }
    while (good < runner->count && runner->ids[good] < vocab)
        good++;
    if (good == runner->count) return true;
    ctl_error("%s: token %u is id %u, the vocabulary has %u", runner->options->tokens, good,
              runner->ids[good], vocab);
    return false;
}

static int fail(const struct kv_error *err)
{
    ctl_error("%s", err->text);
    return CLIENT_EXIT_FAILED;
}

/* What makes every value worthless that was computed since: the model's files changed. */
static int check_model(const struct runner *runner)
{
    struct kv_error err = {0};
    if (eng_model_check(runner->model, &err) == KV_OK) return CLIENT_EXIT_OK;
    return model_failure(&err, CLIENT_EXIT_CORRUPT);
}

static int make_pages(struct runner *runner)
{
    const size_t bytes = eng_model_layout(runner->model)->page_bytes;
    const uint32_t count = kv_pages_for(runner->count);

    runner->pages = calloc(count, sizeof(*runner->pages));
    for (uint32_t i = 0; runner->pages != NULL && i < count; i++) {
        runner->pages[i] = calloc(1, bytes);
        if (runner->pages[i] == NULL) break;
        runner->page_count++;
    }
    if (runner->page_count == count) return CLIENT_EXIT_OK;
    ctl_error("no memory for the rows of %u tokens: %u pages of %zu bytes", runner->count, count,
              bytes);
    return CLIENT_EXIT_FAILED;
}

static int make_session(struct runner *runner)
{
    struct kv_error err = {0};
    eng_session_destroy(runner->session);
    runner->session = NULL;
    if (eng_session_create(runner->model, &runner->session, &err) != KV_OK) return fail(&err);
    eng_session_set_pages(runner->session, runner->pages, runner->page_count);
    return CLIENT_EXIT_OK;
}

/* The next pass: the decoder follows the encoder at once with --prefill all, else it comes after.
 */
static struct eng_piece next_piece(const struct runner *runner, struct eng_run_left left)
{
    const uint32_t max = eng_model_pass_rows(runner->model);
    const uint32_t encode = KV_MIN(left.encode, max);
    const uint32_t encoded = encode > 0 ? encode : max;
    const uint32_t decode = runner->options->prefill_all || left.encode == 0 ? encoded : 0;
    return (struct eng_piece){
        .session = runner->session, .encode = encode, .decode = KV_MIN(left.decode, decode)};
}

static int prefill(struct runner *runner, const char *what, uint32_t from, uint32_t to)
{
    const uint64_t begin = model_now_ms();
    uint64_t next = begin + PROGRESS_EVERY_MS;
    struct eng_run_left left;

    eng_prefill_begin(runner->session, runner->ids, from, to);
    while (left = eng_run_left(runner->session), left.encode > 0 || left.decode > 0) {
        const struct eng_piece piece = next_piece(runner, left);
        eng_pass(runner->model, &piece, 1);
        if (spawn_interrupted()) {
            ctl_error("interrupted");
            return CLIENT_EXIT_FAILED;
        }
        /* What follows would be computed from other weights, or from none. */
        const int code = check_model(runner);
        if (code != CLIENT_EXIT_OK) return code;
        const uint64_t now = model_now_ms();
        if (now < next) continue;
        next = now + PROGRESS_EVERY_MS;
        ctl_say(runner->ctl, "%s: %u of %u tokens, %llu s", what,
                to - from - left.encode + piece.encode, to - from,
                (unsigned long long)(now - begin) / 1000);
    }
    return CLIENT_EXIT_OK;
}

/* Runs [0, at) and makes an image of what is there then. */
static int run_to_image(struct runner *runner, uint32_t at, uint8_t *image,
                        struct kv_image_header *ret_header)
{
    const struct kv_layout *layout = eng_model_layout(runner->model);
    struct kv_error err = {0};

    const int code = prefill(runner, "before the resume point", 0, at);
    if (code != CLIENT_EXIT_OK) return code;
    ret_header->state = eng_session_state(runner->session);
    eng_session_export(runner->session, image);
    kv_image_seal(layout, image, ret_header);
    return kv_image_decode(layout, image, ret_header, &err) == KV_OK ? CLIENT_EXIT_OK : fail(&err);
}

/* Runs [0, resume_at), then a fresh session stands there: from its image, or with rows alone. */
static int resume(struct runner *runner)
{
    const uint32_t at = runner->options->resume_at;
    const struct kv_layout *layout = eng_model_layout(runner->model);
    struct kv_image_header header = {0};
    kv_status status = KV_OK;
    uint8_t *image = calloc(1, layout->image_bytes);

    if (image == NULL) {
        ctl_error("no memory for an image of %u bytes", layout->image_bytes);
        return CLIENT_EXIT_FAILED;
    }
    int code = run_to_image(runner, at, image, &header);
    if (code == CLIENT_EXIT_OK) code = make_session(runner);
    if (code == CLIENT_EXIT_OK && runner->options->replay)
        eng_session_rows_only(runner->session, runner->ids, at);
    else if (code == CLIENT_EXIT_OK)
        status = eng_session_import(runner->session, image, &header.state, runner->ids, at);
    if (code == CLIENT_EXIT_OK && status != KV_OK) {
        ctl_error("the image taken at %u cannot be resumed there", at);
        code = CLIENT_EXIT_FAILED;
    }
    free(image);
    return code;
}

static uint32_t first_computed(const struct runner *runner)
{
    const uint32_t window = eng_model_layout(runner->model)->window_tokens;
    const uint32_t at = runner->options->resumes ? runner->options->resume_at : 0;
    if (!runner->options->replay) return at;
    return at > window ? at - window : 0;
}

static void take_sources(const struct runner *runner, struct run_tensors *tensors)
{
    const struct kv_layout *layout = eng_model_layout(runner->model);
    for (uint32_t s = 0; s < layout->source_count; s++) {
        const struct kv_source *source = &layout->sources[s];
        uint8_t *rows = model_dump_data(&tensors->dump, tensors->main_rows[s]);
        uint8_t *keys = model_dump_data(&tensors->dump, tensors->keys[s]);
        for (uint32_t entry = 0; entry < runner->count / source->ratio; entry++) {
            const uint32_t position = entry * source->ratio;
            const uint8_t *page = runner->pages[position / KV_PAGE_TOKENS];
            const uint32_t at = position % KV_PAGE_TOKENS / source->ratio;
            memcpy(rows + (size_t)entry * source->main_bytes,
                   page + layout->main_offset[s] + (size_t)at * source->main_bytes,
                   source->main_bytes);
            memcpy(keys + (size_t)entry * source->index_bytes,
                   page + layout->index_offset[s] + (size_t)at * source->index_bytes,
                   source->index_bytes);
        }
    }
}

static void take_draft(const struct runner *runner, struct run_tensors *tensors)
{
    const uint32_t max = eng_model_config(runner->model)->draft_block;
    const struct eng_sampling greedy = {.temperature = 0, .top_p = 1};
    uint32_t tokens[KV_DRAFT_BLOCK_MAX];
    float confidence[KV_DRAFT_BLOCK_MAX];

    if (max == 0) return;
    const uint32_t first = eng_session_sample(runner->session, &greedy);
    *(int32_t *)model_dump_data(&tensors->dump, tensors->draft_token) = (int32_t)first;
    eng_draft(runner->model,
              &(struct eng_draft_item){.session = runner->session,
                                       .first = first,
                                       .sampling = greedy,
                                       .max = max,
                                       .tokens = tokens,
                                       .confidence = confidence},
              1);
}

static kv_status open_dump(const struct runner *runner, struct run_tensors *tensors,
                           struct kv_error *err)
{
    const struct model_run_options *options = runner->options;
    char chunk[16], resume_at[16] = "";

    (void)snprintf(chunk, sizeof(chunk), "%u", eng_model_pass_rows(runner->model));
    if (options->resumes) (void)snprintf(resume_at, sizeof(resume_at), "%u", options->resume_at);
    const char *const meta[][2] = {
        {"model", eng_model_name(runner->model)},
        {"isa", eng_model_isa(runner->model)},
        {"family", eng_model_family(runner->model)},
        {"prefill", options->prefill_all ? "all" : "ced"},
        {"chunk", chunk},
        {"resume_at", resume_at},
        {"replay", options->replay ? "yes" : "no"},
        {"quant", options->quant_off ? "off" : "on"},
    };
    return model_dump_open(&tensors->dump, options->dump, meta, KV_ARRAY_COUNT(meta), err);
}

/* One document, or one line for people. */
static int print_result(const struct runner *runner, const struct model_dump *dump, uint32_t first)
{
    const struct model_run_options *options = runner->options;
    const uint64_t spent_ms = model_now_ms() - runner->began_ms;

    if (!runner->ctl->json) {
        ctl_say(runner->ctl,
                "%s: %zu tensors, %llu bytes: tokens %u to %u of %u through %s, %.1f s", dump->path,
                dump->count, (unsigned long long)dump->map_bytes, first, runner->count - 1,
                runner->count, eng_model_name(runner->model), (double)spent_ms / 1000);
        return CLIENT_EXIT_OK;
    }
    json_t *result = json_pack(
        "{s:s, s:s, s:s, s:s, s:s, s:s, s:I, s:I, s:b, s:I, s:s, s:I, s:I, s:I}", "model",
        eng_model_name(runner->model), "directory", options->dir, "isa",
        eng_model_isa(runner->model), "family", eng_model_family(runner->model), "prefill",
        options->prefill_all ? "all" : "ced", "quant", options->quant_off ? "off" : "on", "chunk",
        (json_int_t)eng_model_pass_rows(runner->model), "tokens", (json_int_t)runner->count,
        "replay", options->replay, "first_computed", (json_int_t)first, "dump", dump->path,
        "tensors", (json_int_t)dump->count, "bytes", (json_int_t)dump->map_bytes, "milliseconds",
        (json_int_t)spent_ms);
    if (result != NULL)
        (void)json_object_set_new(result, "resume_at",
                                  options->resumes ? json_integer((json_int_t)options->resume_at)
                                                   : json_null());
    return out_json_take(result);
}

/* The dump's file is there before anything is computed: a full disk shows at once. */
static int run_and_dump(struct runner *runner)
{
    const struct model_run_options *options = runner->options;
    const uint32_t window = eng_model_layout(runner->model)->window_tokens;
    const uint32_t first = first_computed(runner), to = runner->count;
    const bool all = options->prefill_all || to - first <= window;
    struct run_tensors tensors;
    struct eng_probe probe;
    struct kv_error err = {0};

    run_tensors_init(&tensors, eng_model_config(runner->model), eng_model_layout(runner->model),
                     options->quant_off, first, all ? first : to - window, to);
    int code = open_dump(runner, &tensors, &err) == KV_OK ? CLIENT_EXIT_OK : fail(&err);
    if (code == CLIENT_EXIT_OK) code = make_pages(runner);
    if (code == CLIENT_EXIT_OK) code = make_session(runner);
    if (code == CLIENT_EXIT_OK && options->resumes) code = resume(runner);
    if (code == CLIENT_EXIT_OK) {
        run_tensors_fill_positions(&tensors);
        memcpy(model_dump_data(&tensors.dump, tensors.tokens), runner->ids, to * sizeof(uint32_t));
        run_tensors_probe(&tensors, &probe);
        eng_model_set_probe(runner->model, &probe);
        code = prefill(runner, "run", first, to);
        if (code == CLIENT_EXIT_OK) take_draft(runner, &tensors);
        eng_model_set_probe(runner->model, NULL);
    }
    if (code == CLIENT_EXIT_OK) {
        take_sources(runner, &tensors);
        code = check_model(runner);
    }
    if (code == CLIENT_EXIT_OK && model_dump_finish(&tensors.dump, &err) != KV_OK)
        code = fail(&err);
    if (code == CLIENT_EXIT_OK) code = print_result(runner, &tensors.dump, first);
    model_dump_fini(&tensors.dump);
    return code;
}

static int run_model(struct ctl *ctl, const struct model_run_options *options)
{
    const struct eng_options engine = {
        .backend = ENG_BACKEND_CPU,
        .model_dir = options->dir,
        .spare_tokens = SPARE_TOKENS,
        .isa = options->isa,
        .threads = options->threads,
        .pass_rows = options->chunk,
        .quant_off = options->quant_off,
        .prefill_all = options->prefill_all,
    };
    struct runner runner = {.ctl = ctl, .options = options, .began_ms = model_now_ms()};
    struct kv_error err = {0};
    int code = CLIENT_EXIT_FAILED;

    uint32_t *ids = read_tokens(options->tokens, &runner.count);
    if (ids == NULL) return code;
    runner.ids = ids;
    if (options->resumes && (options->resume_at == 0 || options->resume_at >= runner.count)) {
        ctl_error("--resume-at must be 1 to %u: there are %u tokens", runner.count - 1,
                  runner.count);
        free(ids);
        return CLIENT_EXIT_USAGE;
    }
    /* Before the engine starts its threads. */
    spawn_hold_signals();
    if (eng_model_open(&engine, &runner.model, &err) != KV_OK)
        code = model_failure(&err, CLIENT_EXIT_CORRUPT);
    else if (check_tokens(&runner))
        code = run_and_dump(&runner);
    eng_session_destroy(runner.session);
    for (uint32_t i = 0; i < runner.page_count; i++)
        free(runner.pages[i]);
    free(runner.pages);
    free(ids);
    eng_model_close(runner.model);
    return code;
}

static int run(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    struct model_run_options options = {0};
    const char *prefill_text = "ced", *quant_text = "on", *isa_text = "auto";
    uint64_t chunk = 0, threads = 0, resume_at = NOT_GIVEN;
    int code = 0;
    const struct arg args[] = {
        {"--tokens", ARG_TEXT, "FILE", "the ids: unsigned 32-bit little endian", &options.tokens},
        {"--dump", ARG_TEXT, "OUT", "the safetensors file to write", &options.dump},
        {"--prefill", ARG_TEXT, "MODE", "ced (default) or all: decoder over every token",
         &prefill_text},
        {"--chunk", ARG_COUNT, "N", "tokens of a pass (0, the default: 256)", &chunk},
        {"--resume-at", ARG_COUNT, "N", "go on from an image taken at N", &resume_at},
        {"--replay", ARG_FLAG, NULL, "go on from rows alone: the last window is rerun",
         &options.replay},
        {"--quant", ARG_TEXT, "MODE", "on (default) or off: activations and rows unrounded",
         &quant_text},
        {"--isa", ARG_TEXT, "NAME", "auto (default), portable, avx2, avx512 or amx", &isa_text},
        {"--threads", ARG_COUNT, "N", "0 (default): one per core", &threads},
    };

    if (ctl_parse(ctl, command, args, KV_ARRAY_COUNT(args), argc, argv, &code) < 0) return code;
    options.dir = argv[0];
    options.resumes = resume_at != NOT_GIVEN;
    options.resume_at = (uint32_t)KV_MIN(resume_at, UINT32_MAX);
    options.chunk = (uint32_t)KV_MIN(chunk, KV_PASS_ROWS_MAX);
    options.threads = (uint32_t)KV_MIN(threads, KV_ENGINE_THREADS_MAX);
    if (!check_options(&options, chunk, threads) || !check_names(ctl, &options) ||
        !model_run_check_output(&options) ||
        !parse_choice("--prefill", prefill_text, "all", "ced", &options.prefill_all) ||
        !parse_choice("--quant", quant_text, "off", "on", &options.quant_off) ||
        !parse_isa(isa_text, &options.isa))
        return CLIENT_EXIT_USAGE;
    return run_model(ctl, &options);
}

const struct command command_model_run = {
    .name = "model run",
    .arguments = "DIR",
    .summary = "run tokens through a model and dump what each layer did",
    .details = details,
    .example = "cachectl model run DIR --tokens ids.bin --dump out.safetensors",
    .arguments_min = 1,
    .arguments_max = 1,
    .run = run,
};
