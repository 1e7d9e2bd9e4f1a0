#pragma once

/* What the two halves of a checkpoint share.  Private to checkpoint.c and checkpoint_verify.c. */

#include "engine/model/checkpoint.h"
#include "engine/model/model_limits.h"

struct eng_shard {
    char *path;
    struct eng_safetensors *file;
};

struct eng_checkpoint {
    char *dir;
    struct eng_config config;
    struct kv_digest config_digest, ids_digest, digest;
    struct eng_shard shards[ENG_SHARDS_MAX]; /* Ascending by file name. */
    uint32_t shard_count;
    const struct eng_tensor **tensors; /* Of the text model, of all shards, ascending by name. */
    size_t tensor_count;
    uint64_t bytes;
    uint32_t *compressed_ids;
};

/* KV_INVALID with the place when a scale is NaN, or a value NaN or infinite.  `first` is the number
 * of the first item of `data` in the tensor. */
kv_status eng_values_check(const char *path, const struct eng_tensor *tensor, uint64_t first,
                           const uint8_t *data, uint64_t count, struct kv_error *err) KV_MUST_CHECK;
