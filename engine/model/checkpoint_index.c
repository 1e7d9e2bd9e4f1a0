/*
 * Reads model.safetensors.index.json.
 *
 * A shard is a plain file name beside the index: nothing that leaves the directory, nothing hidden.
 * Whether the shards hold what the index says is the checkpoint's business, which has their
 * headers.
 */

#include "engine/model/checkpoint_index.h"

#include "engine/model/json_text.h"
#include "engine/model/model_limits.h"
#include "engine/model/printable.h"
#include "kvstore/base/bytes.h"

#include <assert.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

struct eng_index {
    json_t *root;
    const json_t *map;
    const char *shards[ENG_SHARDS_MAX];
    uint32_t shard_count;
    uint64_t total_bytes;
};

static bool shard_name_good(const char *name)
{
    static const char suffix[] = ".safetensors";
    const size_t count = strlen(name);

    if (name[0] == '.' || count < sizeof(suffix) || count > 128) return false;
    for (const char *c = name; *c != '\0'; c++)
        if (*c <= ' ' || *c > '~' || *c == '/' || *c == '\\') return false;
    return strcmp(name + count - sizeof(suffix) + 1, suffix) == 0;
}

static bool tensor_name_good(const char *name)
{
    for (const char *c = name; *c != '\0'; c++)
        if (*c <= ' ' || *c > '~') return false;
    return name[0] != '\0';
}

/* Where `name` is, or where it belongs. */
static uint32_t place_of(const struct eng_index *index, const char *name)
{
    uint32_t low = 0, high = index->shard_count;
    while (low < high) {
        const uint32_t middle = (low + high) / 2;
        if (strcmp(index->shards[middle], name) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool add_shard(struct eng_index *index, const char *name)
{
    const uint32_t at = place_of(index, name);

    if (at < index->shard_count && strcmp(index->shards[at], name) == 0) return true;
    if (index->shard_count == ENG_SHARDS_MAX) return false;
    memmove(&index->shards[at + 1], &index->shards[at],
            (index->shard_count - at) * sizeof(*index->shards));
    index->shards[at] = name;
    index->shard_count++;
    return true;
}

/* `name` is what the file says, anything at all. */
static kv_status refuse_name(const char *path, const char *tensor, const json_t *value,
                             struct kv_error *err)
{
    enum { SHOWN = 48 };
    const char *name = json_string_value(value);
    char shown[SHOWN + 4];

    if (name == NULL) name = "(not a string)";
    (void)snprintf(shown, sizeof(shown), "%.*s%s", SHOWN, name, strlen(name) > SHOWN ? "..." : "");
    eng_printable(shown);
    return KV_FAIL(err, KV_INVALID,
                   "%s: tensor %.60s: expected the name of a .safetensors file beside the index, "
                   "found %s",
                   path, tensor, shown);
}

static kv_status read_map(const char *path, struct eng_index *index, struct kv_error *err)
{
    const char *tensor;
    json_t *value;

    json_object_foreach((json_t *)(uintptr_t)index->map, tensor, value)
    {
        if (!tensor_name_good(tensor))
            return KV_FAIL(err, KV_INVALID,
                           "%s: weight_map: a tensor's name must be printable ASCII", path);
        if (!json_is_string(value) || !shard_name_good(json_string_value(value)))
            return refuse_name(path, tensor, value, err);
        if (!add_shard(index, json_string_value(value)))
            return KV_FAIL(err, KV_INVALID, "%s: more than %u shards", path, ENG_SHARDS_MAX);
    }
    if (index->shard_count == 0)
        return KV_FAIL(err, KV_INVALID, "%s: weight_map names no tensor", path);
    return KV_OK;
}

static kv_status read_total(const char *path, struct eng_index *index, struct kv_error *err)
{
    const json_t *metadata = json_object_get(index->root, "metadata");
    const json_t *total = json_object_get(metadata, "total_size");

    if (metadata != NULL && !json_is_object(metadata))
        return KV_FAIL(err, KV_INVALID, "%s: metadata must be an object", path);
    if (total == NULL) return KV_OK;
    if (!json_is_integer(total) || json_integer_value(total) <= 0)
        return KV_FAIL(err, KV_INVALID, "%s: metadata.total_size must be a positive integer", path);
    index->total_bytes = (uint64_t)json_integer_value(total);
    return KV_OK;
}

kv_status eng_index_parse(const char *path, const char *text, size_t count,
                          struct eng_index **ret_index, struct kv_error *err)
{
    json_error_t fault = {.text = ""};
    kv_status status = KV_OK;
    struct eng_index *index = calloc(1, sizeof(*index));
    if (index == NULL) return KV_FAIL(err, KV_NOMEM, "%s", path);

    index->root = json_loadb(text, count, JSON_REJECT_DUPLICATES, &fault);
    index->map = json_object_get(index->root, "weight_map");
    eng_printable(fault.text);
    if (index->root == NULL && eng_json_no_memory(text, count, &fault))
        status = KV_FAIL(err, KV_NOMEM, "%s: no memory for its %zu bytes", path, count);
    else if (index->root == NULL)
        status = KV_FAIL(err, KV_INVALID, "%s: line %d: %.120s", path, fault.line, fault.text);
    else if (!json_is_object(index->root))
        status = KV_FAIL(err, KV_INVALID, "%s: must be a JSON object", path);
    else if (!json_is_object(index->map))
        status = KV_FAIL(err, KV_INVALID, "%s: weight_map must be an object", path);
    if (status == KV_OK) status = read_map(path, index, err);
    if (status == KV_OK) status = read_total(path, index, err);
    if (status != KV_OK) {
        eng_index_destroy(index);
        return status;
    }
    *ret_index = index;
    return KV_OK;
}

void eng_index_destroy(struct eng_index *index)
{
    if (index == NULL) return;
    json_decref(index->root);
    free(index);
}

uint32_t eng_index_shard_count(const struct eng_index *index)
{
    return index->shard_count;
}

const char *eng_index_shard(const struct eng_index *index, uint32_t shard)
{
    assert(shard < index->shard_count);
    return index->shards[shard];
}

const char *eng_index_shard_of(const struct eng_index *index, const char *tensor)
{
    const json_t *value = json_object_get(index->map, tensor);
    return value == NULL ? NULL : json_string_value(value);
}

kv_status eng_index_each(const struct eng_index *index, eng_index_visit *visit, void *context)
{
    const char *tensor;
    json_t *value;

    json_object_foreach((json_t *)(uintptr_t)index->map, tensor, value)
    {
        const kv_status status = visit(context, tensor, json_string_value(value));
        if (status != KV_OK) return status;
    }
    return KV_OK;
}

uint64_t eng_index_total_bytes(const struct eng_index *index)
{
    return index->total_bytes;
}
