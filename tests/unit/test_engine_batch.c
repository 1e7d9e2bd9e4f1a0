/*
 * Passes over several sessions: no bit depends on how rows were put into them, and a backend that
 * mixes sessions up in one of several small ways is found.
 */

#include "engine/backend/backend.h"
#include "tests/unit/engine_schedule.h"
#include "tests/unit/test_engine_fixture.h"

static struct eng_model *open_with(const char *dir, const struct eng_backend_ops *ops,
                                   uint32_t pass_rows, bool prefill_all)
{
    const struct eng_options options = {
        .backend = dir != NULL ? ENG_BACKEND_CPU : ENG_BACKEND_SYNTHETIC,
        .model_dir = dir,
        .spare_tokens = RIG_SPARE,
        .pass_rows = pass_rows,
        .prefill_all = prefill_all,
    };
    struct eng_model *model = NULL;
    EXPECT(eng_model_open_with(&options, ops, &model, NULL) == KV_OK);
    return model;
}

static void test_backend(const char *dir, const struct eng_backend_ops *ops, bool prefill_all)
{
    static const uint32_t sizes[] = {1, 3, 16, 61, 256};
    struct eng_model *alone = open_with(dir, ops, 1, prefill_all);
    for (uint64_t seed = 1; seed <= (prefill_all ? 1 : 2); seed++) {
        struct reference *reference = reference_make(alone, &host_pages, seed, prefill_all);
        for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
            struct eng_model *model = open_with(dir, ops, sizes[i], prefill_all);
            EXPECT_EQ_U32(
                schedule_differing(reference, model, &host_pages, seed + 10 * i, prefill_all), 0);
            EXPECT_EQ_U64(eng_model_wrong_bytes(model), 0);
            eng_model_close(model);
        }
        free(reference);
    }
    eng_model_close(alone);
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

    struct eng_model *alone = open_with(dir, &eng_backend_cpu, 1, false);
    struct reference *reference = reference_make(alone, &host_pages, 1, false);
    for (int i = 0; i < 5; i++) {
        struct eng_model *model = open_with(dir, &ops[i], 40, false);
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
    test_backend(NULL, &eng_backend_synthetic, false);
    test_backend(NULL, &eng_backend_synthetic, true);
    test_backend(dir, &eng_backend_cpu, false);
    test_backend(dir, &eng_backend_cpu, true);
    test_planted(dir);
    fixture_remove_model(dir);
    HARNESS_END();
}
