/*
 * Drafting: a resumed session drafts what the uninterrupted one does, rejected drafts leave no
 * trace, and what comes out of decoding does not depend on whether it was drafted.
 */

#include "tests/unit/test_engine_fixture.h"

enum { BLOCK_MAX = 16 };

struct drafts {
    uint32_t tokens[BLOCK_MAX];
    float confidence[BLOCK_MAX];
};

static uint32_t ids[RIG_TOKENS];

static const struct eng_sampling greedy = {.temperature = 0, .top_p = 1};
static const struct eng_sampling warm = {.temperature = 1.2f, .top_p = 0.95f, .seed = 7};

static void draft(struct rig *rig, uint32_t first, const struct eng_sampling *sampling,
                  uint32_t max, struct drafts *ret)
{
    memset(ret, 0, sizeof(*ret));
    eng_draft(rig->model,
              &(struct eng_draft_item){.session = rig->session,
                                       .first = first,
                                       .sampling = *sampling,
                                       .max = max,
                                       .tokens = ret->tokens,
                                       .confidence = ret->confidence},
              1);
}

static void expect_same_drafts(struct rig *a, struct rig *b, uint32_t first)
{
    const uint32_t max = eng_model_draft_max(a->model);
    struct drafts left, right;
    draft(a, first, &greedy, max, &left);
    draft(b, first, &greedy, max, &right);
    EXPECT_EQ_MEM(&left, &right, sizeof(left));
    draft(a, first, &warm, max, &left);
    draft(b, first, &warm, max, &right);
    EXPECT_EQ_MEM(&left, &right, sizeof(left));
}

/* Drafting moves nothing, depends on its first token, and fewer drafts are the first of more. */
static void test_draft(struct rig *a, struct rig *b)
{
    const uint32_t max = eng_model_draft_max(a->model);
    struct drafts all, few;
    uint32_t differ = 0;

    rig_reset(a);
    rig_reset(b);
    rig_prefill(a, ids, 50);
    rig_prefill(b, ids, 50);
    draft(a, 100, &greedy, max, &all);
    expect_same(a, b);
    for (uint32_t n = 1; n <= max; n++) {
        draft(a, 100, &greedy, n, &few);
        EXPECT_EQ_MEM(few.tokens, all.tokens, n * sizeof(few.tokens[0]));
        EXPECT_EQ_MEM(few.confidence, all.confidence, n * sizeof(few.confidence[0]));
    }
    for (uint32_t first = 0; first < 20; first++) {
        draft(a, first, &greedy, max, &few);
        differ += memcmp(&few, &all, sizeof(few)) != 0;
        for (uint32_t i = 0; i < max; i++)
            EXPECT(few.tokens[i] < a->layout->vocab_tokens);
    }
    EXPECT(differ >= 19);
}

/* Together with others in one call, in any order: the same bits. */
static void test_batch(struct eng_model *model)
{
    enum { COUNT = 5 };
    struct rig rigs[COUNT];
    struct drafts alone[COUNT], together[COUNT];
    struct eng_draft_item items[COUNT];
    const uint32_t max = eng_model_draft_max(model);

    for (uint32_t i = 0; i < COUNT; i++) {
        rig_init(&rigs[i], model);
        rig_prefill(&rigs[i], ids + i, 1 + 13 * i);
        draft(&rigs[i], i, i % 2 ? &greedy : &warm, 1 + i % max, &alone[i]);
    }
    memset(together, 0, sizeof(together));
    for (uint32_t i = 0; i < COUNT; i++) {
        const uint32_t n = COUNT - 1 - i;
        items[i] = (struct eng_draft_item){
            .session = rigs[n].session,
            .first = n,
            .sampling = n % 2 ? greedy : warm,
            .max = 1 + n % max,
            .tokens = together[n].tokens,
            .confidence = together[n].confidence,
        };
    }
    eng_draft(model, items, COUNT);
    EXPECT_EQ_MEM(alone, together, sizeof(alone));
    for (uint32_t i = 0; i < COUNT; i++)
        rig_fini(&rigs[i]);
}

