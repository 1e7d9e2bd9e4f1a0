#pragma once

/*
 * The property that batching must keep: whatever pieces runs are cut into and whoever else is in
 * a pass, each session goes through the states it goes through alone, token by token.
 *
 * A script is a random list of movements of one session: prefills, tokens runs of which some are
 * rejected, cuts, restores from an image, replays, aborts.  Scripts run once alone, and once for
 * all sessions together in random passes; after each movement image, rows and logits are compared.
 * Private to tests/unit/test_engine_*.c.
 */

#include "engine/engine.h"
#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "kvstore/format/page.h"
#include "tests/harness.h"

#include <stdlib.h>
#include <string.h>

enum { SCHEDULE_PAGES = 4, SCHEDULE_TOKENS = SCHEDULE_PAGES * 128, SCHEDULE_SESSIONS = 5 };
enum { SCRIPT_MOVES = 14 };

enum move_kind { MOVE_PREFILL, MOVE_TOKENS, MOVE_CUT, MOVE_RESTORE, MOVE_REPLAY, MOVE_ABORT };

struct move {
    enum move_kind kind;
    uint32_t count; /* New tokens. */
    uint32_t other; /* TOKENS: kept; CUT: back; REPLAY: depth; ABORT: encoded before it. */
};

struct script {
    uint32_t ids[SCHEDULE_TOKENS];
    struct move moves[SCRIPT_MOVES];
};

/* What is compared after a move. */
struct snapshot {
    struct kv_image_state state;
    uint32_t image, rows, logits, drafts;
};

/* Where pages lie: a backend may have memory of its own. */
struct page_memory {
    uint8_t *(*take)(struct eng_model *model);
    void (*give_back)(struct eng_model *model, uint8_t *page);
    void (*read)(struct eng_model *model, const uint8_t *page, uint8_t *copy);
};

struct actor {
    struct eng_model *model;
    const struct page_memory *memory;
    const struct script *script;
    struct eng_session *session;
    uint8_t *pages[SCHEDULE_PAGES];
    uint8_t *image, *copy;
    uint32_t move;       /* Index of the present move. */
    uint32_t abort_left; /* Tokens still to encode before the abort. */
    struct snapshot seen[SCRIPT_MOVES];
};

static inline uint32_t schedule_random(uint64_t *state, uint32_t below)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((*state >> 33) % below);
}

static inline void script_make(struct script *script, uint64_t seed)
{
    static const enum move_kind kinds[] = {MOVE_PREFILL, MOVE_PREFILL, MOVE_TOKENS,
                                           MOVE_TOKENS,  MOVE_TOKENS,  MOVE_CUT,
                                           MOVE_RESTORE, MOVE_REPLAY,  MOVE_ABORT};
    uint64_t state = seed * 77777 + 5;
    for (uint32_t i = 0; i < SCHEDULE_TOKENS; i++)
        script->ids[i] = schedule_random(&state, 500);
    for (uint32_t i = 0; i < SCRIPT_MOVES; i++) {
        struct move *move = &script->moves[i];
        move->kind = i == 0 ? MOVE_PREFILL : kinds[schedule_random(&state, 9)];
        move->count = 1 + schedule_random(&state, schedule_random(&state, 3) == 0 ? 120 : 30);
        move->other = 1 + schedule_random(&state, 16);
        if (move->kind == MOVE_TOKENS) {
            move->count = 1 + schedule_random(&state, 8);
            move->other = 1 + schedule_random(&state, move->count);
        }
        if (move->kind == MOVE_REPLAY) move->other = schedule_random(&state, 150);
        if (move->kind == MOVE_ABORT) {
            move->count = 20 + schedule_random(&state, 40);
            move->other = schedule_random(&state, 15);
        }
    }
}

