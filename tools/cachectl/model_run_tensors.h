#pragma once

/*
 * The tensors of a run, by layer and position, from the model's config.  Which there are, their
 * shapes and where a row of one goes; the values come from the run.
 *
 * Owned by: the thread of the run.
 */

#include "engine/model/config.h"
#include "engine/probe.h"
#include "kvstore/format/layout.h"
#include "tools/cachectl/model_run_dump.h"

#include <stdbool.h>

enum run_kind {
    RUN_STREAM,
    RUN_PREMIX,
    RUN_WINDOW,
    RUN_TOPK,
    RUN_CANDIDATES,
    RUN_EXPERTS,
    RUN_WEIGHTS,
    RUN_ENGRAM,
    RUN_LOGITS,
    RUN_KIND_COUNT,
};

#define RUN_LAYERS_MAX (KV_LAYERS_MAX + KV_DRAFT_STAGES_MAX)

struct run_tensors {
    struct model_dump dump;
    const struct eng_config *config;
    const struct kv_layout *layout;
    bool quant_off;
    uint32_t first, decoder_first,
        to; /* Positions computed: [first, to); decoder from its first. */
    size_t rows[RUN_KIND_COUNT][RUN_LAYERS_MAX]; /* Index of the tensor + 1; 0: there is none. */
    size_t tokens, main_rows[KV_SOURCES_MAX], keys[KV_SOURCES_MAX];
    size_t draft, draft_token, draft_logits, draft_confidence;
};

/* Config and layout are borrowed.  dump is initialised and has all tensors, but no file yet. */
void run_tensors_init(struct run_tensors *tensors, const struct eng_config *config,
                      const struct kv_layout *layout, bool quant_off, uint32_t first,
                      uint32_t decoder_first, uint32_t to);

/* After model_dump_open: positions of all tensors that have them. */
void run_tensors_fill_positions(struct run_tensors *tensors);

/* Row of `position` in the tensor of a layer (0 for kinds without layer); NULL: there is no such
 * tensor, or the position is before its first. */
void *run_tensors_row(const struct run_tensors *tensors, enum run_kind kind, uint32_t layer,
                      uint32_t position);

/* model_run_probe.c: callbacks that fill the tensors of an open dump. */
void run_tensors_probe(struct run_tensors *tensors, struct eng_probe *ret_probe);
