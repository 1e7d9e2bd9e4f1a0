#pragma once

/*
 * A safetensors file, read once and checked as a whole before a single weight is used.
 *
 * Owned by: whoever opens the model.  The bytes are read into private memory, not mapped: a file
 * that someone truncates meanwhile then is an error and not a SIGBUS.
 */

#include "engine/model/tensors.h"
#include "kvstore/base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ENG_RANK_MAX 2u

struct eng_tensor {
    const char *name; /* Owned by the file. */
    enum eng_dtype dtype;
    uint32_t rank;
    uint64_t shape[ENG_RANK_MAX];
    const uint8_t *data;
    uint64_t bytes;
    bool used; /* Set by eng_safetensors_take. */
};

struct eng_safetensors;

/* KV_INVALID: not a safetensors file that holds together; the text names file and tensor. */
kv_status eng_safetensors_open(const char *path, struct eng_safetensors **ret_file,
                               struct kv_error *err) KV_MUST_CHECK;
void eng_safetensors_close(struct eng_safetensors *file);

/* The tensor with exactly this dtype and shape (columns 0: rank 1), marked used. */
kv_status eng_safetensors_take(struct eng_safetensors *file, const char *name, enum eng_dtype dtype,
                               uint64_t rows, uint64_t columns, const uint8_t **ret_data,
                               struct kv_error *err) KV_MUST_CHECK;

/* KV_INVALID when a tensor was never taken: it belongs to another model. */
kv_status eng_safetensors_all_used(const struct eng_safetensors *file,
                                   struct kv_error *err) KV_MUST_CHECK;

const uint8_t *eng_safetensors_bytes(const struct eng_safetensors *file, size_t *ret_count);

/* Whole regular file of at most `max` bytes into malloc'd memory. */
kv_status eng_file_read(const char *path, uint64_t max, uint8_t **ret_data, size_t *ret_count,
                        struct kv_error *err) KV_MUST_CHECK;
