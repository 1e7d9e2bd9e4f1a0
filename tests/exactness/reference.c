/*
 * States that never leave memory.
 *
 * Pages are counted: copies share them, and a state gets its own copy of a page before the engine
 * writes into it.  Nothing here goes through an image, a pool or a file, and the only calls that
 * move a session are those of the engine's header, so a difference to the daemon is the daemon's.
 */

#include "tests/exactness/reference.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "tests/harness.h"

#define TOKENS_MAX 4096u
#define PAGES_MAX (TOKENS_MAX / KV_PAGE_TOKENS)
#define DECOY_PAGES 2u
#define DECOY_ROWS_MAX 20u /* Beside the rows that are compared: of a block, whole or cut. */

struct ref_model {
    struct eng_model *model;
    const struct kv_layout *layout;
    /* A random schedule: pieces of any size, half of them beside those of a session nobody asks
     * about. */
    bool is_random;
    struct ex_random random;
    struct eng_session *decoy;
    uint8_t *decoy_pages[DECOY_PAGES];
    uint32_t decoy_ids[DECOY_PAGES * KV_PAGE_TOKENS];
};

struct page {
    uint32_t holders;
    uint8_t bytes[];
};

struct ref_state {
    uint32_t holders;
    struct ref_model *model;
    struct eng_session *session;
    struct page *pages[PAGES_MAX];
    uint8_t *page_bytes[PAGES_MAX]; /* The same for the engine. */
    uint32_t page_count;
    uint32_t replays[REF_REPLAYS_MAX];
    uint32_t replay_count;
    uint32_t ids[TOKENS_MAX];
};

static void decoy_init(struct ref_model *model)
{
    EXPECT(eng_session_create(model->model, &model->decoy, NULL) == KV_OK);
    for (uint32_t i = 0; i < DECOY_PAGES; i++) {
        model->decoy_pages[i] = calloc(1, model->layout->page_bytes);
        EXPECT(model->decoy_pages[i] != NULL);
    }
    eng_session_set_pages(model->decoy, model->decoy_pages, DECOY_PAGES);
    for (uint32_t i = 0; i < KV_ARRAY_COUNT(model->decoy_ids); i++)
        model->decoy_ids[i] = ex_random_below(&model->random, model->layout->vocab_tokens);
}

struct ref_model *ref_model_open(const char *model_dir, uint32_t spare_tokens,
                                 struct ex_random *schedule)
{
    const struct eng_options options = {
        .backend = ENG_BACKEND_CPU,
        .model_dir = model_dir,
        .spare_tokens = spare_tokens,
        .pass_rows = schedule != NULL ? ex_random_between(schedule, 1, 200) : 0,
    };
    struct kv_error err = {0};
    struct ref_model *model = calloc(1, sizeof(*model));
    EXPECT(model != NULL);
    if (eng_model_open(&options, &model->model, &err) != KV_OK) {
        (void)fprintf(stderr, "exactness: %s\n", err.text);
        free(model);
        return NULL;
    }
    model->layout = eng_model_layout(model->model);
    if (schedule == NULL) return model;
    model->is_random = true;
    model->random.state = ex_random_next(schedule);
    decoy_init(model);
    return model;
}

void ref_model_close(struct ref_model *model)
{
    if (model == NULL) return;
    eng_session_destroy(model->decoy);
    for (uint32_t i = 0; i < DECOY_PAGES; i++)
        free(model->decoy_pages[i]);
    eng_model_close(model->model);
    free(model);
}

/* What the decoy does beside `piece`. */
static struct eng_piece decoy_piece(struct ref_model *model, const struct eng_piece *piece)
{
    const uint32_t rows = eng_model_pass_rows(model->model);
    const uint32_t at = eng_session_state(model->decoy).tokens;
    struct eng_run_left left = eng_run_left(model->decoy);

    if (left.encode == 0 && left.decode == 0) {
        const uint32_t to = at + ex_random_between(&model->random, 1, 70);
        if (to > KV_ARRAY_COUNT(model->decoy_ids)) {
            eng_session_reset(model->decoy);
            eng_session_set_pages(model->decoy, model->decoy_pages, DECOY_PAGES);
            return (struct eng_piece){.session = model->decoy};
        }
        eng_prefill_begin(model->decoy, model->decoy_ids, at, to);
        left = eng_run_left(model->decoy);
    }
    const uint32_t most = ex_random_between(&model->random, 1, KV_MIN(rows, DECOY_ROWS_MAX));
    const uint32_t encode = KV_MIN(KV_MIN(left.encode, most), rows - piece->encode);
    const uint32_t decode =
        encode < left.encode ? 0 : KV_MIN(KV_MIN(left.decode, most), rows - piece->decode);
    return (struct eng_piece){.session = model->decoy, .encode = encode, .decode = decode};
}

