/*
 * What engine.h promises of positions, for both backends: any chunk sizes give the same bits, a
 * restored session is the live one, at every kind of position and after every kind of cut.
 */

#include "tests/unit/test_engine_fixture.h"

static uint32_t ids[RIG_TOKENS];

static const uint32_t positions[] = {1,  2,  3,  15, 16, 17,  31,  32,
                                     33, 40, 47, 48, 49, 127, 128, 129};

static void test_chunks(struct rig *a, struct rig *b)
{
    static const uint32_t chunks[] = {1, 2, 3, 7, 16, 17, 64, 1000};
    rig_reset(a);
    rig_replay(a, ids, 0, 150, 64);
    for (size_t i = 0; i < sizeof(chunks) / sizeof(*chunks); i++) {
        rig_reset(b);
        rig_replay(b, ids, 0, 150, chunks[i]);
        expect_same(a, b);
    }
}

/* Everything that may follow a position, compared between two sessions that should be equal. */
static void expect_same_futures(struct rig *a, struct rig *b, struct rig *c, struct rig *d)
{
    static const uint32_t suffixes[] = {1, 2, 5, 16, 17, 40};
    for (size_t i = 0; i < sizeof(suffixes) / sizeof(*suffixes); i++) {
        const uint32_t to = rig_tokens(a) + suffixes[i];
        rig_copy(c, a);
        rig_copy(d, b);
        rig_prefill(c, ids, to);
        rig_prefill(d, ids, to);
        expect_same(c, d);
        for (uint32_t n = 0; n < 3; n++) {
            const struct eng_sampling greedy = {0};
            const uint32_t token = eng_session_sample(c->session, &greedy);
            EXPECT_EQ_U32(eng_session_sample(d->session, &greedy), token);
            steps_token(c->session, token);
            steps_token(d->session, token);
        }
        expect_same(c, d);
    }
    rig_copy(c, a);
    rig_copy(d, b);
    for (uint32_t n = 0; n < 4; n++) {
        steps_token(c->session, ids[300 + n]);
        steps_token(d->session, ids[300 + n]);
        expect_same(c, d);
    }
}

static void test_restored_is_live(struct rig *a, struct rig *b, struct rig *c, struct rig *d)
{
    for (size_t i = 0; i < sizeof(positions) / sizeof(*positions); i++) {
        const uint32_t t = positions[i];
        rig_reset(a);
        rig_prefill(a, ids, t);
        rig_export(a);
        EXPECT(a->state.encoder_first >= kv_layout_image_base(a->layout, t));
        EXPECT(a->state.decoder_first >= kv_layout_image_base(a->layout, t));
        rig_restore(b, a, ids, t);
        rig_export(b);
        EXPECT_EQ_MEM(a->image, b->image, a->layout->image_bytes);
        expect_same_futures(a, b, c, d);
    }
}

/* The same after a history of several prefills and decoded tokens. */
static void test_restored_is_live_later(struct rig *a, struct rig *b, struct rig *c, struct rig *d)
{
    static const uint32_t stops[] = {7, 8, 30, 35, 70, 77, 120};
    rig_reset(a);
    for (size_t i = 0; i < sizeof(stops) / sizeof(*stops); i++) {
        rig_prefill(a, ids, stops[i]);
        for (uint32_t n = 0; n < i; n++)
            steps_token(a->session, ids[rig_tokens(a)]);
        rig_export(a);
        rig_restore(b, a, ids, rig_tokens(a));
        expect_same_futures(a, b, c, d);
    }
}

static void test_cut_restored_is_live(struct rig *a, struct rig *b, struct rig *c, struct rig *d)
{
    static const uint32_t ends[] = {12, 17, 40, 61, 100};
    for (size_t e = 0; e < sizeof(ends) / sizeof(*ends); e++)
        for (uint32_t back = 1; back <= RIG_SPARE + 2; back++) {
            rig_reset(a);
            rig_prefill(a, ids, ends[e] - 5);
            for (uint32_t n = 0; n < 5; n++)
                steps_token(a->session, ids[rig_tokens(a)]);
            rig_export(a);
            if (back > ends[e]) continue;
            const uint32_t cut = kv_image_cut(a->layout, &a->state, ends[e] - back);
            if (cut == 0) continue;
            rig_restore(b, a, ids, cut);
            eng_session_cut(a->session, cut);
            EXPECT(!eng_session_has_logits(a->session));
            rig_export(b);
            const struct kv_image_state live = eng_session_state(a->session);
            EXPECT_EQ_U32(live.encoder_first, b->state.encoder_first);
            EXPECT_EQ_U32(live.decoder_first, b->state.decoder_first);
            if (back % 3 == 0) expect_same_futures(a, b, c, d);
            rig_prefill(a, ids, cut + 3);
            rig_prefill(b, ids, cut + 3);
            expect_same(a, b);
        }
}

/* The whole prompt is stored: cut to even(N-1) gives the logits of the first time. */
static void test_same_prompt_again(struct rig *a, struct rig *b)
{
    for (uint32_t n = 3; n < 60; n++) {
        rig_reset(a);
        rig_prefill(a, ids, n);
        rig_copy(b, a);
        eng_session_cut(b->session,
                        kv_image_cut(a->layout, &(struct kv_image_state){.tokens = n}, n - 1));
        rig_prefill(b, ids, n);
        EXPECT_EQ_MEM(eng_session_logits(a->session), eng_session_logits(b->session),
                      a->layout->vocab_tokens * sizeof(float));
        expect_same_rows(a, b, n);
    }
}

