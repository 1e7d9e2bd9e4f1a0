/*
 * Reads and validates safetensors.
 *
 * Each rule below was a real hole in some loader: the header length is compared before it is added
 * to anything; the JSON must be one object without duplicate keys; an unknown dtype is an error,
 * not a skip; shape products are checked for overflow; byte counts match exactly; tensors sorted by
 * offset leave neither hole nor overlap and end where the file ends.
 */

#include "engine/model/safetensors.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define HEADER_BYTES_MAX (100u << 20)
#define FILE_BYTES_MAX (1ull << 40)

static const struct {
    const char *name;
    uint64_t bytes;
} dtypes[] = {
    [ENG_F32] = {"F32", 4},         [ENG_BF16] = {"BF16", 2}, [ENG_F8_E4M3] = {"F8_E4M3", 1},
    [ENG_F8_E8M0] = {"F8_E8M0", 1}, [ENG_I8] = {"I8", 1},
};

struct eng_safetensors {
    char *path;
    uint8_t *data;
    size_t bytes;
    json_t *header;
    struct eng_tensor *tensors; /* By name. */
    size_t count;
};

kv_status eng_file_read(const char *path, uint64_t max, uint8_t **ret_data, size_t *ret_count,
                        struct kv_error *err)
{
    struct stat found;
    uint8_t *data = NULL;
    size_t got = 0;
    kv_status status = KV_OK;

    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return KV_FAIL_ERRNO(err, KV_IO, "%s", path);
    if (fstat(fd, &found) != 0)
        status = KV_FAIL_ERRNO(err, KV_IO, "%s", path);
    else if (!S_ISREG(found.st_mode))
        status = KV_FAIL(err, KV_INVALID, "%s: not a regular file", path);
    else if ((uint64_t)found.st_size > max)
        status = KV_FAIL(err, KV_INVALID, "%s: %llu bytes, expected at most %llu", path,
                         (unsigned long long)found.st_size, (unsigned long long)max);
    if (status != KV_OK) goto fail;

    const size_t size = (size_t)found.st_size;
    data = malloc(size + 1);
    if (data == NULL) {
        status = KV_FAIL(err, KV_NOMEM, "%s: %zu bytes", path, size);
        goto fail;
    }
    while (got < size) {
        const ssize_t n = read(fd, data + got, size - got);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) status = KV_FAIL_ERRNO(err, KV_IO, "%s", path);
        if (n == 0)
            status = KV_FAIL(err, KV_INVALID, "%s: shrank while being read, expected %zu bytes",
                             path, size);
        if (n <= 0) goto fail;
        got += (size_t)n;
    }
    (void)close(fd);
    *ret_data = data;
    *ret_count = size;
    return KV_OK;

fail:
    free(data);
    (void)close(fd);
    return status;
}

static kv_status read_dtype(const char *path, struct eng_tensor *tensor, const json_t *value,
                            struct kv_error *err)
{
    const char *found = json_is_string(value) ? json_string_value(value) : "(none)";
    for (size_t i = 0; i < KV_ARRAY_COUNT(dtypes); i++)
        if (strcmp(found, dtypes[i].name) == 0) {
            tensor->dtype = (enum eng_dtype)i;
            return KV_OK;
        }
    return KV_FAIL(err, KV_INVALID, "%s: tensor %.80s: unknown dtype \"%.20s\"", path, tensor->name,
                   found);
}

