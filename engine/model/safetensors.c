/*
 * Reads and validates safetensors.
 *
 * Each rule below was a real hole in some loader: the header length is compared before it is added
 * to anything; the JSON must be one object without duplicate keys; an unknown dtype is an error,
 * not a skip; shape products are checked for overflow; byte counts match exactly; tensors sorted by
 * offset leave neither hole nor overlap and end where the file ends.  The parser counts nesting
 * (2,048 levels) and refuses zero characters in names; everything deeper than a shape is refused
 * here.
 */

#include "engine/model/safetensors.h"

#include "engine/model/json_text.h"
#include "engine/model/model_limits.h"
#include "engine/model/printable.h"
#include "kvstore/base/bytes.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

struct eng_safetensors {
    struct eng_mapping mapping;
    uint64_t data_at;
    json_t *header;
    struct eng_tensor *tensors; /* By name. */
    size_t count;
};

static kv_status read_dtype(const char *path, struct eng_tensor *tensor, const json_t *value,
                            struct kv_error *err)
{
    const char *found = json_string_value(value); /* NULL: it is no string. */
    if (found != NULL && eng_dtype_parse(found, &tensor->dtype)) return KV_OK;
    char shown[24];
    (void)snprintf(shown, sizeof(shown), "%.20s", found != NULL ? found : "");
    eng_printable(shown);
    /* The format has more of them; no tensor of this model's is of another one. */
    return KV_FAIL(err, KV_INVALID,
                   "%s: tensor %.80s: dtype must be \"%s\", \"%s\", \"%s\", \"%s\" or \"%s\", "
                   "found %s%s%s",
                   path, tensor->name, eng_dtype_name(ENG_F32), eng_dtype_name(ENG_BF16),
                   eng_dtype_name(ENG_F8_E4M3), eng_dtype_name(ENG_F8_E8M0), eng_dtype_name(ENG_I8),
                   found != NULL ? "\"" : "what is no string", shown, found != NULL ? "\"" : "");
}

static kv_status read_shape(const char *path, struct eng_tensor *tensor, const json_t *value,
                            uint64_t *ret_bytes, struct kv_error *err)
{
    uint64_t bytes = eng_dtype_bytes(tensor->dtype);
    const size_t rank = json_is_array(value) ? json_array_size(value) : 0;

    if (rank < 1 || rank > ENG_RANK_MAX)
        return KV_FAIL(err, KV_INVALID, "%s: tensor %.80s: expected a shape of 1 to %u numbers",
                       path, tensor->name, ENG_RANK_MAX);
    for (size_t i = 0; i < rank; i++) {
        const json_t *item = json_array_get(value, i);
        const json_int_t extent = json_is_integer(item) ? json_integer_value(item) : -1;
        if (extent < 1 || !kv_mul_u64(bytes, (uint64_t)extent, &bytes))
            return KV_FAIL(err, KV_INVALID,
                           "%s: tensor %.80s: shape[%zu] is not a positive size that fits", path,
                           tensor->name, i);
        tensor->shape[i] = (uint64_t)extent;
    }
    tensor->rank = (uint32_t)rank;
    *ret_bytes = bytes;
    return KV_OK;
}

static kv_status read_tensor(const struct eng_safetensors *file, struct eng_tensor *tensor,
                             const json_t *value, struct kv_error *err)
{
    const char *path = file->mapping.path;
    const uint64_t data_bytes = file->mapping.bytes - file->data_at;
    const json_t *offsets = json_object_get(value, "data_offsets");
    uint64_t bytes = 0;

    if (!json_is_object(value) || json_object_size(value) != 3)
        return KV_FAIL(err, KV_INVALID, "%s: tensor %.80s: expected dtype, shape and data_offsets",
                       path, tensor->name);
    kv_status status = read_dtype(path, tensor, json_object_get(value, "dtype"), err);
    if (status == KV_OK)
        status = read_shape(path, tensor, json_object_get(value, "shape"), &bytes, err);
    if (status != KV_OK) return status;

    const json_t *first = json_array_get(offsets, 0);
    const json_t *last = json_array_get(offsets, 1);
    if (json_array_size(offsets) != 2 || !json_is_integer(first) || !json_is_integer(last))
        return KV_FAIL(err, KV_INVALID, "%s: tensor %.80s: data_offsets must be two integers", path,
                       tensor->name);
    const json_int_t begin = json_integer_value(first);
    const json_int_t end = json_integer_value(last);
    if (begin < 0 || end < begin || (uint64_t)end > data_bytes)
        return KV_FAIL(err, KV_INVALID,
                       "%s: tensor %.80s: data_offsets %lld to %lld, expected within %llu bytes of "
                       "data: the file is truncated or damaged",
                       path, tensor->name, (long long)begin, (long long)end,
                       (unsigned long long)data_bytes);
    if ((uint64_t)(end - begin) != bytes)
        return KV_FAIL(err, KV_INVALID,
                       "%s: tensor %.80s: shape asks for %llu bytes, data_offsets hold %llu", path,
                       tensor->name, (unsigned long long)bytes, (unsigned long long)(end - begin));
    tensor->data = file->mapping.data + file->data_at + begin;
    tensor->bytes = bytes;
    return KV_OK;
}

