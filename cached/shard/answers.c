/*
 * Calls that are made again: request_id.
 *
 * A client that lost the answer of a call cannot know whether it ran.  With a request_id it sends
 * the call again: while the first one still runs the second joins it and both get its answer; after
 * that it gets the answer that was kept.  Only answers of calls that ended well are kept: one that
 * failed changed nothing and is run again.  A Decode that was cut off is the exception: its head
 * stays where it was, so its tokens are kept, and a repeat sends them again and goes on.
 *
 * A running call that others joined is not cancelled when its own caller leaves.  The tokens of a
 * Decode stand in one array here while it runs and afterwards, and each of its streams is fed from
 * there at its own pace.
 *
 * All of it is in memory, the last KV_ANSWERS_PER_SESSION_MAX of a session for KV_ANSWERS_LIFE_MS,
 * and at most KV_ANSWERS_BYTES_MAX: then the oldest goes.  Whoever deletes a session takes its
 * answers, and the tokens in them, along.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"
#include "kvstore/format/kernels.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define STREAM_TOKENS_MAX 1024u

/* Owned by: shard. */
struct answer {
    struct answer *next; /* In its bucket. */
    struct answer *older, *newer;
    struct kv_session_id session;
    struct kv_user_id user;
    enum request_method method;
    char id[KV_REQUEST_ID_MAX + 1];
    struct request_field fields[KV_REQUEST_FIELDS_MAX];
    uint32_t field_count;
    struct flow *running; /* NULL: it is over, and in the list of those. */
    uint32_t joined;      /* Flows that wait for it, or still send what it made. */
    bool is_found;        /* In its bucket; else it goes with the last that joined. */
    bool is_whole;        /* `out` is the answer; else a Decode that was cut off. */
    uint64_t ended_ms, bytes;
    struct request_out out; /* Of it: checkpoints (heap), kernels, numbers. */
    char kernels[KV_KERNELS_NAME_BYTES];
    /* Decode: everything its stream sends, from first_position on. */
    uint32_t *tokens;
    uint32_t capacity, count; /* count: not those of a job that runs. */
    uint32_t resent;          /* Of them: sent again because of from_position. */
    uint32_t first_position;
};

static struct answer **bucket_of(struct answers *answers, const struct kv_session_id *session)
{
    return &answers->buckets[kv_load32(session->bytes) % KV_ARRAY_COUNT(answers->buckets)];
}

/* ---- the list of those that are over, oldest first ---- */

static void list_add(struct answers *answers, struct answer *answer)
{
    answer->older = answers->newest;
    answer->newer = NULL;
    if (answers->newest != NULL)
        answers->newest->newer = answer;
    else
        answers->oldest = answer;
    answers->newest = answer;
    answer->bytes = sizeof(*answer) + sizeof(*answer->tokens) * (uint64_t)answer->capacity +
                    sizeof(*answer->out.checkpoints) * (uint64_t)answer->out.checkpoint_count;
    answers->bytes += answer->bytes;
    answers->count++;
}

static void list_remove(struct answers *answers, struct answer *answer)
{
    if (answer->older != NULL)
        answer->older->newer = answer->newer;
    else
        answers->oldest = answer->newer;
    if (answer->newer != NULL)
        answer->newer->older = answer->older;
    else
        answers->newest = answer->older;
    answers->bytes -= answer->bytes;
    answers->count--;
}

/* Tokens and ids are the user's: they do not stay behind. */
static void answer_free(struct answer *answer)
{
    if (answer->tokens != NULL)
        explicit_bzero(answer->tokens, sizeof(*answer->tokens) * answer->capacity);
    free(answer->tokens);
    free(answer->out.checkpoints);
    explicit_bzero(answer, sizeof(*answer));
    free(answer);
}

/* Nobody finds it any more. */
static void answer_drop(struct shard *shard, struct answer *answer)
{
    struct answer **link = bucket_of(&shard->answers, &answer->session);
    assert(answer->is_found);
    while (*link != answer)
        link = &(*link)->next;
    *link = answer->next;
    if (answer->running == NULL) list_remove(&shard->answers, answer);
    answer->is_found = false;
    if (answer->running == NULL && answer->joined == 0) answer_free(answer);
}

