/*
 * A model without weights: every byte is a known function of the tokens before it.
 *
 * Rows, windows and tails are drawn from a running 64-bit hash of the token history, with position
 * and place mixed in.  So this backend can say of any byte that comes back from the store whether
 * it is the one that was written: on every import, rows_only and prefill it derives the history
 * again and compares all rows of the pages, all ids, and all window rows of the image.  What
 * differs is counted, never repaired.  It is fast enough that the store, not the model, is what a
 * test waits for.
 */

#include "engine/backend/host.h"
#include "kvstore/base/bytes.h"
#include "kvstore/format/page.h"

#include <assert.h>

struct synthetic_session {
    struct eng_host host;
    uint64_t history; /* After session->tokens tokens, or after what a run has encoded. */
    uint64_t *hashes; /* History after position p at p % hash_count(): what a cut goes back to. */
};

/* A pass may encode pass_rows beyond what it then decodes. */
static uint32_t hash_count(const struct eng_model *model)
{
    return model->ring_rows + model->pass_rows;
}

enum { PLACE_MAIN = 1 << 16, PLACE_INDEX = 2 << 16, PLACE_TAIL = 3 << 16, PLACE_LOGITS = 4 << 16 };

static const uint64_t history_start = 0x6b7663616368656du;

static inline uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static inline uint64_t history_next(uint64_t history, uint32_t id)
{
    return mix(history * 0x9e3779b97f4a7c15u + id + 1);
}

static inline uint64_t row_seed(uint64_t history, uint32_t position, uint32_t place)
{
    return mix(history ^ ((uint64_t)place << 32 | position));
}

static inline uint64_t row_word(uint64_t *seed)
{
    *seed += 0x9e3779b97f4a7c15u;
    return (*seed ^ (*seed >> 29)) * 0xbf58476d1ce4e5b9u;
}

/* Bytes of one row: seeded by history, position and place, so that a row put in the wrong place is
 * as wrong as a row of other tokens. */
static void fill(uint64_t history, uint32_t position, uint32_t place, uint8_t *bytes, size_t count)
{
    uint64_t seed = row_seed(history, position, place);
    for (size_t i = 0; i < count; i += 8) {
        const uint64_t word = row_word(&seed);
        memcpy(bytes + i, &word, KV_MIN((size_t)8, count - i));
    }
}

static uint64_t differing(const uint8_t *bytes, uint64_t history, uint32_t position, uint32_t place,
                          size_t count)
{
    uint64_t seed = row_seed(history, position, place);
    uint64_t wrong = 0;
    for (size_t i = 0; i < count; i += 8) {
        const uint64_t word = row_word(&seed);
        const size_t part = KV_MIN((size_t)8, count - i);
        if (memcmp(bytes + i, &word, part) == 0) continue;
        for (size_t b = 0; b < part; b++)
            wrong += bytes[i + b] != (uint8_t)(word >> (8 * b));
    }
    return wrong;
}

static uint64_t history_before(const struct eng_session *session, uint32_t tokens)
{
    const struct synthetic_session *own = session->backend;
    return tokens == 0 ? history_start : own->hashes[(tokens - 1) % hash_count(session->model)];
}

static void derive(struct eng_session *session, const uint32_t *ids, uint32_t tokens)
{
    struct synthetic_session *own = session->backend;
    const uint32_t count = hash_count(session->model);
    uint64_t history = history_start;
    for (uint32_t p = 0; p < tokens; p++) {
        history = history_next(history, ids[p]);
        own->hashes[p % count] = history;
    }
    own->history = history;
}

static void note_wrong(struct eng_session *session, uint64_t wrong)
{
    if (wrong > 0)
        (void)atomic_fetch_add_explicit(&session->model->wrong_bytes, wrong, memory_order_relaxed);
}

