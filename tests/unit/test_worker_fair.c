/*
 * What a short turn and a decode wait for while another user's prompts are computed.
 *
 * Goal: with ten prompts of 8,192 tokens of one user under way, another user's turn of 50 tokens is
 * over after at most two chunks of them (the one in flight when it comes, and one beside it), and a
 * step of a decode waits for at most one, wherever in the prompts that is.
 * Method: this thread is the worker and takes the turns of its loop one by one, so rows are counted
 * exactly, pass by pass.  The turn comes at the worst moment: when a pass has just begun.
 */

#include "cached/worker/worker_internal.h"
#include "kvstore/base/bytes.h"
#include "kvstore/base/thread.h"
#include "tests/harness.h"

enum {
    PROMPTS = 10,
    SLOTS = PROMPTS + 1,
    CHUNK = 128,
    PROMPT_TOKENS = 8192,
    PROMPT_PAGES = PROMPT_TOKENS / KV_PAGE_TOKENS,
    TURN_TOKENS = 50,
    DECODE_TOKENS = 200,
};

struct fair;

struct turn {
    struct worker_job job;
    struct fair *fair;
    bool done;
};

struct fair {
    struct eng_model *model;
    struct worker *worker;
    struct kv_mailbox *reply;
    struct turn turns[SLOTS]; /* The last one is the other user's. */
    uint8_t *pages[SLOTS][PROMPT_PAGES];
    uint32_t ids[PROMPT_TOKENS];
    uint32_t out_tokens[DECODE_TOKENS], out_crcs[DECODE_TOKENS];
    uint32_t prompts_done;
};

static void on_done(struct kv_msg *msg)
{
    struct turn *turn = KV_CONTAINER_OF(msg, struct turn, job.msg);
    EXPECT(turn->job.status == KV_OK && turn->job.kept && !turn->done);
    turn->done = true;
    if (turn != &turn->fair->turns[PROMPTS]) turn->fair->prompts_done++;
}

static struct turn *turn_init(struct fair *fair, uint32_t slot, uint32_t tokens)
{
    struct turn *turn = &fair->turns[slot];
    *turn = (struct turn){.fair = fair};
    turn->job = (struct worker_job){
        .msg = {.run = on_done},
        .reply = fair->reply,
        .user = {{slot == PROMPTS ? 2 : 1}},
        .slot = slot,
        .start = WORKER_RESET,
        .pages = fair->pages[slot],
        .page_count = PROMPT_PAGES,
        .ids = fair->ids,
        .prefill_to = tokens,
        .stops = {{.tokens = tokens}},
        .stop_count = 1,
        .sampling = {.temperature = 1.0f, .top_p = 1.0f, .seed = 1},
        .out_tokens = fair->out_tokens,
        .out_crcs = fair->out_crcs,
    };
    return turn;
}

/* The ten prompts are posted, and the first one has begun. */
static struct fair *fair_open(void)
{
    const struct eng_options options = {.backend = ENG_BACKEND_SYNTHETIC, .spare_tokens = 16};
    struct fair *fair = calloc(1, sizeof(*fair));
    EXPECT(fair != NULL);
    EXPECT(eng_model_open(&options, &fair->model, NULL) == KV_OK);
    const struct worker_options worker_options = {
        .model = fair->model, .slots = SLOTS, .chunk_tokens = CHUNK, .draft = WORKER_DRAFT_OFF};
    EXPECT(worker_create(&worker_options, &fair->worker, NULL) == KV_OK);
    EXPECT(kv_mailbox_create(&fair->reply, NULL) == KV_OK);
    const struct kv_layout *layout = eng_model_layout(fair->model);
    for (uint32_t i = 0; i < PROMPT_TOKENS; i++)
        fair->ids[i] = (i * 31 + i / 7) % layout->vocab_tokens;
    for (uint32_t slot = 0; slot < SLOTS; slot++) {
        for (uint32_t i = 0; i < PROMPT_PAGES; i++) {
            fair->pages[slot][i] = calloc(1, layout->page_bytes);
            EXPECT(fair->pages[slot][i] != NULL);
        }
    }
    for (uint32_t i = 0; i < PROMPTS; i++)
        worker_post(fair->worker, &turn_init(fair, i, PROMPT_TOKENS)->job);
    return fair;
}

