/*
 * What a probe sees is what the engine has, for every row once and in order; what it overwrites is
 * what the engine goes on with.
 */

#include "engine/probe.h"
#include "kvstore/base/bytes.h"
#include "tests/unit/test_engine_fixture.h"

enum { LAYERS = 16, ENCODER = 8, WIDTH = 4 * 128, WINDOW = 16, TOPK = 16, BLOCKS = 4, VOCAB = 512 };
enum { PROBED = 90, ROW_BYTES = 66 };

/* Everything of one run, by layer and position. */
struct record {
    float streams[LAYERS][PROBED][WIDTH], premix[LAYERS][PROBED][4]; /* After the layer. */
    float before[LAYERS][PROBED][WIDTH], before_premix[LAYERS][PROBED][4];
    uint8_t windows[LAYERS][PROBED][ROW_BYTES];
    uint32_t lists[LAYERS][PROBED][TOPK], list_counts[LAYERS][PROBED];
    uint32_t blocks[PROBED][BLOCKS], block_counts[PROBED];
    uint32_t experts[LAYERS][PROBED][2];
    float weights[LAYERS][PROBED][2];
    float logits[PROBED][VOCAB];
    uint32_t seen[LAYERS], logits_seen; /* Rows. */
    const struct record *feed;          /* Overwrite with this record's. */
    uint32_t feed_layer;
    bool feed_choices;
};

static void before_layer(void *context, const struct eng_probe_rows *rows, float *streams,
                         float *premix)
{
    struct record *record = context;
    const struct record *feed = record->feed;
    if (feed != NULL && rows->layer == record->feed_layer) {
        memcpy(streams, feed->before[rows->layer][rows->first],
               rows->count * sizeof(feed->before[0][0]));
        memcpy(premix, feed->before_premix[rows->layer][rows->first],
               rows->count * sizeof(feed->before_premix[0][0]));
    }
    memcpy(record->before[rows->layer][rows->first], streams,
           rows->count * sizeof(record->before[0][0]));
    memcpy(record->before_premix[rows->layer][rows->first], premix,
           rows->count * sizeof(record->before_premix[0][0]));
}

static void after_layer(void *context, const struct eng_probe_rows *rows, const float *streams,
                        const float *premix)
{
    struct record *record = context;
    memcpy(record->streams[rows->layer][rows->first], streams,
           rows->count * sizeof(record->streams[0][0]));
    memcpy(record->premix[rows->layer][rows->first], premix,
           rows->count * sizeof(record->premix[0][0]));
    record->seen[rows->layer] += rows->count;
}

static void window_row(void *context, const struct eng_probe_rows *rows, const uint8_t *row)
{
    struct record *record = context;
    EXPECT_EQ_U32(rows->count, 1);
    memcpy(record->windows[rows->layer][rows->first], row, ROW_BYTES);
}

static void topk(void *context, const struct eng_probe_rows *rows, uint32_t *list, uint32_t *counts)
{
    struct record *record = context;
    for (uint32_t i = 0; i < rows->count; i++) {
        const uint32_t position = rows->first + i;
        uint32_t *own = list + (size_t)i * TOPK;
        if (record->feed_choices) {
            counts[i] = record->feed->list_counts[rows->layer][position];
            memcpy(own, record->feed->lists[rows->layer][position], TOPK * sizeof(*own));
        }
        for (uint32_t k = 1; k < counts[i]; k++)
            EXPECT(own[k] > own[k - 1]);
        record->list_counts[rows->layer][position] = counts[i];
        memcpy(record->lists[rows->layer][position], own, TOPK * sizeof(*own));
    }
}

static void candidates(void *context, const struct eng_probe_rows *rows, uint32_t *blocks,
                       uint32_t *counts)
{
    struct record *record = context;
    EXPECT_EQ_U32(rows->layer, ENCODER);
    memcpy(record->blocks[rows->first], blocks, rows->count * sizeof(record->blocks[0]));
    memcpy(&record->block_counts[rows->first], counts, rows->count * sizeof(*counts));
}

static void experts(void *context, const struct eng_probe_rows *rows, uint32_t *chosen,
                    float *weights)
{
    struct record *record = context;
    if (record->feed_choices) {
        memcpy(chosen, record->feed->experts[rows->layer][rows->first], rows->count * 8);
        memcpy(weights, record->feed->weights[rows->layer][rows->first], rows->count * 8);
    }
    memcpy(record->experts[rows->layer][rows->first], chosen, rows->count * 8);
    memcpy(record->weights[rows->layer][rows->first], weights, rows->count * 8);
}

static void logits(void *context, const struct eng_probe_rows *rows, const float *values)
{
    struct record *record = context;
    memcpy(record->logits[rows->first], values, rows->count * sizeof(record->logits[0]));
    record->logits_seen += rows->count;
}

static void run(struct rig *rig, const uint32_t *ids, struct record *record, bool all_logits)
{
    const struct eng_probe probe = {
        .context = record,
        .all_logits = all_logits,
        .before_layer = before_layer,
        .after_layer = after_layer,
        .window_row = window_row,
        .candidates = candidates,
        .topk = topk,
        .experts = experts,
        .logits = logits,
    };
    rig_reset(rig);
    eng_model_set_probe(rig->model, &probe);
    rig_replay(rig, ids, 0, PROBED, 40);
    eng_model_set_probe(rig->model, NULL);
    rig_export(rig);
}

