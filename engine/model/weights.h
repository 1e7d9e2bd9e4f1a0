#pragma once

/*
 * The weights of a model as they lie in the mapped checkpoint; only small vectors (norms, biases,
 * bases) are fp32 copies.
 *
 * Owned by: the model.  Immutable after loading; any thread.
 */

#include "engine/backend/kernels/gemm.h"
#include "engine/model/checkpoint.h"
#include "engine/model/config.h"
#include "engine/model/engram_fetch.h"

struct eng_expert {
    struct eng_matrix w1, w3, w2; /* gate, up, down */
};

struct eng_hc {
    struct eng_matrix fn; /* 24 x 4 hidden */
    float base[24];
    float scale[3];
};

struct eng_layer {
    struct eng_hc hc_attn, hc_ffn;
    float *attn_norm, *ffn_norm, *q_norm, *kv_norm, *sink;
    struct eng_matrix wq_a, wq_b, wkv, wo_a, wo_b;
    /* Layers that own rows; wgate only with ratio 2. */
    struct eng_matrix cmp_wkv, cmp_wgate, ix_wk;
    float *cmp_norm, *ix_k_norm;
    /* Layers that own a list. */
    struct eng_matrix ix_wq_b, ix_proj;
    struct eng_matrix gate;
    float *gate_bias, *gate_bias_vl;
    struct eng_expert *experts;
    struct eng_expert shared;
};

struct eng_engram_weights {
    struct eng_engram_hash hash;
    struct eng_engram_table table; /* Points into the checkpoint. */
    struct eng_matrix wkv;         /* (4 + 1) hidden: a key per stream, then the value. */
    float *qk;                     /* 4 x hidden: q_weight times k_weight, which is exact. */
};

/* What the draft stages share (the stages themselves are layers). */
struct eng_draft_weights {
    struct eng_matrix main_proj; /* Taps to main_x. */
    float *main_norm, *norm;
    struct eng_matrix markov_embed; /* vocab x rank, BF16: rows are looked up. */
    struct eng_matrix markov_head;
    float *confidence; /* hidden + rank */
};

struct eng_weights {
    struct eng_layer *layers;          /* The model's, then the draft stages. */
    struct eng_engram_weights *engram; /* engram_count */
    struct eng_draft_weights draft;
    struct eng_matrix embed; /* vocab x hidden, BF16 */
    float *norm;
    struct eng_matrix head;
    float *rope_plain; /* Frequencies, rope_dim / 2 each. */
    float *rope_yarn;
    uint64_t bytes; /* Of all the above, without the tables of Engram. */
    void **blocks;  /* What is not in the checkpoint, for freeing. */
    size_t block_count, block_max;
};

/* The checkpoint outlives the weights. */
kv_status eng_weights_load(const struct eng_checkpoint *checkpoint, struct eng_weights *ret_weights,
                           struct kv_error *err) KV_MUST_CHECK;
/* rope_dim / 2 of each, defined by fp32 rounding at every step (the model's specification, section
 * 2.2).  Pure. */
void eng_rope_frequencies(const struct eng_config *config, float *plain, float *yarn);
/* Row `row` of a BF16 matrix. */
void eng_weights_row(const struct eng_matrix *matrix, uint32_t row, float *values);
void eng_weights_fini(struct eng_weights *weights);
