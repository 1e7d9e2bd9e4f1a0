/*
 * The output of `cachectl model run`: a safetensors file, mapped and filled where its values
 * belong.
 *
 * Offsets follow from the shapes, so the header is written first and a tensor may be filled row by
 * row in any order, which is how passes produce them.  Its values are never held twice, and a dump
 * may be larger than memory.
 */

#include "tools/cachectl/model_run_dump.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PART_TRIES 100u

static const struct {
    const char *name;
    uint32_t bytes;
} types[] = {
    [DUMP_U8] = {"U8", 1},   [DUMP_I32] = {"I32", 4},   [DUMP_I64] = {"I64", 8},
    [DUMP_F32] = {"F32", 4}, [DUMP_BF16] = {"BF16", 2},
};

void model_dump_init(struct model_dump *dump)
{
    *dump = (struct model_dump){0};
}

static uint64_t row_bytes(const struct model_dump_tensor *tensor)
{
    uint64_t bytes = types[tensor->type].bytes;
    for (uint32_t i = 1; i < tensor->rank; i++)
        bytes *= tensor->shape[i];
    return bytes;
}

static uint64_t tensor_bytes(const struct model_dump_tensor *tensor)
{
    return tensor->shape[0] * row_bytes(tensor);
}

size_t model_dump_add(struct model_dump *dump, const char *name, enum model_dump_type type,
                      uint32_t rank, const uint64_t *shape)
{
    assert(rank >= 1 && rank <= 3);
    if (dump->count == dump->max) {
        const size_t max = dump->max == 0 ? 256 : 2 * dump->max;
        struct model_dump_tensor *tensors = realloc(dump->tensors, max * sizeof(*tensors));
        if (tensors == NULL) {
            dump->failed = true;
            return 0;
        }
        dump->tensors = tensors;
        dump->max = max;
    }
    struct model_dump_tensor *tensor = &dump->tensors[dump->count];
    *tensor = (struct model_dump_tensor){.type = type, .rank = rank};
    const int length = snprintf(tensor->name, sizeof(tensor->name), "%s", name);
    assert(length > 0 && (size_t)length < sizeof(tensor->name));
    memcpy(tensor->shape, shape, rank * sizeof(*shape));
    return dump->count++;
}

/* The widest values first: the format allows no gaps, and so each stands aligned without any. */
static void place(struct model_dump *dump)
{
    for (uint32_t bytes = 8; bytes > 0; bytes /= 2)
        for (size_t i = 0; i < dump->count; i++) {
            struct model_dump_tensor *tensor = &dump->tensors[i];
            if (types[tensor->type].bytes != bytes) continue;
            tensor->offset = dump->bytes;
            dump->bytes += tensor_bytes(tensor);
        }
}

/* The header's text, padded so that the data behind it begins at a multiple of 8; or NULL. */
static char *make_header(const struct model_dump *dump, const char *const (*meta)[2],
                         size_t meta_count, size_t *ret_bytes)
{
    json_t *root = json_object();
    json_t *pairs = json_object();

    for (size_t i = 0; i < meta_count; i++)
        (void)json_object_set_new(pairs, meta[i][0], json_string(meta[i][1]));
    (void)json_object_set_new(root, "__metadata__", pairs);
    for (size_t i = 0; i < dump->count; i++) {
        const struct model_dump_tensor *tensor = &dump->tensors[i];
        json_t *shape = json_array();
        for (uint32_t n = 0; n < tensor->rank; n++)
            (void)json_array_append_new(shape, json_integer((json_int_t)tensor->shape[n]));
        json_t *entry = json_pack("{s:s, s:o, s:[I, I]}", "dtype", types[tensor->type].name,
                                  "shape", shape, "data_offsets", (json_int_t)tensor->offset,
                                  (json_int_t)(tensor->offset + tensor_bytes(tensor)));
        (void)json_object_set_new(root, tensor->name, entry);
    }
    char *text = json_dumps(root, JSON_COMPACT);
    json_decref(root);
    if (text == NULL) return NULL;
    const size_t count = strlen(text);
    *ret_bytes = (size_t)kv_round_up(count, 8);
    char *padded = realloc(text, *ret_bytes + 1);
    if (padded == NULL) {
        free(text);
        return NULL;
    }
    memset(padded + count, ' ', *ret_bytes - count);
    return padded;
}

