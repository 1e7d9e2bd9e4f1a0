/*
 * Reads a trace file line by line, unpacking zstd or gzip on the way.
 *
 * The agentic file unpacks to 381 MB, so nothing is held but one buffer of each side and the line
 * itself.  A stream that ends in the middle of a frame is an error and not an end: half a trace
 * would give statistics that look right.  The zstd window is allowed up to 128 MiB, which is what
 * that file was packed with.
 */

#include "tools/cachectl/trace_input.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <zlib.h>
#include <zstd.h>

enum input_kind { INPUT_PLAIN, INPUT_ZSTD, INPUT_GZIP };

enum {
    PACKED_BYTES = 1 << 17,
    UNPACKED_BYTES = 1 << 18,
    ZSTD_WINDOW_LOG = 27, /* 128 MiB */
    GZIP_WINDOW_BITS = 15 + 16,
};

struct trace_input {
    char *path;
    FILE *file;
    enum input_kind kind;
    ZSTD_DStream *zstd;
    z_stream gzip;
    bool gzip_ready;
    bool frame_open; /* The compressed stream is inside a frame. */

    uint8_t *packed;
    size_t packed_count;
    size_t packed_used;
    uint8_t *unpacked;
    size_t unpacked_count;
    size_t unpacked_used;

    char *line;
    size_t line_capacity;
    uint64_t line_number;
    uint64_t file_bytes;
    uint64_t read_bytes;
};

