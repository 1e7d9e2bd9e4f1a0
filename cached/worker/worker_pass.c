/*
 * One pass: who takes part, what is proposed, what it cost.
 *
 * The batch says which rows of which jobs; steps are begun only then, because the number of drafts
 * follows from the room there is.  A forced answer is its own draft: its tokens are known, so they
 * are verified several at a time, and all of them are right.  Cancelled jobs leave between passes.
 */

#include "cached/worker/worker_internal.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <stdio.h>

/* ---- drafts ---- */

uint32_t worker_drafts_wanted(struct worker *worker, struct worker_job *job, uint32_t tokens_left)
{
    const uint32_t room = KV_MIN(worker->step_max, tokens_left) - 1;
    if (worker->draft == WORKER_DRAFT_OFF || room == 0) return 0;
    if (job->forced != NULL) return room;

    const uint32_t most = KV_MIN(room, eng_model_draft_max(worker->model));
    if (worker->draft == WORKER_DRAFT_ON || most == 0) return most;
    const uint32_t sessions = KV_MAX(worker->batch.step_count, 1u);
    const struct draft_costs *costs =
        worker->batch.user_count > 0 ? &worker->costs_beside : &worker->costs;
    return draft_policy_next(&worker->slots[job->slot].policy, costs, sessions, most);
}

static bool is_in_pass(const struct worker_job *job)
{
    return job != NULL && job->batch.take_encode + job->batch.take_decode > 0;
}

/* For all sessions together: their drafts share the draft stages' weights as the pass does. */
static void draft_together(struct worker *worker)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < worker->slot_count; i++) {
        struct slot *slot = &worker->slots[i];
        const struct worker_job *job = slot->job;
        if (!is_in_pass(job) || job->phase != PHASE_DECODE) continue;
        if (job->forced != NULL || job->batch.take_encode == 1) continue;
        worker->items[count++] = (struct eng_draft_item){
            .session = slot->session,
            .first = eng_session_state(slot->session).pending,
            .sampling = job->sampling,
            .max = job->batch.take_encode - 1,
            .tokens = slot->step_tokens + 1,
        };
    }
    if (count > 0) eng_draft(worker->model, worker->items, count);
}

static void step_begin(struct slot *slot, const struct worker_job *job, uint32_t rows)
{
    const struct kv_image_state state = eng_session_state(slot->session);
    assert(state.has_pending);
    slot->step_tokens[0] = state.pending;
    for (uint32_t i = 1; job->forced != NULL && i < rows; i++)
        slot->step_tokens[i] = job->forced[job->decode_done + i - 1];
    eng_tokens_begin(slot->session, slot->step_tokens, rows);
}

/* ---- what it was ---- */

struct pass_sums {
    uint32_t sessions, steps, drafts;
    bool forced; /* Some step's tokens were known: its rows were not drafted. */
    uint32_t encode, decode;
    uint32_t prefill_rows, replay_rows, step_rows; /* Of both halves. */
    uint32_t prefill_tokens, replay_tokens, chunks;
};

/* Of the next `rows` rows of a half that has `left` to the stop: those below the start. */
static uint32_t rows_again(const struct worker_job *job, uint32_t left, uint32_t rows)
{
    const uint32_t position = job->stops[job->stop_index].tokens - left;
    return position < job->start_tokens ? KV_MIN(rows, job->start_tokens - position) : 0;
}

static void add_piece(struct pass_sums *sums, const struct worker_job *job, uint32_t encode,
                      uint32_t decode)
{
    sums->sessions++;
    sums->encode += encode;
    sums->decode += decode;
    if (job->phase == PHASE_DECODE) {
        sums->steps++;
        sums->drafts += encode - 1;
        sums->forced |= job->forced != NULL;
        sums->step_rows += encode + decode;
        return;
    }
    const uint32_t again = rows_again(job, job->batch.encode, encode);
    const uint32_t decode_again = rows_again(job, job->batch.decode, decode);
    sums->replay_tokens += again;
    sums->prefill_tokens += encode - again;
    sums->replay_rows += again + decode_again;
    sums->prefill_rows += encode - again + decode - decode_again;
    if (encode > 0) sums->chunks++;
}