/* Rows of prefills since the start, of everyone. */
struct rows {
    uint64_t encode, decode;
};

static struct rows rows_so_far(const struct fair *fair)
{
    const struct worker_stats stats = worker_stats(fair->worker);
    return (struct rows){stats.prefill_tokens, stats.prefill_rows - stats.prefill_tokens};
}

/* One turn of the worker's loop; returns the rows of prefills in it. */
static struct rows take_turn(struct fair *fair)
{
    const struct rows before = rows_so_far(fair);
    worker_turn(fair->worker);
    (void)kv_mailbox_run(fair->reply, UINT32_MAX);
    const struct rows after = rows_so_far(fair);
    return (struct rows){after.encode - before.encode, after.decode - before.decode};
}

static void fair_close(struct fair *fair)
{
    while (fair->prompts_done < PROMPTS)
        (void)take_turn(fair);
    EXPECT_EQ_U64(eng_model_wrong_bytes(fair->model), 0);
    worker_destroy(fair->worker);
    kv_mailbox_destroy(fair->reply);
    eng_model_close(fair->model);
    for (uint32_t slot = 0; slot < SLOTS; slot++)
        for (uint32_t i = 0; i < PROMPT_PAGES; i++)
            free(fair->pages[slot][i]);
    free(fair);
}

/* Again and again until only one prompt is left: so it comes everywhere in them, at ends too. */
static void test_short_turn(void)
{
    struct fair *fair = fair_open();
    const uint32_t window = eng_model_layout(fair->model)->window_tokens;
    uint32_t turns = 0, at_ends = 0;
    uint64_t most = 0;

    EXPECT_EQ_U64(take_turn(fair).encode, CHUNK); /* Under way. */
    while (fair->prompts_done < PROMPTS - 1) {
        /* The pass in flight when the turn comes. */
        const struct rows in_flight = take_turn(fair);
        struct turn *turn = turn_init(fair, PROMPTS, TURN_TOKENS);
        worker_post(fair->worker, &turn->job);
        struct rows others = in_flight;
        while (!turn->done) {
            const struct rows rows = take_turn(fair);
            others.encode += rows.encode;
            others.decode += rows.decode;
        }
        others.encode -= TURN_TOKENS;
        others.decode -= window;
        EXPECT(others.encode <= 2 * CHUNK);
        EXPECT(others.decode <= 2 * CHUNK);
        EXPECT(in_flight.encode <= CHUNK);
        most = KV_MAX(most, others.encode);
        at_ends += others.decode > 0;
        turns++;
    }
    (void)printf("  %u turns, %u at the end of a prompt, at most %llu rows of others\n", turns,
                 at_ends, (unsigned long long)most);
    EXPECT_EQ_U64(most, 2 * CHUNK); /* The bound is not met by others standing still. */
    EXPECT(turns > 200 && at_ends >= PROMPTS / 2);
    fair_close(fair);
}

static void test_decode(void)
{
    struct fair *fair = fair_open();
    const uint64_t window = eng_model_layout(fair->model)->window_tokens;
    struct turn *turn = turn_init(fair, PROMPTS, TURN_TOKENS);
    uint32_t passes = 0;

    EXPECT_EQ_U64(take_turn(fair).encode, CHUNK);
    turn->job.decode_max = DECODE_TOKENS;
    worker_post(fair->worker, &turn->job);
    const struct rows first = take_turn(fair);
    EXPECT_EQ_U64(first.encode, CHUNK + TURN_TOKENS);
    EXPECT_EQ_U64(first.decode, window);
    EXPECT_EQ_U32(atomic_load(&turn->job.out_count), 1); /* From the logits of the prefill. */
    while (!turn->done) {
        const uint32_t sent = atomic_load(&turn->job.out_count);
        const struct rows rows = take_turn(fair);
        passes++;
        EXPECT_EQ_U32(atomic_load(&turn->job.out_count), sent + 1); /* In every pass. */
        EXPECT(rows.encode <= CHUNK && rows.decode <= CHUNK);
        EXPECT(rows.encode > 0); /* And the prompts go on. */
    }
    EXPECT_EQ_U32(passes, DECODE_TOKENS - 1);
    EXPECT(fair->prompts_done >= 2);
    fair_close(fair);
}

int main(void)
{
    test_short_turn();
    test_decode();
    HARNESS_END();
}