static void check_pages(struct eng_session *session, const uint32_t *ids, uint32_t tokens)
{
    const struct kv_layout *layout = &session->model->layout;
    uint64_t history = history_start;
    uint64_t wrong = 0;

    if (session->page_count < kv_pages_for(tokens)) return;
    for (uint32_t p = 0; p < tokens; p++) {
        history = history_next(history, ids[p]);
        if (kv_page_id(eng_page_at(session, p), p % KV_PAGE_TOKENS) != ids[p]) wrong += 4;
        for (uint32_t i = 0; i < layout->source_count; i++) {
            const struct kv_source *source = &layout->sources[i];
            if ((p + 1) % source->ratio != 0) continue;
            wrong += differing(eng_main_row(session, i, p), history, p, PLACE_MAIN + i,
                               source->main_bytes);
            wrong += differing(eng_index_row(session, i, p), history, p, PLACE_INDEX + i,
                               source->index_bytes);
        }
    }
    note_wrong(session, wrong);
}

/* The history at every position of the image is needed, also beyond a cut: rows from the cut to
 * state->tokens were computed from ids this call does not have, so only rows below it are checked.
 */
static void check_image(struct eng_session *session, const uint32_t *ids, const uint8_t *image,
                        const struct kv_image_state *state)
{
    const struct eng_model *model = session->model;
    const struct kv_layout *layout = &model->layout;
    const uint32_t base = kv_layout_image_base(layout, state->tokens);
    uint64_t history = history_start;
    uint64_t wrong = 0;

    for (uint32_t p = 0; p < session->tokens; p++) {
        history = history_next(history, ids[p]);
        if (p < base) continue;
        for (uint32_t layer = 0; layer < model->layer_count; layer++) {
            if (p < eng_layer_first(session, layer)) continue;
            const uint8_t *row = image + kv_layout_window_offset(layout, layer) +
                                 (size_t)(p - base) * layout->window_row_bytes;
            wrong += differing(row, history, p, layer, layout->window_row_bytes);
        }
    }
    for (uint32_t i = 0; i < layout->source_count && session->tokens % 2 == 1; i++)
        wrong += differing(image + layout->tails_offset + eng_tail_offset(model, i), history,
                           session->tokens - 1, PLACE_TAIL + i, layout->sources[i].tail_bytes);
    note_wrong(session, wrong);
}

static kv_status synthetic_open(struct eng_model *model, const char *model_dir,
                                struct kv_error *err)
{
    return KV_OK;
}

static void synthetic_close(struct eng_model *model)
{
    assert(model->backend == NULL);
}

static const char *synthetic_kind(const struct eng_model *model)
{
    return "synthetic";
}

static size_t synthetic_session_bytes(const struct eng_model *model)
{
    return (size_t)kv_round_up(sizeof(struct synthetic_session), 64) + eng_host_bytes(model) +
           hash_count(model) * sizeof(uint64_t);
}

static kv_status synthetic_session_init(struct eng_session *session, void *memory,
                                        struct kv_error *err)
{
    const struct eng_model *model = session->model;
    struct synthetic_session *own = memory;
    uint8_t *rest = (uint8_t *)memory + kv_round_up(sizeof(*own), 64);
    eng_host_init(&own->host, model, rest);
    own->hashes = (uint64_t *)(void *)(rest + eng_host_bytes(model));
    own->history = history_start;
    return KV_OK;
}

static void synthetic_session_copy(struct eng_session *to, const struct eng_session *from)
{
    struct synthetic_session *own = to->backend;
    const struct synthetic_session *other = from->backend;
    eng_host_copy(to, from);
    own->history = other->history;
    memcpy(own->hashes, other->hashes, hash_count(from->model) * sizeof(*own->hashes));
}

static void synthetic_moved(struct eng_session *session, const uint32_t *ids, const uint8_t *image,
                            const struct kv_image_state *state)
{
    derive(session, ids, session->tokens);
    check_pages(session, ids, session->tokens);
    if (image != NULL) check_image(session, ids, image, state);
}

