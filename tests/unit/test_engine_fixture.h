#pragma once

/* A toy model, sessions with pages, and comparison of everything two sessions hold.  Private to
 * tests/unit/test_engine_*.c. */

#include "engine/engine.h"
#include "kvstore/format/page.h"
#include "tests/harness.h"
#include "tests/unit/engine_steps.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { RIG_PAGES = 4, RIG_TOKENS = RIG_PAGES * 128, RIG_SPARE = 16 };

struct rig {
    struct eng_model *model;
    const struct kv_layout *layout;
    struct eng_session *session;
    uint8_t *pages[RIG_PAGES];
    uint8_t *image;
    struct kv_image_state state; /* Of `image`. */
};

/* Runs mkmodel into a new directory under the temporary one; the caller removes it. */
static inline void fixture_make(char dir[64], unsigned seed, const char *how)
{
    const char *build = getenv("CACHED_BUILD_ROOT");
    char command[4300];
    if (build == NULL) SKIP("CACHED_BUILD_ROOT is not set: run through meson test");
    (void)snprintf(dir, 64, "/tmp/eng-test-XXXXXX");
    EXPECT(mkdtemp(dir) != NULL);
    (void)snprintf(command, sizeof(command), "'%s/tools/mkmodel' %s --seed %u %s >/dev/null", build,
                   how, seed, dir);
    EXPECT_EQ_I64(system(command), 0);
}

static inline void fixture_make_model(char dir[64], unsigned seed)
{
    fixture_make(dir, seed, "--config tiny");
}

/* Without Engram and drafting. */
static inline void fixture_make_plain_model(char dir[64], unsigned seed)
{
    fixture_make(dir, seed, "--config tiny --plain");
}

static inline void fixture_remove_model(const char *dir)
{
    char path[128];
    (void)snprintf(path, sizeof(path), "%s/config.json", dir);
    (void)unlink(path);
    (void)snprintf(path, sizeof(path), "%s/model.safetensors", dir);
    (void)unlink(path);
    (void)snprintf(path, sizeof(path), "%s/engram_ids.bin", dir);
    (void)unlink(path);
    (void)rmdir(dir);
}

static inline struct eng_model *fixture_open_with(const struct eng_options *options)
{
    struct eng_model *model = NULL;
    struct kv_error err = {0};
    const kv_status status = eng_model_open(options, &model, &err);
    if (status != KV_OK) (void)fprintf(stderr, "%s\n", err.text);
    EXPECT(status == KV_OK);
    return model;
}

static inline struct eng_model *fixture_open(const char *dir, enum eng_backend backend)
{
    const struct eng_options options = {
        .backend = backend, .model_dir = dir, .spare_tokens = RIG_SPARE};
    return fixture_open_with(&options);
}

static inline struct eng_model *fixture_open_isa(const char *dir, enum eng_isa isa,
                                                 uint32_t threads)
{
    const struct eng_options options = {.backend = ENG_BACKEND_CPU,
                                        .model_dir = dir,
                                        .spare_tokens = RIG_SPARE,
                                        .isa = isa,
                                        .threads = threads};
    return fixture_open_with(&options);
}

static inline void rig_init(struct rig *rig, struct eng_model *model)
{
    *rig = (struct rig){.model = model, .layout = eng_model_layout(model)};
    EXPECT(eng_session_create(model, &rig->session, NULL) == KV_OK);
    for (int i = 0; i < RIG_PAGES; i++) {
        rig->pages[i] = calloc(1, rig->layout->page_bytes);
        EXPECT(rig->pages[i] != NULL);
    }
    rig->image = calloc(1, rig->layout->image_bytes);
    EXPECT(rig->image != NULL);
    eng_session_set_pages(rig->session, rig->pages, RIG_PAGES);
}

static inline void rig_fini(struct rig *rig)
{
    eng_session_destroy(rig->session);
    for (int i = 0; i < RIG_PAGES; i++)
        free(rig->pages[i]);
    free(rig->image);
}

static inline void rig_reset(struct rig *rig)
{
    eng_session_reset(rig->session);
    eng_session_set_pages(rig->session, rig->pages, RIG_PAGES);
    for (int i = 0; i < RIG_PAGES; i++)
        memset(rig->pages[i], 0, rig->layout->page_bytes);
}

