/*
 * The layer maths of the CPU backend: kernels of every instruction set agree, replay reads and
 * never writes, and a replay deep enough rebuilds windows bit for bit while one token less does
 * not.
 */

#include "engine/backend/cpu.h"
#include "kvstore/base/checksum.h"
#include "tests/unit/test_engine_fixture.h"

#include <math.h>

static uint32_t ids[RIG_TOKENS];

static float random_float(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(*state >> 32) * 0x1p-31f;
}

static void test_kernel_variants(void)
{
    enum { DIM = 64, KEYS = 100 };
    static float q[4 * DIM], keys[KEYS * DIM], rows[KEYS * DIM], x[4 * DIM], w[DIM];
    const float sink[4] = {0.1f, -2.0f, 3.0f, 0.0f};
    uint64_t state = 2;
    for (int i = 0; i < 4 * DIM; i++) {
        q[i] = 3 * random_float(&state);
        x[i] = random_float(&state);
    }
    for (int i = 0; i < KEYS * DIM; i++) {
        keys[i] = random_float(&state);
        rows[i] = random_float(&state);
    }
    for (int i = 0; i < DIM; i++)
        w[i] = 1 + random_float(&state);

    float want[8][4 * DIM];
    for (enum eng_isa isa = ENG_ISA_PORTABLE; isa < ENG_ISA_COUNT; isa++) {
        const struct eng_kernel_set *set = eng_kernels_of(isa, false);
        if (set == NULL) continue;
        const struct eng_elementwise_ops *k = set->elementwise;
        float got[8][4 * DIM] = {{0}};
        uint8_t *packed = (uint8_t *)got[7];
        k->attend(&(struct eng_attend_args){.q = q,
                                            .heads = 4,
                                            .dim = DIM,
                                            .scale = 0.125f,
                                            .sink = sink,
                                            .window = rows,
                                            .window_valid = 70,
                                            .window_columns = 90,
                                            .compressed = keys,
                                            .compressed_count = KEYS,
                                            .o = got[0]});
        k->rms(x, w, DIM, 1e-20f, got[1]);
        k->collapse(x, sink, DIM, got[2]);
        memcpy(got[3], x, sizeof(x));
        k->expand(got[3], q, sink, keys, DIM);
        k->gate(q, x, 4 * DIM, 1.5f, 0.7f, got[4]);
        got[5][0] = k->rms_inverse(q, DIM, 1e-20f);
        memcpy(got[6], q, sizeof(q));
        k->rotate(got[6], x, 40, true);
        k->window_row(q, DIM, packed);
        k->main_row(x, DIM, packed + 100);
        k->index_row(x, DIM, packed + 200);
        if (isa == ENG_ISA_PORTABLE) memcpy(want, got, sizeof(want));
        EXPECT_EQ_MEM(got, want, sizeof(want));
    }
}

/* The online softmax over blocks of 64 is, up to rounding, the softmax with a sink. */
static void test_attend_is_softmax(void)
{
    enum { DIM = 32, WINDOW = 20, KEYS = 90 };
    static float q[DIM], rows[WINDOW * DIM], keys[KEYS * DIM], o[DIM];
    const float sink = 0.4f;
    uint64_t state = 9;
    double sum = exp((double)sink), want[DIM] = {0};

    for (int i = 0; i < DIM; i++)
        q[i] = 4 * random_float(&state);
    for (int i = 0; i < WINDOW * DIM; i++)
        rows[i] = random_float(&state);
    for (int i = 0; i < KEYS * DIM; i++)
        keys[i] = random_float(&state);
    for (int c = 0; c < 13 + KEYS; c++) {
        const float *key = c < 13 ? rows + c * DIM : keys + (c - 13) * DIM;
        double dot = 0;
        for (int i = 0; i < DIM; i++)
            dot += (double)q[i] * (double)key[i];
        const double p = exp(dot * 0.25);
        sum += p;
        for (int i = 0; i < DIM; i++)
            want[i] += p * (double)key[i];
    }
    eng_kernels_of(ENG_ISA_AUTO, false)
        ->elementwise->attend(&(struct eng_attend_args){.q = q,
                                                        .heads = 1,
                                                        .dim = DIM,
                                                        .scale = 0.25f,
                                                        .sink = &sink,
                                                        .window = rows,
                                                        .window_valid = 13,
                                                        .window_columns = WINDOW,
                                                        .compressed = keys,
                                                        .compressed_count = KEYS,
                                                        .o = o});
    for (int i = 0; i < DIM; i++)
        EXPECT(fabs((double)o[i] - want[i] / sum) < 4e-3);
}

