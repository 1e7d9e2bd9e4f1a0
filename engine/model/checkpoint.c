/*
 * Opens a checkpoint: config, shards, the list of tensors, compressed ids.
 *
 * The list of tensors.h is compared with what the headers hold, both ways: what is missing and what
 * is left over both mean that the config describes another model than the weights belong to.  The
 * parts of a released checkpoint that a text engine has no use for are known and skipped.
 */

#include "engine/model/checkpoint.h"

#include "engine/model/checkpoint_index.h"
#include "engine/model/checkpoint_internal.h"
#include "engine/model/model_limits.h"
#include "kvstore/base/bytes.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#define PATH_BYTES_MAX 4096u

static const char single_name[] = "model.safetensors";
static const char index_name[] = "model.safetensors.index.json";
static const char ids_name[] = "engram_ids.bin";

static kv_status join(const char *dir, const char *name, char path[PATH_BYTES_MAX],
                      struct kv_error *err)
{
    const int length = snprintf(path, PATH_BYTES_MAX, "%s/%s", dir, name);
    if (length >= 0 && (size_t)length < PATH_BYTES_MAX) return KV_OK;
    return KV_FAIL(err, KV_INVALID, "%.120s...: path too long, expected at most %u bytes", dir,
                   PATH_BYTES_MAX - 1);
}

kv_status eng_checkpoint_config_read(const char *dir, struct eng_config *ret_config,
                                     struct kv_digest *ret_digest, struct kv_error *err)
{
    char path[PATH_BYTES_MAX];
    uint8_t *text = NULL;
    size_t count = 0;

    struct stat info;
    if (stat(dir, &info) == 0 && !S_ISDIR(info.st_mode))
        return KV_FAIL(err, KV_INVALID, "%s: is a file; name the directory of the model", dir);
    kv_status status = join(dir, "config.json", path, err);
    if (status == KV_OK) status = eng_file_read(path, ENG_CONFIG_BYTES_MAX, &text, &count, err);
    if (status != KV_OK) return status;
    status = eng_config_parse(path, (const char *)text, count, ret_config, err);
    if (status == KV_OK && ret_digest != NULL) kv_sha256(text, count, ret_digest);
    free(text);
    return status;
}

static kv_status add_shard(struct eng_checkpoint *checkpoint, const char *dir, const char *name,
                           struct kv_error *err)
{
    struct eng_shard *shard = &checkpoint->shards[checkpoint->shard_count];
    char path[PATH_BYTES_MAX];

    assert(checkpoint->shard_count < ENG_SHARDS_MAX);
    kv_status status = join(dir, name, path, err);
    if (status != KV_OK) return status;
    shard->path = strdup(path);
    if (shard->path == NULL) return KV_FAIL(err, KV_NOMEM, "%s", path);
    checkpoint->shard_count++;
    return eng_safetensors_open(path, &shard->file, err);
}

/* Walking the index: is each tensor where it says? */
struct index_walk {
    const struct eng_checkpoint *checkpoint;
    struct kv_error *err;
};

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash == NULL ? path : slash + 1;
}

static kv_status check_named(void *context, const char *tensor, const char *name)
{
    const struct index_walk *walk = context;
    const struct eng_checkpoint *checkpoint = walk->checkpoint;
    uint32_t low = 0, high = checkpoint->shard_count;

    while (low + 1 < high) {
        const uint32_t middle = (low + high) / 2;
        if (strcmp(base_name(checkpoint->shards[middle].path), name) <= 0)
            low = middle;
        else
            high = middle;
    }
    if (eng_safetensors_find(checkpoint->shards[low].file, tensor) != NULL) return KV_OK;
    return KV_FAIL(walk->err, KV_INVALID,
                   "%s: tensor %.80s is missing, which the index says is here",
                   checkpoint->shards[low].path, tensor);
}