static bool is_past(const struct shard *shard, const struct answer *answer)
{
    if (answer->running != NULL) return false;
    return kv_store_now_ms(shard->store) > answer->ended_ms + KV_ANSWERS_LIFE_MS;
}

static struct answer *answer_find(struct shard *shard, const struct request *req)
{
    struct answer *answer = *bucket_of(&shard->answers, &req->in.session);
    while (answer != NULL && !(kv_id_equal(answer->session.bytes, req->in.session.bytes) &&
                               strcmp(answer->id, req->in.request_id) == 0))
        answer = answer->next;
    if (answer == NULL || !is_past(shard, answer)) return answer;
    answer_drop(shard, answer);
    return NULL;
}

/* A new one of this session: the oldest of too many goes. */
static void make_room(struct shard *shard, const struct kv_session_id *session)
{
    struct answer *oldest = NULL;
    uint32_t count = 0;
    for (struct answer *answer = *bucket_of(&shard->answers, session); answer != NULL;
         answer = answer->next) {
        if (answer->running != NULL || !kv_id_equal(answer->session.bytes, session->bytes))
            continue;
        count++;
        oldest = answer; /* New ones stand first. */
    }
    if (count >= KV_ANSWERS_PER_SESSION_MAX) answer_drop(shard, oldest);
}

static struct answer *answer_make(struct flow *flow)
{
    const struct request *req = flow->req;
    struct answer *answer = calloc(1, sizeof(*answer));
    if (answer == NULL) return NULL;
    make_room(flow->shard, &req->in.session);
    struct answer **bucket = bucket_of(&flow->shard->answers, &req->in.session);
    answer->session = req->in.session;
    answer->user = req->user;
    answer->method = req->method;
    memcpy(answer->id, req->in.request_id, strlen(req->in.request_id) + 1);
    memcpy(answer->fields, req->in.fields, sizeof(*req->in.fields) * req->in.field_count);
    answer->field_count = req->in.field_count;
    answer->is_found = true;
    answer->next = *bucket;
    *bucket = answer;
    return answer;
}

/* ---- the log of a Decode ---- */

uint32_t answers_made_before(const struct flow *flow)
{
    const struct answer *answer = flow->answer;
    return answer == NULL || answer->count < answer->resent ? 0 : answer->count - answer->resent;
}

/* An array of this many, with what there is; the old one is wiped. */
static bool resize(struct answer *answer, uint32_t capacity)
{
    uint32_t *tokens = malloc(sizeof(*tokens) * KV_MAX(capacity, 1u));
    assert(capacity >= answer->count);
    if (tokens == NULL) return false;
    if (answer->tokens != NULL) {
        memcpy(tokens, answer->tokens, sizeof(*tokens) * answer->count);
        explicit_bzero(answer->tokens, sizeof(*tokens) * answer->capacity);
        free(answer->tokens);
    }
    answer->tokens = tokens;
    answer->capacity = capacity;
    return true;
}

bool answers_decode_log(struct flow *flow)
{
    struct answer *answer = flow->answer;
    if (answer == NULL) return true;
    const bool goes_on = answer->tokens != NULL;
    if (goes_on && answer->first_position + answer->count != flow->first_position) {
        flow_fail(flow, KV_REASON_HEAD_MOVED, "request_id",
                  request_u64(flow->req, answer->first_position + answer->count),
                  request_u64(flow->req, flow->first_position));
        return false;
    }
    if (!goes_on) answer->resent = flow->resend_to - flow->resend_from;
    if (!resize(answer, answer->resent + flow->req->in.u.decode.max_tokens)) {
        flow_fail_status(flow, KV_NOMEM);
        return false;
    }
    if (!goes_on) {
        answer->first_position = flow->first_position - answer->resent;
        answer->count = answer->resent;
        memcpy(answer->tokens, flow->live->ids + answer->first_position,
               sizeof(*answer->tokens) * answer->resent);
    }
    flow->resend_from = flow->resend_to; /* They are in this log now. */
    flow->logged = answer->count;
    flow->job.out_tokens = answer->tokens + answer->count;
    return true;
}