static void test_exp(void)
{
    for (int i = -8600; i <= 8700; i++) {
        const float x = (float)i * 0.01f;
        const double want = exp((double)x);
        EXPECT(fabs((double)eng_exp(x) - want) <= want * 3e-7);
    }
    EXPECT(eng_exp(0.0f) == 1.0f);
    EXPECT(eng_exp(-1000.0f) == 0.0f);
    EXPECT(eng_exp(-1e30f) == 0.0f);
}

/* Against sorting everything: larger score, then smaller index. */
static void test_top(void)
{
    uint64_t state = 4;
    for (uint32_t round = 0; round < 200; round++) {
        float scores[60], room_scores[20], order[20];
        uint32_t kept[8], room_indices[20];
        struct cpu_top top = {
            .scores = room_scores, .indices = room_indices, .order = order, .room = 9 + round % 12};
        const uint32_t count = 1 + round % 60;
        cpu_top_reset(&top, 8);
        for (uint32_t i = 0; i < count; i++) {
            scores[i] = floorf(random_float(&state) * 6.0f); /* Many ties. */
            cpu_top_offer(&top, scores[i], i);
        }
        const uint32_t taken = cpu_top_take(&top, kept);
        EXPECT_EQ_U32(taken, count < 8 ? count : 8);
        for (uint32_t j = 1; j < taken; j++)
            EXPECT(kept[j - 1] < kept[j]);
        for (uint32_t i = 0; i < count; i++) {
            uint32_t before = 0;
            bool is_kept = false;
            for (uint32_t j = 0; j < count; j++)
                before += scores[j] > scores[i] || (scores[j] == scores[i] && j < i);
            for (uint32_t j = 0; j < taken; j++)
                is_kept = is_kept || kept[j] == i;
            EXPECT(is_kept == (before < 8));
        }
    }
}

static void rig_rows_only(struct rig *to, const struct rig *from, uint32_t tokens)
{
    rig_reset(to);
    for (int i = 0; i < RIG_PAGES; i++)
        memcpy(to->pages[i], from->pages[i], from->layout->page_bytes);
    eng_session_rows_only(to->session, ids, tokens);
}

static void test_replay_reads_only(struct rig *a, struct rig *b, struct rig *c)
{
    for (uint32_t hit = 40; hit < 140; hit += 9) {
        rig_reset(a);
        rig_prefill(a, ids, hit);
        rig_rows_only(b, a, hit);
        rig_replay(b, ids, hit - 16, hit + 21, 5);
        expect_same_rows(a, b, hit);
        const struct kv_image_state state = eng_session_state(b->session);
        EXPECT_EQ_U32(state.replay_at, hit);
        /* Clipped at hit - 16, and no more than an image holds. */
        EXPECT_EQ_U32(state.encoder_first, hit + 21 - 32);
        EXPECT_EQ_U32(state.decoder_first, hit + 5);
        EXPECT_EQ_U32(state.tokens, hit + 21);
        /* Chunk sizes do not show in a replay either. */
        rig_rows_only(c, a, hit);
        rig_replay(c, ids, hit - 16, hit + 21, 64);
        expect_same(b, c);
        /* Nor does a restore after it, at the position and a cut below. */
        rig_export(b);
        rig_restore(c, b, ids, hit + 21);
        rig_prefill(b, ids, hit + 30);
        rig_prefill(c, ids, hit + 30);
        expect_same(b, c);
    }
}

