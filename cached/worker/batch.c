/*
 * Deficit round robin over users, with steps before everything.
 *
 * A visit gives a user QUANTUM rows on top of what it has left; the user's jobs take them in the
 * order in which they came.  A user whose rows are used up goes to the end of the ring; one that
 * has some left when the pass is full stays in front and goes on with the same visit in the next
 * pass. The quantum is small against a chunk, so within one pass all users get about equal shares,
 * and what one does not need falls to the others.
 */

#include "cached/worker/batch.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <string.h>

#define QUANTUM 16u

/* ---- lists ---- */

static void list_push(struct batch_list *list, struct batch_job *job)
{
    job->next = NULL;
    job->prev = list->last;
    if (list->last == NULL) {
        list->first = job;
    } else {
        list->last->next = job;
    }
    list->last = job;
}

static void list_take(struct batch_list *list, struct batch_job *job)
{
    if (job->prev == NULL) {
        list->first = job->next;
    } else {
        job->prev->next = job->next;
    }
    if (job->next == NULL) {
        list->last = job->prev;
    } else {
        job->next->prev = job->prev;
    }
    job->next = job->prev = NULL;
}

static void ring_push(struct batch *batch, struct batch_user *user)
{
    user->next = NULL;
    if (batch->ring_last == NULL) {
        batch->ring_first = user;
    } else {
        batch->ring_last->next = user;
    }
    batch->ring_last = user;
}

static void ring_take(struct batch *batch, struct batch_user *user)
{
    struct batch_user *before = NULL;
    struct batch_user *at = batch->ring_first;
    while (at != user) {
        before = at;
        at = at->next;
    }
    if (before == NULL) {
        batch->ring_first = user->next;
    } else {
        before->next = user->next;
    }
    if (batch->ring_last == user) batch->ring_last = before;
    user->next = NULL;
}

/* Those before it go behind the last one. */
static void ring_turn(struct batch *batch, const struct batch_user *first)
{
    while (batch->ring_first != first) {
        struct batch_user *user = batch->ring_first;
        ring_take(batch, user);
        ring_push(batch, user);
    }
}

void batch_init(struct batch *batch, uint32_t pass_rows, uint32_t chunk_tokens,
                struct batch_user *users, uint32_t user_count)
{
    assert(chunk_tokens >= 1 && pass_rows >= chunk_tokens && pass_rows >= 2);
    *batch = (struct batch){.pass_rows = pass_rows, .chunk_tokens = chunk_tokens};
    for (uint32_t i = user_count; i-- > 0;) {
        users[i] = (struct batch_user){.next = batch->free};
        batch->free = &users[i];
    }
}

/* ---- who is there ---- */

static struct batch_user *user_of(struct batch *batch, const struct kv_user_id *id)
{
    struct batch_user *user = batch->ring_first;
    while (user != NULL && !kv_id_equal(user->id.bytes, id->bytes))
        user = user->next;
    if (user != NULL) return user;
    user = batch->free;
    assert(user != NULL);
    batch->free = user->next;
    *user = (struct batch_user){.id = *id};
    ring_push(batch, user);
    batch->user_count++;
    return user;
}

void batch_add(struct batch *batch, struct batch_job *job)
{
    assert(job->of == NULL && job->next == NULL && job->prev == NULL);
    assert(batch->steps.first != job);
    job->take_encode = job->take_decode = 0;
    if (job->is_step) {
        list_push(&batch->steps, job);
        batch->step_count++;
        return;
    }
    job->of = user_of(batch, &job->user);
    list_push(&job->of->jobs, job);
}

void batch_remove(struct batch *batch, struct batch_job *job)
{
    struct batch_user *user = job->of;
    job->take_encode = job->take_decode = 0;
    if (user != NULL) {
        list_take(&user->jobs, job);
        job->of = NULL;
        if (user->jobs.first != NULL) return;
        ring_take(batch, user);
        *user = (struct batch_user){.next = batch->free};
        batch->free = user;
        batch->user_count--;
        return;
    }
    const bool is_in = job->prev != NULL || job->next != NULL || batch->steps.first == job;
    if (!is_in) return;
    list_take(&batch->steps, job);
    batch->step_count--;
}

bool batch_is_empty(const struct batch *batch)
{
    return batch->steps.first == NULL && batch->ring_first == NULL;
}