/* A file that nobody else writes, under a name that nobody has: a process number comes back, and a
 * run that was killed leaves its part behind.  -1: errno says why. */
static int create_part(struct model_dump *dump)
{
    for (uint32_t try = 0; try < PART_TRIES; try++) {
        char more[16] = "";
        if (try > 0) (void)snprintf(more, sizeof(more), ".%u", try);
        const int length = snprintf(dump->part, sizeof(dump->part), "%s.part.%ld%s", dump->path,
                                    (long)getpid(), more);
        if (length < 0 || (size_t)length >= sizeof(dump->part)) {
            errno = ENAMETOOLONG;
            break;
        }
        const int fd = open(dump->part, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd >= 0) return fd;
        if (errno != EEXIST) break;
    }
    dump->part[0] = '\0';
    return -1;
}

static kv_status map_file(struct model_dump *dump, struct kv_error *err)
{
    const int fd = create_part(dump);
    if (fd < 0) return KV_FAIL_ERRNO(err, KV_IO, "make a file beside %s", dump->path);
    kv_status status = KV_OK;
    errno = posix_fallocate(fd, 0, (off_t)dump->map_bytes);
    if (errno != 0)
        status = KV_FAIL_ERRNO(err, KV_IO, "%s: no room for %llu bytes", dump->part,
                               (unsigned long long)dump->map_bytes);
    void *map = MAP_FAILED;
    if (status == KV_OK) {
        map = mmap(NULL, dump->map_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (map == MAP_FAILED) status = KV_FAIL_ERRNO(err, KV_NOMEM, "%s", dump->part);
    }
    (void)close(fd);
    if (status == KV_OK) dump->map = map;
    return status;
}

kv_status model_dump_open(struct model_dump *dump, const char *path, const char *const (*meta)[2],
                          size_t meta_count, struct kv_error *err)
{
    size_t header_bytes = 0;
    assert(dump->map == NULL);

    dump->path = path;
    place(dump);
    char *header = make_header(dump, meta, meta_count, &header_bytes);
    if (header == NULL || dump->failed) {
        free(header);
        return KV_FAIL(err, KV_NOMEM, "header of the dump");
    }
    dump->data_at = 8 + header_bytes;
    dump->map_bytes = dump->data_at + dump->bytes;
    const kv_status status = map_file(dump, err);
    if (status == KV_OK) {
        kv_store64(dump->map, header_bytes);
        memcpy(dump->map + 8, header, header_bytes);
    }
    free(header);
    return status;
}

void *model_dump_data(const struct model_dump *dump, size_t tensor)
{
    assert(dump->map != NULL && tensor < dump->count);
    return dump->map + dump->data_at + dump->tensors[tensor].offset;
}

uint64_t model_dump_row_bytes(const struct model_dump *dump, size_t tensor)
{
    assert(tensor < dump->count);
    return row_bytes(&dump->tensors[tensor]);
}

kv_status model_dump_finish(struct model_dump *dump, struct kv_error *err)
{
    if (msync(dump->map, dump->map_bytes, MS_SYNC) != 0)
        return KV_FAIL_ERRNO(err, KV_IO, "%s", dump->part);
    if (rename(dump->part, dump->path) != 0) return KV_FAIL_ERRNO(err, KV_IO, "%s", dump->path);
    dump->part[0] = '\0';
    return KV_OK;
}

void model_dump_fini(struct model_dump *dump)
{
    if (dump->map != NULL) (void)munmap(dump->map, dump->map_bytes);
    if (dump->part[0] != '\0') (void)unlink(dump->part);
    free(dump->tensors);
    *dump = (struct model_dump){0};
}
