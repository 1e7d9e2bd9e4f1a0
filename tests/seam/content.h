#pragma once

/* What the sessions of the tests hold: every token and every byte of a page follows from session,
 * life and position, so that whatever a store gives back can be compared.  A life is one history of
 * a session: after its checkpoints were deleted it starts another, of other tokens.  Pure. */

#include "kvstore/base/digest.h"
#include "kvstore/format/ids.h"
#include "kvstore/format/layout.h"

#define CONTENT_SESSIONS 6u
#define CONTENT_TOKENS_MAX 700u
#define CONTENT_PAGES_MAX ((CONTENT_TOKENS_MAX + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS)

struct kv_layout content_layout(void); /* Pages of 8 KiB. */
struct kv_digest content_model(void);
struct kv_directory_id content_directory(void); /* Where it lies, says what is written. */

const char *content_user_name(uint32_t session); /* Two users. */
const char *content_session_name(uint32_t session);
struct kv_user_id content_user(uint32_t session);
struct kv_session_id content_session(uint32_t session);
const uint8_t *content_salt(uint32_t session); /* 32 B. */

/* Chain values of a history: tokens / 128 + 1. */
void content_chain(uint32_t session, uint32_t life, uint32_t tokens,
                   struct kv_digest chain[CONTENT_PAGES_MAX + 1]);
/* Digest and id of the checkpoint at `tokens`. */
struct kv_checkpoint_id content_point(uint32_t session, uint32_t life, uint32_t tokens,
                                      struct kv_digest *ret_digest);

/* Page k with its first `count` tokens; no header. */
void content_page(const struct kv_layout *layout, uint32_t session, uint32_t life, uint32_t k,
                  uint32_t count, uint8_t *page);
/* Whether the page holds at least `count` tokens of page k, and nothing else. */
bool content_matches(const struct kv_layout *layout, uint32_t session, uint32_t life, uint32_t k,
                     uint32_t count, const uint8_t *page);
