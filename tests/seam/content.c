/* What the sessions of the tests hold. */

#include "tests/seam/content.h"

#include "kvstore/base/bytes.h"
#include "kvstore/format/page.h"
#include "kvstore/index/match.h"
#include "tests/driver/random.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define PAGE_COUNT_AT 12u

struct kv_layout content_layout(void)
{
    struct kv_layout layout = {
        .vocab_tokens = 512,
        .context_tokens = KV_PROMPT_TOKENS_MAX,
        .window_tokens = 8,
        .spare_tokens = 4,
        .encoder_layers = 2,
        .decoder_layers = 2,
        .draft_stages = 1,
        .window_row_bytes = 24,
        .source_count = 2,
        .sources =
            {
                {.layer = 0, .ratio = 2, .main_bytes = 24, .index_bytes = 8, .tail_bytes = 40},
                {.layer = 2, .ratio = 1, .main_bytes = 20, .index_bytes = 6},
            },
    };
    const kv_status status = kv_layout_finish(&layout, NULL);
    assert(status == KV_OK && layout.page_bytes == 8192);
    return layout;
}

struct kv_digest content_model(void)
{
    struct kv_digest model;
    memset(model.bytes, 0x4d, sizeof(model.bytes));
    return model;
}

struct kv_directory_id content_directory(void)
{
    struct kv_directory_id id;
    memset(id.bytes, 0x44, sizeof(id.bytes));
    return id;
}

const char *content_user_name(uint32_t session)
{
    return session % 2 == 0 ? "ann" : "bob";
}

const char *content_session_name(uint32_t session)
{
    static const char *const names[CONTENT_SESSIONS] = {"s0", "s1", "s2", "s3", "s4", "s5"};
    return names[session];
}

struct kv_user_id content_user(uint32_t session)
{
    return kv_user_id_of(content_user_name(session));
}

struct kv_session_id content_session(uint32_t session)
{
    const struct kv_user_id user = content_user(session);
    return kv_session_id_of(&user, content_session_name(session));
}

const uint8_t *content_salt(uint32_t session)
{
    static const uint8_t salts[2][32] = {{1, 2, 3}, {4, 5, 6}};
    return salts[session % 2];
}

static uint64_t key_of(uint32_t session, uint32_t life, uint32_t position)
{
    return ex_mix(((uint64_t)session << 48) ^ ((uint64_t)life << 24) ^ position);
}

static uint32_t token(uint32_t session, uint32_t life, uint32_t position)
{
    return (uint32_t)(key_of(session, life, position) % 512);
}

void content_chain(uint32_t session, uint32_t life, uint32_t tokens,
                   struct kv_digest chain[CONTENT_PAGES_MAX + 1])
{
    uint32_t ids[CONTENT_TOKENS_MAX];
    const struct kv_digest model = content_model();
    const struct kv_digest root = kv_digest_root(&model, content_salt(session));
    assert(tokens <= CONTENT_TOKENS_MAX);
    for (uint32_t i = 0; i < tokens; i++)
        ids[i] = token(session, life, i);
    kv_match_chain(&root, ids, tokens, chain);
}

struct kv_checkpoint_id content_point(uint32_t session, uint32_t life, uint32_t tokens,
                                      struct kv_digest *ret_digest)
{
    struct kv_digest chain[CONTENT_PAGES_MAX + 1];
    uint32_t rest[KV_PAGE_TOKENS];
    struct kv_checkpoint_id id;
    const uint32_t start = tokens / KV_PAGE_TOKENS * KV_PAGE_TOKENS;
    content_chain(session, life, tokens, chain);
    for (uint32_t i = start; i < tokens; i++)
        rest[i - start] = token(session, life, i);
    *ret_digest = kv_digest_at(&chain[tokens / KV_PAGE_TOKENS], tokens, rest);
    memcpy(id.bytes, ret_digest->bytes, sizeof(id.bytes));
    return id;
}

void content_page(const struct kv_layout *layout, uint32_t session, uint32_t life, uint32_t k,
                  uint32_t count, uint8_t *page)
{
    struct ex_random random = {key_of(session, life, k) ^ 0x706167u};
    for (uint32_t at = KV_PAGE_ROWS_OFFSET; at < layout->page_bytes; at += 8)
        kv_store64(page + at, ex_random_next(&random));
    for (uint32_t i = 0; i < KV_PAGE_TOKENS; i++)
        kv_page_set_id(page, i, token(session, life, k * KV_PAGE_TOKENS + i));
    kv_page_clear_after(layout, page, count);
}

bool content_matches(const struct kv_layout *layout, uint32_t session, uint32_t life, uint32_t k,
                     uint32_t count, const uint8_t *page)
{
    const uint32_t have = kv_load32(page + PAGE_COUNT_AT);
    if (have < count || have > KV_PAGE_TOKENS) return false;
    uint8_t *want = calloc(1, layout->page_bytes);
    assert(want != NULL);
    content_page(layout, session, life, k, have, want);
    const bool same = memcmp(page + KV_PAGE_HEADER_BYTES, want + KV_PAGE_HEADER_BYTES,
                             layout->page_bytes - KV_PAGE_HEADER_BYTES) == 0;
    free(want);
    return same;
}
