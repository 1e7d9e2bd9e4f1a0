/*
 * After the restart: everything that was acknowledged is there, and nothing else is.
 *
 * Each writer compares its own sessions.  All checkpoints are compared with what is listed; a turn
 * tries those of the session in use and those not tried since their session was left, and at the
 * end of a round all.  A turn shows three things: the resume reaches the checkpoint, no plan was
 * weakened, and the logits that follow are those of a run that never stopped.
 */

#include "kvstore/base/bytes.h"
#include "tests/crash/expect.h"
#include "tests/driver/scratch.h"
#include "tests/harness.h"

#include <time.h>

enum { NAMES_MAX = 4096 };

static struct client *client_of(const struct cr_writer *writer)
{
    return ex_daemon_client(writer->run->daemon, writer->user, writer->index);
}

static bool to_be_tried(const struct cr_writer *writer, const struct cr_session *session,
                        const struct cr_point *point)
{
    if (session->deleted) return false;
    return writer->run->deep || session == cr_session_last(writer) || !point->tried;
}

/* ---- the list ---- */

/* What was under way may be there whole: then it is there for good. */
static void adopt(struct cr_writer *writer, struct cr_session *session,
                  const struct ex_checkpoint *listed)
{
    if (listed->branch) return; /* Content of ours, cut where we did not ask. */
    if (!session->in_flight || listed->position > session->flight_count) {
        cr_fail(writer, CR_WRONG, session, &listed->id, "a checkpoint at %u that nobody made",
                listed->position);
        return;
    }
    cr_learn(writer, session, listed, session->flight, session->flight_count);
    struct cr_point *point = cr_find(session, &listed->id);
    if (point != NULL) point->listed = true;
    writer->counts.adopted++;
}

static const struct ex_checkpoint *listed_as(const struct ex_view *view, const struct ex_id *id)
{
    for (uint32_t i = 0; i < view->point_count; i++)
        if (ex_id_equal(&view->points[i].id, id)) return &view->points[i];
    return NULL;
}

/* Those that were acknowledged below SSD and went with the daemon. */
static void forget_unlisted(struct cr_session *session, const struct ex_view *view)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < session->point_count; i++) {
        if (session->points[i].durable || listed_as(view, &session->points[i].id) != NULL)
            session->points[kept++] = session->points[i];
        else
            free(session->points[i].ids);
    }
    session->point_count = kept;
}

static void compare_list(struct cr_writer *writer, struct cr_session *session,
                         const struct ex_view *view)
{
    for (uint32_t i = 0; i < session->point_count; i++) {
        struct cr_point *point = &session->points[i];
        const struct ex_checkpoint *listed = listed_as(view, &point->id);
        point->listed = listed != NULL;
        if (point->durable) writer->counts.acknowledged++;
        if (listed == NULL) {
            if (point->durable)
                cr_fail(writer, CR_LOST, session, &point->id,
                        "acknowledged at level SSD at %u, and not listed", point->position);
            continue;
        }
        if (!listed->durable)
            cr_fail(writer, CR_WRONG, session, &point->id, "listed, but not on SSD");
        if (listed->position != point->position || memcmp(listed->digest, point->digest, 32) != 0)
            cr_fail(writer, CR_WRONG, session, &point->id, "listed with other content, at %u",
                    listed->position);
        else if (point->durable)
            writer->counts.found++;
        cr_make_durable(writer, session, point);
    }
    for (uint32_t i = 0; i < view->point_count; i++)
        if (cr_find(session, &view->points[i].id) == NULL) adopt(writer, session, &view->points[i]);
    if (view->epoch < session->epoch)
        cr_fail(writer, CR_WRONG, session, NULL, "the epoch went back from %llu to %llu",
                (unsigned long long)session->epoch, (unsigned long long)view->epoch);
    session->epoch = view->epoch;
    if (session->has_rolled && !(view->has_head && ex_id_equal(&view->head, &session->rolled)))
        cr_fail(writer, CR_LOST, session, &session->rolled,
                "the head was rolled back there, and stands at %u", view->head_position);
}

/* ---- turns ---- */

static void prepare(struct cr_writer *writer, struct cr_point *point)
{
    const uint32_t from = point->position + CR_SUFFIX;
    if (point->has_crcs) return;
    cr_oracle_crcs(writer->oracle, point->ids, from, from + CR_ANSWER - 1, point->crcs);
    point->has_crcs = true;
}