/* Moves the session's run to its end. */
static void run_to_end(struct ref_model *model, struct eng_session *session, uint32_t chunk)
{
    const uint32_t rows = eng_model_pass_rows(model->model);
    for (;;) {
        const struct eng_run_left left = eng_run_left(session);
        if (left.encode == 0 && left.decode == 0) return;
        const uint32_t most =
            model->is_random ? ex_random_between(&model->random, 1, rows) : KV_MIN(chunk, rows);
        struct eng_piece pieces[2] = {{.session = session, .encode = KV_MIN(left.encode, most)}};
        if (pieces[0].encode == left.encode) pieces[0].decode = KV_MIN(left.decode, most);
        const bool beside = model->is_random && ex_random_percent(&model->random, 50);
        if (beside) pieces[1] = decoy_piece(model, &pieces[0]);
        eng_pass(model->model, pieces, beside ? 2 : 1);
    }
}

const struct kv_layout *ref_model_layout(const struct ref_model *model)
{
    return model->layout;
}

uint32_t ref_model_eos(const struct ref_model *model)
{
    return eng_model_eos(model->model);
}

/* ---- pages ---- */

static struct page *page_make(const struct ref_model *model)
{
    struct page *page = calloc(1, sizeof(*page) + model->layout->page_bytes);
    EXPECT(page != NULL);
    page->holders = 1;
    return page;
}

static void page_drop(struct page *page)
{
    if (--page->holders == 0) free(page);
}

static void pages_cut(struct ref_state *state, uint32_t tokens)
{
    while (state->page_count > kv_pages_for(tokens))
        page_drop(state->pages[--state->page_count]);
}

static void pages_share(struct ref_state *to, const struct ref_state *from, uint32_t tokens)
{
    EXPECT(to->page_count == 0 && kv_pages_for(tokens) <= from->page_count);
    to->page_count = kv_pages_for(tokens);
    for (uint32_t k = 0; k < to->page_count; k++) {
        to->pages[k] = from->pages[k];
        to->pages[k]->holders++;
    }
}

/* Pages of its own for positions [from, to). */
static void pages_own(struct ref_state *state, uint32_t from, uint32_t to)
{
    EXPECT(to <= TOKENS_MAX);
    for (uint32_t k = from / KV_PAGE_TOKENS; k < kv_pages_for(to); k++) {
        if (k < state->page_count && state->pages[k]->holders == 1) continue;
        struct page *page = page_make(state->model);
        if (k < state->page_count) {
            memcpy(page->bytes, state->pages[k]->bytes, state->model->layout->page_bytes);
            page_drop(state->pages[k]);
        } else {
            state->page_count = k + 1;
        }
        state->pages[k] = page;
    }
    for (uint32_t k = 0; k < state->page_count; k++)
        state->page_bytes[k] = state->pages[k]->bytes;
    eng_session_set_pages(state->session, state->page_bytes, state->page_count);
}

/* ---- states ---- */

static struct ref_state *state_make(struct ref_model *model)
{
    struct ref_state *state = calloc(1, sizeof(*state));
    EXPECT(state != NULL);
    state->holders = 1;
    state->model = model;
    EXPECT(eng_session_create(model->model, &state->session, NULL) == KV_OK);
    return state;
}

struct ref_state *ref_start(struct ref_model *model)
{
    return state_make(model);
}

struct ref_state *ref_copy(const struct ref_state *state)
{
    struct ref_state *copy = state_make(state->model);
    eng_session_copy(copy->session, state->session);
    eng_session_set_pages(copy->session, NULL, 0);
    pages_share(copy, state, ref_tokens(state));
    copy->replay_count = state->replay_count;
    memcpy(copy->replays, state->replays, sizeof(copy->replays));
    memcpy(copy->ids, state->ids, sizeof(*copy->ids) * ref_tokens(state));
    return copy;
}

