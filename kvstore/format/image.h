#pragma once

/*
 * Header of a window image.  Version 2, by offset:
 *
 *     0  magic "KVIMAG2\n"
 *     8  u32 checksum: CRC-32C of bytes 12 .. image_bytes
 *    12  u32 image_bytes
 *    16  u64 generation of the pool slot
 *    24  u32 tokens: t, the position the image was taken at
 *    28  u32 encoder_first: first position whose encoder window rows are present
 *    32  u32 decoder_first: the same for the decoder (where the last prefill clipped, or later)
 *    36  u32 draft_first: the same for the draft stages (t when there are none)
 *    40  u32 replay_at: H of the last clipped replay, 0 if none; no cut goes to or below it
 *    44  u32 flags: bit 0 pending token present, bit 1 tails present (t odd)
 *    48  u32 pending token
 *    52  u32 zero
 *    56  user id, 16 B
 *    72  model fingerprint, 32 B
 *   104  digest at t, 32 B
 *   136  u64 kernels: the family that computed it (format/kernels.h)
 *   144  zeros
 *
 * The engine writes the rows, tails and the fields of struct kv_image_state; the store adds
 * identity and checksum.  Pure; any thread.
 */

#include "kvstore/base/digest.h"
#include "kvstore/format/ids.h"
#include "kvstore/format/kernels.h"
#include "kvstore/format/layout.h"

#include <stdbool.h>

/* What the engine knows of a position. */
struct kv_image_state {
    uint32_t tokens;
    uint32_t encoder_first;
    uint32_t decoder_first;
    uint32_t draft_first;
    uint32_t replay_at;
    bool has_pending;
    uint32_t pending;
};

struct kv_image_header {
    struct kv_image_state state;
    uint64_t generation;
    struct kv_user_id user;
    struct kv_digest model;
    struct kv_digest digest; /* At state.tokens. */
    uint64_t kernels;
};

void kv_image_seal(const struct kv_layout *layout, uint8_t *image,
                   const struct kv_image_header *header);

/* KV_CORRUPT: magic, size, checksum, a first beyond t, or anything but zero where zero must be.
 * Identity is for the caller to compare. */
kv_status kv_image_decode(const struct kv_layout *layout, const uint8_t *image,
                          struct kv_image_header *ret_header, struct kv_error *err) KV_MUST_CHECK;

/* The position a window at state.tokens can serve for a history that shares `match` tokens with it
 * ("cut at t-k" in ARCHITECTURE.md): state.tokens itself when match >= it, else the largest allowed
 * even position <= match within spare_tokens; 0 when none.  A result below state.tokens never has a
 * pending token nor tails. */
uint32_t kv_image_cut(const struct kv_layout *layout, const struct kv_image_state *state,
                      uint32_t match);