static bool same_after_replay(struct rig *live, struct rig *other, uint32_t hit, uint32_t depth)
{
    const struct kv_layout *layout = live->layout;
    const uint32_t to = hit + 20;

    rig_reset(live);
    rig_prefill(live, ids, hit);
    rig_rows_only(other, live, hit);
    rig_replay(other, ids, hit - depth, to, 64);
    rig_prefill(live, ids, to);
    rig_export(live);
    rig_export(other);

    /* Window rows of positions [hit - 15, to): what a query at hit or later reads. */
    bool same = memcmp(eng_session_logits(live->session), eng_session_logits(other->session),
                       layout->vocab_tokens * sizeof(float)) == 0;
    const uint32_t skip = hit - 15 - kv_layout_image_base(layout, to);
    for (uint32_t layer = 0; layer < layout->encoder_layers; layer++) {
        const uint32_t offset =
            kv_layout_window_offset(layout, layer) + skip * layout->window_row_bytes;
        const size_t bytes = (size_t)(to - hit + 15) * layout->window_row_bytes;
        same = same && memcmp(live->image + offset, other->image + offset, bytes) == 0;
    }
    for (uint32_t page = 0; page < kv_pages_for(to); page++)
        same = same && memcmp(live->pages[page], other->pages[page], layout->page_bytes) == 0;
    return same;
}

/* Each of 8 encoder layers reaches W - 1 = 15 tokens back, so 120 replayed tokens are enough. */
static void test_exact_replay(struct rig *a, struct rig *b)
{
    bool shorter_differs = false;
    for (uint32_t hit = 200; hit < 208; hit++) {
        EXPECT(same_after_replay(a, b, hit, 121));
        EXPECT(same_after_replay(a, b, hit, 120));
        /* No mark, and in everything the session that never lost its windows, also later. */
        EXPECT_EQ_U32(eng_session_state(b->session).replay_at, 0);
        expect_same(a, b);
        const uint32_t cut = kv_image_cut(a->layout, &a->state, hit + 6);
        EXPECT_EQ_U32(cut, (hit + 6) / 2 * 2);
        EXPECT_EQ_U32(kv_image_cut(b->layout, &b->state, hit + 6), cut);
        eng_session_cut(a->session, cut);
        eng_session_cut(b->session, cut);
        rig_prefill(a, ids, hit + 30);
        rig_prefill(b, ids, hit + 30);
        expect_same(a, b);
    }
    /* One row too few, through eight layers of rounding, shows at some positions only. */
    for (uint32_t hit = 200; hit < 260 && !shorter_differs; hit++) {
        shorter_differs = !same_after_replay(a, b, hit, 119);
        EXPECT_EQ_U32(eng_session_state(b->session).replay_at, hit);
    }
    EXPECT(shorter_differs);
    EXPECT(!same_after_replay(a, b, 200, 16));
    /* From the start it is no replay at all. */
    EXPECT(same_after_replay(a, b, 60, 60));
    EXPECT_EQ_U32(eng_session_state(b->session).replay_at, 0);
}

static void test_sampling(struct rig *a)
{
    const uint32_t vocab = a->layout->vocab_tokens;
    uint32_t best = 0, seen[512] = {0};

    rig_reset(a);
    rig_prefill(a, ids, 50);
    const float *logits = eng_session_logits(a->session);
    for (uint32_t i = 1; i < vocab; i++)
        if (logits[i] > logits[best]) best = i;
    const struct eng_sampling greedy = {.temperature = 0, .top_p = 1};
    EXPECT_EQ_U32(eng_session_sample(a->session, &greedy), best);
    double sum = 0, expected_best;
    for (uint32_t i = 0; i < vocab; i++)
        sum += exp((double)logits[i] - (double)logits[best]);
    expected_best = 1 / sum;
    uint32_t above = 0;
    for (uint32_t i = 0; i < vocab; i++)
        above += logits[i] > logits[best] - 1.0f;
    for (uint64_t seed = 0; seed < 4000; seed++) {
        struct eng_sampling sampling = {.temperature = 1, .top_p = 1, .seed = seed};
        const uint32_t token = eng_session_sample(a->session, &sampling);
        EXPECT_EQ_U32(eng_session_sample(a->session, &sampling), token);
        EXPECT(token < vocab);
        seen[token]++;
        sampling.top_k = 1;
        EXPECT_EQ_U32(eng_session_sample(a->session, &sampling), best);
        sampling.top_k = above;
        EXPECT(logits[eng_session_sample(a->session, &sampling)] > logits[best] - 1.0f);
        sampling.top_k = 0;
        sampling.top_p = (float)expected_best * 0.9f;
        EXPECT_EQ_U32(eng_session_sample(a->session, &sampling), best);
    }
    const double share = (double)seen[best] / 4000;
    EXPECT(fabs(share - expected_best) < 4 * sqrt(expected_best / 4000) + 1e-3);
}

