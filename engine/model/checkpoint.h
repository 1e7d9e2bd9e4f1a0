#pragma once

/*
 * A checkpoint in the released format: one directory with
 *
 *   config.json
 *   model.safetensors, or model.safetensors.index.json and the shards it names
 *   engram_ids.bin     one int32 LE per vocabulary id; only for models with Engram
 *
 * Opening it checks everything that can be checked without reading the weights: the config, every
 * shard's header, that exactly the tensors of the config are there (tensors.h) with dtype and
 * shape, each in the shard the index says, and the compressed ids.  Checkpoints of at most
 * ENG_CHECKPOINT_WHOLE_MAX bytes are also read through, as eng_checkpoint_verify() does it.
 *
 * Weights are pointers into the mapped files (mapping.h): as stored, little-endian, shared by all
 * processes of the machine.
 *
 * Owned by: the model.  Immutable after opening; any thread.  Errors: KV_IO when a file cannot be
 * read or shrank, KV_INVALID for everything else that is wrong with it, KV_NOMEM; the text names
 * file and tensor or field, what was expected and what was found.
 */

#include "engine/model/config.h"
#include "engine/model/safetensors.h"
#include "kvstore/base/digest.h"
#include "kvstore/base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ENG_CHECKPOINT_WHOLE_MAX (1ull << 30)

struct eng_checkpoint;

/* Calls `visit` with the name of each file that makes up the model in `dir`, whether it is there or
 * not; of the shards those an index names that can be read.  For whoever writes files nearby. */
typedef bool eng_checkpoint_visit_file(void *context, const char *name);
void eng_checkpoint_files_each(const char *dir, eng_checkpoint_visit_file *visit, void *context);

kv_status eng_checkpoint_open(const char *dir, struct eng_checkpoint **ret_checkpoint,
                              struct kv_error *err) KV_MUST_CHECK;
/* The same without reading weights through, however small the checkpoint is.  `whole_max` 0: its
 * digest is then that of a large one. */
kv_status eng_checkpoint_open_max(const char *dir, uint64_t whole_max,
                                  struct eng_checkpoint **ret_checkpoint,
                                  struct kv_error *err) KV_MUST_CHECK;
void eng_checkpoint_close(struct eng_checkpoint *checkpoint);

/* Reads and parses DIR/config.json alone.  ret_digest: of its bytes; NULL: not wanted. */
kv_status eng_checkpoint_config_read(const char *dir, struct eng_config *ret_config,
                                     struct kv_digest *ret_digest,
                                     struct kv_error *err) KV_MUST_CHECK;

const struct eng_config *eng_checkpoint_config(const struct eng_checkpoint *checkpoint);

/* First byte of the tensor with exactly this dtype and shape (columns 0: a vector). */
kv_status eng_checkpoint_take(const struct eng_checkpoint *checkpoint, const char *name,
                              enum eng_dtype dtype, uint64_t rows, uint64_t columns,
                              const uint8_t **ret_data, struct kv_error *err) KV_MUST_CHECK;
/* The same of a tensor that is BF16 or F32; *ret_dtype: which of them. */
kv_status eng_checkpoint_take_either(const struct eng_checkpoint *checkpoint, const char *name,
                                     uint64_t rows, uint64_t columns, enum eng_dtype *ret_dtype,
                                     const uint8_t **ret_data, struct kv_error *err) KV_MUST_CHECK;

/* Compressed id of every vocabulary id (section 2.8, rule 1); NULL without Engram. */
const uint32_t *eng_checkpoint_compressed_ids(const struct eng_checkpoint *checkpoint);

/* Bytes of all tensors of the text model. */
uint64_t eng_checkpoint_bytes(const struct eng_checkpoint *checkpoint);
uint32_t eng_checkpoint_shard_count(const struct eng_checkpoint *checkpoint);

/* What the fingerprint of a model takes of its files.  SHA-256 over the digest of config.json, that
 * of engram_ids.bin, and of the shards:
 *   every byte, as the digest that eng_checkpoint_verify() gives, when the checkpoint has at most
 *   ENG_CHECKPOINT_WHOLE_MAX bytes;
 *   else for each shard its size and its header, then of each tensor the first and last
 *   ENG_SAMPLE_BYTES, which is one page to read for two tensors.  Other weights of the same shape
 *   differ there; damage inside is found by verify. */
#define ENG_SAMPLE_BYTES 64u
struct kv_digest eng_checkpoint_digest(const struct eng_checkpoint *checkpoint);
struct kv_digest eng_checkpoint_config_digest(const struct eng_checkpoint *checkpoint);

/* KV_IO, with the file: it has another size or time than at opening, or a page of it was missing;
 * nothing computed since can be believed. */
kv_status eng_checkpoint_check(const struct eng_checkpoint *checkpoint,
                               struct kv_error *err) KV_MUST_CHECK;

/* Progress of a verification; returning false ends it with KV_CANCELLED. */
typedef bool eng_checkpoint_progress(void *context, uint64_t done_bytes, uint64_t total_bytes);

/*
 * Reads every byte once: no scale may be NaN (ue8m0 255), no value NaN or infinite.  ret_content:
 * SHA-256 over the SHA-256 of each shard's whole file, in ascending order of their names.  Keeps no
 * page of what it read.  `progress` may be NULL; it is called about every 16 MiB.
 */
kv_status eng_checkpoint_verify(const struct eng_checkpoint *checkpoint,
                                eng_checkpoint_progress *progress, void *context,
                                struct kv_digest *ret_content, struct kv_error *err) KV_MUST_CHECK;