static inline void actor_init(struct actor *actor, struct eng_model *model,
                              const struct page_memory *memory, const struct script *script)
{
    const struct kv_layout *layout = eng_model_layout(model);
    *actor = (struct actor){.model = model, .memory = memory, .script = script};
    EXPECT(eng_session_create(model, &actor->session, NULL) == KV_OK);
    for (int i = 0; i < SCHEDULE_PAGES; i++)
        actor->pages[i] = memory->take(model);
    actor->image = calloc(1, layout->image_bytes);
    actor->copy = malloc(layout->page_bytes);
    EXPECT(actor->image != NULL && actor->copy != NULL);
    eng_session_set_pages(actor->session, actor->pages, SCHEDULE_PAGES);
}

static inline void actor_fini(struct actor *actor)
{
    eng_session_destroy(actor->session);
    for (int i = 0; i < SCHEDULE_PAGES; i++)
        actor->memory->give_back(actor->model, actor->pages[i]);
    free(actor->image);
    free(actor->copy);
}

static inline uint32_t actor_tokens(const struct actor *actor)
{
    return eng_session_state(actor->session).tokens;
}

/* Image of the session, sealed and read again, as a restore would. */
static inline struct kv_image_state actor_export(struct actor *actor)
{
    const struct kv_layout *layout = eng_model_layout(actor->model);
    struct kv_image_header header = {.state = eng_session_state(actor->session)};
    eng_session_export(actor->session, actor->image);
    kv_image_seal(layout, actor->image, &header);
    EXPECT(kv_image_decode(layout, actor->image, &header, NULL) == KV_OK);
    return header.state;
}

/* What would be drafted here. */
static inline uint32_t actor_drafts(struct actor *actor)
{
    const uint32_t max = eng_model_draft_max(actor->model);
    const uint32_t at = actor_tokens(actor);
    uint32_t tokens[16];
    float confidence[16];

    if (max == 0 || at == 0) return 0;
    const struct eng_draft_item item = {
        .session = actor->session,
        .first = actor->script->ids[at % SCHEDULE_TOKENS],
        .sampling = {.temperature = 0.7f, .top_p = 1, .seed = at},
        .max = max,
        .tokens = tokens,
        .confidence = confidence,
    };
    eng_draft(actor->model, &item, 1);
    return kv_checksum(tokens, max * sizeof(*tokens)) ^
           kv_checksum(confidence, max * sizeof(*confidence));
}

static inline struct snapshot actor_snapshot(struct actor *actor)
{
    const struct kv_layout *layout = eng_model_layout(actor->model);
    struct snapshot now = {.state = actor_export(actor)};
    const uint32_t tokens = now.state.tokens;

    now.image = kv_checksum(actor->image + 256, layout->image_bytes - 256);
    for (uint32_t page = 0; page < kv_pages_for(tokens); page++) {
        actor->memory->read(actor->model, actor->pages[page], actor->copy);
        kv_page_clear_after(layout, actor->copy, KV_MIN(tokens - page * 128, 128u));
        now.rows = now.rows * 31 + kv_checksum(actor->copy + 256, layout->page_bytes - 256);
    }
    if (eng_session_has_logits(actor->session))
        now.logits =
            kv_checksum(eng_session_logits(actor->session), layout->vocab_tokens * sizeof(float));
    return now;
}

static inline void begin_tokens(struct actor *actor, const struct move *move)
{
    const uint32_t at = actor_tokens(actor);
    uint32_t tokens[16];
    for (uint32_t i = 0; i < move->count; i++)
        tokens[i] = i < move->other ? actor->script->ids[at + i] : 499 - actor->script->ids[at + i];
    eng_tokens_begin(actor->session, tokens, move->count);
}

static inline void move_restore(struct actor *actor, uint32_t cut)
{
    const struct kv_image_state state = actor_export(actor);
    if (cut == 0) cut = state.tokens;
    /* A new one, so that nothing is left of the old. */
    eng_session_destroy(actor->session);
    EXPECT(eng_session_create(actor->model, &actor->session, NULL) == KV_OK);
    eng_session_set_pages(actor->session, actor->pages, SCHEDULE_PAGES);
    EXPECT(eng_session_import(actor->session, actor->image, &state, actor->script->ids, cut) ==
           KV_OK);
}

