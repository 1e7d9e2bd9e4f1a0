#pragma once

/* Private to the CPU backend: the rows of one pass on their way through the layers, and the steps
 * of one layer.  A row is one token of one session.  Weights meet all rows at once; what belongs to
 * a session (windows, rows, lists) is done span by span.  Owned by: worker. */

#include "engine/backend/host.h"
#include "engine/backend/kernels.h"
#include "engine/model/weights.h"
#include "kvstore/base/bytes.h"

#define CPU_TILE 64u         /* Index keys scored at once; never crosses a page. */
#define CPU_HEAD_ROWS 16u    /* Rows of logits made at once. */
#define CPU_WINDOW_SPANS 16u /* Full windows that scratch holds beside a pass's own rows. */

#define CPU_DRAFT_SESSIONS 16u /* Sessions drafted for at once. */

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

/* Rows [row, row + count): positions [first, first + count) of one session. */
struct cpu_span {
    struct eng_session *session;
    uint32_t first, count;
    uint32_t row;
    uint32_t window_base; /* Position of the first window row that is loaded for it, */
    uint32_t window_at;   /* and where that stands in batch->window. */
};

struct cpu_row {
    struct eng_session *session;
    uint32_t position;
    uint32_t span;
};

struct cpu_batch {
    const struct eng_model *owner;
    const struct cpu_model *model;
    const struct eng_config *config;
    const struct eng_kernels *kernels;
    struct cpu_span *spans;
    uint32_t span_count;
    struct cpu_row *rows;
    uint32_t count; /* Rows; at most cpu_rows_max(). */
    /* Ids of the rows of a block of drafts; NULL: rows belong to runs. */
    const uint32_t *draft_ids;

    /* The streams of this half of the model: 4 x hidden, bf16 values, and the incoming pre-mix. */
    float *streams, *g;
    float *encoder_streams, *encoder_g, *decoder_streams, *decoder_g;

    /* [pass_rows] of each. */
    struct cpu_mix *mix;
    float *z;      /* 32: raw mixes, padded */
    float *x, *xq; /* hidden: normed input, and after FP8 */
    float *sub;    /* hidden: output of a sublayer */
    float *qr, *qrq, *q, *kv;
    float *pool_a, *pool_b, *latent, *key;
    uint32_t *entry_row; /* Row that completes latent[i]. */
    float *iq, *iw;
    float *o, *oz;
    float *gate;
    uint32_t *chosen; /* experts_active */
    float *chosen_weight;
    uint32_t *expert_slot;  /* Indices of `chosen`, by expert, then by row. */
    uint32_t *expert_first; /* experts + 1: where an expert's begin. */
    float *expert_x, *expert_a, *expert_b, *expert_h, *expert_y; /* Gathered rows. */
    float *expert_scale;
    uint32_t *list;       /* index_topk, ascending */
    uint32_t *list_count; /* one */
    uint32_t *blocks;     /* candidate_blocks, ascending */
    uint32_t *block_count;
    struct cpu_top *top, *top_blocks;
    /* Rotations: cos then sin, rope_dim / 2 each.  entry: of the position before. */
    float *rope_plain, *rope_yarn, *rope_entry;
    float *tile_score; /* index_heads x CPU_TILE */

    float *engram_x;  /* columns x engram_dim: table rows */
    float *engram_kv; /* (4 + 1) x hidden: a key per stream, then the value */
    float *taps;      /* draft_target_count x hidden */

    struct cpu_draft *draft; /* NULL without draft stages. */

    float *window;   /* (CPU_WINDOW_SPANS x window + pass_rows) x head_dim */
    float *selected; /* index_topk x head_dim: the rows of one list */
    float *tile;     /* CPU_TILE x index_dim, packed by 16 keys */
    float *head_x;   /* CPU_HEAD_ROWS x hidden */
    float *head_y;   /* CPU_HEAD_ROWS x vocab, padded */
    float *scratch;  /* Largest single row. */
};

/* [CPU_DRAFT_SESSIONS] blocks: what the last part of drafting works on. */
struct cpu_draft {
    uint32_t *ids;     /* block */
    float *logits;     /* block x vocab, padded */
    float *confidence; /* block */
    uint32_t *tokens;  /* block */
    /* [CPU_DRAFT_SESSIONS] of each. */
    uint32_t *prev;
    float *embed; /* draft_rank */
    float *bias;  /* vocab, padded */
};

struct cpu_model {
    struct eng_checkpoint *checkpoint;
    struct eng_weights weights;
    struct eng_engram_ids engram_ids;
    struct eng_engram_table *engram_tables;
    struct eng_fetch *fetch; /* NULL without Engram. */
    const struct eng_kernels *kernels;
    struct cpu_batch batch;
    void *batch_memory;
    size_t batch_bytes;
};

/* Encoder outputs of the last window of encoded tokens: what the decoder starts from when another
 * pass than the one that encoded them decodes. */
struct cpu_session {
    struct eng_host host;
    uint16_t *encoded; /* window x 4 hidden bf16, position p at p % window */
    float *encoded_g;  /* window x 4 */
};

/* Rows scratch is sized for: a block of drafts is never divided. */
static inline uint32_t cpu_rows_max(const struct eng_model *model)
{
    return KV_MAX(model->pass_rows, model->config.draft_block);
}

static inline uint32_t cpu_row_id(const struct cpu_batch *batch, uint32_t row)
{
    return batch->draft_ids != NULL
               ? batch->draft_ids[row]
               : eng_run_id(batch->rows[row].session, batch->rows[row].position);
}