/* The other way round, which also finds a tensor that stands in two shards; and the sum of all. */
static kv_status check_shards(const struct eng_checkpoint *checkpoint,
                              const struct eng_index *index, const char *path, struct kv_error *err)
{
    uint64_t total = 0;

    for (uint32_t i = 0; i < checkpoint->shard_count; i++) {
        const struct eng_shard *shard = &checkpoint->shards[i];
        size_t count = 0;
        const struct eng_tensor *tensors = eng_safetensors_tensors(shard->file, &count);
        for (size_t t = 0; t < count; t++) {
            const char *named = eng_index_shard_of(index, tensors[t].name);
            if (named == NULL || strcmp(named, base_name(shard->path)) != 0)
                return KV_FAIL(err, KV_INVALID, "%s: tensor %.80s: the index says it is in %.80s",
                               shard->path, tensors[t].name, named == NULL ? "no shard" : named);
            total += tensors[t].bytes;
        }
    }
    const uint64_t expected = eng_index_total_bytes(index);
    if (expected != 0 && expected != total)
        return KV_FAIL(err, KV_INVALID, "%s: metadata.total_size is %llu, the shards hold %llu",
                       path, (unsigned long long)expected, (unsigned long long)total);
    return KV_OK;
}

static kv_status open_sharded(struct eng_checkpoint *checkpoint, const char *dir, const char *path,
                              struct kv_error *err)
{
    struct eng_index *index = NULL;
    uint8_t *text = NULL;
    size_t count = 0;

    kv_status status = eng_file_read(path, ENG_INDEX_BYTES_MAX, &text, &count, err);
    if (status != KV_OK) return status;
    status = eng_index_parse(path, (const char *)text, count, &index, err);
    free(text);
    if (status != KV_OK) return status;
    for (uint32_t i = 0; status == KV_OK && i < eng_index_shard_count(index); i++) {
        struct kv_error why = {0};
        status = add_shard(checkpoint, dir, eng_index_shard(index, i), &why);
        if (status == KV_IO && why.sys_errno == ENOENT)
            status = KV_FAIL(err, KV_INVALID, "%s: shard %.80s is missing, which it names", path,
                             eng_index_shard(index, i));
        else if (status != KV_OK && err != NULL)
            *err = why;
    }
    struct index_walk walk = {.checkpoint = checkpoint, .err = err};
    if (status == KV_OK) status = eng_index_each(index, check_named, &walk);
    if (status == KV_OK) status = check_shards(checkpoint, index, path, err);
    eng_index_destroy(index);
    return status;
}

static kv_status open_files(struct eng_checkpoint *checkpoint, const char *dir,
                            struct kv_error *err)
{
    char single[PATH_BYTES_MAX], sharded[PATH_BYTES_MAX];
    struct stat found;

    kv_status status = join(dir, single_name, single, err);
    if (status == KV_OK) status = join(dir, index_name, sharded, err);
    if (status != KV_OK) return status;
    if (stat(sharded, &found) != 0) return add_shard(checkpoint, dir, single_name, err);
    if (stat(single, &found) == 0)
        return KV_FAIL(err, KV_INVALID, "%s: stands beside %s; keep one of the two", sharded,
                       single_name);
    return open_sharded(checkpoint, dir, sharded, err);
}

void eng_checkpoint_files_each(const char *dir, eng_checkpoint_visit_file *visit, void *context)
{
    static const char *const names[] = {"config.json", single_name, index_name, ids_name};
    char path[PATH_BYTES_MAX];
    struct eng_index *index = NULL;
    uint8_t *text = NULL;
    size_t count = 0;
    bool more = true;

    for (size_t i = 0; i < KV_ARRAY_COUNT(names) && more; i++)
        more = visit(context, names[i]);
    if (!more || join(dir, index_name, path, NULL) != KV_OK ||
        eng_file_read(path, ENG_INDEX_BYTES_MAX, &text, &count, NULL) != KV_OK)
        return;
    if (eng_index_parse(path, (const char *)text, count, &index, NULL) == KV_OK)
        for (uint32_t i = 0; i < eng_index_shard_count(index) && more; i++)
            more = visit(context, eng_index_shard(index, i));
    eng_index_destroy(index);
    free(text);
}

/* Walking the list of the config: is each tensor somewhere, as it should be? */
struct list_walk {
    struct eng_checkpoint *checkpoint;
    const char *dir;
    struct kv_error *err;
    kv_status status;
};

