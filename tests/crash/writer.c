/*
 * One writer: what a harness sends, until the daemon dies.
 *
 * Every call is noted before it is sent and after it is answered.  A call that fails before the
 * kill is a fault of its own: nothing here asks for what a healthy daemon refuses, but an answer on
 * a head that is not there.
 */

#include "kvstore/base/bytes.h"
#include "tests/crash/expect.h"
#include "tests/harness.h"

enum { LONG_TALK = 270, POINTS_MANY = 7, NEW_MAX = 40 };

static struct client *client_of(const struct cr_writer *writer)
{
    return ex_daemon_client(writer->run->daemon, writer->user, writer->index);
}

static bool killing(const struct cr_writer *writer)
{
    return atomic_load(&writer->run->killing);
}

/* The call was answered after a fault whose answers prove nothing. */
static bool unheard(const struct cr_writer *writer)
{
    return writer->run->deaf && killing(writer);
}

static void begin(struct cr_writer *writer, struct cr_session *session, enum cr_phase phase,
                  const uint32_t *ids, uint32_t count)
{
    atomic_store(&writer->phase, phase);
    writer->counts.calls++;
    session->in_flight = true;
    session->has_rolled = false;
    session->flight_count = count;
    if (count > 0) memcpy(session->flight, ids, sizeof(*ids) * count);
}

static void end(struct cr_writer *writer, struct cr_session *session)
{
    atomic_store(&writer->phase, CR_IDLE);
    session->in_flight = false;
    (void)clock_gettime(CLOCK_MONOTONIC, &session->used);
}

/* A call that was answered.  save_reason: why what it left could not be stored; a disk that went
 * away may have the record all the same. */
static void end_saved(struct cr_writer *writer, struct cr_session *session, const char *save_reason)
{
    /* A slow machine: it is as not saved yet. */
    const bool saved = save_reason[0] == '\0' || strcmp(save_reason, "SSD_SLOW") == 0;
    if (!saved && !killing(writer))
        cr_fail(writer, CR_WRONG, session, NULL, "not saved: %s", save_reason);
    end(writer, session);
    session->in_flight = !saved;
}

/* False: refused as it may be, and nothing is under way. */
static void failed(struct cr_writer *writer, struct cr_session *session, const char *why)
{
    cr_note(writer->run, session, "failed: %.200s", why);
    session->head = 0;
    /* Its result is unknown: it stays in flight. */
    if (killing(writer) || strstr(why, "SSD_SLOW") != NULL) return;
    /* Equal tokens with other marks are another branch, which we do not keep apart. */
    if (strstr(why, "HEAD_MOVED") == NULL && strstr(why, "HEAD_EMPTY") == NULL &&
        strstr(why, "CHECKPOINT_OTHER_BRANCH") == NULL &&
        !(session->fleeting && strstr(why, "CHECKPOINT_NOT_FOUND") != NULL))
        cr_fail(writer, CR_WRONG, session, NULL, "refused before the kill: %.300s", why);
    end(writer, session);
}

static enum ex_level draw_level(struct cr_writer *writer)
{
    const uint32_t kind = ex_random_below(&writer->random, 100);
    if (kind < 25) return EX_LEVEL_ACCEPTED;
    if (kind < 45) return EX_LEVEL_RAM;
    return kind < 70 ? EX_LEVEL_SSD : EX_LEVEL_DEFAULT;
}

static void draw_ids(struct cr_writer *writer, uint32_t *ids, uint32_t count)
{
    const uint32_t vocab = cr_oracle_vocab(writer->oracle);
    for (uint32_t i = 0; i < count; i++)
        ids[i] = ex_random_below(&writer->random, vocab - 8);
}