/* ---- steps ---- */

/* Returns the rows they took, in either half. */
static uint32_t plan_steps(struct batch *batch)
{
    const uint32_t kept = batch->ring_first == NULL
                              ? 0
                              : KV_MIN(batch->chunk_tokens, KV_MAX(batch->pass_rows / 4, 1u));
    const uint32_t room = batch->pass_rows - kept;
    const uint32_t served = KV_MIN(batch->step_count, room);
    uint32_t used = served;

    struct batch_job *job = batch->steps.first;
    for (uint32_t i = 0; i < served; i++, job = job->next)
        job->take_encode = job->take_decode = 1;
    for (; job != NULL; job = job->next)
        job->take_encode = job->take_decode = 0;
    job = batch->steps.first;
    for (uint32_t i = 0; i < served && used < room; i++, job = job->next) {
        assert(job->encode >= 1 && job->encode == job->decode);
        const uint32_t more = KV_MIN(job->encode - 1, room - used);
        job->take_encode += more;
        job->take_decode += more;
        used += more;
    }
    /* Those left out come first in the next pass. */
    for (uint32_t i = 0; served < batch->step_count && i < served; i++) {
        job = batch->steps.first;
        list_take(&batch->steps, job);
        list_push(&batch->steps, job);
    }
    return used;
}

/* ---- prefills ---- */

struct room {
    uint32_t encode, decode; /* Of the pass. */
};

/* Decoder rows follow the job's last encoder row. */
static void job_take(const struct batch *batch, struct batch_user *user, struct batch_job *job,
                     struct room *room)
{
    const uint32_t encode_left = job->encode - job->take_encode;
    uint32_t encode = KV_MIN(encode_left, KV_MIN(user->deficit, room->encode));
    encode = KV_MIN(encode, batch->chunk_tokens - user->encode);
    user->deficit -= encode;
    uint32_t decode = 0;
    if (encode == encode_left) {
        decode = KV_MIN(job->decode - job->take_decode, KV_MIN(user->deficit, room->decode));
        decode = KV_MIN(decode, batch->chunk_tokens - user->decode);
    }
    user->deficit -= decode;
    user->encode += encode;
    user->decode += decode;
    room->encode -= encode;
    room->decode -= decode;
    job->take_encode += encode;
    job->take_decode += decode;
}

/* The user's jobs take what the visit allows; its deficit is 0 when there could be more. */
static void visit_user(const struct batch *batch, struct batch_user *user, struct room *room)
{
    bool wants = false;
    if (!user->visited) user->deficit += QUANTUM;
    user->visited = true;
    for (struct batch_job *job = user->jobs.first; job != NULL && user->deficit > 0;
         job = job->next) {
        job_take(batch, user, job, room);
        wants |= job->take_encode < job->encode || job->take_decode < job->decode;
    }
    /* A visit ends with its rows, or with the jobs; else the pass, or this user's share of it, is
     * full, and the visit goes on in the next pass. */
    if (user->deficit > 0 && wants) return;
    user->deficit = 0;
    user->visited = false;
}

static void plan_prefills(struct batch *batch, uint32_t step_rows)
{
    const uint32_t left = batch->pass_rows - step_rows;
    const uint32_t most = step_rows > 0 ? KV_MIN(left, batch->chunk_tokens) : left;
    struct room room = {most, most};
    const struct batch_user *cut_short = NULL;
    bool took = true;

    for (struct batch_user *user = batch->ring_first; user != NULL; user = user->next) {
        user->encode = user->decode = 0;
        for (struct batch_job *job = user->jobs.first; job != NULL; job = job->next)
            job->take_encode = job->take_decode = 0;
    }
    while (took) {
        took = false;
        for (struct batch_user *user = batch->ring_first; user != NULL; user = user->next) {
            const struct room before = room;
            visit_user(batch, user, &room);
            took |= before.encode != room.encode || before.decode != room.decode;
            const bool full = room.encode == 0 || room.decode == 0;
            if (user->visited && full && cut_short == NULL) cut_short = user;
        }
    }
    if (cut_short != NULL) ring_turn(batch, cut_short);
}

bool batch_plan(struct batch *batch)
{
    const uint32_t step_rows = plan_steps(batch);
    plan_prefills(batch, step_rows);
    return !batch_is_empty(batch);
}
