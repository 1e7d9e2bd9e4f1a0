/*
 * Reading the trace format, above all when it is damaged.
 *
 * Goal: every damage is reported with the number of its line, nothing damaged is taken for a trace,
 * and what is written reads back the same.
 * Method: a table of bad files with the line and words the message must hold; then random changes
 * of a good file, which must load or fail with a line; then a round trip.
 */

#include "tools/cachectl/trace_file.h"

#include "tests/harness.h"
#include "tools/cachectl/trace_load.h"

#include <unistd.h>
#include <zlib.h>

#define HEADER "{\"trace\":1,\"name\":\"x\",\"block\":64,\"clock\":\"session\",\"tail\":2}\n"
#define FIRST                                                                                      \
    "{\"t\":5,\"dur\":0,\"user\":1,\"sess\":7,\"turn\":0,\"par\":-1,\"keep\":0,\"in\":200,"        \
    "\"out\":10,\"ids\":[[1,3]]}\n"
#define SECOND                                                                                     \
    "{\"t\":6,\"dur\":0,\"user\":1,\"sess\":7,\"turn\":1,\"par\":0,\"keep\":192,\"in\":300,"       \
    "\"out\":10,\"ids\":[[4,1]],\"later\":{\"field\":1}}\n"
/* A second line with one thing changed. */
#define LINE(t, user, sess, turn, par, keep, in, ids)                                              \
    "{\"t\":" t ",\"dur\":0,\"user\":" user ",\"sess\":" sess ",\"turn\":" turn ",\"par\":" par    \
    ",\"keep\":" keep ",\"in\":" in ",\"out\":10,\"ids\":" ids "}\n"

static void file_write(const char *path, const void *bytes, size_t count)
{
    FILE *out = fopen(path, "wb");
    EXPECT(out != NULL);
    EXPECT(fwrite(bytes, 1, count, out) == count);
    EXPECT(fclose(out) == 0);
}

/* Loads the bytes as a file; the error must name the line and hold the words. */
static void check_refused(const char *path, const char *text, unsigned line, const char *words)
{
    struct trace *trace = NULL;
    struct kv_error err = {0};
    char place[128];

    file_write(path, text, strlen(text));
    EXPECT(trace_load(path, 1, &trace, &err) == KV_CORRUPT);
    (void)snprintf(place, sizeof(place), "%s:%u: ", path, line);
    (void)printf("  %s\n", err.text);
    EXPECT(strncmp(err.text, place, strlen(place)) == 0);
    EXPECT(strstr(err.text, words) != NULL);
}

