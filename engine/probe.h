#pragma once

/*
 * A look into the layers as they run, for dumps and for comparison with another implementation.
 *
 * Each callback is called for the rows of one session that stand together in a pass, positions
 * [first, first + count) ascending, from the thread that called eng_pass().  Callbacks that get
 * pointers to changeable values may overwrite them: the engine goes on with what it finds.  A NULL
 * callback is not called.  Layers are numbered as in a checkpoint; draft stage s is layer
 * num_hidden_layers + s.  Floats are bf16 values where the model says so (model-v41, 2.11).
 */

#include "engine/engine.h"

struct eng_probe_rows {
    struct eng_session *session;
    uint32_t layer;
    uint32_t first, count;
};

struct eng_probe {
    void *context;
    bool all_logits; /* Logits of every row the decoder runs over, not only where needed. */

    /* streams: count x 4 x hidden; premix: count x 4.  Before the first decoder layer it is called
     * twice for a token: where the encoder ends (the layer's rows are made of it), and where the
     * decoder starts. */
    void (*before_layer)(void *context, const struct eng_probe_rows *rows, float *streams,
                         float *premix);
    void (*after_layer)(void *context, const struct eng_probe_rows *rows, const float *streams,
                        const float *premix);
    /* One packed window row (count is 1), as it was written. */
    void (*window_row)(void *context, const struct eng_probe_rows *rows, const uint8_t *row);
    /* blocks: count x candidate_topk_blocks, ascending, counts[i] of them. */
    void (*candidates)(void *context, const struct eng_probe_rows *rows, uint32_t *blocks,
                       uint32_t *counts);
    /* list: count x index_topk entries, ascending, counts[i] of them.  Layers that own a list. */
    void (*topk)(void *context, const struct eng_probe_rows *rows, uint32_t *list,
                 uint32_t *counts);
    /* count x experts per token, ascending, and their weights. */
    void (*experts)(void *context, const struct eng_probe_rows *rows, uint32_t *chosen,
                    float *weights);
    /* Rows of the layer's Engram table: count x columns. */
    void (*engram)(void *context, const struct eng_probe_rows *rows, const uint64_t *table_rows,
                   uint32_t columns);
    /* count x vocab_tokens. */
    void (*logits)(void *context, const struct eng_probe_rows *rows, const float *logits);
    /* `count` drafts after `first - 1`: tokens, count x vocab_tokens logits, count confidences
     * before the sigmoid. */
    void (*draft)(void *context, const struct eng_probe_rows *rows, const uint32_t *tokens,
                  const float *logits, const float *confidence);
};

/* Borrowed until replaced; NULL: none.  Between passes only. */
void eng_model_set_probe(struct eng_model *model, const struct eng_probe *probe);