/* At any position, through its image, at every parity; and on from there. */
static void test_resume(struct rig *a, struct rig *b)
{
    for (uint32_t at = 1; at < 70; at += at < 36 ? 1 : 7) {
        rig_reset(a);
        rig_prefill(a, ids, at > 8 ? at - 5 : at);
        for (uint32_t p = rig_tokens(a); p < at; p++)
            steps_token(a->session, ids[p]);
        rig_export(a);
        rig_restore(b, a, ids, at);
        expect_same_drafts(a, b, ids[at]);
        for (uint32_t p = at; p < at + 3; p++) {
            steps_token(a->session, ids[p]);
            steps_token(b->session, ids[p]);
            expect_same_drafts(a, b, ids[p + 1]);
        }
        expect_same(a, b);
    }
}

static void verify(struct rig *rig, const uint32_t *tokens, uint32_t count, uint32_t kept)
{
    eng_tokens_begin(rig->session, tokens, count);
    eng_pass(rig->model,
             &(struct eng_piece){.session = rig->session, .encode = count, .decode = count}, 1);
    eng_verify_keep(rig->session, kept);
}

/* Every kept count at both parities: rows, windows, tails, logits and later drafts are those of
 * plain decoding. */
static void test_rejection(struct rig *a, struct rig *b)
{
    const uint32_t count = 1 + eng_model_draft_max(a->model);
    uint32_t tokens[BLOCK_MAX + 1];
    EXPECT(count <= eng_model_verify_max(a->model));

    for (uint32_t at = 14; at < 60; at += 15)
        for (uint32_t kept = 1; kept <= count; kept++) {
            rig_reset(a);
            rig_reset(b);
            rig_prefill(a, ids, at);
            rig_prefill(b, ids, at);
            for (uint32_t round = 0; round < 5; round++) {
                const uint32_t start = rig_tokens(a);
                for (uint32_t i = 0; i < count; i++)
                    tokens[i] = i < kept ? ids[start + i] : 499 - ids[start + i];
                verify(a, tokens, count, kept);
                for (uint32_t i = 0; i < kept; i++)
                    steps_token(b->session, ids[start + i]);
                expect_same(a, b);
                expect_same_drafts(a, b, ids[start + kept]);
            }
        }
}

/* Decodes with drafts (`least` or more in a step): keeps what the model itself would have drawn.
 * Returns the steps. */
static uint32_t decode_drafted(struct rig *rig, const struct eng_sampling *sampling, uint32_t least,
                               uint32_t count, uint32_t *out)
{
    const uint32_t block = eng_model_draft_max(rig->model);
    uint32_t tokens[BLOCK_MAX + 1], done = 0, steps = 0;
    struct drafts drafts;

    uint32_t next = eng_session_sample(rig->session, sampling);
    while (done < count) {
        const uint32_t max = least + steps % (block + 1 - least);
        draft(rig, next, sampling, max, &drafts);
        tokens[0] = next;
        memcpy(tokens + 1, drafts.tokens, max * sizeof(*tokens));
        eng_tokens_begin(rig->session, tokens, 1 + max);
        eng_pass(rig->model,
                 &(struct eng_piece){.session = rig->session, .encode = 1 + max, .decode = 1 + max},
                 1);
        uint32_t kept = 0;
        do {
            if (done < count) out[done++] = tokens[kept];
            next = eng_session_sample_at(rig->session, kept++, sampling);
        } while (kept <= max && next == tokens[kept]);
        eng_verify_keep(rig->session, kept);
        EXPECT_EQ_U32(eng_session_sample(rig->session, sampling), next);
        steps++;
    }
    return steps;
}

