/*
 * Classes of turns, and the numbers that decide between them.
 *
 * Goal: each rule of trace_classify() and both sides of each boundary; and the whole way from a
 * file to counts.
 * Method: a table of joins, then a hand-made session in which every class occurs once, read as it
 * is, scaled while loading, and through the program's own converter of scale.
 */

#include "tools/cachectl/trace_classes.h"

#include "tests/harness.h"
#include "tools/cachectl/trace.h"
#include "tools/cachectl/trace_scale.h"

#include <unistd.h>

/* Blocks of 64 tokens, tail 2, tools + system 640 tokens: fall-back up to 1,664 = 26 blocks. */
static struct trace_join join_of(uint64_t joined, uint64_t parent_in, bool parent_is_last)
{
    return (struct trace_join){.joined_blocks = joined,
                               .block_tokens = 64,
                               .parent_in_tokens = parent_in,
                               .tail_tokens = 2,
                               .prefix_tokens = 640,
                               .parent_is_last = parent_is_last};
}

static void test_each_rule(void)
{
    const struct {
        const char *what;
        uint64_t joined;
        uint64_t parent_in;
        bool parent_is_last;
        enum trace_class want;
    } cases[] = {
        {"all full blocks of the last turn", 50, 50 * 64 + 10, true, TRACE_CLASS_EXTEND},
        {"the tail reaches into the last block: 0", 49, 50 * 64, true, TRACE_CLASS_EXTEND},
        {"the tail reaches into the last block: 1", 49, 50 * 64 + 1, true, TRACE_CLASS_EXTEND},
        {"the tail is beyond the last block: 2", 49, 50 * 64 + 2, true, TRACE_CLASS_TAIL},
        {"the block under the tail came back after all", 50, 50 * 64, true, TRACE_CLASS_EXTEND},
        {"all full blocks of an older turn", 50, 50 * 64 + 10, false, TRACE_CLASS_OLDER},
        {"one block less than an older turn", 49, 50 * 64 + 10, false, TRACE_CLASS_CUT_OLDER},
        {"one block less than the last turn", 49, 50 * 64 + 63, true, TRACE_CLASS_TAIL},
        {"two blocks less", 48, 50 * 64 + 10, true, TRACE_CLASS_CUT},
        {"tools + system + 1,024 exactly", 26, 50 * 64 + 10, true, TRACE_CLASS_FALLBACK},
        {"one block more", 27, 50 * 64 + 10, true, TRACE_CLASS_CUT},
        {"the same in an older turn", 26, 50 * 64 + 10, false, TRACE_CLASS_FALLBACK},
        {"one block more in an older turn", 27, 50 * 64 + 10, false, TRACE_CLASS_CUT_OLDER},
        {"a short parent: tail before fall-back", 19, 20 * 64 + 5, true, TRACE_CLASS_TAIL},
        {"nothing in common", 0, 0, false, TRACE_CLASS_FALLBACK},
        {"a parent shorter than its tail", 1, 1, true, TRACE_CLASS_EXTEND},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        (void)printf("  %s\n", cases[i].what);
        EXPECT_EQ_STR(trace_class_name(trace_classify(
                          join_of(cases[i].joined, cases[i].parent_in, cases[i].parent_is_last))),
                      trace_class_name(cases[i].want));
    }
}

/* par of turn 3 is not the newest holder, and the rules must not care. */
static const char hand_made[] =
    "{\"trace\":1,\"name\":\"hand\",\"block\":64,\"clock\":\"session\",\"users\":\"made-up\","
    "\"tail\":2}\n"
    "{\"t\":0,\"dur\":0,\"user\":1,\"sess\":7,\"turn\":0,\"par\":-1,\"keep\":0,\"in\":2570,"
    "\"out\":100,\"ids\":[[1,40]],\"sys\":[5,640]}\n"
    "{\"t\":1,\"dur\":0,\"user\":1,\"sess\":7,\"turn\":1,\"par\":0,\"keep\":2560,\"in\":3210,"
    "\"out\":100,\"ids\":[[41,10]],\"sys\":[5,640]}\n"
    "{\"t\":2,\"dur\":0,\"user\":1,\"sess\":7,\"turn\":2,\"par\":1,\"keep\":3136,\"in\":3333,"
    "\"out\":100,\"ids\":[[101,3]],\"sys\":[5,640]}\n"
    "{\"t\":3,\"dur\":0,\"user\":1,\"sess\":7,\"turn\":3,\"par\":1,\"keep\":2880,\"in\":3520,"
    "\"out\":100,\"ids\":[[201,10]],\"sys\":[5,640]}\n"
    "{\"t\":4,\"dur\":0,\"user\":1,\"sess\":7,\"turn\":4,\"par\":1,\"keep\":3200,\"in\":3328,"
    "\"out\":100,\"ids\":[[301,2]],\"sys\":[5,640]}\n"
    "{\"t\":5,\"dur\":0,\"user\":1,\"sess\":7,\"turn\":5,\"par\":2,\"keep\":3200,\"in\":3530,"
    "\"out\":100,\"ids\":[[401,5]],\"sys\":[5,640]}\n"
    "{\"t\":6,\"dur\":0,\"user\":1,\"sess\":7,\"turn\":6,\"par\":5,\"keep\":1280,\"in\":3210,"
    "\"out\":0,\"ids\":[[501,30]],\"sys\":[5,640]}\n"
    "{\"t\":6,\"dur\":0,\"user\":1,\"sess\":1007000,\"sub\":7,\"turn\":0,\"par\":-1,\"keep\":0,"
    "\"in\":130,\"out\":9,\"ids\":[[1,1],[900,1]]}\n";

