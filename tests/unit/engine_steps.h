#pragma once

/* Runs of one session alone, in the form that needs no thought about passes: eng_prefill_begin(),
 * steps_chunk() while the encoder has something left, steps_end(). */

#include "engine/backend/backend.h"
#include "kvstore/base/bytes.h"

#include <assert.h>

/* The last decoder row is left for steps_end(), so that the run ends there and not before. */
static inline void steps_chunk(struct eng_session *session, uint32_t count_max)
{
    struct eng_model *model = session->model;
    assert(session->run.active);
    assert(count_max > 0);

    for (uint32_t left = KV_MIN(count_max, eng_run_left(session).encode); left > 0;) {
        const uint32_t count = KV_MIN(left, model->pass_rows);
        const uint32_t decode =
            model->prefill_all ? KV_MIN(count, eng_run_left(session).decode - 1) : 0;
        eng_pass(model, &(struct eng_piece){.session = session, .encode = count, .decode = decode},
                 1);
        left -= count;
    }
}

static inline void steps_end(struct eng_session *session)
{
    struct eng_model *model = session->model;
    assert(session->run.active);
    assert(eng_run_left(session).encode == 0);

    while (session->run.active) {
        const uint32_t count = KV_MIN(eng_run_left(session).decode, model->pass_rows);
        eng_pass(model, &(struct eng_piece){.session = session, .decode = count}, 1);
    }
}

/* All of them: a begun prefill, in chunks of `chunk` tokens. */
static inline void steps_all(struct eng_session *session, uint32_t chunk)
{
    while (eng_run_left(session).encode > 0)
        steps_chunk(session, chunk);
    steps_end(session);
}

/* A tokens run of one token, at once. */
static inline void steps_token(struct eng_session *session, uint32_t token)
{
    eng_tokens_begin(session, &token, 1);
    eng_pass(session->model, &(struct eng_piece){.session = session, .encode = 1, .decode = 1}, 1);
}
