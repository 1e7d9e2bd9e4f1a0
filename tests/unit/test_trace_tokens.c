/*
 * Tokens of prompts and answers, and what can be reused of them at best.
 *
 * Goal: prompts agree as far as their block ids do and, with a large vocabulary, no further; the
 * answer is what the next prompt holds; ids count within the session, or the file, or the parent of
 * a sub-agent; the prefix tree finds what comparing with everything finds.
 * Method: the excerpt in tests/data at a vocabulary without chance matches and at 512, hand-made
 * traces for answers and scopes, random sequences over 3 tokens for the tree.
 */

#include "tools/cachectl/trace_tokens.h"

#include "tests/harness.h"
#include "tools/cachectl/trace_classes.h"
#include "tools/cachectl/trace_ideal.h"

#include <unistd.h>

enum { VOCAB_LARGE = 1 << 30, VOCAB_SMALL = 512 };

static struct trace *load_path(const char *path, uint32_t scale)
{
    struct trace *trace = NULL;
    struct kv_error err = {0};
    const kv_status status = trace_load(path, scale, &trace, &err);
    if (status != KV_OK) (void)fprintf(stderr, "%s\n", err.text);
    EXPECT(status == KV_OK);
    return trace;
}

static struct trace *load_text(const char *text, uint32_t scale)
{
    char path[] = "/tmp/test_trace_tokens_XXXXXX";
    const int fd = mkstemp(path);
    EXPECT(fd >= 0);
    EXPECT(write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    EXPECT(close(fd) == 0);
    struct trace *trace = load_path(path, scale);
    EXPECT(unlink(path) == 0);
    return trace;
}

static uint32_t *prompt_of(const struct trace *trace, uint32_t item, uint32_t vocab)
{
    uint32_t *tokens = calloc(trace->items[item].turn.in_tokens, sizeof(*tokens));
    EXPECT(tokens != NULL);
    trace_prompt_tokens(trace, item, vocab, tokens);
    return tokens;
}

static uint32_t *answer_of(const struct trace *trace, uint32_t item, uint32_t vocab)
{
    uint32_t *tokens = calloc(trace->items[item].turn.out_tokens + 1, sizeof(*tokens));
    EXPECT(tokens != NULL);
    trace_answer_tokens(trace, item, vocab, tokens);
    return tokens;
}

/* The sum over all turns of the best reuse, counted on the tokens. */
static uint64_t ideal_sum(const struct trace *trace, uint32_t vocab)
{
    uint64_t sum = 0;

    for (uint32_t s = 0; s < trace->session_count; s++) {
        struct trace_ideal *ideal = trace_ideal_create();
        EXPECT(ideal != NULL);
        for (uint32_t i = 0; i < trace->sessions[s].item_count; i++) {
            const uint32_t item = trace->sessions[s].items[i];
            const struct trace_turn *turn = &trace->items[item].turn;
            uint32_t *prompt = prompt_of(trace, item, vocab);
            uint32_t *answer = answer_of(trace, item, vocab);
            const uint32_t reused = trace_ideal_match(ideal, prompt, turn->in_tokens);
            EXPECT(reused >= turn->keep_tokens);
            sum += reused;
            EXPECT(trace_ideal_add(ideal, prompt, turn->in_tokens, answer, turn->out_tokens) ==
                   KV_OK);
            EXPECT_EQ_U32(trace_ideal_match(ideal, prompt, turn->in_tokens), turn->in_tokens);
            for (uint32_t k = 0; k < turn->in_tokens; k += 97)
                EXPECT(prompt[k] >= 3 && prompt[k] < vocab - 3);
            for (uint32_t k = 0; k < turn->out_tokens; k++)
                EXPECT(answer[k] >= 3 && answer[k] < vocab - 3);
            free(prompt);
            free(answer);
        }
        trace_ideal_destroy(ideal);
    }
    return sum;
}

static void test_excerpt(void)
{
    char path[1024];
    struct trace_summary summary;
    struct kv_error err = {0};
    const char *root = getenv("CACHED_SOURCE_ROOT");

    (void)snprintf(path, sizeof(path), "%s/tests/data/agentic_excerpt.jsonl",
                   root == NULL ? "." : root);
    struct trace *trace = load_path(path, 1);
    EXPECT(trace_summarize(trace, &summary, &err) == KV_OK);
    EXPECT_EQ_U64(summary.main.sessions, 31);
    EXPECT_EQ_U64(summary.main.turns + summary.sub.turns, 830);
    for (int class = TRACE_CLASS_EXTEND; class < TRACE_CLASS_COUNT; class ++)
        EXPECT(summary.main.classes[class] >= 3);

    /* Without chance matches the tokens share exactly what the block ids say. */
    const uint64_t joined = summary.scaled_in_tokens - summary.scaled_new_tokens;
    EXPECT_EQ_U64(ideal_sum(trace, VOCAB_LARGE), joined);
    /* With 506 tokens to choose from some go on by chance: few, and never fewer. */
    const uint64_t small = ideal_sum(trace, VOCAB_SMALL);
    (void)printf("  joined %llu, at vocabulary 512 %llu\n", (unsigned long long)joined,
                 (unsigned long long)small);
    EXPECT(small >= joined);
    EXPECT(small - joined < 30);
    trace_destroy(trace);
}

#define LINE(sess, extra, turn, par, keep, in, out, ids)                                           \
    "{\"t\":" turn ",\"dur\":0,\"user\":1,\"sess\":" sess extra ",\"turn\":" turn ",\"par\":" par  \
    ",\"keep\":" keep ",\"in\":" in ",\"out\":" out ",\"ids\":" ids "}\n"

/* Turn 0 holds 2 blocks and 2 tokens; turn 1 has room for it and its 5 tokens, turn 2 has not. */
static const char answers[] =
    "{\"trace\":1,\"block\":4,\"tail\":2}\n" LINE("1", "", "0", "-1", "0", "10", "5", "[[1,2]]")
        LINE("1", "", "1", "0", "8", "18", "9", "[[3,2]]")
            LINE("1", "", "2", "1", "16", "18", "3", "[]");

static void test_answers(void)
{
    struct trace *trace = load_text(answers, 1);
    uint32_t *first = prompt_of(trace, 0, VOCAB_LARGE);
    uint32_t *second = prompt_of(trace, 1, VOCAB_LARGE);
    uint32_t *third = prompt_of(trace, 2, VOCAB_LARGE);
    uint32_t *answer = answer_of(trace, 0, VOCAB_LARGE);

    EXPECT_EQ_MEM(first, second, 8 * sizeof(*first));
    EXPECT(first[8] != second[8]); /* The tail is really another. */
    EXPECT(first[9] != second[9]);
    EXPECT_EQ_MEM(answer, second + 10, 5 * sizeof(*answer));
    EXPECT_EQ_MEM(second, third, 16 * sizeof(*first));
    EXPECT(second[16] != third[16]);
    free(answer);

    answer = answer_of(trace, 1, VOCAB_LARGE); /* 18 + 9 does not fit into 18. */
    for (uint32_t k = 0; k < 9; k++)
        for (uint32_t j = 0; j < 18; j++)
            EXPECT(answer[k] != third[j]);
    free(answer);
    free(first);
    free(second);
    free(third);
    trace_destroy(trace);
}

static void test_scopes(void)
{
    const char *lines = LINE("1", "", "0", "-1", "0", "8", "1", "[[1,2]]")
        LINE("2", "", "0", "-1", "0", "8", "1", "[[1,2]]")
            LINE("3", ",\"sub\":1", "0", "-1", "0", "8", "1", "[[1,2]]");
    const char *headers[] = {"{\"trace\":1,\"block\":4,\"tail\":2}\n",
                             "{\"trace\":1,\"block\":4,\"tail\":2,\"scope\":\"global\"}\n"};

    for (int global = 0; global < 2; global++) {
        char text[1024];
        (void)snprintf(text, sizeof(text), "%s%s", headers[global], lines);
        struct trace *trace = load_text(text, 1);
        uint32_t *one = prompt_of(trace, 0, VOCAB_LARGE);
        uint32_t *two = prompt_of(trace, 1, VOCAB_LARGE);
        uint32_t *sub = prompt_of(trace, 2, VOCAB_LARGE);
        EXPECT((memcmp(one, two, 8 * sizeof(*one)) == 0) == (global == 1));
        EXPECT_EQ_MEM(one, sub, 8 * sizeof(*one));
        free(one);
        free(two);
        free(sub);
        trace_destroy(trace);
    }
}

static void test_scale(void)
{
    struct trace *trace = load_text(answers, 4);
    struct trace *whole = load_text(answers, 1);
    uint32_t *scaled = prompt_of(trace, 1, VOCAB_LARGE);
    uint32_t *full = prompt_of(whole, 1, VOCAB_LARGE);

    EXPECT_EQ_U32(trace->items[1].turn.in_tokens, 6);
    for (uint32_t block = 0; block < 4; block++)
        EXPECT_EQ_U32(scaled[block], full[4 * block]);
    EXPECT_EQ_MEM(scaled + 4, full + 16, 2 * sizeof(*full));
    EXPECT_EQ_U32(trace->items[0].turn.out_tokens, 1);
    free(scaled);
    free(full);
    trace_destroy(trace);
    trace_destroy(whole);
}

/* The tree against comparing with every earlier sequence. */
static void test_ideal_against_brute_force(void)
{
    enum { SEQUENCES = 40, LENGTH_MAX = 24 };
    const uint64_t rounds = harness_count(200);
    uint64_t seed = 7;

    for (uint64_t round = 0; round < rounds; round++) {
        uint32_t held[SEQUENCES][LENGTH_MAX];
        uint32_t lengths[SEQUENCES];
        struct trace_ideal *ideal = trace_ideal_create();
        EXPECT(ideal != NULL);
        for (uint32_t i = 0; i < SEQUENCES; i++) {
            uint32_t best = 0;
            for (uint32_t k = 0; k < LENGTH_MAX; k++) {
                seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
                held[i][k] = (uint32_t)(seed >> 60) < 13 ? 1 : (uint32_t)(seed >> 40) % 3;
            }
            lengths[i] = (uint32_t)(seed >> 33) % (LENGTH_MAX + 1);
            for (uint32_t j = 0; j < i; j++) {
                uint32_t same = 0;
                while (same < lengths[i] && same < lengths[j] && held[i][same] == held[j][same])
                    same++;
                if (same > best) best = same;
            }
            EXPECT_EQ_U32(trace_ideal_match(ideal, held[i], lengths[i]), best);
            const uint32_t prompt = lengths[i] / 2;
            EXPECT(trace_ideal_add(ideal, held[i], prompt, held[i] + prompt, lengths[i] - prompt) ==
                   KV_OK);
        }
        trace_ideal_destroy(ideal);
    }
}

int main(void)
{
    test_answers();
    test_scopes();
    test_scale();
    test_ideal_against_brute_force();
    test_excerpt();
    HARNESS_END();
}
