#pragma once

/*
 * Header of a page of rows: the same bytes in HBM and on SSD (docs/format.md).  Layout version 1,
 * by offset:
 *
 *     0  magic "KVPAGE1\n"
 *     8  u32 checksum: CRC-32C of bytes 12 .. page_bytes
 *    12  u32 count: tokens present, 1..128
 *    16  u32 position of the first token, a multiple of 128
 *    20  u32 page_bytes
 *    24  u64 generation: unique per write of this store, compared with the index
 *    32  user id, 16 B
 *    48  model fingerprint, 32 B
 *    80  chain digest D_k at the page's start, 32 B
 *   112  directory id, 16 B
 *   128  u16 cipher: 0 none, and zeros follow; 1 AES-256-GCM of bytes 256 .. page_bytes
 *   130  zeros
 *   132  u32 key id
 *   136  nonce: u32 page n of the directory, u64 generation
 *   148  tag, 16 B
 *   164  run, 16 B: random, of the run of a daemon that wrote it
 *   180  zeros
 *
 * Of an encrypted page the checksum is taken over what is on disk, so that damage is found without
 * a key; the header, with zeros for checksum and tag, is authenticated with the rest.  In memory a
 * page is always plain: after kv_page_decrypt() its checksum means nothing.
 *
 * A page is bound to its directory, user, model and the tokens before it, not to a session: forks
 * share it.
 * Pure; any thread.  The page must be kv_layout.page_bytes long.
 */

#include "kvstore/base/digest.h"
#include "kvstore/format/ids.h"
#include "kvstore/format/key_record.h"
#include "kvstore/format/layout.h"

/* How a page is encrypted; key_id 0: it is not. */
struct kv_page_cipher {
    uint32_t key_id;
    uint32_t ssd_page; /* Where it was written: page n of the directory. */
    uint8_t run[KV_RUN_BYTES];
};

struct kv_page_header {
    uint32_t count;
    uint32_t position;
    uint64_t generation;
    struct kv_user_id user;
    struct kv_digest model;
    struct kv_digest chain;
    struct kv_directory_id directory;
    struct kv_page_cipher cipher; /* As found; nobody expects one. */
};

/* Writes the header of a plain page, without its checksum: for a page that is encrypted on its way
 * to disk. */
void kv_page_stamp(const struct kv_layout *layout, uint8_t *page,
                   const struct kv_page_header *header);
/* Writes the header and the checksum.  Bytes beyond `count` tokens must already be zero if the
 * page is to be bit-equal for equal content (kv_page_clear_after does that). */
void kv_page_seal(const struct kv_layout *layout, uint8_t *page,
                  const struct kv_page_header *header);

/* KV_CORRUPT with the first field that does not match.  `want` names what the index expects; all
 * its fields are compared. */
kv_status kv_page_verify(const struct kv_layout *layout, const uint8_t *page,
                         const struct kv_page_header *want, struct kv_error *err) KV_MUST_CHECK;

/* The same without the checksum: for an encrypted page that is about to be decrypted, which finds
 * every damage but one of the checksum itself. */
kv_status kv_page_compare(const struct kv_layout *layout, const uint8_t *page,
                          const struct kv_page_header *want, struct kv_error *err) KV_MUST_CHECK;
bool kv_page_is_encrypted(const uint8_t *page);

/* Decodes without expectations (tools): KV_CORRUPT when magic, bounds or checksum are wrong. */
kv_status kv_page_decode(const struct kv_layout *layout, const uint8_t *page,
                         struct kv_page_header *ret_header, struct kv_error *err) KV_MUST_CHECK;

/* The fields of a header in memory, which was verified when it came; nothing is compared. */
void kv_page_peek(const uint8_t *page, struct kv_page_header *ret_header);

/* Writes the stamped page `from` to `to`, encrypted and with its checksum.  `key` is that of its
 * user's data key and of the run.  The context's thread. */
void kv_page_encrypt(struct kv_aead *aead, const struct kv_layout *layout,
                     const uint8_t key[KV_KEY_BYTES], const struct kv_page_cipher *cipher,
                     const uint8_t *from, uint8_t *to);
/* Makes a page plain, in place, that was verified or at least compared.  KV_CORRUPT: it is not what
 * was encrypted with this key; its bytes mean nothing then. */
kv_status kv_page_decrypt(struct kv_aead *aead, const struct kv_layout *layout,
                          const uint8_t key[KV_KEY_BYTES], uint8_t *page,
                          struct kv_error *err) KV_MUST_CHECK;

/* The page as it is at `count` tokens, into other memory of page_bytes.  Nothing behind is looked
 * at: rows may be written there meanwhile. */
void kv_page_copy(const struct kv_layout *layout, const uint8_t *page, uint32_t count, uint8_t *to);

/* Zeroes ids and rows of tokens >= count (an entry of ratio 2 stands until both tokens are in). */
void kv_page_clear_after(const struct kv_layout *layout, uint8_t *page, uint32_t count);

static inline uint32_t kv_page_id(const uint8_t *page, uint32_t index);
static inline void kv_page_set_id(uint8_t *page, uint32_t index, uint32_t id);

#include "kvstore/base/bytes.h"

static inline uint32_t kv_page_id(const uint8_t *page, uint32_t index)
{
    return kv_load32(page + KV_PAGE_IDS_OFFSET + 4u * index);
}

static inline void kv_page_set_id(uint8_t *page, uint32_t index, uint32_t id)
{
    kv_store32(page + KV_PAGE_IDS_OFFSET + 4u * index, id);
}
