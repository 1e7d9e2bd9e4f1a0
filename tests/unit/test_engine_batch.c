/*
 * Passes over several sessions: no bit depends on how rows were put into them, and a backend that
 * mixes sessions up in one of several small ways is found.
 */

#include "engine/backend/backend.h"
#include "tests/unit/engine_schedule.h"
#include "tests/unit/test_engine_fixture.h"

#include <math.h>

enum mode { CED, PREFILL_ALL, QUANT_OFF };

struct how {
    enum eng_isa isa;
    uint32_t threads;
};

static struct eng_model *open_how(const char *dir, const struct eng_backend_ops *ops,
                                  uint32_t pass_rows, enum mode mode, struct how how)
{
    const struct eng_options options = {
        .backend = dir != NULL ? ENG_BACKEND_CPU : ENG_BACKEND_SYNTHETIC,
        .model_dir = dir,
        .spare_tokens = RIG_SPARE,
        .isa = how.isa,
        .threads = how.threads,
        .pass_rows = pass_rows,
        .prefill_all = mode == PREFILL_ALL,
        .quant_off = mode == QUANT_OFF,
    };
    struct eng_model *model = NULL;
    EXPECT(eng_model_open_with(&options, ops, &model, NULL) == KV_OK);
    return model;
}

static struct eng_model *open_with(const char *dir, const struct eng_backend_ops *ops,
                                   uint32_t pass_rows, enum mode mode)
{
    return open_how(dir, ops, pass_rows, mode, (struct how){ENG_ISA_AUTO, 1});
}

static void test_backend(const char *dir, const struct eng_backend_ops *ops, enum mode mode)
{
    const bool all = mode == PREFILL_ALL;
    static const uint32_t sizes[] = {3, 61, 1, 16, 256};
    const size_t size_count = mode == CED ? 5 : 2;
    struct eng_model *alone = open_with(dir, ops, 1, mode);
    for (uint64_t seed = 1; seed <= (mode == CED ? 2 : 1); seed++) {
        struct reference *reference = reference_make(alone, &host_pages, seed, all);
        for (size_t i = 0; i < size_count; i++) {
            struct eng_model *model = open_with(dir, ops, sizes[i], mode);
            EXPECT_EQ_U32(schedule_differing(reference, model, &host_pages, seed + 10 * i, all), 0);
            EXPECT_EQ_U64(eng_model_wrong_bytes(model), 0);
            eng_model_close(model);
        }
        free(reference);
    }
    eng_model_close(alone);
}

/* Rows are fp32 values, and another model's. */
static void test_quant_off(const char *dir)
{
    struct eng_model *on = open_with(dir, &eng_backend_cpu, 0, CED);
    struct eng_model *off = open_with(dir, &eng_backend_cpu, 0, QUANT_OFF);
    const struct kv_layout *layout = eng_model_layout(off);
    EXPECT_EQ_U32(layout->window_row_bytes, 256);
    EXPECT_EQ_U32(layout->sources[3].main_bytes, 256);
    EXPECT_EQ_U32(layout->sources[3].index_bytes, 128);
    EXPECT_EQ_U32(layout->sources[0].tail_bytes, eng_model_layout(on)->sources[0].tail_bytes);
    const struct kv_digest a = eng_model_fingerprint(on), b = eng_model_fingerprint(off);
    EXPECT(memcmp(&a, &b, sizeof(a)) != 0);
    eng_model_close(on);
    eng_model_close(off);
}

/* Passes of a family in which instruction sets and threads change as well. */
static void test_family(const char *dir, enum eng_isa first, enum eng_isa last)
{
    if (eng_isa_missing(last) != NULL) return;
    struct eng_model *alone = open_how(dir, &eng_backend_cpu, 7, CED, (struct how){last, 1});
    struct reference *reference = reference_make(alone, &host_pages, 3, false);
    for (unsigned isa = first; isa <= last; isa++)
        for (uint32_t threads = 1; threads <= 3; threads++) {
            /* The slow ones once. */
            if (eng_isa_missing((enum eng_isa)isa) != NULL) continue;
            if (isa < ENG_ISA_AVX512 && threads != 1 + isa) continue;
            struct eng_model *model = open_how(dir, &eng_backend_cpu, 20 + 60 * threads, CED,
                                               (struct how){(enum eng_isa)isa, threads});
            EXPECT_EQ_U32(
                schedule_differing(reference, model, &host_pages, isa + 10 * threads, false), 0);
            eng_model_close(model);
        }
    free(reference);
    eng_model_close(alone);
}

/* Logits of every token of a prompt, all layers on each. */
struct heard {
    uint32_t vocab;
    float *logits;
};

static void hear(void *context, const struct eng_probe_rows *rows, const float *logits)
{
    struct heard *heard = context;
    memcpy(heard->logits + (size_t)rows->first * heard->vocab, logits,
           (size_t)rows->count * heard->vocab * sizeof(*logits));
}

static float *logits_unrounded(const char *dir, enum eng_isa isa, const uint32_t *ids,
                               uint32_t count, uint32_t *ret_vocab)
{
    const struct eng_options options = {.backend = ENG_BACKEND_CPU,
                                        .model_dir = dir,
                                        .spare_tokens = RIG_SPARE,
                                        .isa = isa,
                                        .pass_rows = 50,
                                        .quant_off = true,
                                        .prefill_all = true};
    struct eng_model *model = fixture_open_with(&options);
    struct heard heard = {.vocab = eng_model_layout(model)->vocab_tokens};
    const struct eng_probe probe = {.context = &heard, .all_logits = true, .logits = hear};
    struct rig rig;

    heard.logits = calloc((size_t)count * heard.vocab, sizeof(*heard.logits));
    EXPECT(heard.logits != NULL);
    rig_init(&rig, model);
    eng_model_set_probe(model, &probe);
    rig_prefill(&rig, ids, count);
    rig_fini(&rig);
    eng_model_close(model);
    *ret_vocab = heard.vocab;
    return heard.logits;
}

