/*
 * Writes the directory of a model: shards, index, compressed ids, config.
 *
 * A header says where each tensor will stand, so it is written first, from the same list the engine
 * reads by; the data follow strip by strip at their offsets.
 *
 * What an earlier run left in the directory is removed first (mkmodel_dir.c), its config.json
 * before all else, and the new config.json comes last.  Without one nothing opens the directory, so
 * a reader never sees half a model, nor one made of two; after a failure there is none.  Every file
 * is written beside its place and renamed.
 */

#include "kvstore/base/bytes.h"
#include "tools/mkmodel.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define PATH_BYTES 4096

/* One file while it is made. */
struct output {
    char path[PATH_BYTES], temporary[PATH_BYTES + 8];
    int fd;
};

struct text {
    char *bytes;
    size_t count, max;
    bool failed;
};

struct writer {
    const struct plan *plan;
    struct eng_tensor_spec *specs;
    size_t count;
    uint64_t *offsets;    /* Of each tensor in the data of its shard. */
    uint32_t *shard_of;   /* Of each tensor. */
    uint64_t total_bytes; /* Of all tensors. */
    /* The file and the tensor that are being written. */
    struct output output;
    uint64_t data_at;
    size_t tensor;
};

static void ending_signals(sigset_t *set)
{
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction action;

    /* Without those that are ignored (nohup): held back, they would be pending all the same. */
    (void)sigemptyset(set);
    for (size_t i = 0; i < KV_ARRAY_COUNT(signals); i++)
        if (sigaction(signals[i], NULL, &action) == 0 && action.sa_handler != SIG_IGN)
            (void)sigaddset(set, signals[i]);
}

/* They are held while files are written: whoever ends this program wants no half of one. */
static bool interrupted(void)
{
    sigset_t ending, pending;

    ending_signals(&ending);
    return sigpending(&pending) == 0 && sigandset(&pending, &pending, &ending) == 0 &&
           !sigisemptyset(&pending);
}

static bool write_at(const struct output *output, uint64_t offset, const void *data, size_t bytes)
{
    const uint8_t *at = data;
    if (interrupted()) {
        (void)fprintf(stderr, "mkmodel: interrupted\n");
        return false;
    }
    while (bytes > 0) {
        const ssize_t n = pwrite(output->fd, at, bytes, (off_t)offset);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return complain(output->temporary);
        at += n;
        offset += (uint64_t)n;
        bytes -= (size_t)n;
    }
    return true;
}