static kv_status read_shape(const char *path, struct eng_tensor *tensor, const json_t *value,
                            uint64_t *ret_bytes, struct kv_error *err)
{
    uint64_t bytes = dtypes[tensor->dtype].bytes;
    const size_t rank = json_is_array(value) ? json_array_size(value) : 0;

    if (rank < 1 || rank > ENG_RANK_MAX)
        return KV_FAIL(err, KV_INVALID, "%s: tensor %.80s: expected a shape of 1 or 2 numbers",
                       path, tensor->name);
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

static kv_status read_tensor(struct eng_safetensors *file, uint64_t data_at,
                             struct eng_tensor *tensor, const json_t *value, struct kv_error *err)
{
    const uint64_t data_bytes = file->bytes - data_at;
    const json_t *offsets = json_object_get(value, "data_offsets");
    uint64_t bytes = 0;

    if (!json_is_object(value) || json_object_size(value) != 3)
        return KV_FAIL(err, KV_INVALID, "%s: tensor %.80s: expected dtype, shape and data_offsets",
                       file->path, tensor->name);
    kv_status status = read_dtype(file->path, tensor, json_object_get(value, "dtype"), err);
    if (status == KV_OK)
        status = read_shape(file->path, tensor, json_object_get(value, "shape"), &bytes, err);
    if (status != KV_OK) return status;

    const json_t *first = json_array_get(offsets, 0);
    const json_t *last = json_array_get(offsets, 1);
    if (json_array_size(offsets) != 2 || !json_is_integer(first) || !json_is_integer(last))
        return KV_FAIL(err, KV_INVALID, "%s: tensor %.80s: data_offsets must be two integers",
                       file->path, tensor->name);
    const json_int_t begin = json_integer_value(first);
    const json_int_t end = json_integer_value(last);
    if (begin < 0 || end < begin || (uint64_t)end > data_bytes)
        return KV_FAIL(err, KV_INVALID,
                       "%s: tensor %.80s: data_offsets %lld to %lld, expected within %llu bytes of "
                       "data: the file is truncated or damaged",
                       file->path, tensor->name, (long long)begin, (long long)end,
                       (unsigned long long)data_bytes);
    if ((uint64_t)(end - begin) != bytes)
        return KV_FAIL(
            err, KV_INVALID, "%s: tensor %.80s: shape asks for %llu bytes, data_offsets hold %llu",
            file->path, tensor->name, (unsigned long long)bytes, (unsigned long long)(end - begin));
    tensor->data = file->data + data_at + begin;
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

static kv_status check_cover(struct eng_safetensors *file, uint64_t data_at, struct kv_error *err)
{
    const uint8_t *next = file->data + data_at;

    qsort(file->tensors, file->count, sizeof(*file->tensors), by_data);
    for (size_t i = 0; i < file->count; i++) {
        const struct eng_tensor *tensor = &file->tensors[i];
        if (tensor->data != next)
            return KV_FAIL(err, KV_INVALID, "%s: tensor %.80s: %s before it", file->path,
                           tensor->name, tensor->data > next ? "a hole" : "an overlap");
        next += tensor->bytes;
    }
    if (next != file->data + file->bytes)
        return KV_FAIL(err, KV_INVALID, "%s: %llu bytes after the last tensor, expected none",
                       file->path, (unsigned long long)(file->data + file->bytes - next));
    qsort(file->tensors, file->count, sizeof(*file->tensors), by_name);
    return KV_OK;
}

static kv_status read_header(struct eng_safetensors *file, struct kv_error *err)
{
    json_error_t fault;

    if (file->bytes < 8)
        return KV_FAIL(err, KV_INVALID, "%s: %zu bytes, expected at least 8: truncated", file->path,
                       file->bytes);
    const uint64_t header_bytes = kv_load64(file->data);
    if (header_bytes > HEADER_BYTES_MAX || header_bytes > file->bytes - 8)
        return KV_FAIL(err, KV_INVALID,
                       "%s: header of %llu bytes, expected at most %llu: the file is truncated or "
                       "not safetensors",
                       file->path, (unsigned long long)header_bytes,
                       (unsigned long long)KV_MIN(file->bytes - 8, (size_t)HEADER_BYTES_MAX));
    file->header = json_loadb((const char *)file->data + 8, (size_t)header_bytes,
                              JSON_REJECT_DUPLICATES, &fault);
    if (file->header == NULL)
        return KV_FAIL(err, KV_INVALID, "%s: header: %.120s", file->path, fault.text);
    if (!json_is_object(file->header))
        return KV_FAIL(err, KV_INVALID, "%s: header must be a JSON object", file->path);

    const size_t entries = json_object_size(file->header);
    file->tensors = calloc(entries + 1, sizeof(*file->tensors));
    if (file->tensors == NULL)
        return KV_FAIL(err, KV_NOMEM, "%s: %zu tensors", file->path, entries);
    const char *name;
    json_t *value;
    json_object_foreach(file->header, name, value)
    {
        if (strcmp(name, "__metadata__") == 0) continue;
        struct eng_tensor *tensor = &file->tensors[file->count++];
        tensor->name = name;
        const kv_status status = read_tensor(file, 8 + header_bytes, tensor, value, err);
        if (status != KV_OK) return status;
    }
    return check_cover(file, 8 + header_bytes, err);
}

kv_status eng_safetensors_open(const char *path, struct eng_safetensors **ret_file,
                               struct kv_error *err)
{
    kv_status status = KV_NOMEM;
    struct eng_safetensors *file = calloc(1, sizeof(*file));
    if (file == NULL) return KV_FAIL(err, KV_NOMEM, "%s", path);

    file->path = strdup(path);
    if (file->path == NULL) {
        status = KV_FAIL(err, KV_NOMEM, "%s", path);
        goto fail;
    }
    status = eng_file_read(path, FILE_BYTES_MAX, &file->data, &file->bytes, err);
    if (status != KV_OK) goto fail;
    status = read_header(file, err);
    if (status != KV_OK) goto fail;
    *ret_file = file;
    return KV_OK;

fail:
    eng_safetensors_close(file);
    return status;
}

void eng_safetensors_close(struct eng_safetensors *file)
{
    if (file == NULL) return;
    json_decref(file->header);
    free(file->tensors);
    free(file->data);
    free(file->path);
    free(file);
}

kv_status eng_safetensors_take(struct eng_safetensors *file, const char *name, enum eng_dtype dtype,
                               uint64_t rows, uint64_t columns, const uint8_t **ret_data,
                               struct kv_error *err)
{
    const struct eng_tensor key = {.name = name};
    struct eng_tensor *tensor = bsearch(&key, file->tensors, file->count, sizeof(key), by_name);

    if (tensor == NULL)
        return KV_FAIL(err, KV_INVALID, "%s: tensor %s is missing", file->path, name);
    const uint64_t found_columns = tensor->rank == 2 ? tensor->shape[1] : 0;
    if (tensor->dtype != dtype || tensor->shape[0] != rows || found_columns != columns)
        return KV_FAIL(err, KV_INVALID,
                       "%s: tensor %s: expected %s [%llu,%llu], found %s [%llu,%llu] (0: no second "
                       "dimension)",
                       file->path, name, dtypes[dtype].name, (unsigned long long)rows,
                       (unsigned long long)columns, dtypes[tensor->dtype].name,
                       (unsigned long long)tensor->shape[0], (unsigned long long)found_columns);
    tensor->used = true;
    *ret_data = tensor->data;
    return KV_OK;
}

kv_status eng_safetensors_all_used(const struct eng_safetensors *file, struct kv_error *err)
{
    for (size_t i = 0; i < file->count; i++)
        if (!file->tensors[i].used)
            return KV_FAIL(err, KV_INVALID, "%s: tensor %.120s is not part of this model",
                           file->path, file->tensors[i].name);
    return KV_OK;
}

const uint8_t *eng_safetensors_bytes(const struct eng_safetensors *file, size_t *ret_count)
{
    *ret_count = file->bytes;
    return file->data;
}
