/*
 * The worker over the synthetic engine: jobs that end early.
 *
 * Goal: whatever ends a job (cancel, deadline, stop of the worker), it comes back, and the slot
 * stands where the job says it does: what follows has the bits it would have had anyway.
 * Method: cancel at an exact step, compare with a session moved by hand, then go on from there.
 */

#include "cached/worker/worker.h"

#include "tests/harness.h"
#include "tests/unit/worker_bench.h"

static void test_cancel_goes_back_to_the_last_stop(void)
{
    struct bench bench;
    bench_open(&bench, NULL);
    struct run *run = run_create(&bench, 0, 4);
    struct run *hand = run_create(&bench, 0, 4);
    struct eng_session *session = reference(&bench, hand);
    uint8_t *image = allocate(bench.layout->image_bytes);

    add_stop(run, 300, image);
    add_stop(run, 900, NULL);
    run->job.cancelled = as_cancelled(&run->job.stops[0].done);
    run->job.decode_max = 5;
    post(run);
    bench_start(&bench);
    bench_wait(&bench, 1);
    EXPECT(run->job.status == KV_CANCELLED && run->job.kept && run->job.has_logits);
    EXPECT(run->job.stops[0].done && !run->job.stops[1].done);
    EXPECT_EQ_U32(run->job.state.tokens, 300);
    EXPECT_EQ_U32(run->job.out_count, 0);
    by_hand(session, hand->ids, 0, 300);
    expect_same_image(&bench, session, image, &run->job.state);

    /* And goes on from there as if nothing had been tried. */
    run_again(run);
    add_stop(run, 512, image);
    post(run);
    bench_wait(&bench, 2);
    EXPECT(run->job.status == KV_OK);
    by_hand(session, hand->ids, 300, 512);
    expect_same_image(&bench, session, image, &run->job.state);
    expect_same_pages(&bench, run, hand, 512);

    EXPECT_EQ_U64(eng_model_wrong_bytes(bench.model), 0);

    eng_session_destroy(session);
    free(image);
    run_destroy(run);
    run_destroy(hand);
    bench_close(&bench);
}

/* Too far from the stop the windows are overwritten: the slot is lost, and the job says so. */
static void test_cancel_too_late_to_go_back(void)
{
    struct bench bench;
    bench_open(&bench, NULL);
    struct run *run = run_create(&bench, 0, 4);
    struct run *other = run_create(&bench, 1, 8);
    const uint32_t forced = 3;

    add_stop(run, 40, NULL);
    add_stop(run, 1000, NULL);
    run->job.cancelled = as_cancelled(&other->job.stopped);
    add_stop(other, 200, NULL); /* 25 chunks, beside those of the other. */
    other->job.decode_max = 1;
    other->job.forced = &forced;
    other->job.forced_count = 1;
    other->job.stops_at[0] = forced;
    other->job.stops_at_count = 1;
    post(run);
    post(other);
    bench_start(&bench);
    bench_wait(&bench, 2);
    EXPECT(run->job.status == KV_CANCELLED && !run->job.kept && !run->job.has_logits);
    EXPECT(run->job.stops[0].done && !run->job.stops[1].done);
    EXPECT_EQ_U32(run->job.state.tokens, 0);

    /* There is nothing to export. */
    run_again(run);
    post(run);
    bench_wait(&bench, 3);
    EXPECT(run->job.status == KV_CANCELLED && !run->job.kept);

    /* The slot is as good as new. */
    run_again(run);
    run->job.start = WORKER_RESET;
    add_stop(run, 256, NULL);
    post(run);
    bench_wait(&bench, 4);
    EXPECT(run->job.status == KV_OK && run->job.kept);
    EXPECT_EQ_U64(eng_model_wrong_bytes(bench.model), 0);
    run_destroy(run);
    run_destroy(other);
    bench_close(&bench);
}

static void test_cancel_in_decode(void)
{
    struct bench bench;
    bench_open(&bench, NULL);
    struct run *run = run_create(&bench, 0, 4);
    struct run *other = run_create(&bench, 1, 8);
    uint8_t *image = allocate(bench.layout->image_bytes);
    const uint32_t forced[4] = {3, 3, 3, 4};

    /* Both take their first token after the first pass and one more after each of the next three;
     * the last one of the other cancels this one before its fifth. */
    add_stop(run, 8, NULL);
    add_stop(other, 8, NULL);
    run->job.decode_max = 50;
    run->job.decode_export = image;
    run->job.cancelled = as_cancelled(&other->job.stopped);
    other->job.decode_max = 4;
    other->job.forced = forced;
    other->job.forced_count = 4;
    other->job.stops_at[0] = 4;
    other->job.stops_at_count = 1;
    post(other);
    post(run);
    bench_start(&bench);
    bench_wait(&bench, 2);
    EXPECT(run->job.status == KV_CANCELLED && run->job.kept);
    const uint32_t count = run->job.out_count;
    EXPECT_EQ_U32(count, 4);
    EXPECT_EQ_U32(run->job.state.tokens, 8 + count - 1);
    EXPECT(run->job.state.has_pending);
    EXPECT_EQ_U32(run->job.state.pending, run->tokens[count - 1]);
    EXPECT(!run->job.stopped);

    /* The image was written; it serves another slot. */
    struct run *restored = run_create(&bench, 2, 4);
    copy_pages(restored, run);
    memcpy(restored->ids + 8, run->tokens, count * sizeof(uint32_t));
    restored->job.start = WORKER_IMPORT;
    restored->job.start_tokens = run->job.state.tokens;
    restored->job.image = image;
    restored->job.image_state = run->job.state;
    restored->job.decode_max = 10;
    run_again(run);
    run->job.decode_max = 10;
    post(restored);
    post(run);
    bench_wait(&bench, 4);
    EXPECT(restored->job.status == KV_OK);
    EXPECT_EQ_MEM(restored->tokens, run->tokens, 10 * sizeof(uint32_t));
    EXPECT_EQ_MEM(restored->crcs, run->crcs, 10 * sizeof(uint32_t));
    EXPECT_EQ_U64(eng_model_wrong_bytes(bench.model), 0);

    free(image);
    run_destroy(run);
    run_destroy(other);
    run_destroy(restored);
    bench_close(&bench);
}

static void test_deadline_and_stop(void)
{
    struct bench bench;
    bench_open(&bench, NULL);
    struct run *late = run_create(&bench, 0, 1);
    struct run *running = run_create(&bench, 1, 2);
    struct run *queued = run_create(&bench, 1, 3);

    add_stop(late, 100, NULL);
    late->job.deadline_ns = 1;
    post(late);
    bench_start(&bench);
    bench_wait(&bench, 1);
    EXPECT(late->job.status == KV_CANCELLED && late->job.kept);
    EXPECT_EQ_U32(late->job.state.tokens, 0);
    EXPECT(late->job.queue_ns > 0 && late->job.run_ns > 0);

    /* The stop comes right behind them: whatever they have done by then, they come back. */
    add_stop(running, 1000, NULL);
    add_stop(queued, 1000, NULL);
    post(running);
    post(queued);
    worker_stop(bench.worker);
    bench_wait(&bench, 3);
    EXPECT(queued->job.status == KV_CANCELLED);
    EXPECT_EQ_U32(running->done_as, 2);
    bench_close(&bench);
    run_destroy(late);
    run_destroy(running);
    run_destroy(queued);
}

int main(void)
{
    test_cancel_goes_back_to_the_last_stop();
    test_cancel_too_late_to_go_back();
    test_cancel_in_decode();
    test_deadline_and_stop();
    HARNESS_END();
}