static bool try_resume(struct cr_writer *writer, struct cr_session *session,
                       const struct cr_point *point)
{
    char why[EX_WHY_BYTES];
    struct ex_prefill_answer answer;
    const double idle_s =
        ex_seconds_since(session->in_flight ? &writer->run->died : &session->used);
    const uint32_t even = point->position & ~1u;
    const struct ex_prefill call = {.session = session->name,
                                    .ids = point->ids,
                                    .count = point->position + CR_SUFFIX,
                                    .no_checkpoint = true,
                                    .level = EX_LEVEL_ACCEPTED};
    if (!ex_call_prefill(client_of(writer), &call, &answer, why)) {
        cr_fail(writer, CR_LOST, session, &point->id, "a turn on it failed: %.300s", why);
        return false;
    }
    if (session->fleeting) {
        if (answer.hit_tokens == 0) writer->counts.expired++;
        if (answer.hit_tokens == 0 || idle_s < (CR_FLEETING_MS + 100) / 1000.0) return true;
        cr_fail(writer, CR_WRONG, session, &point->id, "expired, and hits %u tokens",
                answer.hit_tokens);
        return false;
    }
    if (answer.weakened > 0 || (even > CR_WINDOW && answer.hit_tokens < even)) {
        cr_fail(writer, CR_TORN, session, &point->id,
                "listed at %u, but a turn on it resumes at %u (%s, reason %s, %u weaker plans)",
                point->position, answer.hit_tokens, ex_outcome_name(answer.outcome), answer.reason,
                answer.weakened);
        return false;
    }
    return true;
}

static void try_point(struct cr_writer *writer, struct cr_session *session, struct cr_point *point)
{
    char why[EX_WHY_BYTES];
    struct ex_decode_answer answer;
    struct ex_decode call = {.session = session->name,
                             .max_tokens = CR_ANSWER,
                             .forced_count = CR_ANSWER,
                             .ignore_eos = true,
                             .no_checkpoint = true,
                             .level = EX_LEVEL_ACCEPTED};
    const uint32_t from = point->position + CR_SUFFIX;
    prepare(writer, point);
    point->tried = true;
    writer->counts.tried++;
    memcpy(call.forced, point->ids + from, sizeof(call.forced[0]) * CR_ANSWER);
    bool ok = false;
    /* On a slow machine the head may go before the answer: it expired, or others needed room. */
    for (int tries = 0; !ok && tries < CR_TRIES; tries++) {
        if (!try_resume(writer, session, point)) return;
        ok = ex_call_decode(client_of(writer), &call, &answer, why);
        if (!ok && strstr(why, "HEAD_") == NULL) break;
    }
    if (!ok) {
        if (session->fleeting && strstr(why, "HEAD_") != NULL) return;
        cr_fail(writer, CR_LOST, session, &point->id, "an answer after it failed: %.300s", why);
        return;
    }
    if (answer.first_position != from || answer.count != CR_ANSWER ||
        memcmp(answer.tokens, call.forced, sizeof(call.forced[0]) * CR_ANSWER) != 0 ||
        memcmp(answer.crcs, point->crcs, sizeof(point->crcs)) != 0)
        cr_fail(writer, CR_WRONG, session, &point->id,
                "%u tokens at %u, logits %08x, want %u at %u, %08x", answer.count,
                answer.first_position, answer.crcs[0], (uint32_t)CR_ANSWER, from, point->crcs[0]);
}

static void compare_session(struct cr_writer *writer, struct cr_session *session,
                            struct ex_view *view)
{
    char why[EX_WHY_BYTES];
    const bool there = ex_call_view(client_of(writer), session->name, view, why);
    if (session->deleted || session->leaving) {
        const bool gone = !there && strstr(why, "SESSION_NOT_FOUND") != NULL;
        if (!there && !gone) cr_fail(writer, CR_WRONG, session, NULL, "deleted: %.300s", why);
        if (session->deleted && there)
            cr_fail(writer, CR_WRONG, session, NULL, "deleted, and back with %u checkpoints",
                    view->point_count);
        if (gone) {
            session->deleted = true;
            writer->counts.deleted++;
        }
        session->leaving = session->in_flight = false;
        if (session->deleted) return;
    }
    if (!there) {
        writer->counts.acknowledged += session->durable_count;
        if (session->opened || strstr(why, "SESSION_NOT_FOUND") == NULL)
            cr_fail(writer, CR_LOST, session, NULL, "the session with %u checkpoints: %.300s",
                    session->durable_count, why);
        return;
    }
    session->opened = true;
    compare_list(writer, session, view);
    /* Listed or not: nothing of it may serve.  One turn, which would renew what is left. */
    if (session->fleeting && session->point_count > 0)
        try_point(writer, session, &session->points[session->point_count - 1]);
    forget_unlisted(session, view);
    const uint32_t lucky = ex_random_below(&writer->random, session->point_count + 1);
    for (uint32_t i = 0; i < session->point_count; i++) {
        struct cr_point *point = &session->points[i];
        if (point->listed && !session->fleeting &&
            (i == lucky || to_be_tried(writer, session, point)))
            try_point(writer, session, point);
    }
    /* The turns moved the head. */
    session->in_flight = session->has_rolled = false;
    session->head = 0;
}

