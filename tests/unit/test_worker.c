/*
 * The worker over the synthetic engine: jobs that run to their end.
 *
 * Goal: a job moves its session to exactly where the same calls made by hand on a session of our
 * own move it (pages, images, tokens, checksums of logits), and jobs share passes as promised.
 * Method: each kind of start and part; passes counted to the step.  In builds with planted bugs,
 * that the engine's check finds exactly the planted byte.
 */

#include "cached/worker/worker.h"

#include "cached/worker/worker_internal.h"
#include "kvstore/base/checksum.h"
#include "tests/harness.h"
#include "tests/unit/worker_bench.h"

static void test_prefill_with_stops(void)
{
    struct bench bench;
    bench_open(&bench, NULL);
    struct run *run = run_create(&bench, 1, 1);
    struct run *hand = run_create(&bench, 0, 1);
    struct eng_session *session = reference(&bench, hand);
    uint8_t *images[2] = {allocate(bench.layout->image_bytes), allocate(bench.layout->image_bytes)};

    add_stop(run, 101, images[0]);
    add_stop(run, 250, NULL);
    add_stop(run, 384, images[1]);
    post(run);
    bench_start(&bench);
    bench_wait(&bench, 1);

    EXPECT(run->job.status == KV_OK && run->job.kept && run->job.has_logits);
    EXPECT(run->job.stops[0].done && run->job.stops[1].done && run->job.stops[2].done);
    EXPECT_EQ_U32(run->progress_count, 0);
    by_hand(session, hand->ids, 0, 101);
    expect_same_image(&bench, session, images[0], &run->job.stops[0].state);
    by_hand(session, hand->ids, 101, 250);
    EXPECT_EQ_U32(run->job.stops[1].state.tokens, 250);
    by_hand(session, hand->ids, 250, 384);
    expect_same_image(&bench, session, images[1], &run->job.stops[2].state);
    expect_same_image(&bench, session, images[1], &run->job.state);
    expect_same_pages(&bench, run, hand, 384);

    const struct worker_stats stats = worker_stats(bench.worker);
    EXPECT_EQ_U64(stats.prefill_tokens, 384);
    EXPECT_EQ_U64(stats.replay_tokens, 0);
    EXPECT_EQ_U64(stats.chunks, 13 + 19 + 17); /* 101, 149 and 134 tokens by 8. */
    EXPECT_EQ_U64(stats.jobs, 1);
    EXPECT_EQ_U64(eng_model_wrong_bytes(bench.model), 0);
    eng_session_destroy(session);
    free(images[0]);
    free(images[1]);
    run_destroy(run);
    run_destroy(hand);
    bench_close(&bench);
}

static uint32_t logits_crc(const struct bench *bench, const struct eng_session *session)
{
    return kv_checksum(eng_session_logits(session), bench->layout->vocab_tokens * sizeof(float));
}

/* What a decode from here must send, by hand; the last token is left pending. */
static void decode_by_hand(struct bench *bench, struct eng_session *session, const struct run *run,
                           uint32_t count, uint32_t *tokens, uint32_t *crcs)
{
    for (uint32_t i = 0; i < count; i++) {
        const struct kv_image_state state = eng_session_state(session);
        if (state.has_pending) steps_token(session, state.pending);
        crcs[i] = logits_crc(bench, session);
        tokens[i] = eng_session_sample(session, &run->job.sampling);
        eng_session_set_pending(session, tokens[i]);
    }
}

