#pragma once

/*
 * main() of a fuzzer without libFuzzer: every compiler builds it, every test run tries it.
 *
 * A target offers LLVMFuzzerTestOneInput() and fuzz_seed(), and includes this file first.  Run as
 * `fuzz_NAME [CORPUS]`: tries the seeds, every file of the folder CORPUS (none is fine), then
 * random changes of both; CACHED_TEST_DIVISOR divides how many.  The random numbers are the same in
 * every run, so a failure comes back.  Run as `fuzz_NAME --seed S --first A --count N`: changes
 * A to A+N-1 of that seed, as tests/release asks for them.
 *
 * A target may define FUZZ_TRIES (changes without arguments), and FUZZ_JSON: then numbers and
 * members of the text are changed as well, which single bytes rarely do without breaking the
 * syntax.
 *
 * With libFuzzer: clang -fsanitize=fuzzer,address,undefined -DCACHED_LIBFUZZER.
 */

#include "tests/harness.h"

#include <dirent.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

/* Writes valid input number `index` into buf; returns its length, 0 when there are no more. */
static size_t fuzz_seed(uint32_t index, uint8_t *buf, size_t bytes_max);

enum { FUZZ_INPUT_MAX = 16384, FUZZ_INPUTS_MAX = 256 };
#ifndef FUZZ_TRIES
#define FUZZ_TRIES 100000
#endif

struct fuzz_input {
    uint8_t *data;
    size_t bytes;
};

struct fuzz {
    struct fuzz_input inputs[FUZZ_INPUTS_MAX];
    uint32_t input_count;
    uint64_t random;
};

static inline uint64_t fuzz_random(struct fuzz *fuzz)
{
    fuzz->random ^= fuzz->random << 13;
    fuzz->random ^= fuzz->random >> 7;
    fuzz->random ^= fuzz->random << 17;
    return fuzz->random;
}

static inline size_t fuzz_below(struct fuzz *fuzz, size_t limit)
{
    return limit == 0 ? 0 : (size_t)(fuzz_random(fuzz) >> 11) % limit;
}

/* An allocation of the exact size: a sanitizer then sees one byte too far. */
static inline void fuzz_try(const uint8_t *data, size_t bytes)
{
    uint8_t *exact = malloc(bytes == 0 ? 1 : bytes);
    EXPECT(exact != NULL);
    memcpy(exact, data, bytes);
    (void)LLVMFuzzerTestOneInput(exact, bytes);
    free(exact);
}

static inline void fuzz_add(struct fuzz *fuzz, const uint8_t *data, size_t bytes)
{
    if (fuzz->input_count == FUZZ_INPUTS_MAX) return;
    uint8_t *copy = malloc(bytes == 0 ? 1 : bytes);
    EXPECT(copy != NULL);
    memcpy(copy, data, bytes);
    fuzz->inputs[fuzz->input_count++] = (struct fuzz_input){copy, bytes};
    fuzz_try(data, bytes);
}

static inline void fuzz_add_folder(struct fuzz *fuzz, const char *path)
{
    DIR *dir = opendir(path);
    if (dir == NULL) return;
    for (struct dirent *entry = readdir(dir); entry != NULL; entry = readdir(dir)) {
        char name[4096];
        uint8_t buf[FUZZ_INPUT_MAX];
        if (entry->d_name[0] == '.') continue;
        (void)snprintf(name, sizeof(name), "%s/%s", path, entry->d_name);
        FILE *file = fopen(name, "rb");
        if (file == NULL) continue;
        const size_t bytes = fread(buf, 1, sizeof(buf), file);
        (void)fclose(file);
        fuzz_add(fuzz, buf, bytes);
    }
    (void)closedir(dir);
}

static inline size_t fuzz_change(struct fuzz *fuzz, uint8_t *buf, size_t bytes)
{
    static const uint32_t words[] = {0,          1,          2,         127,     128,
                                     129,        0xffff,     1048575,   1048576, 1048577,
                                     0x7fffffff, 0x80000000, 0xffffffff};
    /* Headers are where decisions are made: half of all changes go there. */
    const size_t reach = fuzz_random(fuzz) % 2 == 0 && bytes > 160 ? 160 : bytes;
    const size_t at = fuzz_below(fuzz, reach);

    switch (fuzz_random(fuzz) % 6) {
    case 0:
        if (bytes > 0) buf[at] ^= (uint8_t)(1u << fuzz_below(fuzz, 8));
        return bytes;
    case 1:
        if (bytes > 0) buf[at] = (uint8_t)fuzz_random(fuzz);
        return bytes;
    case 2:
        if (at + 4 <= bytes)
            memcpy(buf + at, &words[fuzz_below(fuzz, sizeof(words) / sizeof(words[0]))], 4);
        return bytes;
    case 3:
        return at;
    case 4: {
        const size_t more = fuzz_below(fuzz, 64);
        if (bytes + more > FUZZ_INPUT_MAX) return bytes;
        memset(buf + bytes, (int)(fuzz_random(fuzz) & 0xff), more);
        return bytes + more;
    }
    default: {
        const struct fuzz_input *other = &fuzz->inputs[fuzz_below(fuzz, fuzz->input_count)];
        const size_t count = fuzz_below(fuzz, 32);
        if (at + count <= bytes && at + count <= other->bytes)
            memcpy(buf + at, other->data + at, count);
        return bytes;
    }
    }
}