static uint32_t log_count(const struct answer *answer)
{
    const struct flow *running = answer->running;
    if (running == NULL || running->job_done || running->job.out_tokens == NULL)
        return answer->count;
    return running->logged + atomic_load_explicit(&running->job.out_count, memory_order_acquire);
}

bool answers_stream(struct flow *flow)
{
    const struct answer *answer = flow->answer;
    const struct flow *own = answer->running == flow ? flow : NULL;
    const uint32_t made = log_count(answer);
    if (flow->streamed >= made) return false;
    const uint32_t from = flow->streamed;
    uint32_t count = KV_MIN(made - from, STREAM_TOKENS_MAX);
    const uint32_t *crcs = flow->no_crcs;
    if (own != NULL && from >= own->logged)
        crcs = own->job.out_crcs + (from - own->logged);
    else if (own != NULL)
        count = KV_MIN(count, own->logged - from);
    flow->streamed += count;
    request_stream(flow->req, answer->first_position + from, answer->tokens + from, crcs, count);
    return true;
}

void answers_decoded(struct flow *flow, uint32_t made)
{
    if (flow->answer == NULL) return;
    flow->answer->count += made;
    assert(flow->answer->count <= flow->answer->capacity);
}

/* ---- those that join ---- */

bool answers_wanted(const struct flow *flow)
{
    return flow->answer != NULL && !flow->joins && flow->answer->joined > 0;
}

static void leave(struct flow *flow)
{
    struct answer *answer = flow->answer;
    flow->answer = NULL;
    flow->joins = false;
    answer->joined--;
    if (answer->running != NULL) flow->shard->look_now = true; /* It may be wanted by nobody. */
    if (!answer->is_found && answer->running == NULL && answer->joined == 0) answer_free(answer);
}

/* What was kept, in the memory of this request; times are its own. */
static bool give(struct flow *flow, const struct answer *answer)
{
    struct request *req = flow->req;
    struct request_out *out = &req->out;
    const uint64_t arrived_ns = out->times.arrived_ns;
    const size_t bytes = sizeof(*out->checkpoints) * answer->out.checkpoint_count;
    *out = answer->out;
    out->times.arrived_ns = arrived_ns;
    out->repeated = true;
    out->checkpoints = kv_arena_alloc(req->arena, bytes);
    if (out->checkpoints == NULL) return false;
    if (bytes > 0) memcpy(out->checkpoints, answer->out.checkpoints, bytes);
    if (answer->out.kernels != NULL)
        out->kernels = kv_arena_strdup(req->arena, answer->kernels, strlen(answer->kernels));
    return true;
}

static void joined_step(struct flow *flow)
{
    const struct answer *answer = flow->answer;
    if (flow->failed || flow_cancelled(flow)) {
        flow_finish(flow);
        return;
    }
    if (flow->req->stream_busy) return;
    if (answer == NULL) { /* What it joined ended without an answer. */
        flow_start(flow);
        return;
    }
    if (flow->req->method == REQUEST_DECODE && answers_stream(flow)) return;
    if (answer->running != NULL) return;
    if (!give(flow, answer)) flow_fail_status(flow, KV_NOMEM);
    flow_finish(flow);
}

static void joined_sent(struct kv_msg *msg)
{
    struct request *req = KV_CONTAINER_OF(msg, struct request, stream_msg);
    req->stream_busy = false;
    joined_step(req->flow);
}

static void join(struct flow *flow, struct answer *answer)
{
    struct request *req = flow->req;
    flow->answer = answer;
    flow->joins = true;
    answer->joined++;
    if (answer->running != NULL)
        flow->shard->counters.answers_joined++;
    else
        flow->shard->counters.answers_repeated++;
    flow->wake = joined_step;
    req->stream_msg.run = joined_sent;
    if (req->method == REQUEST_DECODE && flow->no_crcs == NULL)
        flow->no_crcs = kv_arena_alloc(req->arena, sizeof(uint32_t) * STREAM_TOKENS_MAX);
    if (req->method == REQUEST_DECODE && flow->no_crcs == NULL) flow_fail_status(flow, KV_NOMEM);
    joined_step(flow);
}