kv_status trace_input_fail(const struct trace_input *input, kv_status status, struct kv_error *err,
                           const char *fmt, ...)
{
    char text[160];
    va_list args;

    va_start(args, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    return KV_FAIL(err, status, "%s:%llu: %s", input->path, (unsigned long long)input->line_number,
                   text);
}

/* Fails on the line being read, which has not been counted yet. */
static kv_status stream_fail(struct trace_input *input, kv_status status, const char *what,
                             struct kv_error *err)
{
    input->line_number++;
    return trace_input_fail(input, status, err, "%s", what);
}

static kv_status packed_fill(struct trace_input *input, struct kv_error *err)
{
    if (input->packed_used < input->packed_count) return KV_OK;
    input->packed_used = 0;
    input->packed_count = fread(input->packed, 1, PACKED_BYTES, input->file);
    input->read_bytes += input->packed_count;
    if (ferror(input->file) != 0) return stream_fail(input, KV_IO, "cannot read the file", err);
    return KV_OK;
}

static kv_status unpack_zstd(struct trace_input *input, struct kv_error *err)
{
    ZSTD_inBuffer in = {input->packed, input->packed_count, input->packed_used};
    ZSTD_outBuffer out = {input->unpacked, UNPACKED_BYTES, 0};

    const size_t rest = ZSTD_decompressStream(input->zstd, &out, &in);
    if (ZSTD_isError(rest) != 0)
        return stream_fail(input, KV_CORRUPT, ZSTD_getErrorName(rest), err);
    input->frame_open = rest != 0;
    input->packed_used = in.pos;
    input->unpacked_count = out.pos;
    return KV_OK;
}

static kv_status unpack_gzip(struct trace_input *input, struct kv_error *err)
{
    z_stream *z = &input->gzip;

    /* A file may hold several members one after the other. */
    if (!input->frame_open && inflateReset(z) != Z_OK)
        return stream_fail(input, KV_NOMEM, "cannot reset the gzip reader", err);
    input->frame_open = true;
    z->next_in = input->packed + input->packed_used;
    z->avail_in = (uInt)(input->packed_count - input->packed_used);
    z->next_out = input->unpacked;
    z->avail_out = UNPACKED_BYTES;

    const int code = inflate(z, Z_NO_FLUSH);
    if (code != Z_OK && code != Z_STREAM_END && code != Z_BUF_ERROR)
        return stream_fail(input, KV_CORRUPT, z->msg != NULL ? z->msg : "damaged gzip data", err);
    if (code == Z_STREAM_END) input->frame_open = false;
    input->packed_used = input->packed_count - z->avail_in;
    input->unpacked_count = UNPACKED_BYTES - z->avail_out;
    return KV_OK;
}

/* At least one more unpacked byte, or KV_MISS at the end of the file. */
static kv_status unpacked_fill(struct trace_input *input, struct kv_error *err)
{
    while (input->unpacked_used == input->unpacked_count) {
        kv_status status = packed_fill(input, err);
        if (status != KV_OK) return status;

        /* A decoder that filled its output holds more even when there is no more input. */
        const bool at_end = input->packed_count == 0;
        const bool may_hold_more = input->frame_open && input->unpacked_count == UNPACKED_BYTES;
        if (at_end && !may_hold_more) {
            if (!input->frame_open) return KV_MISS;
            return stream_fail(input, KV_CORRUPT, "the compressed file is cut off", err);
        }
        input->unpacked_used = 0;
        input->unpacked_count = 0;
        if (input->kind == INPUT_ZSTD) {
            status = unpack_zstd(input, err);
        } else if (input->kind == INPUT_GZIP) {
            status = unpack_gzip(input, err);
        } else {
            (void)memcpy(input->unpacked, input->packed, input->packed_count);
            input->unpacked_count = input->packed_count;
            input->packed_used = input->packed_count;
        }
        if (status != KV_OK) return status;
    }
    return KV_OK;
}

static kv_status line_reserve(struct trace_input *input, size_t bytes, struct kv_error *err)
{
    if (bytes <= input->line_capacity) return KV_OK;
    if (bytes > TRACE_LINE_BYTES_MAX) return stream_fail(input, KV_INVALID, "line too long", err);

    const size_t capacity = 2 * bytes;
    char *line = realloc(input->line, capacity);
    if (line == NULL) return stream_fail(input, KV_NOMEM, "no memory for the line", err);
    input->line = line;
    input->line_capacity = capacity;
    return KV_OK;
}

kv_status trace_input_line(struct trace_input *input, const char **ret_text, size_t *ret_bytes,
                           struct kv_error *err)
{
    size_t bytes = 0;
    bool ended = false;

    assert(input != NULL);
    while (!ended) {
        kv_status status = unpacked_fill(input, err);
        if (status == KV_MISS && bytes > 0) break; /* A last line without a newline. */
        if (status != KV_OK) return status;

        const uint8_t *from = input->unpacked + input->unpacked_used;
        const size_t available = input->unpacked_count - input->unpacked_used;
        const uint8_t *newline = memchr(from, '\n', available);
        const size_t part = newline == NULL ? available : (size_t)(newline - from);
        status = line_reserve(input, bytes + part + 1, err);
        if (status != KV_OK) return status;
        (void)memcpy(input->line + bytes, from, part);
        bytes += part;
        ended = newline != NULL;
        input->unpacked_used += part + (ended ? 1 : 0);
    }
    input->line[bytes] = '\0';
    input->line_number++;
    *ret_text = input->line;
    *ret_bytes = bytes;
    return KV_OK;
}

static kv_status decoder_open(struct trace_input *input, struct kv_error *err)
{
    static const uint8_t zstd_magic[4] = {0x28, 0xb5, 0x2f, 0xfd};
    static const uint8_t gzip_magic[2] = {0x1f, 0x8b};

    const kv_status status = packed_fill(input, err);
    if (status != KV_OK) return status;
    if (input->packed_count >= 4 && memcmp(input->packed, zstd_magic, 4) == 0) {
        input->kind = INPUT_ZSTD;
        input->zstd = ZSTD_createDStream();
        if (input->zstd == NULL) return KV_FAIL(err, KV_NOMEM, "open '%s'", input->path);
        const size_t set =
            ZSTD_DCtx_setParameter(input->zstd, ZSTD_d_windowLogMax, ZSTD_WINDOW_LOG);
        assert(ZSTD_isError(set) == 0);
    } else if (input->packed_count >= 2 && memcmp(input->packed, gzip_magic, 2) == 0) {
        input->kind = INPUT_GZIP;
        if (inflateInit2(&input->gzip, GZIP_WINDOW_BITS) != Z_OK)
            return KV_FAIL(err, KV_NOMEM, "open '%s'", input->path);
        input->gzip_ready = true;
    }
    return KV_OK;
}

kv_status trace_input_open(const char *path, struct trace_input **ret_input, struct kv_error *err)
{
    kv_status status;
    struct stat info;

    assert(path != NULL);
    assert(ret_input != NULL);

    struct trace_input *input = calloc(1, sizeof(*input));
    if (input == NULL) return KV_FAIL(err, KV_NOMEM, "open '%s'", path);
    input->path = strdup(path);
    input->packed = malloc(PACKED_BYTES);
    input->unpacked = malloc(UNPACKED_BYTES);
    input->line = malloc(1);
    input->line_capacity = 1;
    if (input->path == NULL || input->packed == NULL || input->unpacked == NULL ||
        input->line == NULL) {
        status = KV_FAIL(err, KV_NOMEM, "open '%s'", path);
        goto fail;
    }
    input->file = fopen(path, "rbe");
    if (input->file == NULL) {
        status = KV_FAIL_ERRNO(err, KV_IO, "open '%s'", path);
        goto fail;
    }
    if (fstat(fileno(input->file), &info) != 0) {
        status = KV_FAIL_ERRNO(err, KV_IO, "open '%s'", path);
        goto fail;
    }
    if (S_ISDIR(info.st_mode)) {
        status = KV_FAIL(err, KV_IO, "open '%s': it is a directory", path);
        goto fail;
    }
    input->file_bytes = (uint64_t)info.st_size;
    status = decoder_open(input, err);
    if (status != KV_OK) goto fail;

    *ret_input = input;
    return KV_OK;

fail:
    trace_input_close(input);
    return status;
}

void trace_input_close(struct trace_input *input)
{
    if (input == NULL) return;
    if (input->zstd != NULL) (void)ZSTD_freeDStream(input->zstd);
    if (input->gzip_ready) (void)inflateEnd(&input->gzip);
    if (input->file != NULL) (void)fclose(input->file);
    free(input->path);
    free(input->packed);
    free(input->unpacked);
    free(input->line);
    free(input);
}

uint64_t trace_input_line_number(const struct trace_input *input)
{
    return input->line_number;
}

unsigned trace_input_percent(const struct trace_input *input)
{
    if (input->file_bytes == 0) return 0;
    const uint64_t percent = input->read_bytes * 100 / input->file_bytes;
    return percent > 100 ? 100 : (unsigned)percent;
}
