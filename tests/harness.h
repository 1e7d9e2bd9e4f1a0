#pragma once

/* Test harness: checks that count themselves.
 *
 * A test is a program.  Each EXPECT counts one check; the first that fails prints where and what,
 * and ends the program with exit code 1, so a later line never runs on a broken state.  main() ends
 * with HARNESS_END(), which prints how many checks ran and fails if there were none: a test that
 * cannot fail does not pass.  SKIP() says why and ends with 77, which meson counts as skipped.
 *
 * EXPECT works on any thread.  Arguments are evaluated once. */

#include <inttypes.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HARNESS_EXIT_SKIPPED = 77 };

static _Atomic uint64_t harness_checks;

/* _Exit, not exit: no destructors and no leak report on top of the message that matters. */
static inline _Noreturn void harness_exit(int code)
{
    (void)fflush(NULL);
    _Exit(code);
}

static inline void harness_expect(bool ok, const char *what, const char *file, int line)
{
    (void)atomic_fetch_add(&harness_checks, 1);
    if (ok) return;
    (void)fprintf(stderr, "%s:%d: expected: %s\n", file, line, what);
    harness_exit(EXIT_FAILURE);
}

static inline void harness_expect_u64(uint64_t got, uint64_t want, const char *what,
                                      const char *file, int line)
{
    (void)atomic_fetch_add(&harness_checks, 1);
    if (got == want) return;
    (void)fprintf(stderr,
                  "%s:%d: %s: got %" PRIu64 " (0x%" PRIx64 "), want %" PRIu64 " (0x%" PRIx64 ")\n",
                  file, line, what, got, got, want, want);
    harness_exit(EXIT_FAILURE);
}

static inline void harness_expect_i64(int64_t got, int64_t want, const char *what, const char *file,
                                      int line)
{
    (void)atomic_fetch_add(&harness_checks, 1);
    if (got == want) return;
    (void)fprintf(stderr, "%s:%d: %s: got %" PRId64 ", want %" PRId64 "\n", file, line, what, got,
                  want);
    harness_exit(EXIT_FAILURE);
}

static inline void harness_expect_str(const char *got, const char *want, const char *what,
                                      const char *file, int line)
{
    (void)atomic_fetch_add(&harness_checks, 1);
    if (got != NULL && want != NULL && strcmp(got, want) == 0) return;
    if (got == NULL && want == NULL) return;
    (void)fprintf(stderr, "%s:%d: %s: got \"%s\", want \"%s\"\n", file, line, what,
                  got == NULL ? "(null)" : got, want == NULL ? "(null)" : want);
    harness_exit(EXIT_FAILURE);
}

static inline void harness_expect_mem(const void *got, const void *want, size_t bytes,
                                      const char *what, const char *file, int line)
{
    const unsigned char *g = got;
    const unsigned char *w = want;

    (void)atomic_fetch_add(&harness_checks, 1);
    for (size_t i = 0; i < bytes; i++) {
        if (g[i] == w[i]) continue;
        (void)fprintf(stderr, "%s:%d: %s: byte %zu of %zu: got 0x%02x, want 0x%02x\n", file, line,
                      what, i, bytes, g[i], w[i]);
        harness_exit(EXIT_FAILURE);
    }
}

static inline _Noreturn void harness_skip(const char *reason)
{
    (void)printf("SKIPPED: %s\n", reason);
    harness_exit(HARNESS_EXIT_SKIPPED);
}

/* How often a loop of the test's choice runs: `normal`, divided by CACHED_TEST_DIVISOR when that is
 * set (the sanitizer build sets it), at least 1. */
static inline uint64_t harness_count(uint64_t normal)
{
    const char *text = getenv("CACHED_TEST_DIVISOR");
    const unsigned long long divisor = text == NULL ? 1 : strtoull(text, NULL, 10);
    const uint64_t count = divisor == 0 ? normal : normal / divisor;
    return count == 0 ? 1 : count;
}

static inline int harness_end(void)
{
    const uint64_t checks = atomic_load(&harness_checks);
    (void)printf("%" PRIu64 " checks\n", checks);
    if (checks > 0) return EXIT_SUCCESS;
    (void)fprintf(stderr, "no checks ran: a test that checks nothing fails\n");
    return EXIT_FAILURE;
}

#define EXPECT(condition) harness_expect((condition), #condition, __FILE__, __LINE__)
#define EXPECT_EQ_U32(got, want)                                                                   \
    harness_expect_u64((uint32_t){(got)}, (uint32_t){(want)}, #got " == " #want, __FILE__, __LINE__)
#define EXPECT_EQ_U64(got, want)                                                                   \
    harness_expect_u64((uint64_t){(got)}, (uint64_t){(want)}, #got " == " #want, __FILE__, __LINE__)
#define EXPECT_EQ_I64(got, want)                                                                   \
    harness_expect_i64((int64_t){(got)}, (int64_t){(want)}, #got " == " #want, __FILE__, __LINE__)
#define EXPECT_EQ_STR(got, want)                                                                   \
    harness_expect_str((got), (want), #got " == " #want, __FILE__, __LINE__)
#define EXPECT_EQ_MEM(got, want, bytes)                                                            \
    harness_expect_mem((got), (want), (bytes), #got " == " #want, __FILE__, __LINE__)

#define SKIP(reason) harness_skip(reason)

/* The last statement of main(). */
#define HARNESS_END() return harness_end()
