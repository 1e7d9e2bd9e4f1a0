/*
 * Tokens runs: logits after every token, and what is left when only the first few are kept, at even
 * and odd positions, on both backends.
 */

#include "tests/unit/test_engine_fixture.h"

static uint32_t ids[RIG_TOKENS];

static void run_tokens(struct rig *rig, const uint32_t *tokens, uint32_t count)
{
    const struct eng_run_left none = eng_run_left(rig->session);
    EXPECT_EQ_U32(none.encode + none.decode, 0);
    eng_tokens_begin(rig->session, tokens, count);
    const struct eng_run_left left = eng_run_left(rig->session);
    EXPECT_EQ_U32(left.encode, count);
    EXPECT_EQ_U32(left.decode, count);
    const struct eng_piece piece = {.session = rig->session, .encode = count, .decode = count};
    eng_pass(rig->model, &piece, 1);
    EXPECT_EQ_U32(eng_run_left(rig->session).decode, 0);
}

static void test_each_token_has_logits(struct rig *a, struct rig *b)
{
    const size_t bytes = a->layout->vocab_tokens * sizeof(float);
    const struct eng_sampling sampling = {.temperature = 1, .top_p = 0.9f, .seed = 5};
    for (uint32_t at = 20; at < 24; at++) {
        rig_reset(a);
        rig_reset(b);
        rig_prefill(a, ids, at);
        rig_prefill(b, ids, at);
        run_tokens(a, ids + at, 5);
        for (uint32_t i = 0; i < 5; i++) {
            steps_token(b->session, ids[at + i]);
            EXPECT_EQ_MEM(eng_session_logits_at(a->session, i), eng_session_logits(b->session),
                          bytes);
            EXPECT_EQ_U32(eng_session_sample_at(a->session, i, &sampling),
                          eng_session_sample(b->session, &sampling));
        }
        expect_same(a, b);
    }
}

/* Wrong tokens are rejected; then everything is as if they had never been. */
static void test_keep(struct rig *a, struct rig *b)
{
    const uint32_t max = eng_model_verify_max(a->model);
    uint32_t tokens[16];

    for (uint32_t at = 3; at < 90; at += 17)
        for (uint32_t kept = 1; kept <= max; kept++) {
            rig_reset(a);
            rig_reset(b);
            rig_prefill(a, ids, at);
            rig_prefill(b, ids, at);
            /* Several in a row, so that tails and rings of rejected tokens pile up. */
            for (uint32_t round = 0; round < 4; round++) {
                const uint32_t start = rig_tokens(a);
                for (uint32_t i = 0; i < max; i++)
                    tokens[i] = i < kept ? ids[start + i] : 499 - ids[start + i];
                run_tokens(a, tokens, max);
                eng_verify_keep(a->session, kept);
                EXPECT_EQ_U32(rig_tokens(a), start + kept);
                for (uint32_t i = 0; i < kept; i++)
                    steps_token(b->session, ids[start + i]);
                expect_same(a, b);
            }
            rig_prefill(a, ids, rig_tokens(a) + 21);
            rig_prefill(b, ids, rig_tokens(b) + 21);
            expect_same(a, b);
        }
}

static void test_kept_can_be_cut(struct rig *a, struct rig *b)
{
    for (uint32_t kept = 1; kept < 8; kept++) {
        rig_reset(a);
        rig_reset(b);
        rig_prefill(a, ids, 70);
        rig_prefill(b, ids, 70);
        run_tokens(a, ids + 70, 8);
        eng_verify_keep(a->session, kept);
        for (uint32_t i = 0; i < kept; i++)
            steps_token(b->session, ids[70 + i]);
        rig_export(a);
        const uint32_t cut = kv_image_cut(a->layout, &a->state, 70 + kept - RIG_SPARE + 1);
        EXPECT(cut > 0);
        eng_session_cut(a->session, cut);
        eng_session_cut(b->session, cut);
        rig_prefill(a, ids, 90);
        rig_prefill(b, ids, 90);
        expect_same(a, b);
    }
}

static void test_abort(struct rig *a, struct rig *b)
{
    for (uint32_t at = 40; at < 42; at++)
        for (uint32_t decode = 0; decode < 6; decode += 5) {
            rig_reset(a);
            rig_reset(b);
            rig_prefill(a, ids, at);
            rig_prefill(b, ids, at);
            eng_tokens_begin(a->session, ids + 100, 6);
            const struct eng_piece piece = {.session = a->session, .encode = 6, .decode = decode};
            eng_pass(a->model, &piece, 1);
            EXPECT(eng_run_abort(a->session));
            EXPECT(eng_session_has_logits(a->session) == (decode == 0));
            EXPECT_EQ_U32(rig_tokens(a), at);
            rig_prefill(a, ids, at + 33);
            rig_prefill(b, ids, at + 33);
            expect_same(a, b);
        }
}

static void test_backend(struct eng_model *model)
{
    struct rig a, b;
    rig_init(&a, model);
    rig_init(&b, model);
    EXPECT_EQ_U32(eng_model_verify_max(model), 8);
    EXPECT(eng_model_draft_max(model) < eng_model_verify_max(model));
    test_each_token_has_logits(&a, &b);
    test_keep(&a, &b);
    test_kept_can_be_cut(&a, &b);
    test_abort(&a, &b);
    rig_fini(&a);
    rig_fini(&b);
    EXPECT_EQ_U64(eng_model_wrong_bytes(model), 0);
}

int main(void)
{
    char dir[64];
    fixture_ids(ids, RIG_TOKENS, 21);

    struct eng_model *synthetic = fixture_open(NULL, ENG_BACKEND_SYNTHETIC);
    EXPECT_EQ_STR(eng_model_family(synthetic), "synthetic");
    test_backend(synthetic);
    eng_model_close(synthetic);

    fixture_make_model(dir, 5);
    for (unsigned isa = ENG_ISA_PORTABLE; isa < ENG_ISA_COUNT; isa++) {
        /* The best of each family; test_engine_batch.c mixes those of one. */
        if (eng_isa_missing((enum eng_isa)isa) != NULL) continue;
        if (isa < ENG_ISA_AVX512 && eng_isa_missing((enum eng_isa)(isa + 1)) == NULL) continue;
        struct eng_model *cpu = fixture_open_isa(dir, (enum eng_isa)isa, 1 + isa % 3);
        EXPECT_EQ_STR(eng_model_family(cpu), eng_isa_family((enum eng_isa)isa));
        test_backend(cpu);
        eng_model_close(cpu);
    }
    fixture_remove_model(dir);
    HARNESS_END();
}
