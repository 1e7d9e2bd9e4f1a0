#pragma once

/* Private to the CPU backend: the rows of one pass on their way through the layers, and the steps
 * of one layer.  A row is one token of one session.  Weights meet all rows at once; what belongs to
 * a session (windows, rows, lists) is done span by span.  Owned by: worker. */

#include "engine/backend/host.h"
#include "engine/backend/kernels/elementwise.h"
#include "engine/backend/kernels/compute.h"
#include "engine/model/weights.h"
#include "kvstore/base/bytes.h"

#include <math.h>

#define CPU_TILE_ROWS 32u    /* Rows of one session whose index queries meet the keys together, */
#define CPU_TILE_KEYS 512u   /* and keys they meet at once. */
#define CPU_HEAD_ROWS 64u    /* Rows of logits made at once. */
#define CPU_WINDOW_SPANS 16u /* Full windows that scratch holds beside a pass's own rows. */
#define CPU_PACKED_PAD 32u   /* Rows a set of attended rows takes beside its own. */

#define CPU_DRAFT_SESSIONS 16u /* Sessions drafted for at once. */

/* Mixes of one hyper-connection for one token. */
struct cpu_mix {
    float pre[4];
    float post[4];
    float comb[16]; /* [i][j]: stream i into stream j. */
};

/* The best `max` of what is offered in ascending index: larger score, then smaller index.  Offers
 * gather, ascending, until there is no room; then the best are kept. */
struct cpu_top {
    float *scores; /* [room] of each */
    uint32_t *indices;
    float *order; /* For finding the last that is kept. */
    uint32_t count, max, room;
    float least; /* Once `max` are kept: what a score must exceed. */
    bool is_full;
};

/* Rows [row, row + count): positions [first, first + count) of one session. */
struct cpu_span {
    struct eng_session *session;
    uint32_t first, count;
    uint32_t row;
    uint32_t window_base;   /* Position of the first window row that is prepared for it. */
    struct eng_rows window; /* Those, and its own. */
    struct eng_rows block;  /* Of a block of drafts: its own rows. */
};

/* Rows of one span that the indexer takes together. */
struct cpu_tile {
    uint32_t span, row, count;
};

/* What one thread of the pool works with. */
struct cpu_thread {
    void *scratch;          /* ENG_KERNEL_SCRATCH */
    float *row;             /* The largest single row. */
    const uint8_t **packed; /* Rows to prepare: window + pass_rows or index_topk. */
    /* The list that was prepared last: the first list_count entries of a source of a session, or
     * (list_number not 0) that of one row in one publication. */
    struct eng_rows list;
    const struct eng_session *list_session;
    uint32_t list_source, list_count, list_row, list_number;
    void *queries;        /* Of a tile. */
    float *scores;        /* CPU_TILE_ROWS x CPU_TILE_KEYS */
    const uint8_t **keys; /* CPU_TILE_KEYS */
    uint32_t *entries;    /* CPU_TILE_KEYS */
    struct cpu_top top[CPU_TILE_ROWS], blocks[CPU_TILE_ROWS];
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
    const struct eng_compute *compute;
    const struct eng_elementwise_ops *kernels; /* compute->kernels->elementwise */
    struct cpu_thread *threads;
    struct cpu_span *spans;
    uint32_t span_count;
    struct cpu_tile *tiles;
    uint32_t tile_count;
    struct cpu_row *rows;
    uint32_t count; /* Rows; at most cpu_rows_max(). */
    /* Ids of the rows of a block of drafts; NULL: rows belong to runs. */
    const uint32_t *draft_ids;

    /* The streams of this half of the model: 4 x hidden, bf16 values, and the incoming pre-mix. */
    float *streams, *g;
    float *encoder_streams, *encoder_g, *decoder_streams, *decoder_g;
    bool is_packed; /* packed_streams and inverse are those of `streams`. */

    /* [pass_rows] of each.  packed_*: in the form products take them, after FP8 where the model
     * has it (packed_x is not). */
    struct cpu_mix *mix;
    float *z;       /* 32: raw mixes, padded */
    float *inverse; /* 1 / rms of the streams */
    float *x;       /* hidden: normed input */
    float *sub;     /* hidden: output of a sublayer */
    float *qr, *q, *kv_raw, *kv;
    uint8_t *kv_packed; /* Window rows. */
    float *pool_a, *pool_b, *latent, *key;
    uint32_t *entry_row; /* Row that completes latent[i]. */
    float *iq, *iw;
    float *o, *oz;
    uint32_t *list;       /* index_topk, ascending */
    uint32_t *list_count; /* one */
    uint32_t list_number; /* Publications so far. */
    uint32_t *blocks;     /* candidate_blocks, ascending */
    uint32_t *block_count;
    void *packed_streams, *packed_x, *packed_xq, *packed_qr, *packed_latent, *packed_oz;
    void *packed_o; /* o_groups, each of its columns. */
    /* Rotations of a row: rope_dim cosines, then sines.  entry: of the position before. */
    float *rope_plain, *rope_yarn, *rope_entry;