static struct record *record_make(void)
{
    struct record *record = calloc(1, sizeof(*record));
    EXPECT(record != NULL);
    return record;
}

static void test_sees_all(struct rig *a, struct rig *b, const uint32_t *ids)
{
    struct record *record = record_make();
    rig_reset(b);
    rig_prefill(b, ids, PROBED);
    run(a, ids, record, true);
    expect_same(a, b); /* Looking changes nothing. */
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        EXPECT_EQ_U32(record->seen[layer], layer < ENCODER ? PROBED : WINDOW);
    EXPECT_EQ_U32(record->logits_seen, WINDOW);
    EXPECT_EQ_MEM(record->logits[PROBED - 1], eng_session_logits(a->session), VOCAB * 4);
    for (uint32_t layer = 1; layer < LAYERS; layer++) {
        const uint32_t first = layer < ENCODER ? 0 : PROBED - WINDOW;
        EXPECT_EQ_MEM(record->before[layer][first], record->streams[layer - 1][first],
                      (PROBED - first) * sizeof(record->streams[0][0]));
        EXPECT_EQ_MEM(record->before_premix[layer][first], record->premix[layer - 1][first],
                      (PROBED - first) * sizeof(record->premix[0][0]));
    }
    const uint32_t base = kv_layout_image_base(a->layout, PROBED);
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint32_t p = PROBED - WINDOW; p < PROBED; p++)
            EXPECT_EQ_MEM(record->windows[layer][p],
                          a->image + kv_layout_window_offset(a->layout, layer) +
                              (size_t)(p - base) * ROW_BYTES,
                          ROW_BYTES);
    for (uint32_t p = 0; p < PROBED; p++) {
        EXPECT_EQ_U32(record->list_counts[2][p], KV_MIN((p + 1) / 2, (uint32_t)TOPK));
        EXPECT_EQ_U32(record->list_counts[3][p], 0); /* A Reuse layer. */
        EXPECT(record->experts[5][p][0] < record->experts[5][p][1]);
    }
    for (uint32_t p = PROBED - WINDOW; p < PROBED; p++) {
        EXPECT_EQ_U32(record->block_counts[p], BLOCKS);
        EXPECT_EQ_U32(record->blocks[p][BLOCKS - 1], p / 8); /* The newest is in. */
        EXPECT_EQ_U32(record->list_counts[10][p], TOPK);
    }
    free(record);
}

static void test_fed_input_counts(struct rig *a, struct rig *b, const uint32_t *ids,
                                  const uint32_t *others)
{
    struct record *source = record_make(), *record = record_make();
    run(a, ids, source, false);
    for (uint32_t layer = 0; layer < LAYERS; layer += 5) {
        memset(record, 0, sizeof(*record));
        record->feed = source;
        record->feed_layer = layer;
        run(b, others, record, false);
        const uint32_t first = layer < ENCODER ? 0 : PROBED - WINDOW;
        EXPECT_EQ_MEM(record->before[layer][first], source->before[layer][first],
                      (PROBED - first) * sizeof(record->before[0][0]));
        /* From the first layer on, other tokens make no difference at all. */
        const bool same = memcmp(eng_session_logits(a->session), eng_session_logits(b->session),
                                 VOCAB * sizeof(float)) == 0;
        EXPECT(same == (layer == 0));
        if (layer == 0) EXPECT_EQ_MEM(a->image + 256, b->image + 256, a->layout->image_bytes - 256);
        /* A layer without global rows depends on its own input alone. */
        if (layer == 0)
            EXPECT_EQ_MEM(record->streams[0], source->streams[0], sizeof(record->streams[0]));
    }
    free(source);
    free(record);
}

static void test_fed_choices_count(struct rig *a, struct rig *b, const uint32_t *ids,
                                   const uint32_t *others)
{
    struct record *source = record_make(), *record = record_make();
    const size_t logits_bytes = VOCAB * sizeof(float);
    run(a, others, source, false);
    memset(record, 0, sizeof(*record));
    record->feed = source;
    record->feed_layer = LAYERS;
    record->feed_choices = true;
    run(b, ids, record, false);
    EXPECT_EQ_MEM(record->lists[2], source->lists[2], sizeof(source->lists[2]));
    EXPECT_EQ_MEM(record->experts, source->experts, sizeof(source->experts));
    /* Somebody else's choices change the result; one's own do not. */
    run(a, ids, source, false);
    EXPECT(memcmp(eng_session_logits(a->session), eng_session_logits(b->session), logits_bytes) !=
           0);
    run(b, ids, record, false);
    EXPECT_EQ_MEM(eng_session_logits(a->session), eng_session_logits(b->session), logits_bytes);
    free(source);
    free(record);
}

int main(void)
{
    char dir[64];
    uint32_t ids[RIG_TOKENS], others[RIG_TOKENS];
    struct rig a, b;

    fixture_ids(ids, RIG_TOKENS, 31);
    fixture_ids(others, RIG_TOKENS, 32);
    fixture_make_plain_model(dir, 4);
    struct eng_model *model = fixture_open(dir, ENG_BACKEND_CPU);
    fixture_remove_model(dir);
    rig_init(&a, model);
    rig_init(&b, model);
    test_sees_all(&a, &b, ids);
    test_fed_input_counts(&a, &b, ids, others);
    test_fed_choices_count(&a, &b, ids, others);
    rig_fini(&a);
    rig_fini(&b);
    eng_model_close(model);
    HARNESS_END();
}