static void synthetic_rewound(struct eng_session *session, const uint32_t *ids)
{
    struct synthetic_session *own = session->backend;
    eng_host_rewound(session);
    if (ids != NULL) derive(session, ids, session->tokens);
    own->history = history_before(session, session->tokens);
}

static void synthetic_begin(struct eng_session *session)
{
    struct synthetic_session *own = session->backend;
    const struct eng_run *run = &session->run;

    eng_host_begin(session);
    if (run->ids_base == 0) {
        derive(session, run->ids, run->from);
        check_pages(session, run->ids, run->floor);
    } else {
        own->history = history_before(session, run->from);
    }
}

static void synthetic_encode(struct eng_session *session, uint32_t first, uint32_t count)
{
    const struct eng_model *model = session->model;
    const struct kv_layout *layout = &model->layout;
    struct synthetic_session *own = session->backend;

    for (uint32_t p = first; p < first + count; p++) {
        own->history = history_next(own->history, eng_run_id(session, p));
        own->hashes[p % hash_count(model)] = own->history;
        for (uint32_t layer = 0; layer < layout->encoder_layers; layer++)
            fill(own->history, p, layer, eng_ring_row(session, layer, p), layout->window_row_bytes);
        for (uint32_t i = 0; i < layout->source_count; i++) {
            const struct kv_source *source = &layout->sources[i];
            if ((p + 1) % source->ratio != 0) {
                fill(own->history, p, PLACE_TAIL + i,
                     eng_tails_at(session, p) + eng_tail_offset(model, i), source->tail_bytes);
                continue;
            }
            if (p < session->run.floor) continue;
            fill(own->history, p, PLACE_MAIN + i, eng_main_row(session, i, p), source->main_bytes);
            fill(own->history, p, PLACE_INDEX + i, eng_index_row(session, i, p),
                 source->index_bytes);
        }
    }
}

static void synthetic_decode(struct eng_session *session, uint32_t first, uint32_t to)
{
    const struct eng_model *model = session->model;
    const struct kv_layout *layout = &model->layout;

    for (uint32_t p = first; p < to; p++)
        for (uint32_t layer = layout->encoder_layers; layer < model->layer_count; layer++)
            fill(history_before(session, p + 1), p, layer, eng_ring_row(session, layer, p),
                 layout->window_row_bytes);
    for (uint32_t p = first; p < to; p++) {
        uint64_t seed = row_seed(history_before(session, p + 1), p, PLACE_LOGITS);
        float *logits = eng_logits_of(session, p);
        for (uint32_t i = 0; eng_wants_logits(session, p) && i < layout->vocab_tokens; i++)
            logits[i] = (float)(row_word(&seed) >> 40) * 0x1p-20f;
    }
}

static void synthetic_pass(struct eng_model *model, const struct eng_pass_spans *spans)
{
    for (uint32_t i = 0; i < spans->encode_count; i++)
        synthetic_encode(spans->encode[i].session, spans->encode[i].first, spans->encode[i].count);
    for (uint32_t i = 0; i < spans->decode_count; i++)
        synthetic_decode(spans->decode[i].session, spans->decode[i].first,
                         spans->decode[i].first + spans->decode[i].count);
}

const struct eng_backend_ops eng_backend_synthetic = {
    .name = "SYNTHETIC",
    .revision = "synthetic 2",
    .open = synthetic_open,
    .close = synthetic_close,
    .family = synthetic_kind,
    .isa = synthetic_kind,
    .session_bytes = synthetic_session_bytes,
    .session_init = synthetic_session_init,
    .session_fini = eng_host_session_fini,
    .session_copy = synthetic_session_copy,
    .window_read = eng_host_window_read,
    .window_write = eng_host_window_write,
    .tails_read = eng_host_tails_read,
    .tails_write = eng_host_tails_write,
    .ids_write = eng_host_ids_write,
    .moved = synthetic_moved,
    .rewound = synthetic_rewound,
    .begin = synthetic_begin,
    .pass = synthetic_pass,
};
