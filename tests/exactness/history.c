/*
 * One history: a few sessions of two users, a dozen turns, and everything that can happen between
 * them.
 *
 * Each call is made on the daemon first, with what it showed before (GetSession), and then checked
 * on the reference.  Two turns may run side by side when the daemon has room for both; they are
 * checked one after the other.
 */

#include "tests/exactness/run.h"

#include "kvstore/base/bytes.h"

#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- log and verdicts ---- */

void ex_log(struct ex_run *run, const char *fmt, ...)
{
    va_list args;
    char line[512];
    va_start(args, fmt);
    (void)vsnprintf(line, sizeof(line), fmt, args);
    va_end(args);
    if (run->verbose) (void)fprintf(stderr, "  [%u.%u] %s\n", run->history, run->turn, line);
    const size_t room = sizeof(run->log) - run->log_used;
    const int count = snprintf(run->log + run->log_used, room, "  [%u] %s\n", run->turn, line);
    if (count > 0 && (size_t)count < room) run->log_used += (uint32_t)count;
}

static void print_story(const struct ex_run *run, const char *what, const char *text)
{
    const struct ex_setup *setup = &run->setup;
    (void)fprintf(stderr,
                  "\nexactness: history %u of seed %llu, turn %u: %s: %s\n"
                  "repeat: exactness --seed %llu --history %u --plant %s%s%s\n"
                  "daemon: chunk %u, pass rows %u, threads %u, draft %s, live %u, spare %u, pool "
                  "slots %u, hbm pages %u, io %s\n%s",
                  run->history, (unsigned long long)run->seed, run->turn, what, text,
                  (unsigned long long)run->seed, run->history,
                  run->plant == NULL ? "none" : run->plant, run->strict ? " --strict" : "",
                  run->crowd ? " --schedule random" : "", setup->chunk_tokens, setup->pass_rows,
                  setup->threads, setup->draft, setup->live_sessions, setup->spare_tokens,
                  setup->pool_slots, setup->hbm_pages, setup->io_pool ? "pool" : "auto", run->log);
}

