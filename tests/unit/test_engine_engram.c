/*
 * Which table rows a session reads, wherever it comes from: ids before a run count when it was
 * restored, cut, put back or replays, and image tokens block them.
 */

#include "engine/backend/backend.h"
#include "engine/model/engram.h"
#include "kvstore/base/bytes.h"
#include "tests/unit/test_engine_fixture.h"

enum { IMAGE = 510, VOCAB = 512 };

struct watch {
    const struct eng_config *config;
    struct eng_engram_ids ids;
    uint32_t compressed[VOCAB];
    uint32_t tokens[RIG_TOKENS]; /* What the session runs over. */
    uint32_t seen;               /* Rows looked at since the last time it was asked. */
};

static struct watch watch;
static uint64_t random_state = 5;

static uint32_t below(uint32_t end)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 33) % end;
}

static void random_tokens(void)
{
    for (uint32_t i = 0; i < RIG_TOKENS; i++)
        watch.tokens[i] = below(5) == 0 ? IMAGE : below(VOCAB);
}

static void look(void *context, const struct eng_probe_rows *rows, const uint64_t *table_rows,
                 uint32_t columns)
{
    struct watch *own = context;
    struct eng_engram_hash hash;
    const uint32_t index = rows->layer == own->config->engram_layers[0] ? 0 : 1;
    EXPECT_EQ_U32(rows->layer, own->config->engram_layers[index]);

    eng_engram_hash_init(&hash, own->config, index);
    EXPECT_EQ_U32(columns, hash.columns);
    for (uint32_t i = 0; i < rows->count; i++) {
        uint32_t newest_first[ENG_NGRAM_MAX], ngram[ENG_NGRAM_MAX];
        uint64_t want[ENG_ENGRAM_COLUMNS_MAX];
        const uint32_t position = rows->first + i;
        const uint32_t known = KV_MIN(position + 1, hash.max_ngram);
        for (uint32_t s = 0; s < known; s++)
            newest_first[s] = own->tokens[position - s];
        eng_engram_context(&own->ids, newest_first, known, hash.max_ngram, ngram);
        eng_engram_rows(&hash, ngram, want);
        EXPECT_EQ_MEM(table_rows + (size_t)i * columns, want, columns * sizeof(*want));
        own->seen++;
    }
}

static void expect_seen(uint32_t positions)
{
    EXPECT_EQ_U32(watch.seen, positions * watch.config->engram_count);
    watch.seen = 0;
}

static void read_compressed(const char *dir)
{
    char path[128];
    (void)snprintf(path, sizeof(path), "%s/engram_ids.bin", dir);
    FILE *file = fopen(path, "rb");
    EXPECT(file != NULL);
    EXPECT(fread(watch.compressed, 4, VOCAB, file) == VOCAB);
    EXPECT(fclose(file) == 0);
}

/* Tokens runs whose end is rejected: the next run must not look back at what was rejected. */
static void test_rejected(struct rig *rig)
{
    uint32_t wrong[8];
    for (uint32_t kept = 1; kept < 6; kept++)
        for (uint32_t round = 0; round < 4; round++) {
            const uint32_t at = rig_tokens(rig);
            uint32_t right[8];
            memcpy(right, watch.tokens + at, sizeof(right));
            for (uint32_t i = 0; i < 6; i++)
                wrong[i] = i < kept ? right[i] : (round % 2 ? IMAGE : below(VOCAB));
            memcpy(watch.tokens + at, wrong, 6 * sizeof(*wrong));
            eng_tokens_begin(rig->session, wrong, 6);
            eng_pass(rig->model,
                     &(struct eng_piece){.session = rig->session, .encode = 6, .decode = 6}, 1);
            eng_verify_keep(rig->session, kept);
            expect_seen(6);
            memcpy(watch.tokens + at, right, sizeof(right));
        }
}

static void test_moves(struct rig *a, struct rig *b)
{
    for (uint32_t at = 1; at < 60; at += 1 + at % 4) {
        rig_reset(a);
        random_tokens();
        rig_replay(a, watch.tokens, 0, at, 1 + below(9));
        expect_seen(at);
        rig_export(a);
        rig_restore(b, a, watch.tokens, at);
        for (uint32_t i = 0; i < 5; i++)
            steps_token(b->session, watch.tokens[at + i]);
        expect_seen(5);
        rig_prefill(b, watch.tokens, at + 30);
        expect_seen(25);
        rig_export(b);
        const uint32_t cut = kv_image_cut(b->layout, &b->state, at + 25);
        EXPECT(cut > at);
        eng_session_cut(b->session, cut);
        /* What comes after the cut is another text. */
        for (uint32_t i = cut; i < cut + 100; i++)
            watch.tokens[i] = below(4) == 0 ? IMAGE : below(VOCAB);
        rig_prefill(b, watch.tokens, cut + 9);
        expect_seen(cut + 9 - cut);
        test_rejected(b);
    }
}

/* A replay looks at the true ids before its start. */
static void test_replay(struct rig *a, struct rig *b)
{
    for (uint32_t at = 20; at < 60; at += 7) {
        rig_reset(a);
        random_tokens();
        rig_prefill(a, watch.tokens, at);
        expect_seen(at);
        rig_reset(b);
        for (int i = 0; i < RIG_PAGES; i++)
            memcpy(b->pages[i], a->pages[i], a->layout->page_bytes);
        eng_session_rows_only(b->session, watch.tokens, at);
        rig_replay(b, watch.tokens, at - 16, at + 10, 5);
        expect_seen(26);
    }
}

int main(void)
{
    char dir[64];
    struct rig a, b;
    fixture_make_model(dir, 8);
    struct eng_model *model = fixture_open(dir, ENG_BACKEND_CPU);
    const struct eng_probe probe = {.context = &watch, .engram = look};

    read_compressed(dir);
    watch.config = eng_model_config(model);
    EXPECT_EQ_U32(watch.config->engram_count, 2);
    watch.ids = (struct eng_engram_ids){
        .compressed = watch.compressed, .pad = watch.compressed[2], .image = IMAGE};
    eng_model_set_probe(model, &probe);
    rig_init(&a, model);
    rig_init(&b, model);
    test_moves(&a, &b);
    test_replay(&a, &b);
    rig_fini(&a);
    rig_fini(&b);
    eng_model_close(model);
    fixture_remove_model(dir);
    HARNESS_END();
}