    /* Slots: a row's turn with one of its experts; ordered by expert, then by row. */
    float *gate;
    uint32_t *chosen; /* experts_active */
    float *chosen_weight;
    uint32_t slots_each;    /* Of a row; those of the last layer. */
    uint32_t *slot_of;      /* Slot of each of `chosen`. */
    uint32_t *slot_row;     /* Row of a slot. */
    float *slot_weight;     /* [slots]; those of the shared expert are behind. */
    uint32_t *expert_first; /* experts + 1: where an expert's slots begin. */
    float *slot_a, *slot_b, *slot_y;
    uint8_t *packed_slots, *packed_h;   /* Each expert's begin at a block of ENG_PACK_ROWS. */
    uint32_t *expert_block;             /* experts + 1 */
    struct eng_gemm_args *expert_gemms; /* 2 (experts + 1) */
    struct eng_pack_args *expert_packs; /* experts + 1 */

    float *engram_x;  /* columns x engram_dim: table rows */
    float *engram_kv; /* (4 + 1) x hidden: a key per stream, then the value */
    void *packed_engram;
    float *taps; /* draft_target_count x hidden */
    void *packed_taps;

    struct cpu_draft *draft; /* NULL without draft stages. */

    uint8_t *window;     /* Prepared window rows: cpu_window_room() rows, padding included. */
    uint32_t *head_rows; /* [pass_rows]: those that want logits. */
    void *packed_head;   /* CPU_HEAD_ROWS x hidden */
    float *head_y;       /* CPU_HEAD_ROWS x vocab */
};

/* [CPU_DRAFT_SESSIONS] blocks: what the last part of drafting works on. */
struct cpu_draft {
    uint32_t *ids;     /* block */
    float *logits;     /* block x vocab */
    float *confidence; /* block */
    uint32_t *tokens;  /* block */
    /* [CPU_DRAFT_SESSIONS] of each. */
    uint32_t *prev;
    float *embed; /* draft_rank */
    float *bias;  /* vocab */
    void *packed_embed, *packed_x;
    uint8_t *block_rows; /* Prepared rows of the blocks. */
};

struct cpu_model {
    struct eng_checkpoint *checkpoint;
    struct eng_weights weights;
    struct eng_engram_ids engram_ids;
    struct eng_engram_table *engram_tables;
    struct eng_fetch *fetch; /* NULL without Engram. */
    struct eng_compute compute;
    struct cpu_batch batch;
    void *batch_memory;
    size_t batch_bytes;
};

/* Encoder outputs of the last window of encoded tokens: what the decoder starts from when another
 * pass than the one that encoded them decodes. */