_Noreturn void ex_wrong(struct ex_run *run, const char *fmt, ...)
{
    va_list args;
    char text[EX_WHY_BYTES];
    va_start(args, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    print_story(run, "wrong", text);
    ex_report(run);
    _exit(EX_EXIT_WRONG);
}

_Noreturn void ex_different(struct ex_run *run, uint64_t differ, const char *fmt, ...)
{
    va_list args;
    char text[EX_WHY_BYTES];
    va_start(args, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    print_story(run, "bits differ", text);
    run->counts.differ += differ;
    ex_report(run);
    _exit(EX_EXIT_DIFFERENT);
}

/* ---- turns ---- */

/* One prefill and perhaps a decode after it.  Made by one thread, checked by the main one. */
struct turn {
    struct ex_session *session;
    struct client *client;
    struct ex_view view;
    uint32_t ids[EX_TOKENS_MAX]; /* The whole prompt. */
    uint32_t count;
    struct ex_prefill prefill;
    struct ex_prefill_answer prefilled;
    bool has_named;
    struct ex_checkpoint named; /* Taken to learn which branch was replayed. */
    bool decodes;
    struct ex_decode decode;
    struct ex_decode_answer decoded;
    bool ok;
    char why[EX_WHY_BYTES];
};

static struct client *client_of(struct ex_run *run, const struct ex_session *session, uint32_t lane)
{
    return ex_daemon_client(run->daemon, session->user, lane);
}

static void look(struct ex_run *run, struct ex_session *session, struct ex_view *view)
{
    char why[EX_WHY_BYTES];
    if (!ex_call_view(client_of(run, session, 0), session->name, view, why))
        ex_wrong(run, "%s", why);
    check_view(run, session, view);
}

static const struct ex_checkpoint *beyond(const struct ex_prefill_answer *answer)
{
    for (uint32_t i = 0; i < answer->point_count; i++)
        if (answer->points[i].position > answer->hit_tokens) return &answer->points[i];
    return NULL;
}

/* Runs on any thread: only calls. */
static void *turn_make(void *context)
{
    struct turn *turn = context;
    turn->ok = ex_call_prefill(turn->client, &turn->prefill, &turn->prefilled, turn->why);
    if (!turn->ok) return NULL;
    if (turn->prefilled.outcome == EX_REPLAY && beyond(&turn->prefilled) == NULL) {
        turn->has_named = true;
        turn->ok = ex_call_checkpoint(turn->client, turn->session->name, EX_LEVEL_DEFAULT,
                                      &turn->named, turn->why);
    }
    if (turn->ok && turn->decodes)
        turn->ok = ex_call_decode(turn->client, &turn->decode, &turn->decoded, turn->why);
    return NULL;
}

static void talk_set(struct ex_session *session, const uint32_t *ids, uint32_t count)
{
    memcpy(session->talk, ids, sizeof(*ids) * count);
    session->talk_count = session->prompt_count = count;
}

static void talk_add(struct ex_session *session, const struct ex_decode_answer *answer)
{
    memcpy(session->talk + session->talk_count, answer->tokens,
           sizeof(*answer->tokens) * answer->count);
    session->talk_count += answer->count;
}

static void turn_check(struct ex_run *run, struct turn *turn, bool alone)
{
    struct ex_session *session = turn->session;
    const struct ex_prefill_answer *answer = &turn->prefilled;
    if (!turn->ok) ex_wrong(run, "%s", turn->why);
    ex_log(run, "%s: %s at %u of %u, computed %u, stored %u%s%s", session->name,
           ex_outcome_name(answer->outcome), answer->hit_tokens, answer->prompt_tokens,
           answer->computed_tokens, answer->stored_tokens, answer->reason[0] != '\0' ? ", " : "",
           answer->reason);
    check_prefill(run, session, &turn->view, turn->ids, turn->count, &turn->prefill, answer,
                  turn->has_named ? &turn->named : beyond(answer), alone);
    if (turn->has_named) check_checkpoint(run, session, &turn->named, session->live, session->live);
    talk_set(session, turn->ids, turn->count);
    if (!turn->decodes) return;
    ex_log(run, "%s: decoded %u tokens%s", session->name, turn->decoded.count,
           turn->decode.forced_count > 0 ? " (forced)" : "");
    check_decode(run, session, ref_copy(session->live), &turn->decode, &turn->decoded);
    talk_add(session, &turn->decoded);
}

/* A checkpoint of the head's own branch, to send only what follows it. */
static bool draw_parent(struct ex_run *run, const struct ex_view *view, struct ex_id *ret_id)
{
    struct ex_id at = view->head;
    uint32_t up = ex_random_below(&run->random, 3);
    bool found = view->has_head;
    for (uint32_t i = view->point_count; found && i-- > 0;) {
        const struct ex_checkpoint *point = &view->points[i];
        if (!ex_id_equal(&point->id, &at)) continue;
        if (point->expired || point->position > EX_PROMPT_MAX) return false;
        *ret_id = point->id;
        if (up-- == 0 || !point->has_parent) return true;
        at = point->parent; /* Parents stand before children. */
    }
    return false;
}

static void turn_draw(struct ex_run *run, struct turn *turn, struct ex_session *session,
                      uint32_t lane)
{
    const char *what = "parent and more";
    *turn = (struct turn){.session = session, .client = client_of(run, session, lane)};
    look(run, session, &turn->view);
    turn->prefill.session = turn->decode.session = session->name;
    uint32_t sent_from = 0;
    if (ex_random_percent(&run->random, 15) &&
        draw_parent(run, &turn->view, &turn->prefill.parent)) {
        const struct ex_point *point = check_point_find(session, &turn->prefill.parent);
        turn->prefill.has_parent = true;
        sent_from = point->position;
        memcpy(turn->ids, ref_ids(point->rows), sizeof(*turn->ids) * sent_from);
        turn->count = sent_from + script_suffix(run, session, sent_from,
                                                ex_random_between(&run->random, 1, 60),
                                                turn->ids + sent_from);
    } else {
        turn->count = script_prompt(run, session, turn->ids, &what);
    }
    turn->prefill.ids = turn->ids + sent_from;
    turn->prefill.count = turn->count - sent_from;
    script_prefill(run, turn->count, &turn->prefill);
    turn->decodes = ex_random_percent(&run->random, 75);
    script_decode(run, &turn->decode);
    const uint32_t *anchors = turn->prefill.anchors;
    ex_log(run,
           "%s: prefill %u (%s from %u) stable %u anchors %u %u %u %u%s level %u; view %s at %u",
           session->name, turn->count, what, sent_from, turn->prefill.stable_tokens, anchors[0],
           anchors[1], anchors[2], anchors[3], turn->prefill.no_checkpoint ? " no checkpoint" : "",
           turn->prefill.level, turn->view.live ? "live" : "stored", turn->view.head_position);
}

static void one_turn(struct ex_run *run, struct ex_session *session)
{
    struct turn *turn = calloc(1, sizeof(*turn));
    if (turn == NULL) ex_wrong(run, "out of memory");
    turn_draw(run, turn, session, 0);
    (void)turn_make(turn);
    turn_check(run, turn, true);
    free(turn);
}

static uint32_t sessions_max(const struct ex_run *run)
{
    return run->crowd ? EX_SESSIONS_MAX : EX_SESSIONS_FEW;
}

/* Nobody can push anybody out: there are more live slots than sessions of this history, which are
 * the ones used last. */
static bool fits_beside(const struct ex_run *run)
{
    return run->setup.live_sessions > sessions_max(run) && run->session_count > 1;
}

/* Side by side: chunks and steps of all of them share the worker's passes. */
static void turns_beside(struct ex_run *run)
{
    const uint32_t first = ex_random_below(&run->random, run->session_count);
    const uint32_t count = run->crowd ? ex_random_between(&run->random, 2, run->session_count) : 2;
    struct turn *turns = calloc(count, sizeof(*turns));
    pthread_t threads[EX_SESSIONS_MAX];
    if (turns == NULL) ex_wrong(run, "out of memory");
    ex_log(run, "side by side:");
    for (uint32_t i = 0; i < count; i++)
        turn_draw(run, &turns[i], &run->sessions[(first + i) % run->session_count], i);
    for (uint32_t i = 1; i < count; i++)
        if (pthread_create(&threads[i], NULL, turn_make, &turns[i]) != 0)
            ex_wrong(run, "no thread");
    (void)turn_make(&turns[0]);
    for (uint32_t i = 1; i < count; i++)
        (void)pthread_join(threads[i], NULL);
    for (uint32_t i = 0; i < count; i++)
        turn_check(run, &turns[i], false);
    run->counts.beside += count;
    free(turns);
}

/* ---- a decode by itself ---- */

static struct ref_state *stored_head(struct ex_run *run, struct ex_session *session,
                                     const struct ex_view *view, const uint32_t *ids,
                                     uint32_t count, const struct ex_lookup_answer *lookup,
                                     const struct ex_decode_answer *answer)
{
    const struct ex_point *head = check_point_find(session, &view->head);
    struct ex_said said = {lookup->outcome, lookup->hit_tokens, lookup->has_resumed,
                           lookup->resumed};
    bool window = false;
    run->counts.restored++;
    for (uint32_t i = 0; i < view->point_count; i++)
        if (ex_id_equal(&view->points[i].id, &view->head)) window = view->points[i].window;
    if (window && ref_image_state(head->image).has_pending) {
        /* Taken where it stands: the pending token goes on from there. */
        if (answer->outcome != EX_EXACT)
            ex_wrong(run, "%s, the head's window has a pending token",
                     ex_outcome_name(answer->outcome));
        run->counts.turns++;
        run->counts.outcomes[EX_EXACT]++;
        run->counts.from_image++;
        if (count % 2 == 1) run->counts.from_image_odd++;
        return ref_copy(head->image);
    }
    if (answer->outcome != said.outcome)
        ex_wrong(run, "%s, Lookup before said %s", ex_outcome_name(answer->outcome),
                 ex_outcome_name(said.outcome));
    check_plan(run, session, view, ids, count, &said, true);
    struct ref_state *state = check_source(run, session, view, ids, count, &said,
                                           answer->point_count > 0 ? &answer->points[0] : NULL);
    const uint32_t window_tokens = ref_model_layout(run->model)->window_tokens;
    const uint32_t replayed = said.outcome == EX_REPLAY ? window_tokens : 0;
    ref_prefill(state, ids, said.hit_tokens - replayed, count, 64);
    return state;
}

static void stored_decode(struct ex_run *run, struct ex_session *session,
                          const struct ex_view *view, struct ex_decode *call)
{
    struct client *client = client_of(run, session, 0);
    struct ex_lookup_answer lookup;
    struct ex_decode_answer answer;
    char why[EX_WHY_BYTES];
    const struct ex_point *head = check_point_find(session, &view->head);
    const uint32_t count = head->position;
    uint32_t ids[EX_TOKENS_MAX];
    memcpy(ids, ref_ids(head->rows), sizeof(*ids) * count);
    call->no_checkpoint = false; /* Its id tells which branch was restored. */
    if (!ex_call_lookup(client, session->name, ids, count, &lookup, why)) ex_wrong(run, "%s", why);
    if (!ex_call_decode(client, call, &answer, why)) {
        /* Refused when the client knows of tokens that were never saved and are gone: an answer
         * from the stored head would belong to another prompt. */
        const bool there =
            session->talk_count == count && memcmp(session->talk, ids, sizeof(*ids) * count) == 0;
        if (strstr(why, "HEAD_MOVED") == NULL || there) ex_wrong(run, "%s", why);
        ex_log(run, "%s: decode refused, the head fell back to %u", session->name, count);
        one_turn(run, session);
        return;
    }
    ex_log(run, "%s: decode of %u on a stored head at %u: %s (lookup %s at %u)", session->name,
           call->max_tokens, count, ex_outcome_name(answer.outcome),
           ex_outcome_name(lookup.outcome), lookup.hit_tokens);
    struct ref_state *state = stored_head(run, session, view, ids, count, &lookup, &answer);
    const struct kv_image_state at = ref_image_state(state);
    talk_set(session, ids, count);
    if (at.has_pending) session->talk[session->talk_count++] = at.pending;
    check_decode(run, session, state, call, &answer);
    talk_add(session, &answer);
}

static void one_decode(struct ex_run *run, struct ex_session *session)
{
    struct ex_view *view = calloc(1, sizeof(*view));
    struct ex_decode call = {.session = session->name};
    struct ex_decode_answer answer;
    char why[EX_WHY_BYTES];
    if (view == NULL) ex_wrong(run, "out of memory");
    script_decode(run, &call);
    look(run, session, view);
    if (!view->live && view->idle_ms > EX_POOL_TTL_MS) {
        /* A live head past its time goes at the decode; let it go now, to see what is left. */
        if (!ex_call_close(client_of(run, session, 0), session->name, why))
            ex_wrong(run, "%s", why);
        look(run, session, view);
    }
    if (view->live) {
        ex_log(run, "%s: decode of %u on the live head at %u", session->name, call.max_tokens,
               view->head_position);
        if (!ex_call_decode(client_of(run, session, 0), &call, &answer, why))
            ex_wrong(run, "%s", why);
        check_decode(run, session, ref_copy(session->live), &call, &answer);
        if (session->talk_count + answer.count < EX_TOKENS_MAX) talk_add(session, &answer);
    } else if (view->has_head) {
        stored_decode(run, session, view, &call);
    } else {
        one_turn(run, session);
    }
    free(view);
}

/* ---- what happens between turns ---- */

static void rollback(struct ex_run *run, struct ex_session *session)
{
    struct ex_view *view = calloc(1, sizeof(*view));
    uint32_t position = 0;
    char why[EX_WHY_BYTES];
    if (view == NULL) ex_wrong(run, "out of memory");
    look(run, session, view);
    if (view->point_count > 0) {
        const struct ex_checkpoint *to =
            &view->points[ex_random_below(&run->random, view->point_count)];
        if (!to->expired) {
            ex_log(run, "%s: rollback to %u", session->name, to->position);
            if (!ex_call_rollback(client_of(run, session, 0), session->name, &to->id, &position,
                                  why))
                ex_wrong(run, "%s", why);
            if (position != to->position)
                ex_wrong(run, "rolled back to %u, asked for %u", position, to->position);
            talk_set(session, ref_ids(check_point_find(session, &to->id)->rows), position);
        }
    }
    free(view);
}

static void take_checkpoint(struct ex_run *run, struct ex_session *session)
{
    struct ex_view *view = calloc(1, sizeof(*view));
    struct ex_checkpoint checkpoint;
    char why[EX_WHY_BYTES];
    if (view == NULL) ex_wrong(run, "out of memory");
    look(run, session, view);
    /* A live head past its time may or may not be gone: not worth a case of its own. */
    const bool late = !view->live && view->idle_ms > EX_POOL_TTL_MS;
    if ((view->live || view->has_head) && !late) {
        ex_log(run, "%s: checkpoint at %u", session->name, view->head_position);
        if (!ex_call_checkpoint(client_of(run, session, 0), session->name, EX_LEVEL_DEFAULT,
                                &checkpoint, why))
            ex_wrong(run, "%s", why);
        if (checkpoint.position != view->head_position)
            ex_wrong(run, "the checkpoint is at %u, the head at %u", checkpoint.position,
                     view->head_position);
        if (view->live) check_checkpoint(run, session, &checkpoint, session->live, session->live);
    }
    free(view);
}

static void advance(struct ex_run *run)
{
    char why[EX_WHY_BYTES];
    const bool far = ex_random_percent(&run->random, 10);
    const bool near = !far && ex_random_percent(&run->random, 30);
    const uint64_t ms = far ? EX_ROWS_TTL_MS + 1000 : near ? 1000 : EX_POOL_TTL_MS + 1000;
    ex_log(run, "clock: %llu s later", (unsigned long long)(ms / 1000));
    if (!ex_call_advance(ex_daemon_operator(run->daemon), ms, why)) ex_wrong(run, "%s", why);
    if (!near) run->counts.expiries++;
    if (!far) return;
    for (uint32_t i = 0; i < run->session_count; i++)
        for (uint32_t j = 0; j < run->sessions[i].point_count; j++)
            run->sessions[i].points[j].acknowledged = false;
}

static void restart(struct ex_run *run)
{
    char why[EX_WHY_BYTES];
    const bool kill = ex_random_percent(&run->random, 60);
    ex_setup_draw(&run->setup, &run->random, run->crowd);
    ex_log(run, "%s, then chunk %u, live %u, pool slots %u", kill ? "kill -9" : "SIGTERM",
           run->setup.chunk_tokens, run->setup.live_sessions, run->setup.pool_slots);
    if (!ex_daemon_stop(run->daemon, kill ? SIGKILL : SIGTERM, why) ||
        !ex_setup_start(run->daemon, &run->setup, why))
        ex_wrong(run, "%s", why);
    if (kill) run->counts.kills++;
    run->counts.restarts++;
}

static void close_one(struct ex_run *run, struct ex_session *session)
{
    char why[EX_WHY_BYTES];
    ex_log(run, "%s: close", session->name);
    if (!ex_call_close(client_of(run, session, 0), session->name, why)) ex_wrong(run, "%s", why);
}

static void between(struct ex_run *run)
{
    struct ex_session *session = &run->sessions[ex_random_below(&run->random, run->session_count)];
    const uint32_t kind = ex_random_below(&run->random, 100);
    if (kind < 12) rollback(run, session);
    if (kind >= 12 && kind < 24) take_checkpoint(run, session);
    if (kind >= 24 && kind < 38) close_one(run, session);
    if (kind >= 38 && kind < 52) advance(run);
    if (kind >= 52 && kind < 56) restart(run);
}

void ex_history(struct ex_run *run, uint32_t history)
{
    char why[EX_WHY_BYTES];
    run->history = history;
    run->random.state = ex_mix(ex_mix(run->seed) + history);
    run->turn = run->log_used = run->session_count = 0;
    run->log[0] = '\0';
    const uint32_t sessions =
        ex_random_between(&run->random, run->crowd ? 2 : 1, sessions_max(run));
    /* A step of a crowd is a turn of most of its sessions. */
    const uint32_t turns = ex_random_between(&run->random, run->crowd ? 3 : 7, run->crowd ? 6 : 13);
    for (uint32_t i = 0; i < sessions; i++) {
        struct ex_session *session = &run->sessions[i];
        memset(session, 0, sizeof(*session));
        session->user = ex_random_below(&run->random, EX_TALKERS);
        (void)snprintf(session->name, sizeof(session->name), "h%u.%u", history, i);
        if (!ex_call_open(client_of(run, session, 0), session->name, why)) ex_wrong(run, "%s", why);
        run->session_count++;
    }
    for (run->turn = 1; run->turn <= turns; run->turn++) {
        struct ex_session *session = &run->sessions[ex_random_below(&run->random, sessions)];
        const uint32_t kind = ex_random_below(&run->random, 100);
        between(run);
        if (kind < 15) {
            one_decode(run, session);
        } else if (kind < (run->crowd ? 75 : 30) && fits_beside(run)) {
            turns_beside(run);
        } else {
            one_turn(run, session);
        }
    }
    run->counts.histories++;
    for (uint32_t i = 0; i < sessions; i++) {
        ref_free(run->sessions[i].live);
        for (uint32_t j = 0; j < run->sessions[i].point_count; j++) {
            ref_free(run->sessions[i].points[j].image);
            ref_free(run->sessions[i].points[j].rows);
        }
    }
}
