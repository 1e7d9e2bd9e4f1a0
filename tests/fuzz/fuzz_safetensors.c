/*
 * Any bytes as a safetensors file: what is accepted holds together, and what is refused says why.
 *
 * Each input is tried as a file, and again with its length field made to fit its text (up to the
 * last brace), so that a wrong length does not hide the rest.  The loader opens and maps a file, so
 * it gets one, in memory.
 */

#define FUZZ_TRIES 200000
#define FUZZ_JSON
#include "tests/fuzz/fuzz_main.h"

#include "engine/model/safetensors.h"
#include "kvstore/base/bytes.h"

#include <sys/mman.h>
#include <unistd.h>

static int by_data(const void *a, const void *b)
{
    const struct eng_tensor *x = a, *y = b;
    return (x->data > y->data) - (x->data < y->data);
}

static void check_accepted(const struct eng_safetensors *file)
{
    const struct eng_mapping *mapping = eng_safetensors_mapping(file);
    const uint8_t *next = mapping->data + eng_safetensors_data_at(file);
    size_t count = 0;
    uint32_t sum = 0;

    const struct eng_tensor *tensors = eng_safetensors_tensors(file, &count);
    struct eng_tensor *sorted = calloc(count + 1, sizeof(*sorted));
    EXPECT(sorted != NULL);
    for (size_t i = 0; i < count; i++) {
        sorted[i] = tensors[i];
        EXPECT(i == 0 || strcmp(tensors[i - 1].name, tensors[i].name) < 0);
        EXPECT(eng_safetensors_find(file, tensors[i].name) == &tensors[i]);
    }
    qsort(sorted, count, sizeof(*sorted), by_data);
    for (size_t i = 0; i < count; i++) {
        uint64_t bytes = eng_dtype_bytes(sorted[i].dtype);
        for (uint32_t axis = 0; axis < sorted[i].rank; axis++)
            EXPECT(kv_mul_u64(bytes, sorted[i].shape[axis], &bytes));
        EXPECT(bytes == sorted[i].bytes && bytes > 0);
        EXPECT(sorted[i].data == next);
        for (uint64_t k = 0; k < bytes; k++)
            sum += next[k];
        next += bytes;
    }
    EXPECT(next == mapping->data + mapping->bytes);
    EXPECT(sum < UINT32_MAX);
    free(sorted);
}

static void try_file(int fd, const uint8_t *data, size_t bytes)
{
    struct eng_safetensors *file = NULL;
    struct kv_error err = {0};
    char path[64];

    EXPECT(ftruncate(fd, 0) == 0 && pwrite(fd, data, bytes, 0) == (ssize_t)bytes);
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    const kv_status status = eng_safetensors_open(path, &file, &err);
    if (status == KV_OK) {
        check_accepted(file);
        eng_safetensors_close(file);
    } else {
        EXPECT(status == KV_INVALID && file == NULL);
        EXPECT(strncmp(err.text, path, strlen(path)) == 0);
        for (const char *c = err.text; *c != '\0'; c++)
            EXPECT(*c >= ' ' && *c <= '~');
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    const int fd = memfd_create("fuzz", MFD_CLOEXEC);
    EXPECT(fd >= 0);
    try_file(fd, data, bytes);
    size_t end = bytes;
    while (end > 8 && data[end - 1] != '}')
        end--;
    if (end > 8) {
        uint8_t *fixed = malloc(bytes);
        EXPECT(fixed != NULL);
        memcpy(fixed, data, bytes);
        kv_store64(fixed, end - 8);
        try_file(fd, fixed, bytes);
        free(fixed);
    }
    EXPECT(close(fd) == 0);
    return 0;
}

static size_t fuzz_seed(uint32_t index, uint8_t *buf, size_t bytes_max)
{
    static const struct {
        const char *text;
        size_t data_bytes;
    } seeds[] = {
        {"{}", 0},
        {"{\"__metadata__\":{\"format\":\"pt\"},\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],"
         "\"data_offsets\":[0,24]}}",
         24},
        {"{\"embed.weight\":{\"dtype\":\"BF16\",\"shape\":[8,32],\"data_offsets\":[0,512]},"
         "\"w.weight\":{\"dtype\":\"I8\",\"shape\":[4,16],\"data_offsets\":[512,576]},"
         "\"w.scale\":{\"dtype\":\"F8_E8M0\",\"shape\":[4,1],\"data_offsets\":[576,580]},"
         "\"x.weight\":{\"dtype\":\"F8_E4M3\",\"shape\":[3],\"data_offsets\":[580,583]}}",
         583},
        {"{\"b\":{\"dtype\":\"I8\",\"shape\":[1,1,1,7],\"data_offsets\":[5,12]},\n"
         " \"a\":{\"shape\":[5],\"data_offsets\":[0,5],\"dtype\":\"I8\"}}      ",
         12},
    };
    if (index >= sizeof(seeds) / sizeof(seeds[0])) return 0;
    const size_t count = strlen(seeds[index].text);
    EXPECT(8 + count + seeds[index].data_bytes <= bytes_max);
    kv_store64(buf, count);
    memcpy(buf + 8, seeds[index].text, count);
    memset(buf + 8 + count, 1, seeds[index].data_bytes);
    return 8 + count + seeds[index].data_bytes;
}