static const char *file_make(char path[64], const char *text)
{
    (void)snprintf(path, 64, "/tmp/test_trace_XXXXXX");
    const int fd = mkstemp(path);
    EXPECT(fd >= 0);
    EXPECT(write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    EXPECT(close(fd) == 0);
    return path;
}

static struct trace *load(const char *path, uint32_t scale)
{
    struct kv_error err = {0};
    struct trace *trace = NULL;
    const kv_status status = trace_load(path, scale, &trace, &err);
    if (status != KV_OK) (void)fprintf(stderr, "%s\n", err.text);
    EXPECT(status == KV_OK);
    return trace;
}

static void check_counts(const struct trace *trace)
{
    struct trace_summary summary;
    struct kv_error err = {0};

    EXPECT(trace_summarize(trace, &summary, &err) == KV_OK);
    EXPECT_EQ_U64(summary.main.sessions, 1);
    EXPECT_EQ_U64(summary.main.turns, 7);
    for (int class = 0; class < TRACE_CLASS_COUNT; class ++)
        EXPECT_EQ_U64(summary.main.classes[class], 1);
    EXPECT_EQ_U64(summary.sub.sessions, 1);
    EXPECT_EQ_U64(summary.sub.turns, 1);
    EXPECT_EQ_U64(summary.sub.classes[TRACE_CLASS_FIRST], 1);
    EXPECT_EQ_U64(summary.main.in_tokens, 2570 + 3210 + 3333 + 3520 + 3328 + 3530 + 3210);
    EXPECT_EQ_U64(summary.main.out_tokens, 600);
    EXPECT_EQ_U64(summary.main.joined_tokens, 64 * (40 + 49 + 45 + 50 + 50 + 20));
    /* extend: 3210 holds 2570 + 100; older: 3328 holds 3210 + 100. */
    EXPECT_EQ_U64(summary.main.ideal_tokens, 2670 + 64 * (49 + 45) + 3310 + 64 * (50 + 20));
}

static void test_hand_made(void)
{
    char path[64];
    struct trace *trace = load(file_make(path, hand_made), 1);
    check_counts(trace);
    EXPECT_EQ_U32(trace->session_count, 2);
    EXPECT(trace->sessions[1].is_sub);
    EXPECT_EQ_U64(trace->sessions[1].sub, 7);
    EXPECT_EQ_U32(trace->items[0].child, 1);
    EXPECT_EQ_U32(trace->items[1].child, 2);
    EXPECT_EQ_U32(trace->items[6].child, TRACE_NO_ITEM);
    EXPECT_EQ_U32(trace->items[5].blocks.block_count, 55);
    trace_destroy(trace);
    EXPECT(unlink(path) == 0);
}

static void test_scaled(void)
{
    char path[64];
    char scaled_path[64];
    struct kv_error err = {0};
    struct trace *trace = load(file_make(path, hand_made), 64);

    check_counts(trace);
    EXPECT_EQ_U32(trace->header.block_tokens, 1);
    EXPECT_EQ_U32(trace->header.scale, 64);
    EXPECT_EQ_U32(trace->items[0].turn.in_tokens, 42); /* floor(2570 / 64) + 2 */
    EXPECT_EQ_U32(trace->items[0].turn.out_tokens, 1); /* floor(100 / 64) */
    EXPECT_EQ_U32(trace->items[3].turn.in_tokens, 57); /* 3520 is 55 blocks exactly. */
    EXPECT_EQ_U32(trace->items[6].turn.out_tokens, 1); /* Never 0. */
    EXPECT_EQ_U32(trace->items[6].turn.keep_tokens, 20);
    EXPECT_EQ_U32(trace->items[0].turn.sys_tokens, 10);

    /* Written and read again, a scaled trace keeps its classes. */
    FILE *out = fopen(file_make(scaled_path, ""), "w");
    EXPECT(out != NULL);
    trace_header_write(&trace->header, out);
    for (uint32_t i = 0; i < trace->item_count; i++)
        trace_turn_write(&trace->header, &trace->items[i].turn, out);
    EXPECT(fclose(out) == 0);
    trace_destroy(trace);
    trace = load(scaled_path, 1);
    check_counts(trace);
    EXPECT_EQ_U32(trace->items[0].turn.raw_in_tokens, 2570);
    trace_destroy(trace);

    EXPECT(trace_load(path, 48, &trace, &err) == KV_INVALID);
    EXPECT(strstr(err.text, "48") != NULL);
    EXPECT(unlink(path) == 0);
    EXPECT(unlink(scaled_path) == 0);
}

static void test_exit_codes(void)
{
    char path[64];
    char verb[] = "stats";
    char json[] = "--json";
    char unknown[] = "--nothing";
    char missing[] = "/nonexistent/trace.jsonl";

    (void)file_make(path, hand_made);
    EXPECT(cachectl_trace_stats(2, (char *[]){verb, path, NULL}) == 0);
    EXPECT(cachectl_trace_stats(3, (char *[]){verb, json, path, NULL}) == 0);
    EXPECT(cachectl_trace_stats(1, (char *[]){verb, NULL}) == 2);
    EXPECT(cachectl_trace_stats(3, (char *[]){verb, path, unknown, NULL}) == 2);
    EXPECT(cachectl_trace_stats(2, (char *[]){verb, missing, NULL}) == 1);
    EXPECT(unlink(path) == 0);
}

int main(void)
{
    test_each_rule();
    test_hand_made();
    test_scaled();
    test_exit_codes();
    HARNESS_END();
}