static inline uint32_t rig_tokens(const struct rig *rig)
{
    return eng_session_state(rig->session).tokens;
}

static inline void fixture_ids(uint32_t *ids, uint32_t count, uint32_t seed)
{
    uint64_t state = seed;
    for (uint32_t i = 0; i < count; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        ids[i] = (uint32_t)(state >> 40) % 500;
    }
}

static inline void rig_replay(struct rig *rig, const uint32_t *ids, uint32_t from, uint32_t to,
                              uint32_t chunk)
{
    eng_prefill_begin(rig->session, ids, from, to);
    steps_all(rig->session, chunk);
}

static inline void rig_prefill(struct rig *rig, const uint32_t *ids, uint32_t to)
{
    rig_replay(rig, ids, rig_tokens(rig), to, 64);
}

static inline void rig_export(struct rig *rig)
{
    struct kv_image_header header = {.state = eng_session_state(rig->session)};
    struct kv_error err = {0};
    rig->state = header.state;
    eng_session_export(rig->session, rig->image);
    kv_image_seal(rig->layout, rig->image, &header);
    const kv_status status = kv_image_decode(rig->layout, rig->image, &header, &err);
    if (status != KV_OK) (void)fprintf(stderr, "%s\n", err.text);
    EXPECT(status == KV_OK);
}

/* `to` becomes what a restore from the pages and the image of `from` gives. */
static inline void rig_restore(struct rig *to, const struct rig *from, const uint32_t *ids,
                               uint32_t tokens)
{
    rig_reset(to);
    for (int i = 0; i < RIG_PAGES; i++)
        memcpy(to->pages[i], from->pages[i], from->layout->page_bytes);
    EXPECT(eng_session_import(to->session, from->image, &from->state, ids, tokens) == KV_OK);
    EXPECT_EQ_U32(rig_tokens(to), tokens);
    EXPECT(!eng_session_has_logits(to->session));
}

static inline void rig_copy(struct rig *to, const struct rig *from)
{
    eng_session_copy(to->session, from->session);
    eng_session_set_pages(to->session, to->pages, RIG_PAGES);
    for (int i = 0; i < RIG_PAGES; i++)
        memcpy(to->pages[i], from->pages[i], from->layout->page_bytes);
}

/* Rows and ids of [0, tokens), byte for byte. */
static inline void expect_same_rows(const struct rig *a, const struct rig *b, uint32_t tokens)
{
    uint8_t *left = malloc(a->layout->page_bytes);
    uint8_t *right = malloc(a->layout->page_bytes);
    EXPECT(left != NULL && right != NULL);
    for (uint32_t page = 0; page < kv_pages_for(tokens); page++) {
        const uint32_t rest = tokens - page * 128;
        memcpy(left, a->pages[page], a->layout->page_bytes);
        memcpy(right, b->pages[page], a->layout->page_bytes);
        kv_page_clear_after(a->layout, left, rest < 128 ? rest : 128);
        kv_page_clear_after(a->layout, right, rest < 128 ? rest : 128);
        EXPECT_EQ_MEM(left + 256, right + 256, a->layout->page_bytes - 256);
    }
    free(left);
    free(right);
}

static inline void expect_same(struct rig *a, struct rig *b)
{
    rig_export(a);
    rig_export(b);
    EXPECT_EQ_U32(a->state.tokens, b->state.tokens);
    EXPECT_EQ_U32(a->state.encoder_first, b->state.encoder_first);
    EXPECT_EQ_U32(a->state.decoder_first, b->state.decoder_first);
    EXPECT_EQ_U32(a->state.replay_at, b->state.replay_at);
    EXPECT_EQ_MEM(a->image, b->image, a->layout->image_bytes);
    expect_same_rows(a, b, a->state.tokens);
    const bool logits = eng_session_has_logits(a->session);
    EXPECT(logits == eng_session_has_logits(b->session));
    if (logits)
        EXPECT_EQ_MEM(eng_session_logits(a->session), eng_session_logits(b->session),
                      a->layout->vocab_tokens * sizeof(float));
}