/* Encoder state is a function of the tokens: decoded one by one or prefilled at once. */
static void test_decode_makes_the_rows_of_prefill(struct rig *a, struct rig *b)
{
    rig_reset(a);
    rig_reset(b);
    rig_prefill(a, ids, 140);
    rig_prefill(b, ids, 90);
    while (rig_tokens(b) < 140)
        steps_token(b->session, ids[rig_tokens(b)]);
    expect_same_rows(a, b, 140);
    rig_export(a);
    rig_export(b);
    EXPECT_EQ_U32(a->state.encoder_first, b->state.encoder_first);
    EXPECT_EQ_MEM(a->image + 256, b->image + 256,
                  kv_layout_window_offset(a->layout, a->layout->encoder_layers) - 256);
}

static void test_pending(struct rig *a, struct rig *b)
{
    rig_reset(a);
    rig_prefill(a, ids, 33);
    eng_session_set_pending(a->session, 77);
    rig_export(a);
    EXPECT(a->state.has_pending);
    rig_restore(b, a, ids, 33);
    EXPECT(eng_session_state(b->session).has_pending);
    EXPECT_EQ_U32(eng_session_state(b->session).pending, 77);
    rig_restore(b, a, ids, 32);
    EXPECT(!eng_session_state(b->session).has_pending);
    steps_token(a->session, 77);
    EXPECT(!eng_session_state(a->session).has_pending);
    eng_session_set_pending(a->session, 5);
    eng_session_clear_pending(a->session);
    EXPECT(!eng_session_state(a->session).has_pending);
}

/* Another first row for the draft stages than for the decoder: refused, and nothing has moved. */
static void test_import_of_other_draft_rows(struct rig *a, struct rig *b)
{
    rig_reset(a);
    rig_prefill(a, ids, 100);
    rig_export(a);
    EXPECT_EQ_U32(a->state.draft_first, a->state.decoder_first);
    rig_restore(b, a, ids, 98);
    for (uint32_t first = a->state.decoder_first - 1; first <= 100; first++) {
        struct kv_image_state other = a->state;
        other.draft_first = first;
        if (first == other.decoder_first) continue;
        EXPECT(eng_session_import(b->session, a->image, &other, ids, 100) == KV_INVALID);
        EXPECT_EQ_U32(rig_tokens(b), 98);
    }
    rig_restore(b, a, ids, 100);
}

static void test_abort(struct rig *a, struct rig *b, struct rig *c, struct rig *d)
{
    for (uint32_t at = 20; at < 60; at += 13)
        for (uint32_t done = 0; done <= 40; done++) {
            rig_reset(a);
            rig_prefill(a, ids, at);
            rig_copy(b, a);
            eng_prefill_begin(b->session, ids, at, at + 60);
            if (done > 0) steps_chunk(b->session, done);
            const bool kept = eng_run_abort(b->session);
            EXPECT(kept || done > RIG_SPARE);
            EXPECT_EQ_U32(eng_run_left(b->session).encode, 0);
            if (!kept) continue;
            EXPECT(eng_session_has_logits(b->session));
            EXPECT_EQ_U32(rig_tokens(b), at);
            if (done % 8 == 0) {
                rig_copy(c, a);
                rig_copy(d, b);
                rig_prefill(c, ids, at + 30);
                rig_prefill(d, ids, at + 30);
                expect_same(c, d);
            }
        }
}

static void test_refused_import(struct rig *a, struct rig *b)
{
    rig_reset(a);
    rig_prefill(a, ids, 80);
    rig_export(a);
    rig_reset(b);
    EXPECT(eng_session_import(b->session, a->image, &a->state, ids, 79) == KV_INVALID);
    EXPECT(eng_session_import(b->session, a->image, &a->state, ids, 40) == KV_INVALID);
    a->state.encoder_first = 70; /* Too few rows for a window. */
    EXPECT(eng_session_import(b->session, a->image, &a->state, ids, 80) == KV_INVALID);
}

static void test_backend(struct eng_model *model)
{
    struct rig rigs[4];
    for (int i = 0; i < 4; i++)
        rig_init(&rigs[i], model);
    struct rig *a = &rigs[0], *b = &rigs[1], *c = &rigs[2], *d = &rigs[3];

    test_chunks(a, b);
    test_restored_is_live(a, b, c, d);
    test_restored_is_live_later(a, b, c, d);
    test_cut_restored_is_live(a, b, c, d);
    test_same_prompt_again(a, b);
    test_decode_makes_the_rows_of_prefill(a, b);
    test_pending(a, b);
    test_abort(a, b, c, d);
    test_refused_import(a, b);
    test_import_of_other_draft_rows(a, b);
    for (int i = 0; i < 4; i++)
        rig_fini(&rigs[i]);
    EXPECT_EQ_U64(eng_model_wrong_bytes(model), 0);
}

int main(void)
{
    char dir[64];
    fixture_ids(ids, RIG_TOKENS, 3);

    struct eng_model *synthetic = fixture_open(NULL, ENG_BACKEND_SYNTHETIC);
    EXPECT_EQ_STR(eng_model_backend(synthetic), "SYNTHETIC");
    test_backend(synthetic);
    eng_model_close(synthetic);

    fixture_make_model(dir, 1);
    struct eng_model *cpu = fixture_open(dir, ENG_BACKEND_CPU);
    fixture_remove_model(dir);
    EXPECT_EQ_STR(eng_model_backend(cpu), "cpu");
    EXPECT_EQ_STR(eng_model_name(cpu), "tiny");
    EXPECT_EQ_U32(eng_model_eos(cpu), 1);
    EXPECT_EQ_U32(eng_model_layout(cpu)->page_bytes, 20480);
    test_backend(cpu);
    eng_model_close(cpu);
    HARNESS_END();
}