static void test_decode_in_parts(void)
{
    struct bench bench;
    bench_open(&bench, NULL);
    struct run *run = run_create(&bench, 2, 5);
    struct run *hand = run_create(&bench, 0, 5);
    struct eng_session *session = reference(&bench, hand);
    uint8_t *image = allocate(bench.layout->image_bytes);
    uint32_t tokens[40];
    uint32_t crcs[40];

    by_hand(session, hand->ids, 0, 77);
    decode_by_hand(&bench, session, hand, 40, tokens, crcs);

    /* Prefill and decode in one job, then the rest from the pending token. */
    add_stop(run, 77, NULL);
    run->job.decode_max = 15;
    post(run);
    bench_start(&bench);
    bench_wait(&bench, 1);
    EXPECT(run->job.status == KV_OK && run->job.kept && !run->job.stopped);
    EXPECT_EQ_U32(run->job.out_count, 15);
    EXPECT_EQ_MEM(run->tokens, tokens, 15 * sizeof(uint32_t));
    EXPECT_EQ_MEM(run->crcs, crcs, 15 * sizeof(uint32_t));
    EXPECT_EQ_U32(run->job.state.tokens, 77 + 14);
    EXPECT(run->job.state.has_pending);
    EXPECT_EQ_U32(run->job.state.pending, tokens[14]);
    EXPECT(run->progress_count >= 1 && run->progress_count <= 15);
    EXPECT_EQ_U32(run->progress_seen, 15);

    run_again(run);
    run->job.decode_max = 25;
    run->job.decode_export = image;
    post(run);
    bench_wait(&bench, 2);
    EXPECT_EQ_U32(run->job.out_count, 25);
    EXPECT_EQ_MEM(run->tokens, tokens + 15, 25 * sizeof(uint32_t));
    EXPECT_EQ_MEM(run->crcs, crcs + 15, 25 * sizeof(uint32_t));
    expect_same_image(&bench, session, image, &run->job.state);
    expect_same_pages(&bench, run, hand, 116);
    EXPECT_EQ_U64(worker_stats(bench.worker).decode_tokens, 40);

    /* A stop token ends it and is the last one sent. */
    run_again(run);
    run->job.start = WORKER_RESET;
    run->job.start_tokens = 0;
    run->job.replay_from = 0;
    add_stop(run, 77, NULL);
    run->job.decode_max = 40;
    run->job.stops_at[0] = bench.layout->vocab_tokens; /* Never sampled. */
    run->job.stops_at[1] = tokens[9];
    run->job.stops_at_count = 2;
    uint32_t first = 0;
    while (tokens[first] != tokens[9])
        first++;
    post(run);
    bench_wait(&bench, 3);
    EXPECT(run->job.stopped);
    EXPECT_EQ_U32(run->job.out_count, first + 1);
    EXPECT_EQ_U32(run->job.state.pending, tokens[9]);

    eng_session_destroy(session);
    free(image);
    run_destroy(run);
    run_destroy(hand);
    bench_close(&bench);
}

static void test_forced(void)
{
    struct bench bench;
    bench_open(&bench, NULL);
    struct run *run = run_create(&bench, 0, 9);
    const uint32_t forced[6] = {11, 12, 13, 12, 14, 15};

    add_stop(run, 20, NULL);
    run->job.forced = forced;
    run->job.forced_count = 6;
    run->job.decode_max = 60;
    run->job.stops_at[0] = 12;
    run->job.stops_at_count = 1;
    post(run);
    bench_start(&bench);
    bench_wait(&bench, 1);
    /* The stop token inside does not end it: its sender went on. */
    EXPECT_EQ_U32(run->job.out_count, 6);
    EXPECT_EQ_MEM(run->tokens, forced, sizeof(forced));
    EXPECT(!run->job.stopped);
    EXPECT_EQ_U32(run->job.state.pending, 15);
    EXPECT_EQ_U32(run->job.state.tokens, 25);

    run_again(run);
    run->job.decode_max = 4; /* Fewer than are forced. */
    post(run);
    bench_wait(&bench, 2);
    EXPECT_EQ_U32(run->job.out_count, 4);
    EXPECT(run->job.stopped); /* The last one sent is a stop token. */
    EXPECT_EQ_U32(run->job.state.tokens, 29);

    /* Nothing forced, nothing to do. */
    run_again(run);
    run->job.decode_max = 4;
    run->job.forced_count = 0;
    post(run);
    bench_wait(&bench, 3);
    EXPECT(run->job.status == KV_OK && run->job.kept);
    EXPECT_EQ_U32(run->job.out_count, 0);
    EXPECT(run->job.state.has_pending && run->job.state.tokens == 29);
    run_destroy(run);
    bench_close(&bench);
}

