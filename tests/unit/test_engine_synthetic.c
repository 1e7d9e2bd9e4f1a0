/* The synthetic backend tells right bytes from wrong ones, wherever they are, and takes any layout.
 */

#include "tests/unit/test_engine_fixture.h"

#include <time.h>

static uint32_t ids[RIG_TOKENS];

static void load_rows(struct rig *to, const struct rig *from)
{
    rig_reset(to);
    for (int i = 0; i < RIG_PAGES; i++)
        memcpy(to->pages[i], from->pages[i], from->layout->page_bytes);
}

static uint64_t wrong_after_import(struct rig *to, const struct rig *from)
{
    const uint64_t before = eng_model_wrong_bytes(to->model);
    EXPECT(eng_session_import(to->session, from->image, &from->state, ids, from->state.tokens) ==
           KV_OK);
    return eng_model_wrong_bytes(to->model) - before;
}

static void test_every_row_is_checked(struct rig *a, struct rig *b)
{
    const struct kv_layout *layout = a->layout;
    const uint32_t end = KV_PAGE_ROWS_OFFSET + layout->rows_bytes_per_page;

    rig_reset(a);
    rig_prefill(a, ids, 256);
    rig_export(a);
    load_rows(b, a);
    EXPECT_EQ_U64(wrong_after_import(b, a), 0);
    for (uint32_t at = KV_PAGE_IDS_OFFSET; at < end; at += 61) {
        b->pages[1][at] ^= 0x10;
        EXPECT_EQ_U64(wrong_after_import(b, a), at < KV_PAGE_ROWS_OFFSET ? 4 : 1);
        b->pages[1][at] ^= 0x10;
    }
    /* Two pages swapped: right bytes in the wrong place. */
    uint8_t *page = b->pages[0];
    b->pages[0] = b->pages[1];
    b->pages[1] = page;
    EXPECT(wrong_after_import(b, a) > 10000);
}

static void test_every_window_row_is_checked(struct rig *a, struct rig *b)
{
    const struct kv_layout *layout = a->layout;
    rig_reset(a);
    rig_prefill(a, ids, 33);
    while (rig_tokens(a) < 101)
        eng_decode_token(a->session, ids[rig_tokens(a)]);
    rig_export(a);
    load_rows(b, a);
    EXPECT_EQ_U64(wrong_after_import(b, a), 0);
    for (uint32_t at = KV_IMAGE_HEADER_BYTES; at < layout->tails_offset + 3 * 512; at += 37) {
        a->image[at] ^= 1;
        EXPECT_EQ_U64(wrong_after_import(b, a), 1);
        a->image[at] ^= 1;
    }
}

static void test_check_at_prefill_and_rows_only(struct rig *a, struct rig *b)
{
    rig_reset(a);
    rig_prefill(a, ids, 200);
    load_rows(b, a);
    uint64_t before = eng_model_wrong_bytes(a->model);
    eng_session_rows_only(b->session, ids, 200);
    EXPECT_EQ_U64(eng_model_wrong_bytes(a->model), before);
    b->pages[0][2000] ^= 1;
    eng_session_rows_only(b->session, ids, 200);
    EXPECT_EQ_U64(eng_model_wrong_bytes(a->model), before + 1);
    rig_replay(b, ids, 184, 230, 64);
    EXPECT_EQ_U64(eng_model_wrong_bytes(a->model), before + 2);
    b->pages[0][2000] ^= 1;
    rig_prefill(b, ids, 240);
    EXPECT_EQ_U64(eng_model_wrong_bytes(a->model), before + 2);
    rig_prefill(a, ids, 240);
    expect_same_rows(a, b, 240);
}

/* Other history, same ids afterwards: nothing may coincide. */
static void test_history_matters(struct rig *a, struct rig *b)
{
    uint32_t others[64];
    memcpy(others, ids, sizeof(others));
    others[0] ^= 1;
    rig_reset(a);
    rig_reset(b);
    rig_prefill(a, ids, 64);
    rig_prefill(b, others, 64);
    const uint32_t last = eng_model_layout(a->model)->main_offset[3] + 63 * 36;
    EXPECT(memcmp(a->pages[0] + last, b->pages[0] + last, 36) != 0);
    EXPECT(memcmp(eng_session_logits(a->session), eng_session_logits(b->session), 64) != 0);
}