static void test_output(struct rig *a, struct rig *b)
{
    enum { COUNT = 60 };
    uint32_t drafted[COUNT], plain[COUNT];
    uint64_t seed = 11;

    for (uint32_t n = 0; n < 12; n++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        const struct eng_sampling sampling = {
            .temperature = n % 3 == 0 ? 0.0f : 0.1f + (float)(seed >> 60) * 0.1f,
            .top_p = n % 2 ? 1.0f : 0.5f + (float)(seed >> 40 & 15) * 0.03f,
            .top_k = n % 4 == 3 ? 1 + (uint32_t)(seed >> 33 & 31) : 0,
            .seed = seed,
        };
        rig_reset(a);
        rig_reset(b);
        rig_prefill(a, ids + n, 10 + 3 * n);
        rig_prefill(b, ids + n, 10 + 3 * n);
        (void)decode_drafted(a, &sampling, 1, COUNT, drafted);
        for (uint32_t i = 0; i < COUNT; i++) {
            plain[i] = eng_session_sample(b->session, &sampling);
            steps_token(b->session, plain[i]);
        }
        EXPECT_EQ_MEM(drafted, plain, sizeof(plain));
    }
}

static struct eng_model *open_with(const char *dir, uint32_t pass_rows, bool quant_off)
{
    const struct eng_options options = {.backend = ENG_BACKEND_CPU,
                                        .model_dir = dir,
                                        .spare_tokens = RIG_SPARE,
                                        .pass_rows = pass_rows,
                                        .quant_off = quant_off};
    struct eng_model *model = NULL;
    EXPECT(eng_model_open(&options, &model, NULL) == KV_OK);
    return model;
}

/* A block is not divided, however few rows a pass may have. */
static void test_small_passes(const char *dir, struct rig *a)
{
    struct eng_model *model = open_with(dir, 1, false);
    struct rig b;
    rig_init(&b, model);
    rig_reset(a);
    rig_prefill(a, ids, 45);
    rig_prefill(&b, ids, 45);
    expect_same_drafts(a, &b, 9);
    rig_fini(&b);
    eng_model_close(model);
    /* Without rounding drafts are others, but as repeatable. */
    model = open_with(dir, 0, true);
    rig_init(&b, model);
    rig_prefill(&b, ids, 45);
    expect_same_drafts(&b, &b, 9);
    rig_fini(&b);
    eng_model_close(model);
}

/* Weights that know what follows: nearly every draft is right. */
static void test_bigram(void)
{
    enum { COUNT = 120 };
    uint32_t out[COUNT];
    char dir[64];
    struct rig a;
    fixture_make(dir, 3, "--config tiny --bigram");
    struct eng_model *model = fixture_open(dir, ENG_BACKEND_CPU);
    fixture_remove_model(dir);
    rig_init(&a, model);
    rig_prefill(&a, ids, 30);
    const uint32_t max = eng_model_draft_max(model);
    const uint32_t steps = decode_drafted(&a, &greedy, max, COUNT, out);
    (void)fprintf(stderr, "bigram: %.2f tokens per step\n", (double)COUNT / steps);
    EXPECT(10 * COUNT >= 9 * (1 + max) * steps);
    rig_fini(&a);
    eng_model_close(model);
}

int main(void)
{
    char dir[64];
    struct rig a, b;

    fixture_make_model(dir, 3);
    struct eng_model *model = fixture_open(dir, ENG_BACKEND_CPU);
    fixture_ids(ids, RIG_TOKENS, 4);
    EXPECT(eng_model_draft_max(model) > 0);
    rig_init(&a, model);
    rig_init(&b, model);
    test_draft(&a, &b);
    test_batch(model);
    test_resume(&a, &b);
    test_rejection(&a, &b);
    test_output(&a, &b);
    test_small_passes(dir, &a);
    rig_fini(&a);
    rig_fini(&b);
    eng_model_close(model);
    fixture_remove_model(dir);
    test_bigram();
    HARNESS_END();
}
