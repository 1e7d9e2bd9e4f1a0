#pragma once

/*
 * What a config costs: parameters, bytes and state, counted over the list of its tensors and the
 * layout of its state.  No weights are needed.
 *
 * Parameters are values (an MXFP4 pair is two, scales are none); bytes are those of the file,
 * scales included.  Pure; any thread.
 */

#include "engine/model/config.h"
#include "engine/model/tensors.h"
#include "kvstore/format/layout.h"

#include <stdint.h>

enum eng_part {
    ENG_PART_ATTENTION, /* With compressors, indexers and their norms. */
    ENG_PART_EXPERTS,   /* Routed. */
    ENG_PART_SHARED,
    ENG_PART_ROUTER, /* Gates, biases and the norm before them. */
    ENG_PART_MIX,    /* mHC */
    ENG_PART_ENGRAM, /* Projections and gates of Engram. */
    ENG_PART_TABLES, /* Its rows. */
    ENG_PART_EMBED,  /* Embed, head and the last norm. */
    ENG_PART_DRAFT,
    ENG_PART_COUNT,
};

struct eng_inspect {
    struct eng_config config;
    struct kv_layout layout; /* With ENG_INSPECT_SPARE spare rows. */
    uint64_t tensors;
    uint64_t values[ENG_PART_COUNT], bytes[ENG_PART_COUNT];
    uint64_t backbone;       /* Without Engram and drafting. */
    uint64_t active_decode;  /* Read for one token through all layers, embed and tables aside. */
    uint64_t active_prefill; /* Through the encoder and the decoder's row source. */
    uint64_t active_draft;   /* One row of a draft block through all stages, shared head aside. */
    uint64_t total_bytes;
    uint64_t window_bytes;       /* All layers, without spare rows. */
    uint64_t image_window_bytes; /* The same with them, as an image stores it. */
    uint64_t draft_window_bytes, image_draft_bytes;
    uint64_t tail_bytes;
    uint64_t engram_read_bytes; /* Of the tables, per token. */
};

#define ENG_INSPECT_SPARE 16u

const char *eng_part_name(enum eng_part part);
enum eng_part eng_part_of(const struct eng_config *config, const struct eng_tensor_spec *spec);

kv_status eng_inspect(const struct eng_config *config, struct eng_inspect *ret_inspect,
                      struct kv_error *err) KV_MUST_CHECK;
