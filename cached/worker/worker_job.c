/*
 * One job: how it moves its session, between the passes that compute.
 *
 * A job runs as a sequence of prefills, each to the next stop, then as decode steps.  Between two
 * passes every session stands at a position that can be exported, but for those inside a prefill:
 * so a step takes the next token before it is over and leaves it pending, and a prefill that is
 * cancelled goes back to its last finished stop.  Nothing here decides what is kept in the tiers:
 * the worker says where the session stands, the shard draws the conclusions.
 */

#include "cached/worker/worker_internal.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"

#include <assert.h>

static void go_on(struct worker *worker, struct worker_job *job);

static struct eng_session *session_of(const struct worker *worker, const struct worker_job *job)
{
    return worker->slots[job->slot].session;
}

bool job_is_cancelled(const struct worker *worker, const struct worker_job *job)
{
    if (worker->stopping) return true;
    if (job->cancelled != NULL && atomic_load(job->cancelled)) return true;
    return job->deadline_ns != 0 && kv_clock_stopwatch_ns() >= job->deadline_ns;
}

/* ---- The end of a job. ---- */

/* Everything the worker still knows of the job goes back with it; it is not touched below. */
static void post_back(struct worker *worker, struct worker_job *job)
{
    job->run_ns = kv_clock_stopwatch_ns() - job->begun_ns;
    worker_count(&worker->counters.jobs, 1);
    kv_mailbox_post(job->reply, &job->msg);
}

static void fill_results(struct eng_session *session, struct worker_job *job, kv_status status)
{
    job->status = status;
    job->kept = true;
    job->state = eng_session_state(session);
    job->has_logits = eng_session_has_logits(session);
    if (job->decode_export != NULL) eng_session_export(session, job->decode_export);
}

static void fill_lost(struct worker_job *job, kv_status status)
{
    job->status = status;
    job->kept = false;
    job->state = (struct kv_image_state){0};
    job->has_logits = false;
}

static void free_slot(struct worker *worker, struct worker_job *job)
{
    batch_remove(&worker->batch, &job->batch);
    /* The pages go back with the job: nothing may point to them until the next one. */
    eng_session_set_pages(session_of(worker, job), NULL, 0);
    worker->slots[job->slot].job = NULL;
    worker->running--;
}

static void finish(struct worker *worker, struct worker_job *job, kv_status status)
{
    fill_results(session_of(worker, job), job, status);
    free_slot(worker, job);
    post_back(worker, job);
}

static void finish_lost(struct worker *worker, struct worker_job *job, kv_status status)
{
    eng_session_reset(session_of(worker, job));
    worker->slots[job->slot].lost = true;
    fill_lost(job, status);
    free_slot(worker, job);
    post_back(worker, job);
}

/* ---- Decode. ---- */

static uint32_t decode_limit(const struct worker_job *job)
{
    if (job->forced == NULL) return job->decode_max;
    return KV_MIN(job->decode_max, job->forced_count);
}

static bool is_stop_token(const struct worker_job *job, uint32_t token)
{
    for (uint32_t i = 0; i < job->stops_at_count; i++)
        if (job->stops_at[i] == token) return true;
    return false;
}

/* Sends a token.  True: it is the last one. */
static bool publish(struct worker *worker, struct worker_job *job, uint32_t token,
                    const float *logits)
{
    const size_t logits_bytes = eng_model_layout(worker->model)->vocab_tokens * sizeof(float);
    const uint32_t index = job->decode_done++;
    job->out_tokens[index] = token;
    job->out_crcs[index] = kv_checksum(logits, logits_bytes);
    atomic_store_explicit(&job->out_count, index + 1, memory_order_release);
    worker_count(&worker->counters.decode_tokens, 1);

    /* A forced answer ends where its sender ended it, not at a stop token inside. */
    const bool at_limit = job->decode_done == decode_limit(job);
    const bool at_stop = is_stop_token(job, token) && (job->forced == NULL || at_limit);
    job->stopped = at_stop;
    return at_stop || at_limit;
}

