/*
 * The expected logits.
 *
 * The synthetic engine's logits depend on the tokens alone, so one session that starts at 0 and
 * goes through them in one prefill says what every resume must say.  Nothing here goes through a
 * page that was stored, an image or a file.
 */

#include "tests/crash/oracle.h"

#include "engine/engine.h"
#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "tests/crash/expect.h"
#include "tests/harness.h"

enum { PAGES = (CR_TOKENS_MAX + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS };

struct cr_oracle {
    struct eng_model *model;
    struct eng_session *session;
    uint8_t *pages[PAGES];
};

struct cr_oracle *cr_oracle_create(uint32_t spare_tokens)
{
    const struct eng_options options = {
        .backend = ENG_BACKEND_SYNTHETIC, .spare_tokens = spare_tokens, .threads = 1};
    struct kv_error err = {0};
    struct cr_oracle *oracle = calloc(1, sizeof(*oracle));
    EXPECT(oracle != NULL);
    EXPECT(eng_model_open(&options, &oracle->model, &err) == KV_OK);
    EXPECT(eng_session_create(oracle->model, &oracle->session, &err) == KV_OK);
    for (uint32_t i = 0; i < PAGES; i++) {
        oracle->pages[i] = calloc(1, eng_model_layout(oracle->model)->page_bytes);
        EXPECT(oracle->pages[i] != NULL);
    }
    return oracle;
}

void cr_oracle_destroy(struct cr_oracle *oracle)
{
    if (oracle == NULL) return;
    eng_session_destroy(oracle->session);
    eng_model_close(oracle->model);
    for (uint32_t i = 0; i < PAGES; i++)
        free(oracle->pages[i]);
    free(oracle);
}

uint32_t cr_oracle_vocab(const struct cr_oracle *oracle)
{
    return eng_model_layout(oracle->model)->vocab_tokens;
}

static void run_to_end(struct cr_oracle *oracle)
{
    const uint32_t rows = eng_model_pass_rows(oracle->model);
    for (;;) {
        const struct eng_run_left left = eng_run_left(oracle->session);
        if (left.encode == 0 && left.decode == 0) return;
        struct eng_piece piece = {.session = oracle->session, .encode = KV_MIN(left.encode, rows)};
        if (piece.encode == left.encode) piece.decode = KV_MIN(left.decode, rows);
        eng_pass(oracle->model, &piece, 1);
    }
}

void cr_oracle_crcs(struct cr_oracle *oracle, const uint32_t *ids, uint32_t from, uint32_t count,
                    uint32_t *ret_crcs)
{
    const size_t bytes = cr_oracle_vocab(oracle) * sizeof(float);
    EXPECT(from > 0 && count >= from && count <= PAGES * KV_PAGE_TOKENS);
    eng_session_reset(oracle->session);
    eng_session_set_pages(oracle->session, oracle->pages, PAGES);
    eng_prefill_begin(oracle->session, ids, 0, from);
    run_to_end(oracle);
    ret_crcs[0] = kv_checksum(eng_session_logits(oracle->session), bytes);
    for (uint32_t at = from; at < count; at++) {
        eng_tokens_begin(oracle->session, &ids[at], 1);
        run_to_end(oracle);
        ret_crcs[at - from + 1] = kv_checksum(eng_session_logits(oracle->session), bytes);
    }
}