void *cr_compare(void *context)
{
    struct cr_writer *writer = context;
    const struct timespec pause = {.tv_nsec = 500000};
    struct ex_view *view = calloc(1, sizeof(*view));
    EXPECT(view != NULL);
    /* While the daemon starts: what will be asked. */
    for (uint32_t s = 0; s < writer->session_count; s++)
        for (uint32_t i = 0; i < writer->sessions[s]->point_count; i++)
            if (to_be_tried(writer, writer->sessions[s], &writer->sessions[s]->points[i]))
                prepare(writer, &writer->sessions[s]->points[i]);
    while (!atomic_load(&writer->run->ready) && !atomic_load(&writer->run->broken))
        (void)nanosleep(&pause, NULL);
    if (atomic_load(&writer->run->ready))
        for (uint32_t i = 0; i < writer->session_count; i++)
            compare_session(writer, writer->sessions[i], view);
    free(view);
    return NULL;
}

/* ---- users ---- */

static bool has_name(const struct ex_list *list, const char *name)
{
    for (uint32_t i = 0; i < KV_MIN(list->count, list->capacity); i++)
        if (strcmp(list->names[i], name) == 0) return true;
    return false;
}

static void compare_names(struct cr_run *run, uint32_t user, const struct ex_list *list)
{
    uint32_t known = 0;
    for (uint32_t w = 0; w < CR_WRITERS; w++) {
        struct cr_writer *writer = &run->writers[w];
        for (uint32_t i = 0; writer->user == user && i < writer->session_count; i++) {
            const bool listed = has_name(list, writer->sessions[i]->name);
            const bool deleted = writer->sessions[i]->deleted;
            if (listed) known++;
            if (listed && deleted)
                cr_fail(writer, CR_WRONG, writer->sessions[i], NULL, "deleted, and listed");
            if (!listed && writer->sessions[i]->opened && !deleted)
                cr_fail(writer, CR_LOST, writer->sessions[i], NULL, "opened, and not listed");
        }
    }
    if (known != list->count)
        cr_fail(&run->writers[user], CR_WRONG, NULL, NULL,
                "%u sessions are listed that this user never opened", list->count - known);
}

/* One user's tokens in another's session find nothing. */
static void compare_strangers(struct cr_run *run, struct cr_writer *owner, struct cr_writer *other)
{
    char why[EX_WHY_BYTES];
    struct ex_lookup_answer answer;
    const struct cr_session *from = cr_session_last(owner);
    const struct cr_session *in = cr_session_last(other);
    if (from == NULL || from->point_count == 0 || in == NULL || !in->opened || in->deleted) return;
    const struct cr_point *point = &from->points[from->point_count - 1];
    if (!ex_call_lookup(client_of(other), in->name, point->ids, point->position, &answer, why)) {
        cr_fail(other, CR_WRONG, in, NULL, "%.300s", why);
        return;
    }
    if (answer.hit_tokens > 0 || answer.stored_tokens > 8)
        cr_fail(other, CR_WRONG, in, &point->id, "finds %u tokens of another user",
                answer.stored_tokens);
}

void cr_compare_users(struct cr_run *run)
{
    static const char failed[] = "%.300s";
    char why[EX_WHY_BYTES];
    struct ex_stats stats;
    struct ex_list list = {.capacity = NAMES_MAX};
    list.names = calloc(NAMES_MAX, EX_NAME_BYTES);
    EXPECT(list.names != NULL);
    for (uint32_t user = 0; user < EX_USERS; user++) {
        if (ex_call_list(client_of(&run->writers[user]), &list, why))
            compare_names(run, user, &list);
        else
            cr_fail(&run->writers[user], CR_LOST, NULL, NULL, failed, why);
    }
    free(list.names);
    for (uint32_t w = 0; w < CR_WRITERS; w++)
        compare_strangers(run, &run->writers[w], &run->writers[(w + 1) % CR_WRITERS]);
    if (!ex_call_stats(ex_daemon_operator(run->daemon), &stats, why)) {
        cr_fail(&run->writers[0], CR_WRONG, NULL, NULL, failed, why);
        return;
    }
    run->counts.dropped += stats.dropped;
    if (stats.lost_batches > 0)
        cr_fail(&run->writers[0], CR_LOST, NULL, NULL,
                "%llu acknowledged batches are lost, it says",
                (unsigned long long)stats.lost_batches);
    if (stats.wrong_bytes > 0)
        cr_fail(&run->writers[0], CR_WRONG, NULL, NULL, "%llu bytes came back different",
                (unsigned long long)stats.wrong_bytes);
}