static void test_decode_steps_between_chunks(void)
{
    struct bench bench;
    bench_open(&bench, NULL);
    struct run *prefill = run_create(&bench, 0, 1);
    struct run *decode = run_create(&bench, 1, 2);
    struct run *later = run_create(&bench, 2, 3);
    uint32_t forced[20];
    for (uint32_t i = 0; i < 20; i++)
        forced[i] = i + 1;

    add_stop(prefill, 1000, NULL);
    prefill->job.cancelled = as_cancelled(&decode->job.stopped);
    add_stop(decode, 8, NULL);
    decode->job.forced = forced;
    decode->job.forced_count = 20;
    decode->job.decode_max = 20;
    decode->job.stops_at[0] = 20;
    decode->job.stops_at_count = 1;
    add_stop(later, 16, NULL);
    post(prefill);
    post(decode);
    post(later);
    bench_start(&bench);
    bench_wait(&bench, 3);

    EXPECT_EQ_U32(later->done_as, 1);
    EXPECT_EQ_U32(decode->done_as, 2);
    EXPECT_EQ_U32(prefill->done_as, 3);
    /*
     * The first pass has a chunk of each and ends the decode's prefill, whose first token comes
     * from these logits.  Each of the 19 others has a step, and one chunk of the two prefills
     * together.
     */
    const struct worker_stats stats = worker_stats(bench.worker);
    EXPECT_EQ_U64(stats.passes, 20);
    EXPECT_EQ_U64(stats.prefill_tokens, 3 * CHUNK + 19 * CHUNK);
    EXPECT_EQ_U64(stats.decode_tokens, 20);
    EXPECT_EQ_U64(stats.pass_sessions_max, 3);
    EXPECT_EQ_U64(stats.pass_rows_max, 3 * CHUNK + CHUNK); /* The decoder's rows of one. */
    EXPECT(stats.decode_ns > 0 && stats.prefill_ns > 0 && stats.replay_ns == 0);
    EXPECT(bench.worker->costs_beside.ns[0][0] <= 0); /* Forced: says nothing of drafting. */
    EXPECT(prefill->job.status == KV_CANCELLED);
    EXPECT_EQ_U32(decode->job.out_count, 20);
    run_destroy(prefill);
    run_destroy(decode);
    run_destroy(later);
    bench_close(&bench);
}

/* What steps cost is learned with a prefill always queued, and apart from passes without. */
static void test_costs_beside_prefills(void)
{
    struct bench bench;
    bench_open(&bench, NULL);
    struct run *prefill = run_create(&bench, 0, 1);
    struct run *decode = run_create(&bench, 1, 2);

    add_stop(prefill, 1000, NULL);
    add_stop(decode, 8, NULL);
    decode->job.decode_max = 20;
    post(prefill);
    post(decode);
    bench_start(&bench);
    bench_wait(&bench, 1);
    EXPECT_EQ_U32(decode->done_as, 1);
    bench_wait(&bench, 2);
    EXPECT(bench.worker->costs_beside.ns[0][0] > 0);
    EXPECT(bench.worker->costs.ns[0][0] <= 0);

    run_again(decode);
    decode->job.decode_max = 5;
    post(decode);
    bench_wait(&bench, 3);
    EXPECT(bench.worker->costs.ns[0][0] > 0);
    run_destroy(prefill);
    run_destroy(decode);
    bench_close(&bench);
}

