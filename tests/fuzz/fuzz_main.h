#pragma once

/*
 * main() of a fuzzer without libFuzzer: every compiler builds it, every test run tries it.
 *
 * A target offers LLVMFuzzerTestOneInput() and fuzz_seed(), and includes this file first.  Run as
 * `fuzz_NAME [CORPUS]`: tries the seeds, every file of the folder CORPUS (none is fine), then
 * random changes of both; CACHED_TEST_DIVISOR divides how many.  The random numbers are the same in
 * every run, so a failure comes back.
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

enum { FUZZ_INPUT_MAX = 16384, FUZZ_INPUTS_MAX = 256, FUZZ_TRIES = 100000 };

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

static inline int fuzz_run(int argc, char **argv)
{
    struct fuzz fuzz = {.random = 88172645463325252u};
    uint8_t buf[FUZZ_INPUT_MAX];

    for (uint32_t i = 0;; i++) {
        const size_t bytes = fuzz_seed(i, buf, sizeof(buf));
        if (bytes == 0) break;
        fuzz_add(&fuzz, buf, bytes);
    }
    if (argc > 1) fuzz_add_folder(&fuzz, argv[1]);
    EXPECT(fuzz.input_count > 0);

    const uint64_t tries = harness_count(FUZZ_TRIES);
    for (uint64_t i = 0; i < tries; i++) {
        const struct fuzz_input *from = &fuzz.inputs[fuzz_below(&fuzz, fuzz.input_count)];
        size_t bytes = from->bytes;
        memcpy(buf, from->data, bytes);
        for (size_t changes = 1 + fuzz_below(&fuzz, 4); changes > 0; changes--)
            bytes = fuzz_change(&fuzz, buf, bytes);
        fuzz_try(buf, bytes);
    }
    (void)printf("%u inputs, %" PRIu64 " changes of them\n", fuzz.input_count, tries);
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