static void learn_costs(struct worker *worker, const struct pass_sums *sums, uint64_t ns)
{
    if (sums->steps == 0 || sums->forced) return;
    const uint32_t drafts = (sums->drafts + sums->steps - 1) / sums->steps;
    const uint32_t other_rows = sums->prefill_rows + sums->replay_rows;
    if (other_rows == 0) {
        draft_costs_seen(&worker->costs, sums->steps, drafts, ns);
        return;
    }
    const uint64_t beside =
        draft_costs_beside(ns, sums->step_rows, other_rows, worker->batch.chunk_tokens);
    if (beside > 0) draft_costs_seen(&worker->costs_beside, sums->steps, drafts, beside);
}

static void count_pass(struct worker *worker, const struct pass_sums *sums, uint64_t ns)
{
    struct worker_counters *counters = &worker->counters;
    const uint64_t rows = sums->encode + sums->decode;
    worker_count(&counters->prefill_tokens, sums->prefill_tokens);
    worker_count(&counters->replay_tokens, sums->replay_tokens);
    worker_count(&counters->chunks, sums->chunks);
    worker_count(&counters->prefill_rows, sums->prefill_rows);
    worker_count(&counters->replay_rows, sums->replay_rows);
    worker_count(&counters->decode_rows, sums->step_rows);
    worker_count(&counters->prefill_ns, ns * sums->prefill_rows / rows);
    worker_count(&counters->replay_ns, ns * sums->replay_rows / rows);
    worker_count(&counters->decode_ns, ns * sums->step_rows / rows);
    worker_count(&counters->passes, 1);
    worker_count(&counters->pass_rows, rows);
    worker_count_max(&counters->pass_rows_max, rows);
    worker_count(&counters->pass_sessions, sums->sessions);
    worker_count_max(&counters->pass_sessions_max, sums->sessions);
    learn_costs(worker, sums, ns);
}

/* ---- the pass ---- */

static void cancel_jobs(struct worker *worker)
{
    for (uint32_t i = 0; i < worker->slot_count; i++) {
        struct worker_job *job = worker->slots[i].job;
        if (job != NULL && job_is_cancelled(worker, job)) job_cancel(worker, job);
    }
}

/* Weights that are gone or changed give wrong numbers: nothing computed with them leaves the
 * worker. */
static void lose_jobs(struct worker *worker, const struct kv_error *err)
{
    if (atomic_load(&worker->model_lost) == NULL) {
        (void)snprintf(worker->lost_text, sizeof(worker->lost_text),
                       "the model is lost: %s; restart with a whole one", err->text);
        atomic_store(&worker->model_lost, worker->lost_text);
        kv_log(worker->log, KV_LOG_ERROR, "model_lost", "text=\"%s\"", worker->lost_text);
    }
    for (uint32_t i = 0; i < worker->slot_count; i++)
        if (worker->slots[i].job != NULL) job_lose(worker, worker->slots[i].job);
}

/* Returns how many pieces there are. */
static uint32_t gather(struct worker *worker, struct pass_sums *sums, uint64_t now_ns)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < worker->slot_count; i++) {
        struct slot *slot = &worker->slots[i];
        struct worker_job *job = slot->job;
        if (!is_in_pass(job)) continue;
        const uint32_t encode = job->batch.take_encode;
        const uint32_t decode = job->batch.take_decode;
        if (job->phase == PHASE_DECODE) step_begin(slot, job, encode);
        if (!job->computed) {
            job->computed = true;
            job->begun_ns = now_ns;
            job->queue_ns = now_ns - job->posted_ns;
        }
        add_piece(sums, job, encode, decode);
        worker->pieces[count++] = (struct eng_piece){slot->session, encode, decode};
    }
    return count;
}

void worker_pass(struct worker *worker)
{
    cancel_jobs(worker);
    if (!batch_plan(&worker->batch)) return;

    struct pass_sums sums = {0};
    const uint64_t begun_ns = kv_clock_stopwatch_ns();
    draft_together(worker);
    const uint32_t count = gather(worker, &sums, begun_ns);
    assert(count > 0);
    eng_pass(worker->model, worker->pieces, count);
    count_pass(worker, &sums, kv_clock_stopwatch_ns() - begun_ns);
    struct kv_error err;
    if (eng_model_check(worker->model, &err) != KV_OK) {
        lose_jobs(worker, &err);
        return;
    }

    for (uint32_t i = 0; i < worker->slot_count; i++) {
        struct worker_job *job = worker->slots[i].job;
        if (!is_in_pass(job)) continue;
        if (job->phase == PHASE_DECODE) {
            job_step_passed(worker, job, job->batch.take_encode);
        } else {
            job_prefill_passed(worker, job);
        }
    }
}