static int by_data(const void *a, const void *b)
{
    const struct eng_tensor *x = a, *y = b;
    if (x->data != y->data) return x->data < y->data ? -1 : 1;
    return strcmp(x->name, y->name);
}

static int by_name(const void *a, const void *b)
{
    const struct eng_tensor *x = a, *y = b;
    return strcmp(x->name, y->name);
}

static kv_status check_cover(struct eng_safetensors *file, struct kv_error *err)
{
    const char *path = file->mapping.path;
    const uint8_t *next = file->mapping.data + file->data_at;
    const uint8_t *end = file->mapping.data + file->mapping.bytes;

    qsort(file->tensors, file->count, sizeof(*file->tensors), by_data);
    for (size_t i = 0; i < file->count; i++) {
        const struct eng_tensor *tensor = &file->tensors[i];
        if (tensor->data != next)
            return KV_FAIL(err, KV_INVALID, "%s: tensor %.80s: %s before it", path, tensor->name,
                           tensor->data > next ? "a hole" : "an overlap");
        next += tensor->bytes;
    }
    if (next != end)
        return KV_FAIL(err, KV_INVALID,
                       "%s: %llu bytes after the last tensor%s%.80s, expected none", path,
                       (unsigned long long)(end - next), file->count > 0 ? " " : "",
                       file->count > 0 ? file->tensors[file->count - 1].name : "");
    qsort(file->tensors, file->count, sizeof(*file->tensors), by_name);
    return KV_OK;
}

/* What is wrong with a header that does not parse, and in which member. */
static kv_status refuse_header(const char *path, const char *text, size_t bytes,
                               json_error_t *fault, struct kv_error *err)
{
    const size_t at = KV_MIN((size_t)KV_MAX(fault->position, 0), bytes);
    char member[ENG_TENSOR_NAME_MAX], where[ENG_TENSOR_NAME_MAX + 24] = "";
    bool after = false;

    if (eng_json_no_memory(text, bytes, fault))
        return KV_FAIL(err, KV_NOMEM, "%s: no memory for its header of %zu bytes", path, bytes);
    if (eng_json_member(text, at, member, sizeof(member), &after))
        (void)snprintf(where, sizeof(where), ", %s%s%.80s", after ? "after " : "",
                       strcmp(member, "__metadata__") == 0 ? "" : "tensor ", member);
    eng_printable(fault->text);
    return KV_FAIL(err, KV_INVALID, "%s: header at byte %zu%s: %.90s", path, at, where,
                   fault->text);
}

static kv_status parse_header(struct eng_safetensors *file, struct kv_error *err)
{
    const char *path = file->mapping.path;
    const uint64_t file_bytes = file->mapping.bytes;
    json_error_t fault;

    if (file_bytes < 8)
        return KV_FAIL(err, KV_INVALID, "%s: %llu bytes, expected at least 8: truncated", path,
                       (unsigned long long)file_bytes);
    const uint64_t bytes = kv_load64(file->mapping.data);
    if (bytes > ENG_HEADER_BYTES_MAX || bytes > file_bytes - 8)
        return KV_FAIL(err, KV_INVALID,
                       "%s: header of %llu bytes, expected at most %llu: the file is truncated or "
                       "not safetensors",
                       path, (unsigned long long)bytes,
                       (unsigned long long)KV_MIN(file_bytes - 8, (uint64_t)ENG_HEADER_BYTES_MAX));
    const char *text = (const char *)file->mapping.data + 8;
    file->data_at = 8 + bytes;
    file->header = json_loadb(text, (size_t)bytes, JSON_REJECT_DUPLICATES, &fault);
    if (file->header == NULL) return refuse_header(path, text, (size_t)bytes, &fault, err);
    if (!json_is_object(file->header))
        return KV_FAIL(err, KV_INVALID, "%s: header must be a JSON object", path);
    return KV_OK;
}

static kv_status check_metadata(const char *path, const json_t *value, struct kv_error *err)
{
    const char *name;
    json_t *text;
    bool good = json_is_object(value);

    json_object_foreach((json_t *)(uintptr_t)value, name, text) good = good && json_is_string(text);
    if (good) return KV_OK;
    return KV_FAIL(err, KV_INVALID, "%s: __metadata__ must be an object of strings", path);
}

