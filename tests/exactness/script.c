/*
 * What a client does next, drawn from the seed.
 *
 * Prompts are what agents send: the conversation and more, an edited tail, an older point and
 * another way on, the same again.  New tokens come from a few fixed streams per session, so
 * branches leave each other, meet again and repeat what was there: equal content from different
 * calls is where ids, marks and windows are easily confused.
 */

#include "tests/exactness/run.h"

#include "kvstore/base/bytes.h"

#include <string.h>

#define LONG_TALK 700u
#define IDS 509u /* The model's last ids are special. */

uint32_t script_suffix(struct ex_run *run, const struct ex_session *session, uint32_t at,
                       uint32_t count, uint32_t *ids)
{
    /* Half of the time one of two streams, else one that never comes again. */
    uint64_t stream = ex_random_below(&run->random, 2);
    if (ex_random_percent(&run->random, 50)) stream = ex_random_next(&run->random);
    stream = ex_mix(stream ^ ex_mix(session->user + run->seed)) + run->history;
    for (uint32_t i = 0; i < count; i++)
        ids[i] = (uint32_t)(ex_mix(stream ^ ex_mix(at + i)) >> 32) % IDS;
    return count;
}

static uint32_t draw_new_count(struct ex_run *run)
{
    const uint32_t kind = ex_random_below(&run->random, 100);
    if (kind < 55) return ex_random_between(&run->random, 1, 20);
    if (kind < 92) return ex_random_between(&run->random, 21, 70);
    return ex_random_between(&run->random, 71, 200);
}

static uint32_t fresh(struct ex_run *run, const struct ex_session *session, uint32_t *ids)
{
    const uint32_t kind = ex_random_below(&run->random, 100);
    /* Those of a crowd are shorter, and cross the end of a page less often. */
    uint32_t count = ex_random_between(&run->random, 1, 40);
    if (kind >= 40) count = ex_random_between(&run->random, 41, run->crowd ? 140 : 220);
    if (kind >= (run->crowd ? 97 : 94)) count = ex_random_between(&run->random, 221, 700);
    return script_suffix(run, session, 0, count, ids);
}

/* ids[0, keep) stay; what follows differs at once from what stood there. */
static uint32_t turn_off(struct ex_run *run, const struct ex_session *session, uint32_t *ids,
                         uint32_t keep, uint32_t held, uint32_t more)
{
    const uint32_t before = keep < held ? ids[keep] : IDS;
    if (more == 0) return keep;
    (void)script_suffix(run, session, keep, more, ids + keep);
    if (ids[keep] == before) ids[keep] = (before + 1) % IDS;
    return keep + more;
}

/* A stored point of the history, or its middle, and another way on. */
static uint32_t older(struct ex_run *run, const struct ex_session *session, uint32_t *ids,
                      bool inside)
{
    if (session->point_count == 0) return fresh(run, session, ids);
    const struct ex_point *point =
        &session->points[ex_random_below(&run->random, session->point_count)];
    uint32_t keep = point->position;
    if (inside) keep = ex_random_between(&run->random, 1, keep);
    memcpy(ids, ref_ids(point->rows), sizeof(*ids) * point->position);
    return turn_off(run, session, ids, keep, point->position,
                    ex_random_between(&run->random, 1, 40));
}

static uint32_t edit_tail(struct ex_run *run, const struct ex_session *session, uint32_t *ids)
{
    const uint32_t held = session->talk_count;
    const uint32_t back = ex_random_between(&run->random, 1, KV_MIN(20u, held));
    const uint32_t more = back + ex_random_below(&run->random, 30);
    return turn_off(run, session, ids, held - back, held, more);
}

static uint32_t draw_prompt(struct ex_run *run, const struct ex_session *session, uint32_t *ids,
                            const char **ret_what)
{
    const uint32_t held = session->talk_count;
    uint32_t kind = ex_random_below(&run->random, 100);
    memcpy(ids, session->talk, sizeof(*ids) * held);
    if (held == 0) kind = 99;
    if (held > LONG_TALK && kind < 40) kind = 60;
    if (kind < 40) {
        *ret_what = "extend";
        return held + script_suffix(run, session, held, draw_new_count(run), ids + held);
    }
    if (kind < 56) {
        *ret_what = "edit tail";
        return edit_tail(run, session, ids);
    }
    if (kind < 66) {
        *ret_what = "cut";
        const uint32_t keep = ex_random_between(&run->random, 1, held);
        return turn_off(run, session, ids, keep, held, ex_random_below(&run->random, 40));
    }
    if (kind < 72) {
        *ret_what = "same";
        return session->prompt_count;
    }
    if (kind < 78) {
        *ret_what = "prefix";
        return ex_random_between(&run->random, 1, held);
    }
    if (kind < 86) {
        *ret_what = "from a checkpoint";
        return older(run, session, ids, false);
    }
    if (kind < 95) {
        *ret_what = "inside an edge";
        return older(run, session, ids, true);
    }
    *ret_what = "fresh";
    return fresh(run, session, ids);
}

uint32_t script_prompt(struct ex_run *run, struct ex_session *session, uint32_t *ids,
                       const char **ret_what)
{
    /* A prefix of what a client would send is something a client sends. */
    return KV_MIN(draw_prompt(run, session, ids, ret_what), (uint32_t)EX_PROMPT_MAX);
}

void script_prefill(struct ex_run *run, uint32_t count, struct ex_prefill *call)
{
    struct ex_random *random = &run->random;
    if (ex_random_percent(random, 15)) call->stable_tokens = ex_random_between(random, 1, count);
    if (ex_random_percent(random, 15)) {
        uint32_t at = 0;
        const uint32_t wanted = ex_random_between(random, 1, 4);
        for (uint32_t i = 0; i < wanted && at < count; i++) {
            at = ex_random_between(random, at + 1, count);
            call->anchors[call->anchor_count++] = at;
        }
    }
    call->no_checkpoint = ex_random_percent(random, 10);
    if (ex_random_percent(random, 15)) call->level = ex_random_between(random, 1, 3);
}

void script_decode(struct ex_run *run, struct ex_decode *call)
{
    struct ex_random *random = &run->random;
    const uint32_t kind = ex_random_below(random, 100);
    call->max_tokens = ex_random_between(random, 1, ex_random_percent(random, 20) ? 20 : 6);
    call->ignore_eos = ex_random_percent(random, 50);
    call->no_checkpoint = ex_random_percent(random, 15);
    if (kind < 20) {
        call->forced_count = call->max_tokens;
        for (uint32_t i = 0; i < call->forced_count; i++)
            call->forced[i] = ex_random_below(random, IDS);
        return;
    }
    if (ex_random_percent(random, 20)) {
        call->stop_count = ex_random_between(random, 1, 16);
        for (uint32_t i = 0; i < call->stop_count; i++)
            call->stops[i] = ex_random_below(random, IDS);
    }
    if (kind < 55) return; /* Greedy. */
    call->temperature = (float)ex_random_between(random, 1, 20) / 10.0f;
    call->seed = ex_random_next(random);
    if (ex_random_percent(random, 40))
        call->top_p = (float)ex_random_between(random, 1, 99) / 100.0f;
    if (ex_random_percent(random, 40)) call->top_k = ex_random_between(random, 1, 60);
}