static bool output_open(struct output *output, const char *dir, const char *name)
{
    const int length = snprintf(output->path, sizeof(output->path), "%s/%s", dir, name);
    if (length < 0 || (size_t)length >= sizeof(output->path)) {
        errno = ENAMETOOLONG;
        return complain(dir);
    }
    (void)snprintf(output->temporary, sizeof(output->temporary), "%s.tmp", output->path);
    output->fd = open(output->temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    return output->fd >= 0 || complain(output->temporary);
}

/* Puts the file in its place if `ok`, else removes it. */
static bool output_close(struct output *output, bool ok)
{
    if (ok && fsync(output->fd) != 0) ok = complain(output->temporary);
    if (close(output->fd) != 0 && ok) ok = complain(output->temporary);
    if (ok && rename(output->temporary, output->path) != 0) ok = complain(output->path);
    if (!ok) (void)unlink(output->temporary);
    return ok;
}

static bool write_file(const char *dir, const char *name, const void *data, size_t bytes)
{
    struct output output;
    if (!output_open(&output, dir, name)) return false;
    return output_close(&output, write_at(&output, 0, data, bytes));
}

static void text_add(struct text *text, const char *line)
{
    const size_t bytes = strlen(line);
    if (!text->failed && text->count + bytes + 1 > text->max) {
        text->max = 2 * (text->count + bytes + 1);
        char *moved = realloc(text->bytes, text->max);
        text->failed = moved == NULL;
        if (moved != NULL) text->bytes = moved;
    }
    if (text->failed) return;
    memcpy(text->bytes + text->count, line, bytes + 1);
    text->count += bytes;
}

static void shard_name(const struct plan *plan, uint32_t shard, char name[64])
{
    if (plan->shards == 1)
        (void)snprintf(name, 64, "model.safetensors");
    else
        (void)snprintf(name, 64, "model-%05u-of-%05u.safetensors", shard + 1, plan->shards);
}

static bool collect(void *context, const struct eng_tensor_spec *spec)
{
    struct writer *writer = context;
    writer->specs[writer->count++] = *spec;
    writer->total_bytes += eng_tensor_bytes(spec);
    return true;
}

/* Shards of about the same size; a weight and its scale stay together. */
static void place_tensors(struct writer *writer)
{
    uint64_t before = 0, offset = 0;
    uint32_t shard = 0;

    for (size_t i = 0; i < writer->count; i++) {
        const struct eng_tensor_spec *spec = &writer->specs[i];
        const uint64_t share = writer->total_bytes / writer->plan->shards * (shard + 1);
        if (!spec->is_scale && before >= share && shard + 1 < writer->plan->shards) {
            shard++;
            offset = 0;
        }
        writer->shard_of[i] = shard;
        writer->offsets[i] = offset;
        offset += eng_tensor_bytes(spec);
        before += eng_tensor_bytes(spec);
    }
}

static void add_entry(struct text *header, const struct eng_tensor_spec *spec, uint64_t offset)
{
    char entry[320], shape[64];

    if (spec->columns == 0)
        (void)snprintf(shape, sizeof(shape), "[%llu]", (unsigned long long)spec->rows);
    else
        (void)snprintf(shape, sizeof(shape), "[%llu,%llu]", (unsigned long long)spec->rows,
                       (unsigned long long)spec->columns);
    (void)snprintf(entry, sizeof(entry),
                   ",\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%llu,%llu]}",
                   spec->name, eng_dtype_name(spec->dtype), shape, (unsigned long long)offset,
                   (unsigned long long)(offset + eng_tensor_bytes(spec)));
    text_add(header, entry);
}

static bool write_strip(void *context, bool scales, uint64_t offset, const uint8_t *data,
                        size_t bytes)
{
    const struct writer *writer = context;
    const uint64_t tensor_at = writer->offsets[writer->tensor + (scales ? 1 : 0)];
    return write_at(&writer->output, writer->data_at + tensor_at + offset, data, bytes);
}

static bool write_data(struct writer *writer, uint32_t shard)
{
    for (size_t i = 0; i < writer->count; i++) {
        if (writer->shard_of[i] != shard || writer->specs[i].is_scale) continue;
        writer->tensor = i;
        if (!fill_tensor(writer->plan, &writer->specs[i], write_strip, writer)) {
            if (interrupted()) return false;
            (void)fprintf(stderr, "mkmodel: tensor %s could not be made\n", writer->specs[i].name);
            return false;
        }
    }
    return true;
}

static bool write_shard(struct writer *writer, uint32_t shard)
{
    struct text header = {0};
    uint8_t length[8];
    char name[64];

    text_add(&header, MKMODEL_MARK);
    for (size_t i = 0; i < writer->count; i++)
        if (writer->shard_of[i] == shard) add_entry(&header, &writer->specs[i], writer->offsets[i]);
    text_add(&header, "}");
    /* Readers like their data aligned; spaces after the object are part of the format. */
    while (!header.failed && header.count % 8 != 0)
        text_add(&header, " ");
    shard_name(writer->plan, shard, name);
    if (header.failed || !output_open(&writer->output, writer->plan->dir, name)) {
        free(header.bytes);
        return false;
    }
    kv_store64(length, header.count);
    writer->data_at = 8 + header.count;
    const bool ok = write_at(&writer->output, 0, length, sizeof(length)) &&
                    write_at(&writer->output, 8, header.bytes, header.count) &&
                    write_data(writer, shard);
    free(header.bytes);
    return output_close(&writer->output, ok);
}

static bool write_index(const struct writer *writer)
{
    const struct plan *plan = writer->plan;
    struct text text = {0};
    char line[256], name[64];

    if (plan->shards == 1) return true;
    (void)snprintf(line, sizeof(line), "{\n  \"metadata\": {\"total_size\": %llu},\n",
                   (unsigned long long)writer->total_bytes);
    text_add(&text, line);
    text_add(&text, "  \"weight_map\": {\n");
    for (size_t i = 0; i < writer->count; i++) {
        shard_name(plan, writer->shard_of[i], name);
        (void)snprintf(line, sizeof(line), "    \"%s\": \"%s\"%s\n", writer->specs[i].name, name,
                       i + 1 < writer->count ? "," : "");
        text_add(&text, line);
    }
    text_add(&text, "  }\n}\n");
    const bool ok = !text.failed &&
                    write_file(plan->dir, "model.safetensors.index.json", text.bytes, text.count);
    free(text.bytes);
    return ok;
}

static bool write_ids(const struct plan *plan)
{
    const uint32_t vocab = plan->config->vocab;
    if (plan->config->engram_count == 0) return true;
    uint32_t *ids = calloc(vocab, sizeof(*ids));
    uint8_t *bytes = calloc(vocab, 4);
    bool ok = ids != NULL && bytes != NULL;

    if (ok) {
        fill_compressed_ids(plan->config, ids);
        for (uint32_t i = 0; i < vocab; i++)
            kv_store32(bytes + 4 * (size_t)i, ids[i]);
        ok = write_file(plan->dir, "engram_ids.bin", bytes, 4 * (size_t)vocab);
    }
    free(ids);
    free(bytes);
    return ok;
}

int write_model(const struct plan *plan)
{
    sigset_t held;
    const size_t count = eng_tensors_count(plan->config);
    struct writer writer = {
        .plan = plan,
        .specs = calloc(count, sizeof(*writer.specs)),
        .offsets = calloc(count, sizeof(*writer.offsets)),
        .shard_of = calloc(count, sizeof(*writer.shard_of)),
    };
    bool ok = writer.specs != NULL && writer.offsets != NULL && writer.shard_of != NULL;

    if (!ok) (void)fprintf(stderr, "mkmodel: out of memory\n");
    if (ok) {
        (void)eng_tensors_each(plan->config, collect, &writer);
        place_tensors(&writer);
    }
    ending_signals(&held);
    (void)sigprocmask(SIG_BLOCK, &held, NULL);
    ok = ok && dir_prepare(plan, writer.total_bytes);
    for (uint32_t shard = 0; ok && shard < plan->shards; shard++)
        ok = write_shard(&writer, shard);
    ok = ok && write_index(&writer) && write_ids(plan) &&
         write_file(plan->dir, "config.json", plan->config_text, plan->config_bytes);
    if (ok)
        (void)printf("%s: %s%s, seed %llu, %llu bytes of weights in %u file%s\n", plan->dir,
                     plan->config->name, plan->bigram ? " (bigram)" : "",
                     (unsigned long long)plan->seed, (unsigned long long)writer.total_bytes,
                     plan->shards, plan->shards == 1 ? "" : "s");
    free(writer.specs);
    free(writer.offsets);
    free(writer.shard_of);
    return ok ? EXIT_SUCCESS : EXIT_FAILURE;
}