static void wake_list(struct flow *woken)
{
    while (woken != NULL) {
        struct flow *next = woken->next_waiter;
        woken->wake(woken);
        woken = next;
    }
}

void answers_pump(struct flow *flow)
{
    struct flow *woken = NULL;
    if (!answers_wanted(flow)) return;
    for (struct flow *other = flow->shard->flows; other != NULL; other = other->next) {
        if (!other->joins || other->answer != flow->answer) continue;
        other->next_waiter = woken;
        woken = other;
    }
    wake_list(woken);
}

/* ---- a call begins ---- */

/* Fails with the first field in which this call is another one. */
static bool is_same(struct flow *flow, const struct answer *answer)
{
    const struct request_in *in = &flow->req->in;
    if (answer->method != flow->req->method) {
        flow_fail(flow, KV_REASON_REQUEST_ID_REUSED, "method", NULL, NULL);
        return false;
    }
    assert(answer->field_count == in->field_count);
    for (uint32_t i = 0; i < in->field_count; i++) {
        const struct request_field *first = &answer->fields[i], *again = &in->fields[i];
        if (first->value == again->value) continue;
        flow_fail(flow, KV_REASON_REQUEST_ID_REUSED, again->name,
                  again->is_number ? request_u64(flow->req, first->value) : NULL,
                  again->is_number ? request_u64(flow->req, again->value) : NULL);
        return false;
    }
    return true;
}

bool answers_begin(struct flow *flow)
{
    struct shard *shard = flow->shard;
    if (flow->req->in.request_id == NULL) return true;
    struct answer *answer = answer_find(shard, flow->req);
    if (answer != NULL && !is_same(flow, answer)) {
        shard->counters.answers_refused++;
        flow_finish(flow);
        return false;
    }
    if (answer != NULL && (answer->running != NULL || answer->is_whole)) {
        join(flow, answer);
        return false;
    }
    if (answer != NULL) {
        list_remove(&shard->answers, answer); /* A Decode that was cut off goes on. */
        shard->counters.answers_continued++;
    } else {
        answer = answer_make(flow);
        if (answer == NULL) {
            flow_fail_status(flow, KV_NOMEM);
            flow_finish(flow);
            return false;
        }
    }
    answer->running = flow;
    flow->answer = answer;
    return true;
}

/* ---- a call ends ---- */

static bool keep_out(struct answer *answer, const struct request_out *out)
{
    const size_t bytes = sizeof(*out->checkpoints) * out->checkpoint_count;
    struct request_checkpoint *checkpoints = malloc(KV_MAX(bytes, sizeof(*checkpoints)));
    if (checkpoints == NULL) return false;
    if (bytes > 0) memcpy(checkpoints, out->checkpoints, bytes);
    answer->out = *out;
    answer->out.checkpoints = checkpoints;
    answer->out.kernels = NULL;
    if (out->kernels != NULL) {
        const size_t length = strnlen(out->kernels, sizeof(answer->kernels) - 1);
        memcpy(answer->kernels, out->kernels, length);
        answer->out.kernels = answer->kernels;
    }
    return true;
}

/* A Decode that its caller left: the head stands behind its last token, or this call did not get
 * as far as to move it. */
static bool is_cut_off(const struct flow *flow)
{
    return flow->req->method == REQUEST_DECODE && (!flow->job_done || flow->live != NULL) &&
           answers_made_before(flow) > 0;
}

/* Nobody who joined it is to blame that its caller left. */
static bool is_to_run_again(const struct flow *ended, bool is_kept, const struct flow *joined)
{
    const enum kv_reason why = ended->req->out.failure.reason;
    if (ended->closed || atomic_load(&ended->shard->stopping)) return false;
    if (why != KV_REASON_CANCELLED && why != KV_REASON_DEADLINE) return false;
    return is_kept || joined->streamed == 0;
}