/* The flag says whether the message is on its way: it is in one queue at most. */
static void tell_progress(struct worker_job *job)
{
    if (job->progress.run == NULL) return;
    if (!atomic_exchange(&job->progress_posted, true)) kv_mailbox_post(job->reply, &job->progress);
}

/* What the next step asks for: a row for the pending token, and one for each draft. */
static void step_next(struct worker *worker, struct worker_job *job)
{
    const uint32_t left = decode_limit(job) - job->decode_done;
    const uint32_t rows = 1 + worker_drafts_wanted(worker, job, left);
    job->batch.encode = job->batch.decode = rows;
}

void job_step_passed(struct worker *worker, struct worker_job *job, uint32_t rows)
{
    struct slot *slot = &worker->slots[job->slot];
    struct eng_session *session = slot->session;
    uint32_t kept = 0;
    uint32_t token = 0;
    bool ended = false;

    /* A draft counts when it is the token that is taken here anyway. */
    do {
        token = job->forced != NULL ? job->forced[job->decode_done]
                                    : eng_session_sample_at(session, kept, &job->sampling);
        ended = publish(worker, job, token, eng_session_logits_at(session, kept));
        kept++;
    } while (!ended && kept < rows && slot->step_tokens[kept] == token);
    if (rows > 1 && job->forced == NULL) {
        const uint32_t compared = draft_policy_compared(rows - 1, kept - 1, ended);
        draft_policy_seen(&slot->policy, compared, kept - 1);
        worker_count(&worker->counters.drafts_proposed, compared);
        worker_count(&worker->counters.drafts_accepted, kept - 1);
    }
    eng_verify_keep(session, kept);
    eng_session_set_pending(session, token);
    tell_progress(job);
    if (ended) {
        finish(worker, job, KV_OK);
    } else {
        step_next(worker, job);
    }
}

/* The first token is taken from the logits at hand, unless one is pending. */
static void decode_begin(struct worker *worker, struct worker_job *job)
{
    struct eng_session *session = session_of(worker, job);
    job->phase = PHASE_DECODE;
    batch_remove(&worker->batch, &job->batch);
    if (job_is_cancelled(worker, job)) {
        finish(worker, job, KV_CANCELLED);
        return;
    }
    if (!eng_session_state(session).has_pending) {
        assert(eng_session_has_logits(session));
        const uint32_t token =
            job->forced != NULL ? job->forced[0] : eng_session_sample(session, &job->sampling);
        const bool ended = publish(worker, job, token, eng_session_logits(session));
        eng_session_set_pending(session, token);
        tell_progress(job);
        if (ended) {
            finish(worker, job, KV_OK);
            return;
        }
    }
    job->batch.is_step = true;
    step_next(worker, job);
    batch_add(&worker->batch, &job->batch);
}

/* ---- Prefill. ---- */

static void prefill_ask(struct worker *worker, struct worker_job *job)
{
    const struct eng_run_left left = eng_run_left(session_of(worker, job));
    job->batch.encode = left.encode;
    job->batch.decode = left.decode;
}

static void prefill_begin(struct worker *worker, struct worker_job *job)
{
    const uint32_t index = job->stop_index;
    const uint32_t from = index == 0 ? job->replay_from : job->stops[index - 1].tokens;
    assert(job->stops[index].tokens > (index == 0 ? job->start_tokens : from));
    eng_prefill_begin(session_of(worker, job), job->ids, from, job->stops[index].tokens);
    prefill_ask(worker, job);
    if (job->phase != PHASE_PREFILL) batch_add(&worker->batch, &job->batch);
    job->phase = PHASE_PREFILL;
}

/* What follows the start, or the last stop. */
static void go_on(struct worker *worker, struct worker_job *job)
{
    if (job->stop_index < job->stop_count) {
        prefill_begin(worker, job);
    } else if (decode_limit(job) > 0) {
        decode_begin(worker, job);
    } else {
        finish(worker, job, KV_OK);
    }
}

