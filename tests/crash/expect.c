/*
 * The expected state, its log, and how a loss is told.
 *
 * A checkpoint becomes durable here when an answer said that its rows are on SSD, when WaitDurable
 * said so, or when a restarted daemon listed it: what was seen once after a restart must not go
 * away at the next.
 */

#include "tests/crash/expect.h"

#include "kvstore/base/bytes.h"
#include "tests/harness.h"

#include <stdarg.h>
#include <unistd.h>

enum { LINE_BYTES = 400, FAILURES_SHOWN = 3 };

const char *const cr_phase_names[CR_PHASES] = {
    "idle",        "OpenSession", "Prefill",      "Decode", "Checkpoint",
    "WaitDurable", "Rollback",    "CloseSession", "Lookup", "DeleteSession",
};

static const char *const fault_names[CR_FAULTS] = {"LOST", "TORN", "WRONG"};

/* ---- log ---- */

static void session_text(const struct cr_session *session, char text[80])
{
    (void)snprintf(text, 80, "u%u/%s", session->user, session->name);
}

void cr_note(struct cr_run *run, const struct cr_session *session, const char *fmt, ...)
{
    char line[LINE_BYTES], who[80];
    va_list args;
    session_text(session, who);
    int used = snprintf(line, sizeof(line), "case %u %s ", run->kill, who);
    va_start(args, fmt);
    used += vsnprintf(line + used, sizeof(line) - (size_t)used, fmt, args);
    va_end(args);
    used = KV_MIN(used, LINE_BYTES - 2);
    line[used] = '\n';
    EXPECT(write(run->log_fd, line, (size_t)used + 1) == used + 1);
}

void cr_id_text(const struct ex_id *id, char text[33])
{
    for (int i = 0; i < 16; i++)
        (void)snprintf(text + 2 * i, 3, "%02x", id->bytes[i]);
}

/* The lines of the log that are about this session. */
static void print_operations(const struct cr_run *run, const struct cr_session *session)
{
    char line[LINE_BYTES], name[80], who[82];
    session_text(session, name);
    (void)snprintf(who, sizeof(who), "%s ", name);
    FILE *file = fopen(run->log_path, "r");
    if (file == NULL) return;
    while (fgets(line, sizeof(line), file) != NULL)
        if (strstr(line, who) != NULL) (void)fprintf(stderr, "  %s", line);
    (void)fclose(file);
}

void cr_fail(struct cr_writer *writer, enum cr_fault fault, const struct cr_session *session,
             const struct ex_id *id, const char *fmt, ...)
{
    struct cr_run *run = writer->run;
    char what[LINE_BYTES], id_text[33] = "none";
    va_list args;
    va_start(args, fmt);
    (void)vsnprintf(what, sizeof(what), fmt, args);
    va_end(args);
    if (id != NULL) cr_id_text(id, id_text);
    writer->counts.faults[fault]++;
    (void)pthread_mutex_lock(&run->lock);
    if (run->failures_shown++ < FAILURES_SHOWN) {
        (void)fprintf(stderr, "%s: %s: seed %llu case %u user %u session %s checkpoint %s: %s\n",
                      run->program, fault_names[fault], (unsigned long long)run->seed, run->kill,
                      writer->user, session == NULL ? "-" : session->name, id_text, what);
        if (session != NULL) print_operations(run, session);
    }
    (void)pthread_mutex_unlock(&run->lock);
}

uint64_t cr_failed(const struct cr_counts *counts)
{
    return counts->faults[CR_LOST] + counts->faults[CR_TORN] + counts->faults[CR_WRONG];
}

void cr_counts_add(struct cr_counts *to, const struct cr_counts *more)
{
    uint64_t *sums = (uint64_t *)to;
    const uint64_t *numbers = (const uint64_t *)more;
    _Static_assert(sizeof(*to) % sizeof(*sums) == 0, "counts are u64 only");
    for (size_t i = 0; i < sizeof(*to) / sizeof(*sums); i++)
        sums[i] += numbers[i];
}

/* ---- checkpoints ---- */