static void open_session(struct cr_writer *writer)
{
    struct cr_session *session = cr_session_add(writer);
    char why[EX_WHY_BYTES];
    session->fleeting = ex_random_percent(&writer->random, 15);
    const uint64_t ttl_ms = session->fleeting ? CR_FLEETING_MS : 0;
    begin(writer, session, CR_OPEN, NULL, 0);
    cr_note(writer->run, session, "open%s", session->fleeting ? ", fleeting" : "");
    if (!ex_call_open_ttl(client_of(writer), session->name, ttl_ms, why)) {
        failed(writer, session, why);
        return;
    }
    session->opened = !unheard(writer);
    cr_note(writer->run, session, "opened");
    end(writer, session);
}

/* ---- prefill ---- */

/* The prompt: what was said and more, an edited tail, or another way on from an older checkpoint.
 */
static uint32_t draw_prompt(struct cr_writer *writer, const struct cr_session *session,
                            uint32_t *ids)
{
    const uint32_t kind = ex_random_below(&writer->random, 100);
    uint32_t keep = session->talk_count, more = ex_random_between(&writer->random, 2, NEW_MAX);
    memcpy(ids, session->talk, sizeof(*ids) * keep);
    if (keep == 0) more = ex_random_between(&writer->random, CR_FIRST_MIN, 150);
    if (kind >= 60 && keep > CR_FIRST_MIN + 20u) keep -= ex_random_between(&writer->random, 1, 20);
    if (kind >= 85 && session->point_count > 0) {
        const struct cr_point *point =
            &session->points[ex_random_below(&writer->random, session->point_count)];
        keep = point->position;
        memcpy(ids, point->ids, sizeof(*ids) * keep);
    }
    draw_ids(writer, ids + keep, more);
    return keep + more;
}

/* The deepest checkpoint on the branch of the head. */
static const struct cr_point *deepest(const struct cr_session *session)
{
    const struct cr_point *best = NULL;
    for (uint32_t i = 0; i < session->point_count; i++) {
        const struct cr_point *point = &session->points[i];
        if (point->position > session->head || !point->durable) continue;
        if (best != NULL && point->position <= best->position) continue;
        if (memcmp(point->ids, session->talk, sizeof(*point->ids) * point->position) == 0)
            best = point;
    }
    return best;
}

static void fill_prefill(struct cr_writer *writer, const struct cr_session *session,
                         const uint32_t *ids, uint32_t count, struct ex_prefill *call)
{
    const struct cr_point *parent = NULL;
    *call = (struct ex_prefill){.session = session->name,
                                .ids = ids,
                                .count = count,
                                .level = (uint32_t)draw_level(writer)};
    if (session->head > 0 && ex_random_percent(&writer->random, 20)) parent = deepest(session);
    if (parent != NULL && parent->position < count &&
        memcmp(parent->ids, ids, sizeof(*ids) * parent->position) == 0) {
        call->has_parent = true;
        call->parent = parent->id;
        call->ids = ids + parent->position;
        call->count = count - parent->position;
    }
    if (ex_random_percent(&writer->random, 15)) call->stable_tokens = count - 2;
    if (ex_random_percent(&writer->random, 15)) {
        call->anchor_count = 1;
        call->anchors[0] = ex_random_between(&writer->random, CR_FIRST_MIN - 4, count - 2);
    }
}

static void prefill(struct cr_writer *writer, struct cr_session *session)
{
    uint32_t ids[CR_TOKENS_MAX];
    char why[EX_WHY_BYTES];
    struct ex_prefill call;
    struct ex_prefill_answer answer;
    const uint32_t count = draw_prompt(writer, session, ids);
    fill_prefill(writer, session, ids, count, &call);
    begin(writer, session, CR_PREFILL, ids, count);
    cr_note(writer->run, session, "prefill of %u, %u sent, stable %u, anchor %u, level %u", count,
            call.count, call.stable_tokens, call.anchor_count == 0 ? 0 : call.anchors[0],
            call.level);
    if (!ex_call_prefill(client_of(writer), &call, &answer, why)) {
        failed(writer, session, why);
        return;
    }
    cr_note(writer->run, session, "prefilled: %s, hit %u, %u checkpoints%s%s",
            ex_outcome_name(answer.outcome), answer.hit_tokens, answer.point_count,
            answer.save_reason[0] == '\0' ? "" : ", ", answer.save_reason);
    memcpy(session->talk, ids, sizeof(*ids) * count);
    session->talk_count = session->head = count;
    for (uint32_t i = 0; i < answer.point_count; i++)
        cr_learn(writer, session, &answer.points[i], ids, count);
    end_saved(writer, session, answer.save_reason);
}