void job_prefill_passed(struct worker *worker, struct worker_job *job)
{
    struct eng_session *session = session_of(worker, job);
    struct worker_stop_point *stop = &job->stops[job->stop_index];

    prefill_ask(worker, job);
    if (job->batch.encode > 0 || job->batch.decode > 0) return;
    stop->state = eng_session_state(session);
    if (stop->export != NULL) eng_session_export(session, stop->export);
    stop->done = true;
    job->stop_index++;
    go_on(worker, job);
}

void job_cancel(struct worker *worker, struct worker_job *job)
{
    /* Rows without windows are no position to go on from: the next resume would have to know that
     * it must replay.  Nothing is lost, the store has these rows. */
    const bool has_windows = job->start != WORKER_ROWS_ONLY || job->stop_index > 0;
    const bool back = job->phase == PHASE_DECODE || eng_run_abort(session_of(worker, job));
    if (back && has_windows) {
        finish(worker, job, KV_CANCELLED);
    } else {
        finish_lost(worker, job, KV_CANCELLED);
    }
}

void job_lose(struct worker *worker, struct worker_job *job)
{
    finish_lost(worker, job, KV_IO);
}

/* ---- The start of a job. ---- */

static kv_status move_to_start(struct worker *worker, const struct worker_job *job)
{
    struct eng_session *session = session_of(worker, job);

    if (job->start == WORKER_RESET) eng_session_reset(session);
    eng_session_set_pages(session, job->pages, job->page_count); /* A reset forgets them. */
    switch (job->start) {
    case WORKER_CONTINUE:
    case WORKER_RESET:
        break;
    case WORKER_CUT:
        eng_session_cut(session, job->start_tokens);
        break;
    case WORKER_IMPORT:
        if (worker->plant == PLANT_IMPORT) return KV_CORRUPT;
        /* Whatever the engine dislikes about it, it is not the image the index promised. */
        if (eng_session_import(session, worker_image(worker, job), &job->image_state, job->ids,
                               job->start_tokens) != KV_OK)
            return KV_CORRUPT;
        break;
    case WORKER_ROWS_ONLY:
        assert(job->stop_count > 0);
        eng_session_rows_only(session, job->ids, job->start_tokens);
        break;
    }
    return KV_OK;
}

static void note_begin(struct worker_job *job)
{
    job->begun_ns = kv_clock_stopwatch_ns();
    job->queue_ns = job->begun_ns - job->posted_ns;
}

void job_begin(struct worker *worker, struct worker_job *job)
{
    assert(job->stop_count <= KV_STOPS_MAX);
    assert((job->stop_count > 0) == (job->prefill_to > job->start_tokens));
    if (job->stop_count > 0) assert(job->stops[job->stop_count - 1].tokens == job->prefill_to);

    worker->slots[job->slot].job = job;
    worker->running++;
    note_begin(job);

    const bool needs_place = job->start == WORKER_CONTINUE || job->start == WORKER_CUT;
    assert(!needs_place || !worker->slots[job->slot].lost);
    worker->slots[job->slot].lost = false;
    /* Not where the slot stood: what its session's drafts were worth says nothing of this one's. */
    if (!needs_place) worker->slots[job->slot].policy = (struct draft_policy){0};
    const kv_status status = move_to_start(worker, job);
    if (status != KV_OK) {
        finish_lost(worker, job, status);
        return;
    }
    assert(eng_session_state(session_of(worker, job)).tokens == job->start_tokens);
    go_on(worker, job);
}

void job_export(struct worker *worker, struct worker_job *job)
{
    note_begin(job);
    if (worker->slots[job->slot].lost) {
        fill_lost(job, KV_CANCELLED);
    } else {
        fill_results(session_of(worker, job), job, KV_OK);
    }
    post_back(worker, job);
}
