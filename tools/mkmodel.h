#pragma once

/* Between the parts of mkmodel: what is made, from which numbers, into which files. */

#include "engine/model/config.h"
#include "engine/model/tensors.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct plan {
    const char *dir;
    const char *config_text; /* Goes into config.json as it is. */
    size_t config_bytes;
    const struct eng_config *config;
    uint64_t seed;
    uint32_t shards; /* 1: model.safetensors and no index. */
    bool bigram;
    bool force; /* Whoever made the model that is there. */
};

/* ---- mkmodel_fill.c: numbers ---- */

/* Where a weight goes: strips of whole rows, ascending, of it and of its scales. */
typedef bool fill_write(void *context, bool scales, uint64_t offset, const uint8_t *data,
                        size_t bytes);

/* Makes all values of `weight` (never a scale: those come with it).  false: out of memory, or
 * `write` failed. */
bool fill_tensor(const struct plan *plan, const struct eng_tensor_spec *weight, fill_write *write,
                 void *context);

/* Rows whose items come one after the other from the numbers of one name. */
struct stream {
    uint64_t state;
};
struct stream stream_for(uint64_t seed, const char *name);
float stream_normal(struct stream *stream); /* Mean 0, variance 1. */

/* One compressed id per vocabulary id, by the toy rule if its count is the config's. */
void fill_compressed_ids(const struct eng_config *config, uint32_t *ids);

/* ---- mkmodel_bigram.c: a model whose next token is known ---- */

/* The greedy token after `token`. */
uint32_t bigram_next(const struct eng_config *config, uint32_t token);
/* Is this weight all zeros from row *ret_from on? */
bool bigram_zeroed(const struct eng_config *config, const struct eng_tensor_spec *weight,
                   uint64_t *ret_from);
/* Fills row `row` of a BF16 tensor that the model needs to be special; false: it need not be. */
bool bigram_row(const struct plan *plan, const struct eng_tensor_spec *weight, uint64_t row,
                float *values);

/* ---- mkmodel_dir.c: what stands in the directory ---- */

/* How the header of a weight file begins that mkmodel made. */
#define MKMODEL_MARK "{\"__metadata__\":{\"made_by\":\"mkmodel\"}"

/* Says errno's text; false. */
bool complain(const char *path);

/* Makes the directory, or removes the model that is there.  false, with the sentence on stderr and
 * nothing touched: that one, or what else is there, is somebody's and there is no `force`, or
 * weight_bytes find no room; or it could not be removed. */
bool dir_prepare(const struct plan *plan, uint64_t weight_bytes);

/* ---- mkmodel_write.c: files ---- */

/* Writes the whole directory.  Returns the exit code, after saying on stderr what went wrong. */
int write_model(const struct plan *plan);