/* Without rounding, instruction sets are one model: max|a - b| <= 1e-3 max|a|, end to end. */
static void test_unrounded(const char *dir)
{
    enum { TOKENS = 300 };
    uint32_t ids[TOKENS], vocab;

    fixture_ids(ids, TOKENS, 77);
    float *want = logits_unrounded(dir, ENG_ISA_PORTABLE, ids, TOKENS, &vocab);
    for (unsigned isa = ENG_ISA_AVX2; isa < ENG_ISA_COUNT; isa++) {
        if (eng_isa_missing((enum eng_isa)isa) != NULL) continue;
        float *got = logits_unrounded(dir, (enum eng_isa)isa, ids, TOKENS, &vocab);
        double worst = 0;
        for (size_t t = 0; t < TOKENS; t++) {
            double most = 0, apart = 0;
            for (size_t i = t * vocab; i < (t + 1) * vocab; i++) {
                most = fmax(most, fabs((double)want[i]));
                apart = fmax(apart, fabs((double)want[i] - (double)got[i]));
            }
            EXPECT(most > 0.5);
            worst = fmax(worst, apart / most);
        }
        (void)printf("%s unrounded: %.2e\n", eng_isa_name((enum eng_isa)isa), worst);
        EXPECT(isa == ENG_ISA_AMX ? worst <= 1e-3 : worst == 0);
        free(got);
    }
    free(want);
}

/* ---- planted errors ---- */

/* A row of the second session lands in the first. */
static void pass_mixing_windows(struct eng_model *model, const struct eng_pass_spans *spans)
{
    uint8_t row[4096];
    eng_backend_cpu.pass(model, spans);
    if (spans->encode_count < 2) return;
    const struct eng_span *from = &spans->encode[1], *to = &spans->encode[0];
    eng_backend_cpu.window_read(from->session, 3, from->first, 1, row);
    eng_backend_cpu.window_write(to->session, 3, to->first, 1, row);
}

/* The decoder's clip is off by one when others decode as well. */
static void pass_clipping_wrongly(struct eng_model *model, const struct eng_pass_spans *spans)
{
    struct eng_session *session = spans->decode_count > 1 ? spans->decode[1].session : NULL;
    if (session != NULL) session->decoder_first++;
    eng_backend_cpu.pass(model, spans);
    if (session != NULL) session->decoder_first--;
}

/* Logits of the wrong session. */
static void pass_mixing_logits(struct eng_model *model, const struct eng_pass_spans *spans)
{
    eng_backend_cpu.pass(model, spans);
    if (spans->decode_count < 2) return;
    memcpy(spans->decode[1].session->logits, spans->decode[0].session->logits,
           model->layout.vocab_tokens * sizeof(float));
}

/* Token ids of one session are off by one position. */
static void pass_shifting_a_span(struct eng_model *model, const struct eng_pass_spans *spans)
{
    struct eng_run *run = spans->encode_count > 2 ? &spans->encode[2].session->run : NULL;
    const bool shift = run != NULL && run->ids_base == 0 && spans->encode[2].first > 0;
    if (shift) run->ids--;
    eng_backend_cpu.pass(model, spans);
    if (shift) run->ids++;
}

static void rewound_without_tails(struct eng_session *session, const uint32_t *ids)
{
    uint8_t zeros[1 << 14] = {0};
    EXPECT(session->model->tails_bytes <= sizeof(zeros));
    eng_backend_cpu.rewound(session, ids);
    if (session->tokens % 2 == 1) eng_backend_cpu.tails_write(session, session->tokens - 1, zeros);
}

static void test_planted(const char *dir)
{
    struct eng_backend_ops ops[5];
    for (int i = 0; i < 5; i++)
        ops[i] = eng_backend_cpu;
    ops[0].pass = pass_mixing_windows;
    ops[1].pass = pass_clipping_wrongly;
    ops[2].pass = pass_mixing_logits;
    ops[3].pass = pass_shifting_a_span;
    ops[4].rewound = rewound_without_tails;

    struct eng_model *alone = open_with(dir, &eng_backend_cpu, 1, CED);
    struct reference *reference = reference_make(alone, &host_pages, 1, false);
    for (int i = 0; i < 5; i++) {
        struct eng_model *model = open_with(dir, &ops[i], 40, CED);
        const uint32_t differing = schedule_differing(reference, model, &host_pages, 7, false);
        (void)printf("planted %d: %u states differ\n", i, differing);
        EXPECT(differing > 0);
        eng_model_close(model);
    }
    free(reference);
    eng_model_close(alone);
}

int main(void)
{
    char dir[64];
    fixture_make_model(dir, 9);
    test_backend(NULL, &eng_backend_synthetic, CED);
    test_backend(NULL, &eng_backend_synthetic, PREFILL_ALL);
    test_backend(dir, &eng_backend_cpu, CED);
    test_backend(dir, &eng_backend_cpu, PREFILL_ALL);
    test_backend(dir, &eng_backend_cpu, QUANT_OFF);
    test_quant_off(dir);
    test_unrounded(dir);
    test_family(dir, ENG_ISA_PORTABLE, ENG_ISA_AVX512);
    test_family(dir, ENG_ISA_AMX, ENG_ISA_AMX);
    test_planted(dir);
    fixture_remove_model(dir);
    HARNESS_END();
}