/* Begins the present move.  Returns false if it is over at once. */
static inline bool move_begin(struct actor *actor)
{
    const struct move *move = &actor->script->moves[actor->move];
    const uint32_t at = actor_tokens(actor);
    const struct kv_image_state state = eng_session_state(actor->session);
    const uint32_t cut =
        at > move->other ? kv_image_cut(eng_model_layout(actor->model), &state, at - move->other)
                         : 0;
    const bool fits = at + move->count <= SCHEDULE_TOKENS;

    switch (move->kind) {
    case MOVE_CUT:
        if (cut > 0) eng_session_cut(actor->session, cut);
        return false;
    case MOVE_RESTORE:
        move_restore(actor, move->count % 2 == 0 ? cut : 0);
        return false;
    case MOVE_TOKENS:
        if (fits) begin_tokens(actor, move);
        return fits;
    case MOVE_REPLAY:
        if (!fits) return false;
        eng_session_rows_only(actor->session, actor->script->ids, at - at % 2);
        eng_prefill_begin(actor->session, actor->script->ids,
                          at - at % 2 > move->other ? at - at % 2 - move->other : 0,
                          at + move->count);
        return true;
    case MOVE_ABORT:
        actor->abort_left = move->other;
        break;
    case MOVE_PREFILL:
        break;
    }
    if (fits) eng_prefill_begin(actor->session, actor->script->ids, at, at + move->count);
    return fits;
}

/* Ends the move after a pass, if it is over. */
static inline bool move_ended(struct actor *actor)
{
    const struct move *move = &actor->script->moves[actor->move];
    const struct eng_run_left left = eng_run_left(actor->session);

    if (move->kind == MOVE_ABORT && actor->abort_left == 0) {
        EXPECT(left.encode > 0);
        EXPECT(eng_run_abort(actor->session));
        return true;
    }
    if (left.encode > 0 || left.decode > 0) return false;
    if (move->kind == MOVE_TOKENS) eng_verify_keep(actor->session, move->other);
    return true;
}

/* A piece of at most `encode` and `decode` tokens, as the rules of eng_pass() allow. */
static inline struct eng_piece piece_make(struct actor *actor, uint32_t encode, uint32_t decode,
                                          bool prefill_all)
{
    const struct move *move = &actor->script->moves[actor->move];
    const struct eng_run_left left = eng_run_left(actor->session);
    const uint32_t window = eng_model_layout(actor->model)->window_tokens;

    encode = KV_MIN(encode, left.encode);
    if (move->kind == MOVE_ABORT) {
        encode = KV_MIN(encode, actor->abort_left);
        decode = 0;
    }
    if (prefill_all) {
        const uint32_t behind = left.decode - left.encode;
        decode = KV_MIN(decode, behind + encode);
        if (behind + encode > window + decode) encode = window + decode - behind;
    } else if (encode < left.encode) {
        decode = 0;
    }
    decode = KV_MIN(decode, left.decode);
    if (move->kind == MOVE_ABORT) actor->abort_left -= encode;
    return (struct eng_piece){.session = actor->session, .encode = encode, .decode = decode};
}

/* The whole script alone, one token at a time. */
static inline void actor_run_alone(struct actor *actor, bool prefill_all)
{
    for (; actor->move < SCRIPT_MOVES; actor->move++) {
        if (move_begin(actor))
            while (!move_ended(actor)) {
                const struct eng_piece piece = piece_make(actor, 1, 1, prefill_all);
                eng_pass(actor->model, &piece, 1);
            }
        actor->seen[actor->move] = actor_snapshot(actor);
    }
}

/* Moves that are over at once, up to the next run. */
static inline void actor_go_on(struct actor *actor)
{
    while (actor->move < SCRIPT_MOVES) {
        if (move_begin(actor)) {
            if (!move_ended(actor)) return;
        }
        actor->seen[actor->move] = actor_snapshot(actor);
        actor->move++;
    }
}