struct cr_point *cr_find(struct cr_session *session, const struct ex_id *id)
{
    for (uint32_t i = 0; i < session->point_count; i++)
        if (ex_id_equal(&session->points[i].id, id)) return &session->points[i];
    return NULL;
}

void cr_make_durable(struct cr_writer *writer, struct cr_session *session, struct cr_point *point)
{
    char text[33];
    if (point->durable || session->fleeting) return;
    point->durable = true;
    session->durable_count++;
    (void)atomic_fetch_add(&writer->run->acks, 1);
    cr_id_text(&point->id, text);
    cr_note(writer->run, session, "SSD %s at %u", text, point->position);
}

/* The turn that tries it: tokens of its own, and an answer given by us. */
static uint32_t *point_ids(struct cr_writer *writer, const struct ex_checkpoint *from,
                           const uint32_t *ids)
{
    const uint32_t vocab = cr_oracle_vocab(writer->oracle);
    uint32_t *all = malloc(sizeof(*all) * (from->position + CR_SUFFIX + CR_ANSWER));
    uint64_t number = ex_mix(writer->run->seed) ^ from->position;
    EXPECT(all != NULL);
    memcpy(all, ids, sizeof(*ids) * from->position);
    for (uint32_t i = 0; i < 8; i++)
        number = number << 8 ^ from->id.bytes[i];
    for (uint32_t i = 0; i < CR_SUFFIX + CR_ANSWER; i++)
        all[from->position + i] = (uint32_t)(ex_mix(number + i) % (vocab - 8));
    return all;
}

void cr_learn(struct cr_writer *writer, struct cr_session *session,
              const struct ex_checkpoint *from, const uint32_t *ids, uint32_t count)
{
    struct cr_point *point = cr_find(session, &from->id);
    if (point != NULL &&
        (point->position != from->position || memcmp(point->digest, from->digest, 32) != 0)) {
        cr_fail(writer, CR_WRONG, session, &from->id, "same id, another position or digest: %u, %u",
                point->position, from->position);
        return;
    }
    if (from->position == 0 || from->position > count) {
        cr_fail(writer, CR_WRONG, session, &from->id, "a checkpoint at %u of a history of %u",
                from->position, count);
        return;
    }
    if (point == NULL) {
        if (session->point_count == session->point_capacity) {
            session->point_capacity = 2 * session->point_capacity + 16;
            session->points =
                realloc(session->points, sizeof(*session->points) * session->point_capacity);
            EXPECT(session->points != NULL);
        }
        point = &session->points[session->point_count++];
        *point = (struct cr_point){
            .id = from->id, .position = from->position, .ids = point_ids(writer, from, ids)};
        memcpy(point->digest, from->digest, 32);
    }
    if (from->durable && !(writer->run->deaf && atomic_load(&writer->run->killing)))
        cr_make_durable(writer, session, point);
}

/* ---- sessions ---- */

struct cr_session *cr_session_add(struct cr_writer *writer)
{
    struct cr_session *session = calloc(1, sizeof(*session));
    EXPECT(session != NULL);
    if (writer->session_count == writer->session_capacity) {
        writer->session_capacity = 2 * writer->session_capacity + 8;
        writer->sessions =
            realloc(writer->sessions, sizeof(*writer->sessions) * writer->session_capacity);
        EXPECT(writer->sessions != NULL);
    }
    /* Users have sessions of the same names. */
    (void)snprintf(session->name, sizeof(session->name), "s%u-%u", writer->index / EX_USERS,
                   writer->session_count);
    session->user = writer->user;
    writer->sessions[writer->session_count++] = session;
    return session;
}

void cr_forget(struct cr_run *run)
{
    for (uint32_t w = 0; w < CR_WRITERS; w++) {
        struct cr_writer *writer = &run->writers[w];
        for (uint32_t i = 0; i < writer->session_count; i++) {
            for (uint32_t p = 0; p < writer->sessions[i]->point_count; p++)
                free(writer->sessions[i]->points[p].ids);
            free(writer->sessions[i]->points);
            free(writer->sessions[i]);
        }
        free(writer->sessions);
        writer->sessions = NULL;
        writer->session_count = writer->session_capacity = 0;
    }
}