/* ---- the others ---- */

static void decoded(struct cr_writer *writer, struct cr_session *session,
                    const struct ex_decode *call, const struct ex_decode_answer *answer)
{
    uint32_t *talk = session->talk;
    uint32_t at = session->talk_count;
    /* A window that expired took the pending token along; the answer says where it begins. */
    if (session->fleeting) at = KV_MIN(at, answer->first_position);
    if (!answer->ended || answer->torn || answer->count != call->forced_count ||
        answer->first_position != at)
        cr_fail(writer, CR_WRONG, session, NULL,
                "an answer of %u tokens at %u, torn %d, ended %d, wanted %u at %u", answer->count,
                answer->first_position, answer->torn, answer->ended, call->forced_count, at);
    memcpy(talk + at, call->forced, sizeof(*talk) * call->forced_count);
    session->talk_count = at + call->forced_count;
    session->head = answer->head_position;
    cr_note(writer->run, session, "decoded from %u: head %u, %u checkpoints %s",
            answer->first_position, answer->head_position, answer->point_count,
            answer->save_reason);
    for (uint32_t i = 0; i < answer->point_count; i++)
        cr_learn(writer, session, &answer->points[i], talk, session->talk_count);
    end_saved(writer, session, answer->save_reason);
}

static void decode(struct cr_writer *writer, struct cr_session *session)
{
    char why[EX_WHY_BYTES];
    struct ex_decode_answer answer;
    uint32_t *talk = session->talk;
    struct ex_decode call = {.session = session->name,
                             .ignore_eos = true,
                             .forced_count = ex_random_between(&writer->random, 1, 6),
                             .level = (uint32_t)draw_level(writer)};
    call.max_tokens = call.forced_count;
    draw_ids(writer, call.forced, call.forced_count);
    const uint32_t count = session->talk_count + call.forced_count;
    memcpy(talk + session->talk_count, call.forced, sizeof(*talk) * call.forced_count);
    begin(writer, session, CR_DECODE, talk, count);
    cr_note(writer->run, session, "decode of %u from %u, level %u", call.forced_count,
            session->talk_count, call.level);
    if (!ex_call_decode(client_of(writer), &call, &answer, why)) {
        session->talk_count = count;
        failed(writer, session, why);
        return;
    }
    decoded(writer, session, &call, &answer);
}

static void checkpoint(struct cr_writer *writer, struct cr_session *session)
{
    char why[EX_WHY_BYTES];
    struct ex_checkpoint point;
    const enum ex_level level = draw_level(writer);
    begin(writer, session, CR_CHECKPOINT, session->talk, session->talk_count);
    cr_note(writer->run, session, "checkpoint at %u, level %u", session->head, (uint32_t)level);
    if (!ex_call_checkpoint(client_of(writer), session->name, level, &point, why)) {
        failed(writer, session, why);
        return;
    }
    cr_note(writer->run, session, "checkpointed at %u", point.position);
    cr_learn(writer, session, &point, session->talk, session->talk_count);
    end(writer, session);
}

static void wait_durable(struct cr_writer *writer, struct cr_session *session)
{
    char why[EX_WHY_BYTES], text[33];
    struct cr_point *point = NULL;
    for (uint32_t i = 0; i < session->point_count && point == NULL; i++)
        if (!session->points[i].durable) point = &session->points[i];
    if (point == NULL) return;
    begin(writer, session, CR_WAIT, NULL, 0);
    cr_id_text(&point->id, text);
    cr_note(writer->run, session, "wait for %s", text);
    if (!ex_call_wait(client_of(writer), session->name, &point->id, why)) {
        failed(writer, session, why);
        return;
    }
    if (!unheard(writer)) cr_make_durable(writer, session, point);
    end(writer, session);
}