/* All scripts together, in random passes. */
static inline void actors_run(struct actor *actors, uint32_t count, uint64_t seed, bool prefill_all)
{
    struct eng_model *model = actors[0].model;
    const uint32_t rows = eng_model_pass_rows(model);
    uint64_t state = seed;

    for (uint32_t i = 0; i < count; i++)
        actor_go_on(&actors[i]);
    for (bool busy = true; busy;) {
        struct eng_piece pieces[SCHEDULE_SESSIONS];
        struct actor *who[SCHEDULE_SESSIONS];
        uint32_t used = 0, encode = rows, decode = rows;
        const uint32_t start = schedule_random(&state, count);
        busy = false;
        for (uint32_t n = 0; n < count; n++) {
            struct actor *actor = &actors[(start + n) % count];
            if (actor->move == SCRIPT_MOVES) continue;
            busy = true;
            if (schedule_random(&state, 4) == 0) continue;
            const uint32_t most = 1 + schedule_random(&state, rows);
            pieces[used] =
                piece_make(actor, KV_MIN(encode, most), KV_MIN(decode, most), prefill_all);
            encode -= pieces[used].encode;
            decode -= pieces[used].decode;
            who[used++] = actor;
        }
        eng_pass(model, pieces, used);
        for (uint32_t i = 0; i < used; i++) {
            if (!move_ended(who[i])) continue;
            who[i]->seen[who[i]->move] = actor_snapshot(who[i]);
            who[i]->move++;
            actor_go_on(who[i]);
        }
    }
}

static inline uint32_t snapshots_differing(const struct actor *actor, const struct snapshot *want)
{
    uint32_t differing = 0;
    for (uint32_t i = 0; i < SCRIPT_MOVES; i++)
        differing += memcmp(&actor->seen[i], &want[i], sizeof(*want)) != 0;
    return differing;
}

struct reference {
    struct script scripts[SCHEDULE_SESSIONS];
    struct snapshot want[SCHEDULE_SESSIONS][SCRIPT_MOVES];
};

static inline struct reference *reference_make(struct eng_model *model,
                                               const struct page_memory *memory, uint64_t seed,
                                               bool prefill_all)
{
    struct reference *reference = calloc(1, sizeof(*reference));
    struct actor *actor = calloc(1, sizeof(*actor));
    EXPECT(reference != NULL && actor != NULL);
    for (uint32_t i = 0; i < SCHEDULE_SESSIONS; i++) {
        script_make(&reference->scripts[i], seed * 100 + i);
        actor_init(actor, model, memory, &reference->scripts[i]);
        actor_run_alone(actor, prefill_all);
        memcpy(reference->want[i], actor->seen, sizeof(actor->seen));
        actor_fini(actor);
    }
    free(actor);
    return reference;
}

/* States that differ from the reference, of all sessions in one random schedule. */
static inline uint32_t schedule_differing(const struct reference *reference,
                                          struct eng_model *model, const struct page_memory *memory,
                                          uint64_t seed, bool prefill_all)
{
    struct actor *actors = calloc(SCHEDULE_SESSIONS, sizeof(*actors));
    uint32_t differing = 0;
    EXPECT(actors != NULL);
    for (uint32_t i = 0; i < SCHEDULE_SESSIONS; i++)
        actor_init(&actors[i], model, memory, &reference->scripts[i]);
    actors_run(actors, SCHEDULE_SESSIONS, seed, prefill_all);
    for (uint32_t i = 0; i < SCHEDULE_SESSIONS; i++) {
        differing += snapshots_differing(&actors[i], reference->want[i]);
        actor_fini(&actors[i]);
    }
    free(actors);
    return differing;
}

static inline uint8_t *host_page_take(struct eng_model *model)
{
    uint8_t *page = calloc(1, eng_model_layout(model)->page_bytes);
    EXPECT(page != NULL);
    return page;
}

static inline void host_page_give_back(struct eng_model *model, uint8_t *page)
{
    free(page);
}

static inline void host_page_read(struct eng_model *model, const uint8_t *page, uint8_t *copy)
{
    memcpy(copy, page, eng_model_layout(model)->page_bytes);
}

static const struct page_memory host_pages = {
    .take = host_page_take, .give_back = host_page_give_back, .read = host_page_read};