struct cpu_session {
    struct eng_host host;
    uint8_t *encoded; /* window x 4 hidden bf16 (fp32 with quant_off), position p at p % window */
    float *encoded_g; /* window x 4 */
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

/* Calls fn for rows [first, last) of [0, count), `grain` at a time, on the threads of the pool. */
typedef void cpu_rows_fn(struct cpu_batch *batch, const void *arg, uint32_t first, uint32_t last,
                         struct cpu_thread *thread);
void cpu_each(struct cpu_batch *batch, uint32_t count, uint32_t grain, cpu_rows_fn *fn,
              const void *arg);

/* Packing of x, `rows` rows of k; quantize: through FP8, which quant_off leaves out. */
struct eng_pack_args cpu_packing(const struct cpu_batch *batch, const float *x, size_t x_stride,
                                 uint32_t rows, uint32_t k, bool quantize, void *packed);
/* All of it; or rows [first, last), whose first begins a block. */
void cpu_pack(const struct cpu_batch *batch, const struct eng_pack_args *args);
void cpu_pack_rows(const struct cpu_batch *batch, const struct eng_pack_args *args, uint32_t first,
                   uint32_t last);

/* Products that do not depend on each other, computed together.  Every product with weights goes
 * through here. */
struct cpu_products {
    struct eng_gemm_args items[8];
    uint32_t count;
};
/* y = W x for the first `rows` rows; y is [rows][matrix->n]. */
void cpu_product(const struct cpu_batch *batch, struct cpu_products *products,
                 const struct eng_matrix *matrix, const void *packed, uint32_t rows, float *y,
                 bool round_bf16);
void cpu_products_run(const struct cpu_batch *batch, struct cpu_products *products);

/* Rows of batch->window. */
static inline uint32_t cpu_window_room(const struct eng_model *model)
{
    return CPU_WINDOW_SPANS * (model->config.window + CPU_PACKED_PAD) + cpu_rows_max(model) +
           model->config.window + CPU_PACKED_PAD;
}

/* The sum of sixteen partial sums, in the one order there is; the lanes are used up. */
static inline float cpu_lanes_sum(float lanes[16])
{
    for (uint32_t width = 8; width > 0; width /= 2)
        for (uint32_t l = 0; l < width; l++)
            lanes[l] += lanes[l + width];
    return lanes[0];
}

/* cpu_batch.c: 4 x pairs floats as the kernel `rotate` wants them. */
void cpu_rotations(const float *frequencies, uint32_t pairs, uint32_t position, float *row);
/* The last rope_dim of `vector` (width floats), in place, by one row of rotations. */
static inline void cpu_rotate(const struct cpu_batch *batch, const float *rotation, float *vector,
                              uint32_t width, bool inverse)
{
    const uint32_t rope = batch->config->rope_dim;
    batch->kernels->rotate(vector + width - rope, rotation, rope, inverse);
}

/* cpu_codec.c: how rows are stored: packed, or fp32 with quant_off. */
enum eng_row_kind cpu_row_kind(const struct cpu_batch *batch, enum eng_row_kind kind);
/* What a query becomes by being packed, in place. */
void cpu_key_round(const struct cpu_batch *batch, float *values);

/* cpu_mix.c: what a sublayer reads, x and its packed forms, with its mixes (hc) or without (NULL);
 * and how its output, or (moe) that of the experts, goes back into the streams. */
void cpu_read(struct cpu_batch *batch, const struct eng_hc *hc, const float *norm);
void cpu_write(struct cpu_batch *batch, bool moe);

/* cpu_rows.c: compressor of a layer that owns rows, from packed_x: its products, then the rows. */
void cpu_rows_products(struct cpu_batch *batch, uint32_t layer, struct cpu_products *products);
void cpu_write_rows(struct cpu_batch *batch, uint32_t layer);

/* cpu_index.c: publishes batch->list, from batch->iq (ready to be scored) and iw. */
void cpu_publish_list(struct cpu_batch *batch, uint32_t layer);
const uint8_t *cpu_entry_row(const struct eng_session *session, uint32_t source, uint32_t entry,
                             bool main);
void cpu_top_reset(struct cpu_top *top, uint32_t max);
void cpu_top_cut(struct cpu_top *top);
/* Indices of the best, ascending; returns how many. */
uint32_t cpu_top_take(struct cpu_top *top, uint32_t *list);

/* Indices ascend from call to call, so an equal score never displaces.  What is not a number (of
 * rows that are none) counts least. */
static inline void cpu_top_offer(struct cpu_top *top, float score, uint32_t index)
{
    if (top->is_full && !(score > top->least)) return;
    top->scores[top->count] = isnan(score) ? -INFINITY : score;
    top->indices[top->count] = index;
    if (++top->count == top->room) cpu_top_cut(top);
}

/* cpu_attention.c: what cpu_read() left to batch->sub. */
void cpu_attention(struct cpu_batch *batch, uint32_t layer, bool write_rows);
/* o of row t, from what attend left there: rounded and rotated back. */
void cpu_attended(struct cpu_batch *batch, uint32_t layer, uint32_t t);

/* cpu_engram.c: tables and thread of a model that has them; row numbers of a pass; the part before
 * a layer's block (nothing for most layers). */
kv_status cpu_engram_open(const struct eng_model *model, struct cpu_model *own,
                          struct kv_error *err) KV_MUST_CHECK;
uint64_t cpu_engram_rows(const struct eng_model *model); /* eng_model_engram_rows(). */
void cpu_engram_start(const struct cpu_batch *batch);
void cpu_engram(struct cpu_batch *batch, uint32_t layer);

/* cpu_draft.c: what a draft needs of a layer's input (nothing of most); window rows of the stages
 * from that; a block's attention, batch->q and kv to batch->o; and a draft. */
void cpu_tap(struct cpu_batch *batch, uint32_t layer);
void cpu_draft_windows(struct cpu_batch *batch);
void cpu_draft_attend(struct cpu_batch *batch, uint32_t layer);
void cpu_draft(struct eng_model *model, const struct eng_draft_item *items, uint32_t count);

/* cpu_moe.c: what cpu_read() left through the experts; and their sum for row t, hidden values. */
void cpu_moe(struct cpu_batch *batch, uint32_t layer);
void cpu_moe_sum(const struct cpu_batch *batch, uint32_t t, float *sum);