/* Puts `text` in place of `count` bytes at `at`. */
static inline size_t fuzz_replace(uint8_t *buf, size_t bytes, size_t at, size_t count,
                                  const char *text, size_t text_bytes)
{
    if (at + count > bytes || bytes - count + text_bytes > FUZZ_INPUT_MAX) return bytes;
    memmove(buf + at + text_bytes, buf + at + count, bytes - at - count);
    memcpy(buf + at, text, text_bytes);
    return bytes - count + text_bytes;
}

#ifdef FUZZ_JSON
/* Another value for a number, a member gone, or a stretch twice. */
static inline size_t fuzz_change_json(struct fuzz *fuzz, uint8_t *buf, size_t bytes)
{
    static const char *const values[] = {"0",
                                         "1",
                                         "2",
                                         "3",
                                         "-1",
                                         "15",
                                         "16",
                                         "31",
                                         "32",
                                         "64",
                                         "127",
                                         "4096",
                                         "131072",
                                         "4294967295",
                                         "1048577",
                                         "1e9",
                                         "0.5",
                                         "{}",
                                         "[]",
                                         "null",
                                         "5",
                                         "8",
                                         "true",
                                         "\"\"",
                                         "99999999",
                                         "1e30",
                                         "[1]",
                                         "7",
                                         "6",
                                         "1e-20",
                                         "12",
                                         "256",
                                         "512",
                                         "[[[[[[[0]]]",
                                         "65536",
                                         "129",
                                         "1024",
                                         "17",
                                         "33",
                                         "9223372036854775807",
                                         "18446744073709551616"};
    static const char ends[] = ",:[]{}\"\n";
    size_t at = fuzz_below(fuzz, bytes), end;

    if (fuzz_below(fuzz, 4) > 0) {
        while (at < bytes && (buf[at] < '0' || buf[at] > '9'))
            at++;
        while (at > 0 && buf[at - 1] >= '0' && buf[at - 1] <= '9')
            at--;
        for (end = at; end < bytes && buf[end] >= '0' && buf[end] <= '9';)
            end++;
        const char *value = values[fuzz_below(fuzz, sizeof(values) / sizeof(values[0]))];
        return fuzz_replace(buf, bytes, at, end - at, value, strlen(value));
    }
    while (at < bytes && strchr(ends, buf[at]) == NULL)
        at++;
    for (end = at + 1; end < bytes && end < at + 400 && buf[end] != ',' && buf[end] != '\n';)
        end++;
    if (at >= bytes || end >= bytes) return bytes;
    if (fuzz_below(fuzz, 2) == 0) return fuzz_replace(buf, bytes, at, end - at, "", 0);
    char again[400];
    memcpy(again, buf + at, end - at);
    return fuzz_replace(buf, bytes, end, 0, again, end - at);
}
#else
static inline size_t fuzz_change_json(struct fuzz *fuzz, uint8_t *buf, size_t bytes)
{
    return fuzz_change(fuzz, buf, bytes);
}
#endif

struct fuzz_range {
    uint64_t seed, first, count;
};

/* false: these are no arguments of tests/release. */
static inline bool fuzz_arguments(int argc, char **argv, struct fuzz_range *range)
{
    bool found = false;
    for (int i = 1; i + 1 < argc; i++) {
        const uint64_t value = strtoull(argv[i + 1], NULL, 10);
        if (strcmp(argv[i], "--seed") == 0) range->seed = value;
        if (strcmp(argv[i], "--first") == 0) range->first = value;
        if (strcmp(argv[i], "--count") == 0) range->count = value;
        found = found || strncmp(argv[i], "--", 2) == 0;
    }
    return found;
}

/* Change number `index` of a seed: the same whatever was tried before. */
static inline void fuzz_try_changed(struct fuzz *fuzz, uint64_t seed, uint64_t index)
{
    uint8_t buf[FUZZ_INPUT_MAX];

    fuzz->random = (seed * 0x9e3779b97f4a7c15u) ^ (index + 88172645463325252u);
    for (int i = 0; i < 3; i++)
        (void)fuzz_random(fuzz);
    const struct fuzz_input *from = &fuzz->inputs[fuzz_below(fuzz, fuzz->input_count)];
    size_t bytes = from->bytes;
    memcpy(buf, from->data, bytes);
    for (size_t changes = 1 + fuzz_below(fuzz, 4); changes > 0; changes--)
        bytes = fuzz_random(fuzz) % 2 == 0 ? fuzz_change(fuzz, buf, bytes)
                                           : fuzz_change_json(fuzz, buf, bytes);
    fuzz_try(buf, bytes);
}

static inline int fuzz_run(int argc, char **argv)
{
    struct fuzz fuzz = {.random = 88172645463325252u};
    struct fuzz_range range = {.seed = 0, .first = 0, .count = harness_count(FUZZ_TRIES)};
    uint8_t buf[FUZZ_INPUT_MAX];

    for (uint32_t i = 0;; i++) {
        const size_t bytes = fuzz_seed(i, buf, sizeof(buf));
        if (bytes == 0) break;
        fuzz_add(&fuzz, buf, bytes);
    }
    if (!fuzz_arguments(argc, argv, &range) && argc > 1) fuzz_add_folder(&fuzz, argv[1]);
    EXPECT(fuzz.input_count > 0);

    for (uint64_t i = 0; i < range.count; i++)
        fuzz_try_changed(&fuzz, range.seed, range.first + i);
    (void)printf("%u inputs, %" PRIu64 " changes of them\n", fuzz.input_count, range.count);
    for (uint32_t i = 0; i < fuzz.input_count; i++)
        free(fuzz.inputs[i].data);
    return harness_end();
}

#ifndef CACHED_LIBFUZZER
int main(int argc, char **argv)
{
    return fuzz_run(argc, argv);
}
#endif
