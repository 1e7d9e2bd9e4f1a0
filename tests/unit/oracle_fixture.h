#pragma once

/* Reads the fixtures of tests/oracle/fixtures: safetensors written by the oracle, in the names of
 * `cachectl model run --help`.  A reader of its own, so that a fault of the engine's cannot hide
 * itself.  Private to tests/unit/test_oracle_*.c. */

#include "kvstore/base/bytes.h"
#include "tests/harness.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct fixture {
    uint8_t *bytes;
    const uint8_t *data;
    json_t *header;
};

/* One tensor: `rows` rows of `width` values. */
struct fixture_tensor {
    const uint8_t *data;
    size_t rows, width;
    char dtype[8];
};

static inline void fixture_open_file(struct fixture *fixture, const char *name)
{
    const char *root = getenv("CACHED_SOURCE_ROOT");
    char path[4096];
    if (root == NULL) SKIP("CACHED_SOURCE_ROOT is not set: run through meson test");
    (void)snprintf(path, sizeof(path), "%s/tests/oracle/fixtures/%s.safetensors", root, name);
    FILE *file = fopen(path, "rb");
    if (file == NULL) (void)fprintf(stderr, "%s cannot be opened\n", path);
    EXPECT(file != NULL);
    EXPECT(fseek(file, 0, SEEK_END) == 0);
    const long size = ftell(file);
    EXPECT(size > 8);
    rewind(file);
    fixture->bytes = malloc((size_t)size);
    EXPECT(fixture->bytes != NULL);
    EXPECT(fread(fixture->bytes, 1, (size_t)size, file) == (size_t)size);
    (void)fclose(file);
    const uint64_t header = kv_load64(fixture->bytes);
    EXPECT(header <= (uint64_t)size - 8);
    fixture->header = json_loadb((const char *)fixture->bytes + 8, (size_t)header, 0, NULL);
    EXPECT(fixture->header != NULL);
    fixture->data = fixture->bytes + 8 + header;
}

static inline void fixture_close_file(struct fixture *fixture)
{
    json_decref(fixture->header);
    free(fixture->bytes);
}

static inline bool fixture_has(const struct fixture *fixture, const char *name)
{
    return json_object_get(fixture->header, name) != NULL;
}

static inline struct fixture_tensor fixture_take(const struct fixture *fixture, const char *name,
                                                 const char *dtype)
{
    struct fixture_tensor tensor = {.rows = 1, .width = 1};
    const json_t *entry = json_object_get(fixture->header, name);
    if (entry == NULL) (void)fprintf(stderr, "the fixture has no %s\n", name);
    EXPECT(entry != NULL);
    const json_t *shape = json_object_get(entry, "shape");
    (void)snprintf(tensor.dtype, sizeof(tensor.dtype), "%s",
                   json_string_value(json_object_get(entry, "dtype")));
    EXPECT(strcmp(tensor.dtype, dtype) == 0);
    tensor.rows = (size_t)json_integer_value(json_array_get(shape, 0));
    for (size_t i = 1; i < json_array_size(shape); i++)
        tensor.width *= (size_t)json_integer_value(json_array_get(shape, i));
    tensor.data = fixture->data +
                  json_integer_value(json_array_get(json_object_get(entry, "data_offsets"), 0));
    return tensor;
}

/* Row of a position in a tensor with a sibling NAME.pos; -1: none. */
static inline int64_t fixture_row_of(const struct fixture *fixture, const char *name,
                                     uint32_t position)
{
    char sibling[64];
    (void)snprintf(sibling, sizeof(sibling), "%s.pos", name);
    const struct fixture_tensor pos = fixture_take(fixture, sibling, "I32");
    for (size_t i = 0; i < pos.rows; i++)
        if (kv_load32(pos.data + 4 * i) == position) return (int64_t)i;
    return -1;
}

static inline float fixture_f32(const struct fixture_tensor *tensor, size_t index)
{
    const uint32_t bits = kv_load32(tensor->data + 4 * index);
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline float fixture_bf16(const struct fixture_tensor *tensor, size_t index)
{
    const uint32_t bits = (uint32_t)kv_load16(tensor->data + 2 * index) << 16;
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}