struct ref_state *ref_keep(struct ref_state *state)
{
    if (state != NULL) state->holders++;
    return state;
}

void ref_free(struct ref_state *state)
{
    if (state == NULL || --state->holders > 0) return;
    pages_cut(state, 0);
    eng_session_destroy(state->session);
    free(state);
}

uint32_t ref_tokens(const struct ref_state *state)
{
    return eng_session_state(state->session).tokens;
}

const uint32_t *ref_ids(const struct ref_state *state)
{
    return state->ids;
}

struct kv_image_state ref_image_state(const struct ref_state *state)
{
    return eng_session_state(state->session);
}

uint32_t ref_replays(const struct ref_state *state, uint32_t below, const uint32_t **ret_replays)
{
    uint32_t count = 0;
    while (count < state->replay_count && state->replays[count] < below)
        count++;
    *ret_replays = state->replays;
    return count;
}

uint32_t ref_shared(const struct ref_state *state, uint32_t limit, const uint32_t *ids,
                    uint32_t count)
{
    const uint32_t most = KV_MIN(KV_MIN(limit, ref_tokens(state)), count);
    uint32_t t = 0;
    while (t < most && state->ids[t] == ids[t])
        t++;
    return t;
}

/* ---- moving ---- */

void ref_cut(struct ref_state *state, uint32_t tokens)
{
    EXPECT(state->holders == 1);
    eng_session_cut(state->session, tokens);
    pages_cut(state, tokens);
    while (state->replay_count > 0 && state->replays[state->replay_count - 1] >= tokens)
        state->replay_count--;
}

struct ref_state *ref_rows_only(const struct ref_state *state, uint32_t tokens)
{
    struct ref_state *rows = state_make(state->model);
    pages_share(rows, state, tokens);
    memcpy(rows->ids, state->ids, sizeof(*rows->ids) * tokens);
    memcpy(rows->replays, state->replays, sizeof(rows->replays));
    const uint32_t *unused;
    rows->replay_count = ref_replays(state, tokens, &unused);
    EXPECT(rows->replay_count < REF_REPLAYS_MAX);
    rows->replays[rows->replay_count++] = tokens;
    pages_own(rows, tokens, tokens);
    eng_session_rows_only(rows->session, rows->ids, tokens);
    return rows;
}

void ref_prefill(struct ref_state *state, const uint32_t *ids, uint32_t replay_from, uint32_t to,
                 uint32_t chunk)
{
    const uint32_t at = ref_tokens(state);
    EXPECT(state->holders == 1);
    EXPECT(to > at && to <= TOKENS_MAX);
    memcpy(state->ids + at, ids + at, sizeof(*ids) * (to - at));
    pages_own(state, at, to);
    eng_prefill_begin(state->session, state->ids, replay_from, to);
    run_to_end(state->model, state->session, chunk);
}

static bool ends(const struct ref_decode *how, uint32_t token)
{
    for (uint32_t i = 0; i < how->stop_count; i++)
        if (how->stops[i] == token) return true;
    return false;
}

static void decode_pending(struct ref_state *state)
{
    const struct kv_image_state at = eng_session_state(state->session);
    if (!at.has_pending) return;
    EXPECT(at.tokens < TOKENS_MAX);
    pages_own(state, at.tokens, at.tokens + 1);
    state->ids[at.tokens] = at.pending;
    eng_tokens_begin(state->session, &at.pending, 1);
    run_to_end(state->model, state->session, 1);
}

uint32_t ref_decode(struct ref_state *state, const struct ref_decode *how, uint32_t *ret_tokens,
                    uint32_t *ret_crcs)
{
    const size_t bytes = state->model->layout->vocab_tokens * sizeof(float);
    const uint32_t most =
        how->forced == NULL ? how->max_tokens : KV_MIN(how->max_tokens, how->forced_count);
    EXPECT(state->holders == 1);
    for (uint32_t i = 0; i < most; i++) {
        decode_pending(state);
        ret_crcs[i] = kv_checksum(eng_session_logits(state->session), bytes);
        ret_tokens[i] = how->forced != NULL ? how->forced[i]
                                            : eng_session_sample(state->session, &how->sampling);
        eng_session_set_pending(state->session, ret_tokens[i]);
        if (how->forced == NULL && ends(how, ret_tokens[i])) return i + 1;
    }
    return most;
}
