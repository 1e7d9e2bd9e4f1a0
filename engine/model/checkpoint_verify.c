/*
 * Reads a checkpoint through: every byte into a digest, every scale and value looked at.
 *
 * One pass in file order and 16 MiB at a time; what was read is given back, so that verifying 475
 * GiB holds no memory.  The look at the values is a loop without branches over a piece that is in
 * the cache anyway, and only a piece with something wrong in it is searched for the place.
 */

#include "engine/model/checkpoint.h"
#include "engine/model/checkpoint_internal.h"
#include "engine/model/model_limits.h"
#include "kvstore/base/bytes.h"

#include <stdlib.h>

#define PIECE_BYTES (16ull << 20)

/* Is item `i` a NaN, or an infinity where the format has them? */
static bool item_bad(enum eng_dtype dtype, const uint8_t *data, uint64_t i)
{
    switch (dtype) {
    case ENG_F8_E8M0:
        return data[i] == 255;
    case ENG_F8_E4M3:
        return (data[i] & 0x7f) == 0x7f;
    case ENG_BF16:
        return (data[2 * i + 1] & 0x7f) == 0x7f && (data[2 * i] & 0x80) != 0;
    case ENG_F32:
        return (data[4 * i + 3] & 0x7f) == 0x7f && (data[4 * i + 2] & 0x80) != 0;
    case ENG_I8:
        return false; /* Every pair of MXFP4 codes is two numbers. */
    }
    return true;
}

static bool any_bad(enum eng_dtype dtype, const uint8_t *data, uint64_t count)
{
    uint32_t bad = 0;

    switch (dtype) {
    case ENG_F8_E8M0:
        return memchr(data, 255, (size_t)count) != NULL;
    case ENG_F8_E4M3:
        for (uint64_t i = 0; i < count; i++)
            bad |= (data[i] & 0x7f) == 0x7f;
        return bad != 0;
    case ENG_BF16:
        for (uint64_t i = 0; i < count; i++)
            bad |= (kv_load16(data + 2 * i) & 0x7f80) == 0x7f80;
        return bad != 0;
    case ENG_F32:
        for (uint64_t i = 0; i < count; i++)
            bad |= (kv_load32(data + 4 * i) & 0x7f800000) == 0x7f800000;
        return bad != 0;
    case ENG_I8:
        return false;
    }
    return true;
}

kv_status eng_values_check(const char *path, const struct eng_tensor *tensor, uint64_t first,
                           const uint8_t *data, uint64_t count, struct kv_error *err)
{
    uint64_t i = 0;

    if (!any_bad(tensor->dtype, data, count)) return KV_OK;
    while (i < count && !item_bad(tensor->dtype, data, i))
        i++;
    const uint64_t columns = tensor->rank == 2 ? tensor->shape[1] : tensor->shape[0];
    const uint64_t at = first + i;
    const bool scale = tensor->dtype == ENG_F8_E8M0;
    return KV_FAIL(err, KV_INVALID, "%s: tensor %.80s: %s [%llu,%llu] is %s, expected a number",
                   path, tensor->name, scale ? "scale" : "value",
                   (unsigned long long)(at / columns), (unsigned long long)(at % columns),
                   scale ? "NaN" : "NaN or infinite");
}

struct pass {
    eng_checkpoint_progress *progress;
    void *context;
    uint64_t done, total;
    uint64_t kept_from; /* Offset in the shard: pages before it were given back. */
    struct kv_error *err;
};

/* By stretches and not by tensors: touching the next page maps its neighbours again.  Of a small
 * checkpoint the pages are wanted again at once. */
static void give_back(struct pass *pass, const struct eng_mapping *mapping, uint64_t end)
{
    const uint64_t count = end - pass->kept_from;
    if (pass->total <= ENG_CHECKPOINT_WHOLE_MAX) return;
    if (count < PIECE_BYTES && end < mapping->bytes) return;
    eng_mapping_forget(mapping, pass->kept_from, count);
    pass->kept_from = end;
}

