#pragma once

/*
 * A safetensors file, mapped, and checked as a whole before a single weight is used.
 *
 * Owned by: whoever opens the model.  Immutable but for `used`, which is set before others
 * see it; reading: any thread.  Data stay in the file (mapping.h): tensors are
 * pointers into it, little-endian, not aligned.
 */

#include "engine/model/mapping.h"
#include "engine/model/tensors.h"
#include "kvstore/base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ENG_RANK_MAX 4u

struct eng_tensor {
    const char *name; /* Owned by the file.  Printable ASCII. */
    enum eng_dtype dtype;
    uint32_t rank; /* 1 to ENG_RANK_MAX */
    uint64_t shape[ENG_RANK_MAX];
    const uint8_t *data;
    uint64_t bytes;
    bool used; /* The config lists it.  Set by whoever opens the checkpoint. */
};

struct eng_safetensors;

/* KV_INVALID: not a safetensors file that holds together; the text names file and tensor. */
kv_status eng_safetensors_open(const char *path, struct eng_safetensors **ret_file,
                               struct kv_error *err) KV_MUST_CHECK;
void eng_safetensors_close(struct eng_safetensors *file);

/* All tensors, ascending by name. */
const struct eng_tensor *eng_safetensors_tensors(const struct eng_safetensors *file,
                                                 size_t *ret_count);
/* NULL: there is none of that name. */
struct eng_tensor *eng_safetensors_find(const struct eng_safetensors *file, const char *name);

const struct eng_mapping *eng_safetensors_mapping(const struct eng_safetensors *file);
/* Offset of the data: 8 bytes of length and the header come before. */
uint64_t eng_safetensors_data_at(const struct eng_safetensors *file);

/* KV_INVALID unless `tensor` has this dtype, or F32 where that is as good, and this shape (columns
 * 0: rank 1). */
kv_status eng_tensor_check(const char *path, const struct eng_tensor *tensor, enum eng_dtype dtype,
                           bool or_f32, uint64_t rows, uint64_t columns,
                           struct kv_error *err) KV_MUST_CHECK;

/* KV_INVALID when a tensor is neither used nor ignored: it belongs to another model. */
kv_status eng_safetensors_all_used(const struct eng_safetensors *file,
                                   struct kv_error *err) KV_MUST_CHECK;
