/*
 * The harness itself: a failed check must fail the program, and a program without checks too.
 *
 * Goal: every way a test can end.
 * Method: run each ending in a child process and look at its exit code.  What the child prints
 * is thrown away, so a passing run shows no message of failure.
 */

#include "tests/harness.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

static int exit_code_of(int (*body)(void))
{
    int status = 0;

    (void)fflush(NULL);
    const pid_t child = fork();
    EXPECT(child >= 0);
    if (child == 0) {
        const int null_fd = open("/dev/null", O_WRONLY | O_CLOEXEC);
        if (null_fd < 0 || dup2(null_fd, 1) < 0 || dup2(null_fd, 2) < 0) _exit(99);
        atomic_store(&harness_checks, 0);
        harness_exit(body());
    }
    EXPECT(waitpid(child, &status, 0) == child);
    EXPECT(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static int body_passes(void)
{
    const uint32_t three = 3;

    EXPECT(three == 3);
    EXPECT_EQ_U32(three, 3);
    EXPECT_EQ_U64(three, 3);
    EXPECT_EQ_I64(-1, -1);
    EXPECT_EQ_STR("same", "same");
    EXPECT_EQ_STR(NULL, NULL);
    EXPECT_EQ_MEM("same", "same", 4);
    HARNESS_END();
}

static int body_checks_nothing(void)
{
    HARNESS_END();
}

static int body_fails_condition(void)
{
    EXPECT(getpid() == 0);
    HARNESS_END();
}

static int body_fails_u32(void)
{
    EXPECT_EQ_U32(1, 2);
    HARNESS_END();
}

static int body_fails_u64(void)
{
    EXPECT_EQ_U64(1ull << 32, 0);
    HARNESS_END();
}

static int body_fails_i64(void)
{
    EXPECT_EQ_I64(-1, 1);
    HARNESS_END();
}

static int body_fails_str(void)
{
    EXPECT_EQ_STR("one", "other");
    HARNESS_END();
}

static int body_fails_str_null(void)
{
    EXPECT_EQ_STR(NULL, "other");
    HARNESS_END();
}

static int body_fails_mem(void)
{
    EXPECT_EQ_MEM("abc", "abd", 3);
    HARNESS_END();
}

static int body_skips(void)
{
    SKIP("to see the code");
}

int main(void)
{
    EXPECT(exit_code_of(body_passes) == EXIT_SUCCESS);
    EXPECT(exit_code_of(body_checks_nothing) == EXIT_FAILURE);
    EXPECT(exit_code_of(body_fails_condition) == EXIT_FAILURE);
    EXPECT(exit_code_of(body_fails_u32) == EXIT_FAILURE);
    EXPECT(exit_code_of(body_fails_u64) == EXIT_FAILURE);
    EXPECT(exit_code_of(body_fails_i64) == EXIT_FAILURE);
    EXPECT(exit_code_of(body_fails_str) == EXIT_FAILURE);
    EXPECT(exit_code_of(body_fails_str_null) == EXIT_FAILURE);
    EXPECT(exit_code_of(body_fails_mem) == EXIT_FAILURE);
    EXPECT(exit_code_of(body_skips) == HARNESS_EXIT_SKIPPED);

    EXPECT(setenv("CACHED_TEST_DIVISOR", "10", 1) == 0);
    EXPECT_EQ_U64(harness_count(100), 10);
    EXPECT_EQ_U64(harness_count(5), 1);
    HARNESS_END();
}
