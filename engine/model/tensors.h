#pragma once

/*
 * The tensors that a config asks for: names, dtypes and shapes of the released checkpoints (the
 * model's specification, section 7.1).  The one list that loading, checking, counting and making
 * models go by.
 *
 * Shapes are elements, rows first; columns 0 is a vector.  Order: embed, head, norm, then layer by
 * layer, then the draft stages; a weight stands right before its scale.  Pure; any thread.
 */

#include "engine/model/config.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* As safetensors names them: F32, BF16, F8_E4M3, F8_E8M0, I8 (a pair of MXFP4 values). */
enum eng_dtype { ENG_F32, ENG_BF16, ENG_F8_E4M3, ENG_F8_E8M0, ENG_I8 };

#define ENG_TENSOR_NAME_MAX 96u

/* What a tensor is for; one for each row of the table in section 7.1. */
enum eng_role {
    ENG_ROLE_EMBED,
    ENG_ROLE_HEAD,
    ENG_ROLE_NORM, /* Of the whole model, and of the last draft stage. */
    ENG_ROLE_ATTN_NORM,
    ENG_ROLE_FFN_NORM,
    ENG_ROLE_HC_FN,
    ENG_ROLE_HC_BASE,
    ENG_ROLE_HC_SCALE,
    ENG_ROLE_SINK,
    ENG_ROLE_Q_NORM,
    ENG_ROLE_KV_NORM,
    ENG_ROLE_WQ_A,
    ENG_ROLE_WQ_B,
    ENG_ROLE_WKV,
    ENG_ROLE_WO_A,
    ENG_ROLE_WO_B,
    ENG_ROLE_CMP_WKV,
    ENG_ROLE_CMP_WGATE,
    ENG_ROLE_CMP_NORM,
    ENG_ROLE_IX_WK,
    ENG_ROLE_IX_K_NORM,
    ENG_ROLE_IX_WQ_B,
    ENG_ROLE_IX_PROJ,
    ENG_ROLE_GATE,
    ENG_ROLE_GATE_BIAS,
    ENG_ROLE_GATE_BIAS_VL,
    ENG_ROLE_EXPERT_W1, /* gate */
    ENG_ROLE_EXPERT_W3, /* up */
    ENG_ROLE_EXPERT_W2, /* down */
    ENG_ROLE_SHARED_W1,
    ENG_ROLE_SHARED_W3,
    ENG_ROLE_SHARED_W2,
    ENG_ROLE_ENGRAM_ROWS,
    ENG_ROLE_ENGRAM_WKV,
    ENG_ROLE_ENGRAM_Q,
    ENG_ROLE_ENGRAM_K,
    ENG_ROLE_MAIN_PROJ,
    ENG_ROLE_MAIN_NORM,
    ENG_ROLE_MARKOV_EMBED,
    ENG_ROLE_MARKOV_HEAD,
    ENG_ROLE_CONFIDENCE,
    ENG_ROLE_COUNT,
};

struct eng_tensor_spec {
    char name[ENG_TENSOR_NAME_MAX];
    enum eng_dtype dtype;
    uint64_t rows, columns;
    enum eng_role role;
    bool is_scale;   /* The ue8m0 sibling of the weight before it. */
    bool or_f32;     /* Is BF16 in the released files as far as known; F32 is as good. */
    uint32_t layer;  /* Draft stage s: layers + s; ENG_NO_SOURCE outside of layers. */
    uint32_t expert; /* ENG_NO_SOURCE unless the role is an expert's. */
};

/* Called for each tensor in order; returning false ends the walk. */
typedef bool eng_tensor_visit(void *context, const struct eng_tensor_spec *spec);

/* false: the visitor ended it. */
bool eng_tensors_each(const struct eng_config *config, eng_tensor_visit *visit, void *context);

/* How many there are. */
size_t eng_tensors_count(const struct eng_config *config);

/* Part of a released checkpoint that a text engine has no use for: the vision tower, its aligner,
 * and the draft stages' copies of embed and head. */
bool eng_tensor_is_ignored(const char *name);

const char *eng_dtype_name(enum eng_dtype dtype); /* "F8_E4M3" */
/* false: there is no such dtype. */
bool eng_dtype_parse(const char *name, enum eng_dtype *ret_dtype);
uint32_t eng_dtype_bytes(enum eng_dtype dtype);

/* Values in a tensor: an I8 holds two.  0 for scales, which are part of their weight's format. */
static inline uint64_t eng_tensor_values(const struct eng_tensor_spec *spec)
{
    const uint64_t items = spec->rows * (spec->columns == 0 ? 1 : spec->columns);
    return spec->is_scale ? 0 : spec->dtype == ENG_I8 ? 2 * items : items;
}

static inline uint64_t eng_tensor_bytes(const struct eng_tensor_spec *spec)
{
    return spec->rows * (spec->columns == 0 ? 1 : spec->columns) * eng_dtype_bytes(spec->dtype);
}