/* Known tokens go through several at a time: the same tokens, checksums and windows. */
static void test_forced_together(void)
{
    struct bench bench;
    bench_open_drafting(&bench, NULL, WORKER_DRAFT_AUTO);
    struct run *run = run_create(&bench, 1, 5);
    struct run *hand = run_create(&bench, 0, 5);
    struct eng_session *session = reference(&bench, hand);
    uint8_t *image = allocate(bench.layout->image_bytes);
    uint32_t tokens[40];
    uint32_t crcs[40];

    by_hand(session, hand->ids, 0, 77);
    decode_by_hand(&bench, session, hand, 40, tokens, crcs);
    add_stop(run, 77, NULL);
    run->job.forced = tokens;
    run->job.forced_count = 40;
    run->job.decode_max = DECODE_MAX;
    run->job.decode_export = image;
    post(run);
    bench_start(&bench);
    bench_wait(&bench, 1);
    EXPECT_EQ_U32(run->job.out_count, 40);
    EXPECT_EQ_MEM(run->tokens, tokens, sizeof(tokens));
    EXPECT_EQ_MEM(run->crcs, crcs, sizeof(crcs));
    expect_same_image(&bench, session, image, &run->job.state);
    expect_same_pages(&bench, run, hand, 116);
    const struct worker_stats stats = worker_stats(bench.worker);
    EXPECT_EQ_U64(stats.decode_tokens, 40);
    EXPECT(stats.passes <= 10 + 2 + 40 / 4);
    EXPECT_EQ_U64(stats.drafts_proposed, 0); /* They were known, not guessed. */
    EXPECT_EQ_U64(eng_model_wrong_bytes(bench.model), 0);
    eng_session_destroy(session);
    free(image);
    run_destroy(run);
    run_destroy(hand);
    bench_close(&bench);
}

static void test_import_and_cut(void)
{
    struct bench bench;
    bench_open(&bench, NULL);
    struct run *run = run_create(&bench, 0, 6);
    struct run *restored = run_create(&bench, 1, 6);
    uint8_t *image = allocate(bench.layout->image_bytes);
    uint8_t *again[2] = {allocate(bench.layout->image_bytes), allocate(bench.layout->image_bytes)};

    add_stop(run, 301, image);
    post(run);
    bench_start(&bench);
    bench_wait(&bench, 1);
    copy_pages(restored, run);

    /* A little below, by cut and by import, then the same tokens again. */
    const struct kv_image_state state = run->job.stops[0].state;
    const uint32_t cut = kv_image_cut(bench.layout, &state, 295);
    EXPECT_EQ_U32(cut, 294);
    run_again(run);
    run->job.start = WORKER_CUT;
    run->job.start_tokens = cut;
    run->job.replay_from = cut;
    add_stop(run, 420, again[0]);
    restored->job.start = WORKER_IMPORT;
    restored->job.start_tokens = cut;
    restored->job.replay_from = cut;
    restored->job.image = image;
    restored->job.image_state = state;
    add_stop(restored, 420, again[1]);
    post(run);
    post(restored);
    bench_wait(&bench, 3);
    EXPECT(run->job.status == KV_OK && restored->job.status == KV_OK);
    EXPECT_EQ_MEM(again[0] + KV_IMAGE_HEADER_BYTES, again[1] + KV_IMAGE_HEADER_BYTES,
                  bench.layout->image_bytes - KV_IMAGE_HEADER_BYTES);
    expect_same_pages(&bench, run, restored, 384);
    EXPECT_EQ_U64(worker_stats(bench.worker).replay_tokens, 0);
    EXPECT_EQ_U64(eng_model_wrong_bytes(bench.model), 0);

    /* An image that does not serve the position is refused; the slot is forgotten. */
    restored->done_as = 0;
    restored->job.start_tokens = 200;
    restored->job.replay_from = 200;
    post(restored);
    bench_wait(&bench, 4);
    EXPECT(restored->job.status == KV_CORRUPT && !restored->job.kept);
    EXPECT(!restored->job.stops[0].done);
    free(image);
    free(again[0]);
    free(again[1]);
    run_destroy(run);
    run_destroy(restored);
    bench_close(&bench);
}

