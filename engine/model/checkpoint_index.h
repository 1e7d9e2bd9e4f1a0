#pragma once

/*
 * model.safetensors.index.json: which shard holds which tensor.
 *
 * Owned by: the checkpoint that is being opened; dropped when its headers have been compared. Pure.
 */

#include "kvstore/base/status.h"

#include <stddef.h>
#include <stdint.h>

struct eng_index;

/* KV_INVALID: not an index; the text names tensor or shard. */
kv_status eng_index_parse(const char *path, const char *text, size_t count,
                          struct eng_index **ret_index, struct kv_error *err) KV_MUST_CHECK;
void eng_index_destroy(struct eng_index *index);

/* File names without a directory, ascending, each once. */
uint32_t eng_index_shard_count(const struct eng_index *index);
const char *eng_index_shard(const struct eng_index *index, uint32_t shard);

/* NULL: the index does not name the tensor. */
const char *eng_index_shard_of(const struct eng_index *index, const char *tensor);

/* Calls `visit` with each tensor and its shard until it fails; returns how it ended. */
typedef kv_status eng_index_visit(void *context, const char *tensor, const char *shard);
kv_status eng_index_each(const struct eng_index *index, eng_index_visit *visit, void *context);

/* metadata.total_size; 0: it says nothing. */
uint64_t eng_index_total_bytes(const struct eng_index *index);
