#pragma once

/* Private to the CPU backend: a batch of at most CPU_BATCH tokens of one session on its way through
 * the layers, and the steps of one layer.  Owned by: worker. */

#include "engine/backend/backend.h"
#include "engine/backend/kernels.h"
#include "engine/model/weights.h"

#define CPU_BATCH 16u
#define CPU_TILE 64u /* Index keys scored at once; never crosses a page. */

struct cpu_model {
    struct eng_weights weights;
    const struct eng_kernels *kernels;
};

/* Mixes of one hyper-connection for one token. */
struct cpu_mix {
    float pre[4];
    float post[4];
    float comb[16]; /* [i][j]: stream i into stream j. */
};

/* The best `max` of what was offered in ascending index: larger score, then smaller index. */
struct cpu_top {
    float *scores; /* A heap, worst first. */
    uint32_t *indices;
    uint32_t count, max;
};

struct cpu_batch {
    const struct cpu_model *model;
    const struct eng_config *config;
    const struct eng_kernels *kernels;
    uint32_t first, count; /* Positions [first, first + count). */

    /* [CPU_BATCH] of each. */
    float *streams; /* 4 x hidden, bf16 values */
    float *g;       /* 4: incoming pre-mix */
    struct cpu_mix *mix;
    float *z;      /* 32: raw mixes, padded */
    float *x, *xq; /* hidden: normed input, and after FP8 */
    float *sub;    /* hidden: output of a sublayer */
    float *qr, *qrq, *q, *kv;
    float *pool_a, *pool_b, *latent, *key;
    float *iq, *iw;
    float *o, *oz;
    float *gate;
    uint32_t *chosen; /* experts_active */
    float *chosen_weight;
    float *expert_x, *expert_a, *expert_b, *expert_h, *expert_y; /* Gathered tokens. */
    uint32_t *expert_token;
    float *expert_scale;
    uint32_t *list;       /* index_topk, ascending */
    uint32_t *list_count; /* one */
    float *selected;      /* index_topk x head_dim: the rows of `list`, decoded */
    uint32_t *blocks;     /* candidate_blocks, ascending */
    uint32_t *block_count;
    struct cpu_top *top, *top_blocks;
    /* [CPU_BATCH + 1]: rotations from position first - 1 on; cos then sin, rope_dim / 2 each. */
    float *rope_plain, *rope_yarn;
    float *window;     /* (window + CPU_BATCH) x head_dim */
    float *tile;       /* CPU_TILE x index_dim, packed by 16 keys */
    float *tile_score; /* CPU_BATCH x index_heads x CPU_TILE */
    float *scratch;    /* Largest single row. */
};

/* Encoder outputs of the last window of computed tokens: what the decoder starts from. */
struct cpu_session {
    struct cpu_batch batch;
    float *encoded;   /* window x 4 hidden, position p at p % window */
    float *encoded_g; /* window x 4 */
};

/* cpu_batch.c */
size_t cpu_session_bytes(const struct eng_model *model);
void cpu_session_init(struct eng_session *session, void *memory);
void cpu_batch_start(struct cpu_batch *batch, uint32_t first, uint32_t count);
/* y = W x for the batch, x already in the form the matrix wants. */
void cpu_linear(const struct cpu_batch *batch, const struct eng_matrix *matrix, const float *x,
                size_t x_stride, float *y, size_t y_stride, bool round_bf16);
void cpu_quantize(const struct cpu_batch *batch, const float *x, size_t width, float *y);
/* The last rope_dim of `vector` (width floats), in place. */
void cpu_rotate(const struct cpu_batch *batch, const float *table, uint32_t at, float *vector,
                uint32_t width, bool inverse);

/* cpu_mix.c */
void cpu_mix(struct cpu_batch *batch, const struct eng_hc *hc);
/* x = rms(collapse(streams, weights); norm); weights every `stride` floats. */
void cpu_collapse(struct cpu_batch *batch, const float *weights, size_t stride, const float *norm);
void cpu_expand(struct cpu_batch *batch);

/* cpu_rows.c: compressor of a layer that owns rows, from batch->x. */
void cpu_write_rows(struct eng_session *session, struct cpu_batch *batch, uint32_t layer);

/* cpu_index.c: publishes batch->list and batch->selected, from batch->qrq and batch->x. */
void cpu_publish_list(struct eng_session *session, struct cpu_batch *batch, uint32_t layer);
void cpu_top_reset(struct cpu_top *top, uint32_t max);
void cpu_top_insert(struct cpu_top *top, float score, uint32_t index);

/* Indices ascend from call to call, so an equal score never displaces. */
static inline void cpu_top_offer(struct cpu_top *top, float score, uint32_t index)
{
    if (top->count < top->max || score > top->scores[0]) cpu_top_insert(top, score, index);
}

/* cpu_attention.c: batch->x to batch->sub. */
void cpu_attention(struct eng_session *session, struct cpu_batch *batch, uint32_t layer,
                   bool write_rows);

/* cpu_moe.c: batch->x to batch->sub. */
void cpu_moe(struct eng_session *session, struct cpu_batch *batch, uint32_t layer);
