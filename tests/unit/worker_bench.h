#pragma once

/*
 * For tests of the worker: the worker over the synthetic engine, jobs with all memory they name,
 * and a session moved by hand to compare with.
 *
 * Each slot is another user's.  Jobs are posted before the thread starts where the order of passes
 * matters: it is then known to the step.  A job is cancelled at an exact step by pointing its
 * `cancelled` at a flag that the worker itself sets in a job: `done` of a stop, or `stopped` of
 * another job.
 */

#include "cached/worker/worker.h"
#include "kvstore/base/bytes.h"
#include "kvstore/base/thread.h"
#include "tests/harness.h"
#include "tests/unit/engine_steps.h"

enum { SLOTS = 3, CHUNK = 8, TOKENS_MAX = 1024, DECODE_MAX = 64 };

struct bench {
    struct eng_model *model;
    const struct kv_layout *layout;
    struct worker *worker;
    struct kv_thread thread;
    struct kv_mailbox *reply;
    uint32_t finished; /* Jobs that came back. */
};

/* A job with all memory it names. */
struct run {
    struct worker_job job;
    struct bench *bench;
    uint32_t done_as; /* 1: the first job that came back; 0: not yet. */
    uint32_t progress_count, progress_seen;
    uint8_t *pages[TOKENS_MAX / KV_PAGE_TOKENS];
    uint32_t ids[TOKENS_MAX];
    uint32_t tokens[DECODE_MAX], crcs[DECODE_MAX];
};

static inline void *allocate(size_t bytes)
{
    void *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    EXPECT(memory != NULL);
    memset(memory, 0, bytes);
    return memory;
}

static inline void bench_open_drafting(struct bench *bench, const char *plant,
                                       enum worker_draft draft)
{
    const struct eng_options options = {.backend = ENG_BACKEND_SYNTHETIC, .spare_tokens = 16};
    *bench = (struct bench){.model = NULL};
    EXPECT(eng_model_open(&options, &bench->model, NULL) == KV_OK);
    bench->layout = eng_model_layout(bench->model);
    const struct worker_options worker_options = {
        .model = bench->model,
        .slots = SLOTS,
        .chunk_tokens = CHUNK,
        .draft = draft,
        .plant = plant,
    };
    EXPECT(worker_create(&worker_options, &bench->worker, NULL) == KV_OK);
    EXPECT_EQ_U32(worker_slots(bench->worker), SLOTS);
    EXPECT(kv_mailbox_create(&bench->reply, NULL) == KV_OK);
}

/* One token a step, so that steps can be counted. */
static inline void bench_open(struct bench *bench, const char *plant)
{
    bench_open_drafting(bench, plant, WORKER_DRAFT_OFF);
}

static inline void bench_start(struct bench *bench)
{
    EXPECT(kv_thread_start(&bench->thread, KV_THREAD_WORKER, "worker", worker_run, bench->worker,
                           NULL) == KV_OK);
}

static inline void bench_wait(struct bench *bench, uint32_t finished)
{
    while (bench->finished < finished) {
        kv_mailbox_wait(bench->reply, -1);
        (void)kv_mailbox_run(bench->reply, 1);
    }
}

static inline void bench_close(struct bench *bench)
{
    worker_stop(bench->worker);
    worker_stop(bench->worker); /* Twice is fine. */
    kv_thread_join(&bench->thread);
    EXPECT_EQ_U32(kv_mailbox_run(bench->reply, 1), 0);
    worker_destroy(bench->worker);
    kv_mailbox_destroy(bench->reply);
    eng_model_close(bench->model);
}

static inline void on_done(struct kv_msg *msg)
{
    struct run *run = KV_CONTAINER_OF(msg, struct run, job.msg);
    EXPECT_EQ_U32(run->done_as, 0);
    run->done_as = ++run->bench->finished;
}

static inline void on_progress(struct kv_msg *msg)
{
    struct run *run = KV_CONTAINER_OF(msg, struct run, job.progress);
    EXPECT_EQ_U32(run->done_as, 0); /* Never after the job came back. */
    atomic_store(&run->job.progress_posted, false);
    const uint32_t count = atomic_load_explicit(&run->job.out_count, memory_order_acquire);
    EXPECT(count >= run->progress_seen);
    for (uint32_t i = run->progress_seen; i < count; i++)
        EXPECT(run->crcs[i] != 0);
    run->progress_seen = count;
    run->progress_count++;
}