static bool find_listed(void *context, const struct eng_tensor_spec *spec)
{
    struct list_walk *walk = context;
    struct eng_checkpoint *checkpoint = walk->checkpoint;
    struct eng_tensor *tensor = NULL;
    uint32_t shard = 0;

    for (; shard < checkpoint->shard_count && tensor == NULL; shard++)
        tensor = eng_safetensors_find(checkpoint->shards[shard].file, spec->name);
    if (tensor == NULL) {
        walk->status = KV_FAIL(
            walk->err, KV_INVALID, "%s: tensor %s is missing",
            checkpoint->shard_count == 1 ? checkpoint->shards[0].path : walk->dir, spec->name);
        return false;
    }
    walk->status = eng_tensor_check(checkpoint->shards[shard - 1].path, tensor, spec->dtype,
                                    spec->or_f32, spec->rows, spec->columns, walk->err);
    if (walk->status != KV_OK) return false;
    tensor->used = true;
    checkpoint->tensors[checkpoint->tensor_count++] = tensor;
    checkpoint->bytes += tensor->bytes;
    return true;
}

static int by_name(const void *a, const void *b)
{
    const struct eng_tensor *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

static kv_status check_list(struct eng_checkpoint *checkpoint, const char *dir,
                            struct kv_error *err)
{
    const size_t count = eng_tensors_count(&checkpoint->config);
    struct list_walk walk = {.checkpoint = checkpoint, .dir = dir, .err = err, .status = KV_OK};

    checkpoint->tensors = calloc(count, sizeof(*checkpoint->tensors));
    if (checkpoint->tensors == NULL) return KV_FAIL(err, KV_NOMEM, "%s: %zu tensors", dir, count);
    (void)eng_tensors_each(&checkpoint->config, find_listed, &walk);
    for (uint32_t i = 0; walk.status == KV_OK && i < checkpoint->shard_count; i++)
        walk.status = eng_safetensors_all_used(checkpoint->shards[i].file, err);
    if (walk.status != KV_OK) return walk.status;
    assert(checkpoint->tensor_count == count);
    qsort(checkpoint->tensors, count, sizeof(*checkpoint->tensors), by_name);
    return KV_OK;
}

/* New ids are given in order of first appearance, so the next new one is always the next number. */
static kv_status check_ids(const char *path, const struct eng_config *config, const uint8_t *data,
                           uint32_t *ids, struct kv_error *err)
{
    uint32_t different = 0;

    for (uint32_t i = 0; i < config->vocab; i++) {
        ids[i] = kv_load32(data + 4 * (size_t)i);
        if (ids[i] >= config->engram_compressed)
            return KV_FAIL(err, KV_INVALID, "%s: entry %u: expected an id below %u, found %d", path,
                           i, config->engram_compressed, (int32_t)ids[i]);
        if (ids[i] > different)
            return KV_FAIL(err, KV_INVALID,
                           "%s: entry %u: expected at most %u, as ids ascend by first appearance, "
                           "found %u",
                           path, i, different, ids[i]);
        different += ids[i] == different;
    }
    if (different != config->engram_compressed)
        return KV_FAIL(err, KV_INVALID, "%s: expected %u different ids, found %u", path,
                       config->engram_compressed, different);
    return KV_OK;
}

static kv_status read_ids(struct eng_checkpoint *checkpoint, const char *dir, struct kv_error *err)
{
    const struct eng_config *config = &checkpoint->config;
    const size_t expected = 4 * (size_t)config->vocab;
    char path[PATH_BYTES_MAX];
    uint8_t *data = NULL;
    size_t count = 0;
    struct stat found;

    kv_status status = join(dir, ids_name, path, err);
    if (config->engram_count == 0 || status != KV_OK) return status;
    if (stat(path, &found) != 0 && errno == ENOENT)
        return KV_FAIL(err, KV_INVALID,
                       "%s: is missing; mkengramids makes it from the model's tokenizer.json",
                       path);
    status = eng_file_read(path, ENG_IDS_BYTES_MAX, &data, &count, err);
    if (status != KV_OK) return status;
    checkpoint->compressed_ids = malloc(expected);
    if (count != expected)
        status =
            KV_FAIL(err, KV_INVALID, "%s: expected %zu bytes (4 for each of %u ids), found %zu",
                    path, expected, config->vocab, count);
    else if (checkpoint->compressed_ids == NULL)
        status = KV_FAIL(err, KV_NOMEM, "%s: %zu bytes", path, expected);
    else
        status = check_ids(path, config, data, checkpoint->compressed_ids, err);
    if (status == KV_OK) kv_sha256(data, count, &checkpoint->ids_digest);
    free(data);
    return status;
}

/* Of the shard that has the bytes of a tensor. */
static const struct eng_mapping *mapping_of(const struct eng_checkpoint *checkpoint,
                                            const struct eng_tensor *tensor)
{
    for (uint32_t i = 0;; i++) {
        assert(i < checkpoint->shard_count);
        const struct eng_mapping *mapping = eng_safetensors_mapping(checkpoint->shards[i].file);
        if (tensor->data >= mapping->data && tensor->data < mapping->data + mapping->bytes)
            return mapping;
    }
}

/* Of each shard its size and header, of each tensor its two ends. */
static kv_status hash_samples(struct kv_sha256_state *hash, const struct eng_checkpoint *checkpoint,
                              struct kv_error *err)
{
    uint8_t sample[2 * ENG_SAMPLE_BYTES], size[8];
    kv_status status = KV_OK;

    for (uint32_t i = 0; i < checkpoint->shard_count; i++) {
        const struct eng_safetensors *file = checkpoint->shards[i].file;
        const struct eng_mapping *mapping = eng_safetensors_mapping(file);
        kv_store64(size, mapping->bytes);
        kv_sha256_update(hash, size, sizeof(size));
        kv_sha256_update(hash, mapping->data, (size_t)eng_safetensors_data_at(file));
    }
    for (size_t i = 0; i < checkpoint->tensor_count && status == KV_OK; i++) {
        const struct eng_tensor *tensor = checkpoint->tensors[i];
        const struct eng_mapping *mapping = mapping_of(checkpoint, tensor);
        const size_t bytes = (size_t)KV_MIN(tensor->bytes, (uint64_t)ENG_SAMPLE_BYTES);
        const uint64_t first = (uint64_t)(tensor->data - mapping->data);
        const uint64_t last = first + tensor->bytes - bytes;
        status = eng_mapping_read(mapping, first, sample, bytes, err);
        if (status == KV_OK) status = eng_mapping_read(mapping, last, sample + bytes, bytes, err);
        if (status == KV_OK) kv_sha256_update(hash, sample, 2 * bytes);
    }
    return status;
}

/* Reads the weights at most once: their digest comes from the pass that looks at the values. */
static kv_status make_digest(struct eng_checkpoint *checkpoint, bool whole, struct kv_error *err)
{
    struct kv_sha256_state hash;
    struct kv_digest content;
    kv_status status = KV_OK;

    kv_sha256_init(&hash);
    kv_sha256_update(&hash, checkpoint->config_digest.bytes, 32);
    kv_sha256_update(&hash, checkpoint->ids_digest.bytes, 32);
    if (whole) {
        status = eng_checkpoint_verify(checkpoint, NULL, NULL, &content, err);
        if (status == KV_OK) kv_sha256_update(&hash, content.bytes, 32);
    } else {
        status = hash_samples(&hash, checkpoint, err);
    }
    kv_sha256_final(&hash, &checkpoint->digest);
    return status;
}

kv_status eng_checkpoint_open_max(const char *dir, uint64_t whole_max,
                                  struct eng_checkpoint **ret_checkpoint, struct kv_error *err)
{
    struct eng_checkpoint *checkpoint = calloc(1, sizeof(*checkpoint));
    if (checkpoint == NULL) return KV_FAIL(err, KV_NOMEM, "%s", dir);

    checkpoint->dir = strdup(dir);
    kv_status status = checkpoint->dir == NULL ? KV_FAIL(err, KV_NOMEM, "%s", dir) : KV_OK;
    if (status == KV_OK)
        status =
            eng_checkpoint_config_read(dir, &checkpoint->config, &checkpoint->config_digest, err);
    if (status == KV_OK) status = open_files(checkpoint, dir, err);
    if (status == KV_OK) status = check_list(checkpoint, dir, err);
    if (status == KV_OK) status = read_ids(checkpoint, dir, err);
    if (status == KV_OK) status = make_digest(checkpoint, checkpoint->bytes <= whole_max, err);
    if (status == KV_OK) status = eng_checkpoint_check(checkpoint, err);
    if (status != KV_OK) {
        eng_checkpoint_close(checkpoint);
        return status;
    }
    *ret_checkpoint = checkpoint;
    return KV_OK;
}

kv_status eng_checkpoint_open(const char *dir, struct eng_checkpoint **ret_checkpoint,
                              struct kv_error *err)
{
    return eng_checkpoint_open_max(dir, ENG_CHECKPOINT_WHOLE_MAX, ret_checkpoint, err);
}

void eng_checkpoint_close(struct eng_checkpoint *checkpoint)
{
    if (checkpoint == NULL) return;
    for (uint32_t i = 0; i < checkpoint->shard_count; i++) {
        eng_safetensors_close(checkpoint->shards[i].file);
        free(checkpoint->shards[i].path);
    }
    free(checkpoint->compressed_ids);
    free(checkpoint->tensors);
    free(checkpoint->dir);
    free(checkpoint);
}

const struct eng_config *eng_checkpoint_config(const struct eng_checkpoint *checkpoint)
{
    return &checkpoint->config;
}

/* `dtype`, or F32 with or_f32. */
static kv_status take(const struct eng_checkpoint *checkpoint, const char *name,
                      enum eng_dtype dtype, bool or_f32, uint64_t rows, uint64_t columns,
                      const struct eng_tensor **ret_tensor, struct kv_error *err)
{
    const struct eng_tensor key = {.name = name};
    const struct eng_tensor *key_at = &key;
    const struct eng_tensor *const *found =
        bsearch(&key_at, checkpoint->tensors, checkpoint->tensor_count, sizeof(key_at), by_name);

    if (found == NULL)
        return KV_FAIL(err, KV_INVALID, "%s: tensor %.80s is missing", checkpoint->dir, name);
    *ret_tensor = *found;
    return eng_tensor_check(mapping_of(checkpoint, *found)->path, *found, dtype, or_f32, rows,
                            columns, err);
}

kv_status eng_checkpoint_take(const struct eng_checkpoint *checkpoint, const char *name,
                              enum eng_dtype dtype, uint64_t rows, uint64_t columns,
                              const uint8_t **ret_data, struct kv_error *err)
{
    const struct eng_tensor *tensor = NULL;
    const kv_status status = take(checkpoint, name, dtype, false, rows, columns, &tensor, err);
    if (status == KV_OK) *ret_data = tensor->data;
    return status;
}

kv_status eng_checkpoint_take_either(const struct eng_checkpoint *checkpoint, const char *name,
                                     uint64_t rows, uint64_t columns, enum eng_dtype *ret_dtype,
                                     const uint8_t **ret_data, struct kv_error *err)
{
    const struct eng_tensor *tensor = NULL;
    const kv_status status = take(checkpoint, name, ENG_BF16, true, rows, columns, &tensor, err);
    if (status != KV_OK) return status;
    *ret_dtype = tensor->dtype;
    *ret_data = tensor->data;
    return KV_OK;
}

const uint32_t *eng_checkpoint_compressed_ids(const struct eng_checkpoint *checkpoint)
{
    return checkpoint->compressed_ids;
}

uint64_t eng_checkpoint_bytes(const struct eng_checkpoint *checkpoint)
{
    return checkpoint->bytes;
}

uint32_t eng_checkpoint_shard_count(const struct eng_checkpoint *checkpoint)
{
    return checkpoint->shard_count;
}

struct kv_digest eng_checkpoint_digest(const struct eng_checkpoint *checkpoint)
{
    return checkpoint->digest;
}

struct kv_digest eng_checkpoint_config_digest(const struct eng_checkpoint *checkpoint)
{
    return checkpoint->config_digest;
}

kv_status eng_checkpoint_check(const struct eng_checkpoint *checkpoint, struct kv_error *err)
{
    for (uint32_t i = 0; i < checkpoint->shard_count; i++) {
        const kv_status status =
            eng_mapping_check(eng_safetensors_mapping(checkpoint->shards[i].file), err);
        if (status != KV_OK) return status;
    }
    return KV_OK;
}