static void test_replay(void)
{
    struct bench bench;
    bench_open(&bench, NULL);
    struct run *run = run_create(&bench, 0, 6);
    struct run *replayed = run_create(&bench, 1, 6);
    const uint32_t window = bench.layout->window_tokens;

    add_stop(run, 300, NULL);
    post(run);
    bench_start(&bench);
    bench_wait(&bench, 1);
    copy_pages(replayed, run);

    replayed->job.start = WORKER_ROWS_ONLY;
    replayed->job.start_tokens = 300;
    replayed->job.replay_from = 300 - window;
    add_stop(replayed, 310, NULL);
    add_stop(replayed, 360, NULL);
    post(replayed);
    bench_wait(&bench, 2);
    EXPECT(replayed->job.status == KV_OK && replayed->job.kept);
    EXPECT_EQ_U32(replayed->job.stops[0].state.replay_at, 300);
    EXPECT_EQ_U32(replayed->job.state.tokens, 360);
    /* The busy time goes by rows of both halves: the decoder's below the start are replayed too. */
    const struct worker_stats stats = worker_stats(bench.worker);
    EXPECT_EQ_U64(stats.replay_tokens, window);
    EXPECT_EQ_U64(stats.prefill_tokens, 300 + 60);
    EXPECT_EQ_U64(stats.replay_rows, window + (window - 10));
    EXPECT_EQ_U64(stats.prefill_rows, 300 + window + 10 + 10 + 50 + window);
    EXPECT_EQ_U64(stats.decode_rows, 0);
    EXPECT_EQ_U64(stats.replay_rows + stats.prefill_rows, stats.pass_rows);
    EXPECT(stats.replay_ns > 0 && stats.prefill_ns > 0);
    EXPECT_EQ_U64(eng_model_wrong_bytes(bench.model), 0);

    /* Cancelled before the first stop: rows without windows are nothing to keep. */
    atomic_bool cancelled = true;
    replayed->done_as = 0;
    replayed->job.cancelled = &cancelled;
    post(replayed);
    bench_wait(&bench, 3);
    EXPECT(replayed->job.status == KV_CANCELLED && !replayed->job.kept);
    run_destroy(run);
    run_destroy(replayed);
    bench_close(&bench);
}

static void test_export_beside(void)
{
    struct bench bench;
    bench_open(&bench, NULL);
    struct run *run = run_create(&bench, 0, 6);
    struct run *export = run_create(&bench, 0, 6);
    struct run *next = run_create(&bench, 0, 7);
    uint8_t *image = allocate(bench.layout->image_bytes);
    uint8_t *at_stop = allocate(bench.layout->image_bytes);

    /* Waits for the end of the prefill, not for that of the decode. */
    add_stop(run, 100, at_stop);
    run->job.decode_max = 30;
    export->job.start = WORKER_CONTINUE;
    export->job.decode_export = image;
    add_stop(next, 50, NULL); /* Has the same slot: comes after. */
    post(run);
    post(next);
    post(export);
    bench_start(&bench);
    bench_wait(&bench, 3);
    EXPECT_EQ_U32(export->done_as, 1);
    EXPECT_EQ_U32(run->done_as, 2);
    EXPECT_EQ_U32(next->done_as, 3);
    EXPECT(export->job.status == KV_OK && export->job.kept && export->job.has_logits);
    EXPECT_EQ_U32(export->job.state.tokens, 100);
    EXPECT_EQ_MEM(image + KV_IMAGE_HEADER_BYTES, at_stop + KV_IMAGE_HEADER_BYTES,
                  bench.layout->image_bytes - KV_IMAGE_HEADER_BYTES);
    EXPECT_EQ_U32(run->job.out_count, 30);
    EXPECT(next->job.status == KV_OK && next->job.state.tokens == 50);

    /* And alone; where the shard believed the session to stand does not matter. */
    export->done_as = 0;
    export->job.start_tokens = 100;
    post(export);
    bench_wait(&bench, 4);
    EXPECT_EQ_U32(export->job.state.tokens, 50);
    free(image);
    free(at_stop);
    run_destroy(run);
    run_destroy(export);
    run_destroy(next);
    bench_close(&bench);
}

