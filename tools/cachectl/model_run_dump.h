#pragma once

/*
 * A safetensors file whose tensors are all known before the first byte is computed, filled in
 * place.
 *
 *   model_dump_init; model_dump_add ...; model_dump_open; model_dump_data ...;
 *   model_dump_finish; model_dump_fini
 *
 * The file grows under PATH.part.PID, a name that was free and is this process's alone, and gets
 * its own when it is complete: of several that write the same PATH each leaves a whole file, the
 * last one's stays.  Its space is reserved at open, so a full disk is an error there and not a
 * signal later.  Owned by: one thread.
 */

#include "kvstore/base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* At most so much is added to PATH for the name of the unfinished file. */
#define MODEL_DUMP_SUFFIX_BYTES 32u

enum model_dump_type { DUMP_U8, DUMP_I32, DUMP_I64, DUMP_F32, DUMP_BF16 };

struct model_dump_tensor {
    char name[48];
    enum model_dump_type type;
    uint32_t rank;
    uint64_t shape[3];
    uint64_t offset; /* In the data part. */
};

struct model_dump {
    struct model_dump_tensor *tensors;
    size_t count, max;
    bool failed;    /* No memory for one of them. */
    uint64_t bytes; /* Of the data part. */
    const char *path;
    char part[4096]; /* "PATH.part.PID"; "" when there is no such file. */
    uint8_t *map;
    uint64_t map_bytes, data_at;
};

void model_dump_init(struct model_dump *dump);

/* Another tensor of `rank` 1 to 3; shape has that many dimensions, and one of 0 makes it empty.
 * Returns its index; no memory for it shows at open, as KV_NOMEM. */
size_t model_dump_add(struct model_dump *dump, const char *name, enum model_dump_type type,
                      uint32_t rank, const uint64_t *shape);

/* meta: `meta_count` pairs of name and value.  KV_IO (also: no space), KV_NOMEM; nothing is left
 * behind. */
kv_status model_dump_open(struct model_dump *dump, const char *path, const char *const (*meta)[2],
                          size_t meta_count, struct kv_error *err) KV_MUST_CHECK;

/* Where the tensor's values go, little endian; 8 B aligned. */
void *model_dump_data(const struct model_dump *dump, size_t tensor);

/* Bytes of one step of the first dimension. */
uint64_t model_dump_row_bytes(const struct model_dump *dump, size_t tensor);

/* Writes everything out and gives the file its name. */
kv_status model_dump_finish(struct model_dump *dump, struct kv_error *err) KV_MUST_CHECK;

/* Frees; an unfinished file is removed.  Accepts what init made at any stage. */
void model_dump_fini(struct model_dump *dump);