static kv_status step(struct pass *pass, uint64_t bytes)
{
    pass->done += bytes;
    if (pass->progress == NULL || pass->progress(pass->context, pass->done, pass->total))
        return KV_OK;
    return KV_FAIL(pass->err, KV_CANCELLED, "verification was ended");
}

static kv_status read_tensor(struct pass *pass, const struct eng_mapping *mapping,
                             const struct eng_tensor *tensor, struct kv_sha256_state *hash)
{
    const uint64_t item_bytes = eng_dtype_bytes(tensor->dtype);
    kv_status status = KV_OK;

    for (uint64_t at = 0; at < tensor->bytes && status == KV_OK; at += PIECE_BYTES) {
        const uint8_t *data = tensor->data + at;
        const uint64_t bytes = KV_MIN(tensor->bytes - at, PIECE_BYTES);
        kv_sha256_update(hash, data, (size_t)bytes);
        if (!eng_tensor_is_ignored(tensor->name))
            status = eng_values_check(mapping->path, tensor, at / item_bytes, data,
                                      bytes / item_bytes, pass->err);
        /* Zeros in place of a lost page say nothing. */
        if (eng_mapping_lost(mapping)) status = eng_mapping_check(mapping, pass->err);
        if (status == KV_OK) status = step(pass, bytes);
        give_back(pass, mapping, (uint64_t)(data - mapping->data) + bytes);
    }
    return status;
}

static int by_data(const void *a, const void *b)
{
    const struct eng_tensor *const *x = a, *const *y = b;
    return ((*x)->data > (*y)->data) - ((*x)->data < (*y)->data);
}

static kv_status read_shard(struct pass *pass, const struct eng_safetensors *file,
                            struct kv_digest *ret_digest)
{
    const struct eng_mapping *mapping = eng_safetensors_mapping(file);
    const uint64_t data_at = eng_safetensors_data_at(file);
    struct kv_sha256_state hash;
    size_t count = 0;

    const struct eng_tensor *tensors = eng_safetensors_tensors(file, &count);
    const struct eng_tensor **sorted = calloc(count + 1, sizeof(*sorted));
    if (sorted == NULL)
        return KV_FAIL(pass->err, KV_NOMEM, "%s: %zu tensors", mapping->path, count);
    for (size_t i = 0; i < count; i++)
        sorted[i] = &tensors[i];
    qsort(sorted, count, sizeof(*sorted), by_data);

    pass->kept_from = 0;
    kv_sha256_init(&hash);
    kv_sha256_update(&hash, mapping->data, (size_t)data_at);
    kv_status status = step(pass, data_at);
    /* They cover the data without a hole (safetensors.c), so this is the whole file in order. */
    for (size_t i = 0; i < count && status == KV_OK; i++)
        status = read_tensor(pass, mapping, sorted[i], &hash);
    free(sorted);
    if (status == KV_OK) kv_sha256_final(&hash, ret_digest);
    return status;
}

kv_status eng_checkpoint_verify(const struct eng_checkpoint *checkpoint,
                                eng_checkpoint_progress *progress, void *context,
                                struct kv_digest *ret_content, struct kv_error *err)
{
    struct pass pass = {.progress = progress, .context = context, .err = err};
    struct kv_digest digests[ENG_SHARDS_MAX];
    kv_status status = KV_OK;

    for (uint32_t i = 0; i < checkpoint->shard_count; i++)
        pass.total += eng_safetensors_mapping(checkpoint->shards[i].file)->bytes;
    for (uint32_t i = 0; i < checkpoint->shard_count && status == KV_OK; i++)
        status = read_shard(&pass, checkpoint->shards[i].file, &digests[i]);
    if (status == KV_OK) status = eng_checkpoint_check(checkpoint, err);
    if (status == KV_OK)
        kv_sha256(digests, checkpoint->shard_count * sizeof(*digests), ret_content);
    return status;
}