static void test_speed(struct rig *a)
{
    struct timespec start, end;
    uint64_t tokens = 0;
    EXPECT(clock_gettime(CLOCK_MONOTONIC, &start) == 0);
    for (int n = 0; n < 40; n++) {
        rig_reset(a);
        rig_prefill(a, ids, 512);
        tokens += 512;
    }
    EXPECT(clock_gettime(CLOCK_MONOTONIC, &end) == 0);
    const double seconds =
        (double)(end.tv_sec - start.tv_sec) + 1e-9 * (double)(end.tv_nsec - start.tv_nsec);
    (void)printf("synthetic: %.0f tokens/s\n", (double)tokens / seconds);
    EXPECT(seconds < 10); /* Far below what it should be, so that a busy machine does not fail. */
}

/* The real model's config, with Engram and drafting. */
static void test_real_layout(void)
{
    char dir[] = "/tmp/eng-test-XXXXXX", path[64], real[4096];
    struct rig a, b;

    EXPECT(mkdtemp(dir) != NULL);
    (void)snprintf(path, sizeof(path), "%s/config.json", dir);
    (void)snprintf(real, sizeof(real), "%s/engine/model/configs/v41-flash.json",
                   getenv("CACHED_SOURCE_ROOT"));
    EXPECT(symlink(real, path) == 0);
    struct eng_model *model = fixture_open(dir, ENG_BACKEND_SYNTHETIC);
    EXPECT(unlink(path) == 0 && rmdir(dir) == 0);
    const struct kv_layout *layout = eng_model_layout(model);
    EXPECT_EQ_STR(eng_model_name(model), "DeepSeek-V4.1-Flash");
    EXPECT_EQ_U32(layout->page_bytes, 114688);
    EXPECT_EQ_U32(layout->window_row_bytes, 528);
    EXPECT_EQ_U32(layout->sources[3].main_bytes, 288);
    EXPECT_EQ_U32(layout->sources[3].index_bytes, 68);
    EXPECT_EQ_U32(layout->sources[0].tail_bytes, 4096);
    EXPECT_EQ_U32(layout->draft_stages, 3);
    EXPECT_EQ_U32(layout->encoder_layers, 20);

    rig_init(&a, model);
    rig_init(&b, model);
    rig_prefill(&a, ids, 301);
    rig_export(&a);
    EXPECT_EQ_U32(a.state.draft_first, 301 - 128);
    rig_restore(&b, &a, ids, 301);
    rig_prefill(&a, ids, 310);
    rig_prefill(&b, ids, 310);
    expect_same(&a, &b);
    EXPECT_EQ_U64(eng_model_wrong_bytes(model), 0);
    a.image[kv_layout_window_offset(layout, 42) + 100 * 528] ^= 1;
    EXPECT_EQ_U64(wrong_after_import(&b, &a), 1);
    rig_fini(&a);
    rig_fini(&b);
    eng_model_close(model);
}

static void test_threads_bound(void)
{
    struct eng_options options = {.backend = ENG_BACKEND_SYNTHETIC,
                                  .spare_tokens = 16,
                                  .threads = KV_ENGINE_THREADS_MAX + 1};
    struct eng_model *model = NULL;
    struct kv_error err = {0};
    EXPECT(eng_model_open(&options, &model, &err) == KV_INVALID);
    EXPECT(strstr(err.text, "threads: at most 256, found 257") != NULL);
    options.threads = KV_ENGINE_THREADS_MAX;
    EXPECT(eng_model_open(&options, &model, &err) == KV_OK);
    eng_model_close(model);
}

int main(void)
{
    test_threads_bound();
    struct rig a, b;
    fixture_ids(ids, RIG_TOKENS, 8);
    struct eng_model *model = fixture_open(NULL, ENG_BACKEND_SYNTHETIC);
    EXPECT_EQ_STR(eng_model_name(model), "tiny");
    rig_init(&a, model);
    rig_init(&b, model);
    test_every_row_is_checked(&a, &b);
    test_every_window_row_is_checked(&a, &b);
    test_check_at_prefill_and_rows_only(&a, &b);
    test_history_matters(&a, &b);
    test_speed(&a);
    rig_fini(&a);
    rig_fini(&b);
    eng_model_close(model);
    test_real_layout();
    HARNESS_END();
}