/* Routed experts of a layer, and how many of them a token takes. */
static inline uint32_t cpu_experts(const struct eng_config *config, uint32_t layer)
{
    return layer < config->layers ? config->experts : config->draft_experts;
}
static inline uint32_t cpu_experts_active(const struct eng_config *config, uint32_t layer)
{
    return layer < config->layers ? config->experts_active : config->draft_active;
}

/* cpu.c: the streams as the embedding makes them; one layer; and what the probe is told of it. */
void cpu_embed(struct cpu_batch *batch);
void cpu_block(struct cpu_batch *batch, uint32_t layer, bool write_rows);
void cpu_leave_layer(struct cpu_batch *batch, uint32_t layer);

/* cpu_batch.c */
size_t cpu_session_bytes(const struct eng_model *model);
kv_status cpu_session_init(struct eng_session *session, void *memory, struct kv_error *err);
kv_status cpu_batch_init(const struct eng_model *model, struct cpu_model *own,
                         struct kv_error *err) KV_MUST_CHECK;
/* Rows of `spans`, in order, on `streams` and `g`. */
void cpu_batch_start(struct cpu_batch *batch, const struct eng_span *spans, uint32_t count);
struct eng_probe_rows cpu_probe_rows(const struct cpu_span *span, uint32_t layer);

/* y = W x for `rows` rows, x already in the form the matrix wants; y rows hold whole blocks of
 * ENG_LANES.  Every product with weights goes through here. */
void cpu_linear(const struct cpu_batch *batch, const struct eng_matrix *matrix, const float *x,
                size_t x_stride, uint32_t rows, float *y, size_t y_stride, bool round_bf16);
/* The FP8 round trip of activations; a copy with quant_off.  x and y may be the same. */
void cpu_quantize(const struct cpu_batch *batch, const float *x, size_t count, float *y);
/* The last rope_dim of `vector` (width floats), in place, by one row of rotations. */
void cpu_rotate(const struct cpu_batch *batch, const float *rotation, float *vector, uint32_t width,
                bool inverse);

/* cpu_codec.c: packed rows of the model's layout, bf16 values with quant_off. */
void cpu_window_encode(const struct cpu_batch *batch, const float *values, uint8_t *row);
void cpu_window_decode(const struct cpu_batch *batch, const uint8_t *row, float *values);
void cpu_main_encode(const struct cpu_batch *batch, const float *values, uint8_t *row);
void cpu_main_decode(const struct cpu_batch *batch, const uint8_t *row, float *values);
void cpu_key_encode(const struct cpu_batch *batch, const float *values, uint8_t *row);
/* What a query becomes by being packed, in place. */
void cpu_key_round(const struct cpu_batch *batch, float *values);
/* ENG_LANES keys into one block of a matrix of keys, [index_dim][ENG_LANES]. */
void cpu_key_unpack(const struct cpu_batch *batch, const uint8_t *const rows[ENG_LANES],
                    float *block);

/* cpu_mix.c */
void cpu_mix(struct cpu_batch *batch, const struct eng_hc *hc);
/* x = rms(collapse(streams, g); norm). */
void cpu_collapse(struct cpu_batch *batch, const float *norm);
void cpu_expand(struct cpu_batch *batch);
/* g = pre of the mixes. */
void cpu_hand_on(struct cpu_batch *batch);

/* cpu_rows.c: compressor of a layer that owns rows, from batch->x. */
void cpu_write_rows(struct cpu_batch *batch, uint32_t layer);

/* cpu_index.c: publishes batch->list, from batch->qrq and batch->x. */
void cpu_publish_list(struct cpu_batch *batch, uint32_t layer);
const uint8_t *cpu_entry_row(const struct eng_session *session, uint32_t source, uint32_t entry,
                             bool main);
void cpu_top_reset(struct cpu_top *top, uint32_t max);
void cpu_top_insert(struct cpu_top *top, float score, uint32_t index);

/* Indices ascend from call to call, so an equal score never displaces. */
static inline void cpu_top_offer(struct cpu_top *top, float score, uint32_t index)
{
    if (top->count < top->max || score > top->scores[0]) cpu_top_insert(top, score, index);
}

/* cpu_attention.c: batch->x to batch->sub. */
void cpu_attention(struct cpu_batch *batch, uint32_t layer, bool write_rows);

/* cpu_engram.c: tables and thread of a model that has them; row numbers of a pass; the part before
 * a layer's block (nothing for most layers). */
kv_status cpu_engram_open(const struct eng_model *model, struct cpu_model *own,
                          struct kv_error *err) KV_MUST_CHECK;
void cpu_engram_start(const struct cpu_batch *batch);
void cpu_engram(struct cpu_batch *batch, uint32_t layer);

/* cpu_draft.c: what a draft needs of a layer's input (nothing of most); window rows of the stages
 * from that; a block's attention, batch->q and kv to batch->o; and a draft. */
void cpu_tap(struct cpu_batch *batch, uint32_t layer);
void cpu_draft_windows(struct cpu_batch *batch);
void cpu_draft_attend(struct cpu_batch *batch, uint32_t layer);
void cpu_draft(struct eng_model *model, const struct eng_draft_item *items, uint32_t count);

/* cpu_moe.c: batch->x to batch->sub. */
void cpu_moe(struct cpu_batch *batch, uint32_t layer);