static void roll_back(struct cr_writer *writer, struct cr_session *session)
{
    char why[EX_WHY_BYTES], text[33];
    uint32_t position;
    const struct cr_point *point =
        &session->points[ex_random_below(&writer->random, session->point_count)];
    begin(writer, session, CR_ROLLBACK, NULL, 0);
    cr_id_text(&point->id, text);
    cr_note(writer->run, session, "roll back to %s at %u", text, point->position);
    if (!ex_call_rollback(client_of(writer), session->name, &point->id, &position, why)) {
        failed(writer, session, why);
        return;
    }
    cr_note(writer->run, session, "rolled back to %u", position);
    if (position != point->position)
        cr_fail(writer, CR_WRONG, session, &point->id, "rolled back to %u", position);
    memcpy(session->talk, point->ids, sizeof(*point->ids) * point->position);
    session->talk_count = point->position;
    session->head = 0; /* An answer could go on from a pending token we do not know. */
    session->has_rolled = point->durable && !unheard(writer);
    session->rolled = point->id;
    end(writer, session);
}

static void close_session(struct cr_writer *writer, struct cr_session *session)
{
    char why[EX_WHY_BYTES];
    begin(writer, session, CR_CLOSE, NULL, 0);
    cr_note(writer->run, session, "close");
    if (!ex_call_close(client_of(writer), session->name, why)) {
        failed(writer, session, why);
        return;
    }
    session->head = 0;
    end(writer, session);
}

/* Whatever it held is no longer asked for; the next call opens another session. */
static void delete_session(struct cr_writer *writer, struct cr_session *session)
{
    char why[EX_WHY_BYTES];
    begin(writer, session, CR_DELETE, NULL, 0);
    session->leaving = true;
    cr_note(writer->run, session, "delete");
    if (!ex_call_delete(client_of(writer), session->name, why)) {
        failed(writer, session, why);
        return;
    }
    if (unheard(writer)) return; /* Its result is unknown: it stays in flight. */
    session->deleted = true;
    session->leaving = false;
    cr_note(writer->run, session, "deleted");
    end(writer, session);
}

static void look_up(struct cr_writer *writer, struct cr_session *session)
{
    char why[EX_WHY_BYTES];
    struct ex_lookup_answer answer;
    begin(writer, session, CR_LOOKUP, NULL, 0);
    if (!ex_call_lookup(client_of(writer), session->name, session->talk, session->talk_count,
                        &answer, why)) {
        failed(writer, session, why);
        return;
    }
    end(writer, session);
}

void *cr_write(void *context)
{
    struct cr_writer *writer = context;
    while (!writer->run->idle && !killing(writer) && cr_failed(&writer->counts) == 0) {
        struct cr_session *session = cr_session_last(writer);
        const uint32_t kind = ex_random_below(&writer->random, 100);
        if (session == NULL || !session->opened || session->deleted || session->leaving ||
            session->talk_count > LONG_TALK || (session->point_count >= POINTS_MANY && kind < 50)) {
            open_session(writer);
            continue;
        }
        if (session->talk_count == 0 || kind < 50)
            prefill(writer, session);
        else if (kind < 72 && session->head > 0)
            decode(writer, session);
        else if (kind < 82 && session->head > 0)
            checkpoint(writer, session);
        else if (kind < 89)
            wait_durable(writer, session);
        else if (kind < 94 && session->point_count > 0)
            roll_back(writer, session);
        else if (kind < 96)
            close_session(writer, session);
        else if (kind < 98 && session->point_count > 2)
            delete_session(writer, session);
        else
            look_up(writer, session);
    }
    return NULL;
}