static const char *copy_text(struct flow *flow, const char *text)
{
    return text == NULL ? NULL : kv_arena_strdup(flow->req->arena, text, strlen(text));
}

/* They go on when the one that ended has given everything back. */
static struct flow *release_joined(struct flow *ended, struct answer *answer, bool is_kept)
{
    const struct request_failure *failure = &ended->req->out.failure;
    struct flow *woken = NULL;
    for (struct flow *flow = ended->shard->flows; flow != NULL; flow = flow->next) {
        if (!flow->joins || flow->answer != answer) continue;
        flow->next_waiter = woken;
        woken = flow;
        if (answer->is_whole) continue;
        flow->joins = false;
        flow->answer = NULL;
        answer->joined--;
        if (is_to_run_again(ended, is_kept, flow)) continue;
        flow_fail(flow, failure->reason, copy_text(flow, failure->field),
                  copy_text(flow, failure->limit), copy_text(flow, failure->value));
        flow->req->out.failure.retry_ms = failure->retry_ms;
    }
    return woken;
}

static void trim_all(struct shard *shard)
{
    struct answers *answers = &shard->answers;
    while (answers->oldest != NULL &&
           (answers->bytes > KV_ANSWERS_BYTES_MAX || is_past(shard, answers->oldest)))
        answer_drop(shard, answers->oldest);
}

struct flow *answers_end(struct flow *flow)
{
    struct shard *shard = flow->shard;
    struct answer *answer = flow->answer;
    if (answer == NULL) return NULL;
    if (flow->joins) {
        leave(flow);
        return NULL;
    }
    answer->is_whole = !flow->failed && keep_out(answer, &flow->req->out);
    const bool is_kept = answer->is_found && (answer->is_whole || is_cut_off(flow));
    /* Room for more tokens than were made goes back, if there is memory to do so. */
    if (answer->tokens != NULL && answer->count < answer->capacity)
        (void)resize(answer, answer->count);
    struct flow *woken = release_joined(flow, answer, is_kept);
    flow->answer = NULL;
    answer->running = NULL;
    answer->ended_ms = kv_store_now_ms(shard->store);
    if (!answer->is_found) { /* Its session was deleted. */
        if (answer->joined == 0) answer_free(answer);
        return woken;
    }
    list_add(&shard->answers, answer);
    if (!is_kept) answer_drop(shard, answer);
    trim_all(shard);
    return woken;
}

void answers_wake(struct flow *woken)
{
    wake_list(woken);
}

/* ---- what goes ---- */

void answers_tick(struct shard *shard)
{
    trim_all(shard);
}

/* A deletion answers for itself: its own answer has nothing of the session. */
static bool is_deletion(const struct answer *answer)
{
    return answer->method == REQUEST_DELETE_SESSION;
}

static void forget(struct shard *shard, struct answer *answer)
{
    for (struct flow *flow = shard->flows; flow != NULL; flow = flow->next)
        if (flow->joins && flow->answer == answer) flow_close(flow);
    answer_drop(shard, answer);
}

void answers_forget_session(struct shard *shard, const struct kv_session_id *session)
{
    struct answer *next;
    for (struct answer *answer = *bucket_of(&shard->answers, session); answer != NULL;
         answer = next) {
        next = answer->next;
        if (kv_id_equal(answer->session.bytes, session->bytes) && !is_deletion(answer))
            forget(shard, answer);
    }
}

void answers_forget_user(struct shard *shard, const struct kv_user_id *user)
{
    for (uint32_t i = 0; i < KV_ARRAY_COUNT(shard->answers.buckets); i++) {
        struct answer *next;
        for (struct answer *answer = shard->answers.buckets[i]; answer != NULL; answer = next) {
            next = answer->next;
            if (kv_id_equal(answer->user.bytes, user->bytes)) forget(shard, answer);
        }
    }
}

void answers_free_all(struct shard *shard)
{
    while (shard->answers.oldest != NULL)
        answer_drop(shard, shard->answers.oldest);
}