/* A test that can find wrong bits finds planted ones. */
static void test_planted(const char *plant, uint32_t tokens, bool found)
{
    struct bench bench;
    bench_open(&bench, plant);
    struct run *run = run_create(&bench, 0, 6);
    struct run *restored = run_create(&bench, 1, 6);
    uint8_t *image = allocate(bench.layout->image_bytes);

    add_stop(run, tokens, image);
    post(run);
    bench_start(&bench);
    bench_wait(&bench, 1);
    copy_pages(restored, run);
    restored->job.start = WORKER_IMPORT;
    restored->job.start_tokens = tokens;
    restored->job.replay_from = tokens;
    restored->job.image = image;
    restored->job.image_state = run->job.state;
    add_stop(restored, tokens + 10, NULL);
    post(restored);
    bench_wait(&bench, 2);
    EXPECT_EQ_U64(eng_model_wrong_bytes(bench.model), found ? 1 : 0);
    free(image);
    run_destroy(run);
    run_destroy(restored);
    bench_close(&bench);
}

static void test_plants(void)
{
    const struct eng_options options = {.backend = ENG_BACKEND_SYNTHETIC, .spare_tokens = 16};
    struct eng_model *model = NULL;
    struct worker *worker = NULL;
    struct kv_error err;
    EXPECT(eng_model_open(&options, &model, NULL) == KV_OK);
    struct worker_options worker_options = {
        .model = model, .slots = 1, .chunk_tokens = 1, .plant = "no such bug"};
    EXPECT(worker_create(&worker_options, &worker, &err) == KV_INVALID);
    EXPECT(strstr(err.text, "no such bug") != NULL);
    worker_options.plant = "window";
    const bool has_hooks = worker_create(&worker_options, &worker, &err) == KV_OK;
    if (has_hooks) worker_destroy(worker);
    eng_model_close(model);
    (void)printf("  planted bugs: %s\n", has_hooks ? "in this build" : "not in this build");
    if (!has_hooks) return;

    test_planted("window", 100, true);
    test_planted("window", 301, true);
    test_planted("tail", 101, true);
    test_planted("tail", 100, false);
}

/* What was learned of a session's drafts goes with it, not with the slot. */
static void test_drafts_of_the_session(void)
{
    struct bench bench;
    bench_open(&bench, NULL);
    struct run *run = run_create(&bench, 0, 6);
    uint8_t *image = allocate(bench.layout->image_bytes);
    struct draft_policy *policy = &bench.worker->slots[0].policy; /* Ours while nothing runs. */

    add_stop(run, 100, image);
    post(run);
    bench_start(&bench);
    bench_wait(&bench, 1);
    static const enum worker_start starts[] = {WORKER_CONTINUE, WORKER_CUT, WORKER_IMPORT,
                                               WORKER_ROWS_ONLY, WORKER_RESET};
    const struct kv_image_state state = run->job.state;
    for (uint32_t i = 0; i < KV_ARRAY_COUNT(starts); i++) {
        const bool same = starts[i] == WORKER_CONTINUE || starts[i] == WORKER_CUT;
        *policy = (struct draft_policy){.seen = {7}, .wait = 3};
        run_again(run);
        run->job.start = starts[i];
        run->job.image = image;
        run->job.image_state = state;
        run->job.start_tokens = starts[i] == WORKER_RESET ? 0 : 100;
        run->job.replay_from = run->job.start_tokens;
        if (starts[i] == WORKER_ROWS_ONLY) run->job.replay_from -= bench.layout->window_tokens;
        if (!same) add_stop(run, 101, NULL);
        post(run);
        bench_wait(&bench, 2 + i);
        EXPECT(run->job.status == KV_OK && run->job.kept);
        EXPECT_EQ_U32(policy->seen[0], same ? 7 : 0);
        EXPECT_EQ_U32(policy->wait, same ? 3 : 0);
    }
    free(image);
    run_destroy(run);
    bench_close(&bench);
}

int main(void)
{
    test_prefill_with_stops();
    test_decode_in_parts();
    test_forced();
    test_decode_steps_between_chunks();
    test_costs_beside_prefills();
    test_forced_together();
    test_import_and_cut();
    test_replay();
    test_export_beside();
    test_drafts_of_the_session();
    test_plants();
    HARNESS_END();
}