/* Names travel into messages and logs. */
static bool name_printable(const char *name)
{
    for (const char *c = name; *c != '\0'; c++)
        if (*c <= ' ' || *c > '~') return false;
    return name[0] != '\0';
}

static kv_status read_tensors(struct eng_safetensors *file, struct kv_error *err)
{
    const char *path = file->mapping.path;
    const size_t entries = json_object_size(file->header);
    kv_status status = KV_OK;
    const char *name;
    json_t *value;

    file->tensors = calloc(entries + 1, sizeof(*file->tensors));
    if (file->tensors == NULL) return KV_FAIL(err, KV_NOMEM, "%s: %zu tensors", path, entries);
    json_object_foreach(file->header, name, value)
    {
        if (strcmp(name, "__metadata__") == 0) {
            status = check_metadata(path, value, err);
        } else if (!name_printable(name)) {
            status =
                KV_FAIL(err, KV_INVALID, "%s: tensor number %zu: its name must be printable ASCII",
                        path, file->count);
        } else {
            struct eng_tensor *tensor = &file->tensors[file->count++];
            tensor->name = name;
            status = read_tensor(file, tensor, value, err);
        }
        if (status != KV_OK) return status;
    }
    return check_cover(file, err);
}

kv_status eng_safetensors_open(const char *path, struct eng_safetensors **ret_file,
                               struct kv_error *err)
{
    struct eng_safetensors *file = calloc(1, sizeof(*file));
    if (file == NULL) return KV_FAIL(err, KV_NOMEM, "%s", path);

    kv_status status = eng_mapping_open(path, ENG_SAFETENSORS_BYTES_MAX, &file->mapping, err);
    if (status == KV_OK) status = parse_header(file, err);
    /* A file that shrinks meanwhile reads as zeros: then that is what is wrong with it. */
    if (file->mapping.path != NULL && eng_mapping_lost(&file->mapping))
        status = eng_mapping_check(&file->mapping, err);
    if (status == KV_OK) status = read_tensors(file, err);
    if (status != KV_OK) {
        eng_safetensors_close(file);
        return status;
    }
    *ret_file = file;
    return KV_OK;
}

void eng_safetensors_close(struct eng_safetensors *file)
{
    if (file == NULL) return;
    json_decref(file->header);
    free(file->tensors);
    eng_mapping_close(&file->mapping);
    free(file);
}

const struct eng_tensor *eng_safetensors_tensors(const struct eng_safetensors *file,
                                                 size_t *ret_count)
{
    *ret_count = file->count;
    return file->tensors;
}

struct eng_tensor *eng_safetensors_find(const struct eng_safetensors *file, const char *name)
{
    const struct eng_tensor key = {.name = name};
    return bsearch(&key, file->tensors, file->count, sizeof(key), by_name);
}

const struct eng_mapping *eng_safetensors_mapping(const struct eng_safetensors *file)
{
    return &file->mapping;
}

uint64_t eng_safetensors_data_at(const struct eng_safetensors *file)
{
    return file->data_at;
}

static const char *shape_text(char text[64], uint32_t rank, const uint64_t *shape)
{
    size_t used = 0;
    for (uint32_t i = 0; i < rank && used < 60; i++) {
        const int n = snprintf(text + used, 64 - used, "%s%llu", i == 0 ? "[" : ",",
                               (unsigned long long)shape[i]);
        used += (size_t)n;
    }
    if (used < 63) (void)snprintf(text + used, 64 - used, "]");
    return text;
}

kv_status eng_tensor_check(const char *path, const struct eng_tensor *tensor, enum eng_dtype dtype,
                           bool or_f32, uint64_t rows, uint64_t columns, struct kv_error *err)
{
    const uint64_t shape[] = {rows, columns};
    const uint32_t rank = columns == 0 ? 1 : 2;
    char want[64], found[64];

    if ((tensor->dtype == dtype || (or_f32 && tensor->dtype == ENG_F32)) && tensor->rank == rank &&
        memcmp(tensor->shape, shape, rank * sizeof(*shape)) == 0)
        return KV_OK;
    return KV_FAIL(err, KV_INVALID, "%s: tensor %.80s: expected %s%s %s, found %s %s", path,
                   tensor->name, eng_dtype_name(dtype), or_f32 ? " or F32" : "",
                   shape_text(want, rank, shape), eng_dtype_name(tensor->dtype),
                   shape_text(found, tensor->rank, tensor->shape));
}

kv_status eng_safetensors_all_used(const struct eng_safetensors *file, struct kv_error *err)
{
    for (size_t i = 0; i < file->count; i++)
        if (!file->tensors[i].used && !eng_tensor_is_ignored(file->tensors[i].name))
            return KV_FAIL(err, KV_INVALID, "%s: tensor %.120s is not part of this model",
                           file->mapping.path, file->tensors[i].name);
    return KV_OK;
}