static void test_damage_has_a_line(const char *path)
{
    const struct {
        const char *text;
        unsigned line;
        const char *words;
    } cases[] = {
        {"", 1, "empty"},
        {"nonsense\n", 1, "not JSON"},
        {"[1]\n", 1, "not a JSON object"},
        {"{\"block\":64}\n", 1, "'trace' is missing"},
        {"{\"trace\":2,\"block\":64}\n", 1, "version 2"},
        {"{\"trace\":1}\n", 1, "'block' is missing"},
        {"{\"trace\":1,\"block\":0}\n", 1, "'block' is 0"},
        {"{\"trace\":1,\"block\":64,\"clock\":\"mine\"}\n", 1, "'clock'"},
        {HEADER, 1, "no requests"},
        {HEADER FIRST "{\"t\":6,\"dur\":0,\"us", 3, "not JSON"},
        {HEADER FIRST "\n" SECOND, 3, "not JSON"},
        {HEADER FIRST "{}\n", 3, "'t' is missing"},
        {HEADER FIRST LINE("4", "1", "7", "1", "0", "192", "300", "[[4,1]]"), 3, "goes back"},
        {HEADER FIRST LINE("-1", "1", "7", "1", "0", "192", "300", "[[4,1]]"), 3, "'t' is -1"},
        {HEADER FIRST LINE("6.5", "1", "7", "1", "0", "192", "300", "[[4,1]]"), 3, "'t'"},
        {HEADER FIRST LINE("6", "2", "7", "1", "0", "192", "300", "[[4,1]]"), 3, "'user'"},
        {HEADER FIRST LINE("6", "1", "7", "2", "0", "192", "300", "[[4,1]]"), 3, "expected 1"},
        {HEADER FIRST LINE("6", "1", "8", "1", "0", "192", "300", "[[4,1]]"), 3, "expected 0"},
        {HEADER FIRST LINE("6", "1", "7", "1", "1", "192", "300", "[[4,1]]"), 3, "'par' is 1"},
        {HEADER FIRST LINE("6", "1", "7", "1", "-2", "192", "300", "[[4,1]]"), 3, "'par' is -2"},
        {HEADER FIRST LINE("6", "1", "7", "1", "\"0\"", "192", "300", "[[4,1]]"), 3, "'par'"},
        {HEADER FIRST LINE("6", "1", "7", "1", "-1", "192", "300", "[[4,1]]"), 3, "parent"},
        {HEADER FIRST LINE("6", "1", "7", "1", "0", "256", "300", "[]"), 3, "turn 0 has 3"},
        {HEADER FIRST LINE("6", "1", "7", "1", "0", "320", "300", "[]"), 3, "more than 'in'"},
        {HEADER FIRST LINE("6", "1", "7", "1", "0", "192", "0", "[]"), 3, "'in' is 0"},
        {HEADER FIRST LINE("6", "1", "7", "1", "0", "192", "300", "[]"), 3, "holds 4"},
        {HEADER FIRST LINE("6", "1", "7", "1", "0", "192", "300", "[[4,2]]"), 3, "more than"},
        {HEADER FIRST LINE("6", "1", "7", "1", "0", "192", "300", "[[4]]"), 3, "not a pair"},
        {HEADER FIRST LINE("6", "1", "7", "1", "0", "192", "300", "[[4,0]]"), 3, "empty"},
        {HEADER FIRST LINE("6", "1", "7", "1", "0", "192", "300", "[[-4,1]]"), 3, "'ids'"},
        {HEADER FIRST LINE("6", "1", "7", "1", "0", "192", "99999999999", "[[4,1]]"), 3, "'in'"},
        {HEADER FIRST LINE("6", "1", "7", "1", "0", "192", "300", "[[4,99999999999]]"), 3, "ids"},
        {HEADER FIRST "{\"t\":6,\"t\":7}\n", 3, "not JSON"},
        {"{\"trace\":1,\"block\":1,\"scale\":64}\n" FIRST, 2, "'raw' is missing"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        check_refused(path, cases[i].text, cases[i].line, cases[i].words);
}

static void test_good_file(const char *path)
{
    struct trace_reader *reader = NULL;
    struct trace_turn turn = {0};
    struct kv_error err = {0};

    /* A last line without its newline is whole all the same. */
    file_write(path, HEADER FIRST SECOND, strlen(HEADER FIRST SECOND) - 1);
    EXPECT(trace_reader_open(path, &reader, &err) == KV_OK);
    EXPECT_EQ_STR(trace_reader_header(reader)->name, "x");
    EXPECT_EQ_U32(trace_reader_header(reader)->block_tokens, 64);
    EXPECT_EQ_U32(trace_reader_header(reader)->scale, 1);
    EXPECT(trace_reader_next(reader, &turn, &err) == KV_OK);
    EXPECT_EQ_U64(turn.line, 2);
    EXPECT_EQ_I64(turn.par, -1);
    EXPECT_EQ_U32(turn.ids.block_count, 3);
    EXPECT(trace_reader_next(reader, &turn, &err) == KV_OK);
    EXPECT_EQ_U64(turn.line, 3);
    EXPECT_EQ_U32(trace_turn_kept_blocks(trace_reader_header(reader), &turn), 3);
    EXPECT_EQ_U32(turn.ids.block_count, 1);
    EXPECT(!turn.has_gap);
    EXPECT(trace_reader_next(reader, &turn, &err) == KV_MISS);
    EXPECT(trace_reader_next(reader, &turn, &err) == KV_MISS);
    trace_turn_fini(&turn);
    trace_reader_close(reader);

    EXPECT(trace_reader_open("/nonexistent", &reader, &err) == KV_IO);
    EXPECT(trace_reader_open("/tmp", &reader, &err) == KV_IO);
}

static void test_round_trip(const char *path)
{
    const struct trace_header header = {.name = "a",
                                        .source = "b c",
                                        .block_tokens = 4,
                                        .tail_tokens = 2,
                                        .scale = 16,
                                        .global_clock = true,
                                        .global_scope = true,
                                        .real_users = true};
    struct trace_turn turn = {.t_ms = 1,
                              .dur_ms = 2,
                              .gap_ms = 3,
                              .user = 4,
                              .sess = 5,
                              .sub = 6,
                              .sys_id = 7,
                              .sys_tokens = 8,
                              .turn = 1,
                              .par = 0,
                              .keep_tokens = 8,
                              .in_tokens = 22,
                              .out_tokens = 9,
                              .raw_in_tokens = 352,
                              .raw_out_tokens = 144,
                              .kind = TRACE_KIND_TOOL,
                              .has_gap = true,
                              .has_sub = true};
    struct trace_turn read = {0};
    struct trace_reader *reader = NULL;
    struct kv_error err = {0};

    EXPECT(trace_runs_add(&turn.ids, 10, 2) == KV_OK);
    EXPECT(trace_runs_add(&turn.ids, 20, 1) == KV_OK);
    FILE *out = fopen(path, "w");
    EXPECT(out != NULL);
    trace_header_write(&header, out);
    trace_turn_write(&header, &turn, out);
    EXPECT(fclose(out) == 0);

    EXPECT(trace_reader_open(path, &reader, &err) == KV_OK);
    EXPECT_EQ_MEM(trace_reader_header(reader)->name, header.name, sizeof(header.name));
    EXPECT_EQ_STR(trace_reader_header(reader)->source, "b c");
    EXPECT_EQ_U32(trace_reader_header(reader)->scale, 16);
    EXPECT(trace_reader_header(reader)->global_clock);
    EXPECT(trace_reader_header(reader)->global_scope);
    EXPECT(trace_reader_header(reader)->real_users);
    EXPECT(trace_reader_next(reader, &read, &err) == KV_OK);
    EXPECT_EQ_U32(read.ids.run_count, 2);
    for (uint32_t i = 0; i < 2; i++) {
        EXPECT_EQ_U64(read.ids.runs[i].first, turn.ids.runs[i].first);
        EXPECT_EQ_U32(read.ids.runs[i].count, turn.ids.runs[i].count);
    }
    EXPECT_EQ_U64(read.gap_ms, 3);
    EXPECT_EQ_U64(read.sub, 6);
    EXPECT_EQ_U64(read.sys_id, 7);
    EXPECT_EQ_U32(read.sys_tokens, 8);
    EXPECT_EQ_U32(read.raw_in_tokens, 352);
    EXPECT_EQ_U32(read.raw_out_tokens, 144);
    EXPECT(read.kind == TRACE_KIND_TOOL);
    trace_turn_fini(&read);
    trace_turn_fini(&turn);
    trace_reader_close(reader);
}

static void test_random_damage(const char *path)
{
    static const char good[] = HEADER FIRST SECOND SECOND;
    char bad[sizeof(good)];
    uint64_t seed = 1;
    uint64_t refused = 0;
    const uint64_t rounds = harness_count(2000);

    for (uint64_t i = 0; i < rounds; i++) {
        struct trace *trace = NULL;
        struct kv_error err = {0};
        (void)memcpy(bad, good, sizeof(good));
        for (int change = 0; change < 3; change++) {
            seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            bad[(seed >> 33) % (sizeof(good) - 1)] = (char)(seed >> 25);
        }
        const size_t count = (i % 4 == 0) ? (seed >> 40) % sizeof(good) : sizeof(good) - 1;
        file_write(path, bad, count);
        const kv_status status = trace_load(path, 1, &trace, &err);
        EXPECT(status == KV_OK || status == KV_CORRUPT);
        if (status == KV_CORRUPT) {
            EXPECT(strncmp(err.text, path, strlen(path)) == 0);
            EXPECT(err.text[strlen(path)] == ':');
            EXPECT(err.text[strlen(path) + 1] >= '1' && err.text[strlen(path) + 1] <= '9');
            refused++;
        }
        trace_destroy(trace);
    }
    EXPECT(refused > 0);
}

static void test_gzip(const char *path)
{
    char packed[4096];
    struct trace_reader *reader = NULL;
    struct trace_turn turn = {0};
    struct kv_error err = {0};

    gzFile out = gzopen(path, "wb");
    EXPECT(out != NULL);
    EXPECT(gzputs(out, HEADER FIRST SECOND) > 0);
    EXPECT(gzclose(out) == Z_OK);
    EXPECT(trace_reader_open(path, &reader, &err) == KV_OK);
    EXPECT(trace_reader_next(reader, &turn, &err) == KV_OK);
    EXPECT(trace_reader_next(reader, &turn, &err) == KV_OK);
    EXPECT(trace_reader_next(reader, &turn, &err) == KV_MISS);
    trace_reader_close(reader);

    FILE *in = fopen(path, "rb");
    EXPECT(in != NULL);
    const size_t count = fread(packed, 1, sizeof(packed), in);
    EXPECT(fclose(in) == 0);
    file_write(path, packed, count - 5);
    kv_status status = trace_reader_open(path, &reader, &err);
    EXPECT(status == KV_OK);
    while (status == KV_OK)
        status = trace_reader_next(reader, &turn, &err);
    EXPECT(status == KV_CORRUPT);
    EXPECT(strstr(err.text, "cut off") != NULL);
    trace_turn_fini(&turn);
    trace_reader_close(reader);
}

int main(void)
{
    char path[] = "/tmp/test_trace_file_XXXXXX";
    const int fd = mkstemp(path);

    EXPECT(fd >= 0);
    EXPECT(close(fd) == 0);
    test_damage_has_a_line(path);
    test_good_file(path);
    test_round_trip(path);
    test_random_damage(path);
    test_gzip(path);
    EXPECT(unlink(path) == 0);
    HARNESS_END();
}