static inline struct run *run_create(struct bench *bench, uint32_t slot, uint32_t seed)
{
    struct run *run = allocate(sizeof(*run));
    run->bench = bench;
    for (uint32_t i = 0; i < TOKENS_MAX / KV_PAGE_TOKENS; i++)
        run->pages[i] = allocate(bench->layout->page_bytes);
    for (uint32_t i = 0; i < TOKENS_MAX; i++)
        run->ids[i] = (seed * 7919 + i * 31 + i / 7) % bench->layout->vocab_tokens;
    run->job = (struct worker_job){
        .msg = {.run = on_done},
        .reply = bench->reply,
        .user = {{(uint8_t)(slot + 1)}},
        .slot = slot,
        .start = WORKER_RESET,
        .pages = run->pages,
        .page_count = TOKENS_MAX / KV_PAGE_TOKENS,
        .ids = run->ids,
        .sampling = {.temperature = 1.0f, .top_p = 1.0f, .seed = seed},
        .out_tokens = run->tokens,
        .out_crcs = run->crcs,
        .progress = {.run = on_progress},
    };
    return run;
}

static inline void run_destroy(struct run *run)
{
    for (uint32_t i = 0; i < TOKENS_MAX / KV_PAGE_TOKENS; i++)
        free(run->pages[i]);
    free(run);
}

/* The same job again, from where its slot stands. */
static inline void run_again(struct run *run)
{
    run->done_as = 0;
    run->progress_seen = 0;
    run->job.start = WORKER_CONTINUE;
    run->job.start_tokens = run->job.state.tokens;
    run->job.replay_from = run->job.state.tokens;
    run->job.prefill_to = 0;
    run->job.stop_count = 0;
    run->job.decode_max = 0;
    run->job.decode_export = NULL;
    run->job.cancelled = NULL;
}

static inline void add_stop(struct run *run, uint32_t tokens, uint8_t *export)
{
    run->job.stops[run->job.stop_count++] = (struct worker_stop_point){tokens, export, false, {0}};
    run->job.prefill_to = tokens;
}

static inline void post(struct run *run)
{
    worker_post(run->bench->worker, &run->job);
}

/* The reference: the same calls by hand, in one piece each. */
static inline void by_hand(struct eng_session *session, const uint32_t *ids, uint32_t from,
                           uint32_t to)
{
    eng_prefill_begin(session, ids, from, to);
    steps_all(session, UINT32_MAX);
}

static inline void expect_same_image(const struct bench *bench, const struct eng_session *session,
                                     const uint8_t *image, const struct kv_image_state *state)
{
    const struct kv_image_state want = eng_session_state(session);
    uint8_t *expected = allocate(bench->layout->image_bytes);
    eng_session_export(session, expected);
    EXPECT_EQ_MEM(image + KV_IMAGE_HEADER_BYTES, expected + KV_IMAGE_HEADER_BYTES,
                  bench->layout->image_bytes - KV_IMAGE_HEADER_BYTES);
    EXPECT_EQ_U32(state->tokens, want.tokens);
    EXPECT_EQ_U32(state->encoder_first, want.encoder_first);
    EXPECT_EQ_U32(state->decoder_first, want.decoder_first);
    EXPECT_EQ_U32(state->replay_at, want.replay_at);
    EXPECT_EQ_U32(state->has_pending, want.has_pending);
    EXPECT_EQ_U32(state->pending, want.pending);
    free(expected);
}

static inline void expect_same_pages(const struct bench *bench, const struct run *a,
                                     const struct run *b, uint32_t tokens)
{
    for (uint32_t i = 0; i < tokens / KV_PAGE_TOKENS; i++)
        EXPECT_EQ_MEM(a->pages[i], b->pages[i], bench->layout->page_bytes);
}

/* Copies what a store would have kept of `from`: pages up to tokens. */
static inline void copy_pages(struct run *to, const struct run *from)
{
    for (uint32_t i = 0; i < TOKENS_MAX / KV_PAGE_TOKENS; i++)
        memcpy(to->pages[i], from->pages[i], to->bench->layout->page_bytes);
}

static inline struct eng_session *reference(struct bench *bench, struct run *run)
{
    struct eng_session *session = NULL;
    EXPECT(eng_session_create(bench->model, &session, NULL) == KV_OK);
    eng_session_set_pages(session, run->pages, TOKENS_MAX / KV_PAGE_TOKENS);
    return session;
}

/* A flag the worker sets in a job, as the `cancelled` of another: one byte with 0 or 1 in it. */
static inline const atomic_bool *as_cancelled(const bool *flag)
{
    return (const atomic_bool *)(const void *)flag;
}