static void test_logits_are_sane(struct rig *a)
{
    double square = 0;
    rig_reset(a);
    rig_prefill(a, ids, 200);
    for (uint32_t i = 0; i < 512; i++)
        square += pow((double)eng_session_logits(a->session)[i], 2);
    EXPECT(sqrt(square / 512) > 0.5);
    EXPECT(sqrt(square / 512) < 8);
}

/* A prompt with one image token in it. */
static void image_prefill(struct rig *a, uint32_t count)
{
    uint32_t prompt[RIG_TOKENS];
    for (uint32_t i = 0; i < count; i++)
        prompt[i] = (i * 2654435761u >> 20) % 509;
    if (count > 30) prompt[30] = 510;
    rig_reset(a);
    rig_prefill(a, prompt, count);
    rig_export(a);
}

struct digest {
    uint32_t page, image, logits;
};

static struct digest run_digest(const char *dir, enum eng_isa isa, uint32_t threads)
{
    struct eng_model *model = fixture_open_isa(dir, isa, threads);
    struct rig a;
    rig_init(&a, model);
    EXPECT_EQ_STR(eng_model_isa(model), eng_isa_name(isa));
    EXPECT_EQ_STR(eng_model_family(model), eng_isa_family(isa));
    image_prefill(&a, 150);
    const struct digest digest = {
        .page = kv_checksum(a.pages[0] + 256, a.layout->page_bytes - 256),
        .image = kv_checksum(a.image + 256, a.layout->image_bytes - 256),
        .logits = kv_checksum(eng_session_logits(a.session), 512 * sizeof(float)),
    };
    rig_fini(&a);
    eng_model_close(model);
    return digest;
}

/* Every instruction set and number of threads: within a family the same bits; those of "fp32" are
 * the same from build to build, because checkpoints say which family made them and no more: other
 * bits need another family's name.  That they are right is the oracle's business (tests/oracle).
 * Printed by `build/tests/test_engine_cpu digests`. */
static void test_bits_of_a_family(void)
{
    static const struct digest want = {0x26b92418u, 0xfe6279dbu, 0x195e43bau};
    char dir[64];

    fixture_make_plain_model(dir, 7);
    for (unsigned isa = ENG_ISA_PORTABLE; isa < ENG_ISA_COUNT; isa++) {
        if (eng_isa_missing((enum eng_isa)isa) != NULL) continue;
        const struct digest one = run_digest(dir, (enum eng_isa)isa, 1);
        for (uint32_t threads = 2; threads <= 3; threads++) {
            const struct digest more = run_digest(dir, (enum eng_isa)isa, threads);
            EXPECT_EQ_MEM(&more, &one, sizeof(one));
        }
        if (isa == ENG_ISA_AMX) continue;
        EXPECT_EQ_U32(one.page, want.page);
        EXPECT_EQ_U32(one.image, want.image);
        EXPECT_EQ_U32(one.logits, want.logits);
    }
    fixture_remove_model(dir);
}

static int print_digests(void)
{
    char dir[64];

    fixture_make_plain_model(dir, 7);
    const struct digest made = run_digest(dir, ENG_ISA_PORTABLE, 1);
    fixture_remove_model(dir);
    (void)printf("{0x%08xu, 0x%08xu, 0x%08xu}\n", made.page, made.image, made.logits);
    return EXIT_SUCCESS;
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "digests") == 0) return print_digests();

    char dir[64];
    struct rig rigs[3];

    fixture_ids(ids, RIG_TOKENS, 11);
    test_kernel_variants();
    test_attend_is_softmax();
    test_exp();
    test_top();
    test_bits_of_a_family();

    fixture_make_model(dir, 2);
    struct eng_model *model = fixture_open(dir, ENG_BACKEND_CPU);
    fixture_remove_model(dir);
    for (int i = 0; i < 3; i++)
        rig_init(&rigs[i], model);
    test_logits_are_sane(&rigs[0]);
    test_replay_reads_only(&rigs[0], &rigs[1], &rigs[2]);
    test_exact_replay(&rigs[0], &rigs[1]);
    test_sampling(&rigs[0]);
    for (int i = 0; i < 3; i++)
        rig_fini(&rigs[i]);
    eng_model_close(model);
    HARNESS_END();
}
