#pragma once

/*
 * What must be there: sessions, their checkpoints with the tokens of each, and what was under way.
 *
 * A session belongs to one writer, so what it holds has one owner at a time.  The log of intents
 * and acknowledgements is a file of another file system; it is what a failure is explained with.
 */

#include "kvstore/base/status.h"
#include "tests/crash/oracle.h"
#include "tests/driver/calls.h"
#include "tests/driver/daemon.h"
#include "tests/driver/random.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

enum {
    CR_TOKENS_MAX = 512,
    CR_SUFFIX = 2,  /* Tokens of the turn that tries a checkpoint, */
    CR_ANSWER = 2,  /* and of its answer. */
    CR_WRITERS = 8, /* At once, each with a session of its own. */
    CR_SPARE = 16,  /* window.spare_tokens */
    CR_WINDOW = 16, /* Of `tiny`: a shorter history has no plan but MISS. */
    CR_FIRST_MIN = 24,
    CR_TRIES = 8,        /* Of a turn whose head goes before its answer. */
    CR_FLEETING_MS = 40, /* Life of rows of fleeting sessions. */
};

struct cr_point {
    struct ex_id id;
    uint32_t position;
    uint8_t digest[32];
    uint32_t *ids; /* [0, position + CR_SUFFIX + CR_ANSWER): the turn that tries it, too. */
    bool listed;   /* By the last list. */
    bool durable;  /* Acknowledged at level SSD, or found after a restart. */
    bool tried;    /* By a turn, since its session was left. */
    bool has_crcs;
    uint32_t crcs[CR_ANSWER];
};

struct cr_session {
    char name[EX_NAME_BYTES];
    uint32_t user;
    bool opened; /* Acknowledged. */
    bool leaving; /* Its deletion was sent, and not answered before the fault. */
    bool deleted; /* Acknowledged, or seen after a restart: it must never be there again. */
    /* Its rows expire at once, so nothing of it must be there and its space is used again; what is
     * there must be right, and nothing may be once its time is up. */
    bool fleeting;
    struct timespec used;
    struct cr_point *points;
    uint32_t point_count, point_capacity;
    uint32_t durable_count;
    uint32_t talk[CR_TOKENS_MAX]; /* The last prompt and its answer. */
    uint32_t talk_count;
    uint32_t head; /* Tokens processed; 0: not known, so the next call is a prefill. */
    uint64_t epoch;
    bool has_rolled; /* The last acknowledged call moved the head there. */
    struct ex_id rolled;
    /* The call under way at the kill: tokens its checkpoints can hold. */
    bool in_flight;
    uint32_t flight[CR_TOKENS_MAX];
    uint32_t flight_count;
};

/* Calls, by what was under way at the kill. */
enum cr_phase {
    CR_IDLE,
    CR_OPEN,
    CR_PREFILL,
    CR_DECODE,
    CR_CHECKPOINT,
    CR_WAIT,
    CR_ROLLBACK,
    CR_CLOSE,
    CR_LOOKUP,
    CR_DELETE,
    CR_PHASES,
};
extern const char *const cr_phase_names[CR_PHASES];

enum cr_fault { CR_LOST, CR_TORN, CR_WRONG, CR_FAULTS };

struct cr_counts {
    uint64_t kills, starting; /* starting: while it recovered. */
    uint64_t acknowledged, found, tried;
    uint64_t adopted; /* Were under way at the kill and are there whole. */
    uint64_t expired; /* Fleeting sessions that were gone, as they must. */
    uint64_t deleted; /* Deleted ones that were gone, as they must. */
    uint64_t dropped; /* As a start after a kill said. */
    uint64_t busy_kills, phases[CR_PHASES];
    uint64_t faults[CR_FAULTS];
    uint64_t calls;
};

struct cr_run;

struct cr_writer {
    struct cr_run *run;
    uint32_t index, user;
    pthread_t thread;
    struct ex_random random;
    struct cr_oracle *oracle;
    struct cr_session **sessions; /* The last one is in use. */
    uint32_t session_count, session_capacity;
    struct cr_counts counts; /* Of this thread; added up after it is joined. */
    _Atomic enum cr_phase phase;
};

struct cr_run {
    uint64_t seed;
    uint32_t kill;       /* The case. */
    bool deep;           /* Every checkpoint of every session is tried. */
    const char *program; /* "crash", for messages. */
    int log_fd;
    const char *log_path;
    struct ex_daemon *daemon;
    struct cr_writer writers[CR_WRITERS];
    bool idle;             /* Nobody writes. */
    bool deaf;             /* An answer after the fault says nothing of durability: powercut.c. */
    _Atomic bool killing;  /* A call that fails now is no failure. */
    struct timespec died;  /* When the daemon did last. */
    _Atomic bool ready;    /* The restarted daemon serves. */
    _Atomic bool broken;   /* It does not. */
    _Atomic uint32_t acks; /* At level SSD, since the writers began. */
    pthread_mutex_t lock;  /* Of failures. */
    uint32_t failures_shown;
    struct cr_counts counts;
};

/* A line of the expected-state log. */
void cr_note(struct cr_run *run, const struct cr_session *session, const char *fmt, ...)
    KV_PRINTF(3, 4);

/* Counts, and prints what is lost with the case, the operations and the id (NULL: none). */
void cr_fail(struct cr_writer *writer, enum cr_fault fault, const struct cr_session *session,
             const struct ex_id *id, const char *fmt, ...) KV_PRINTF(5, 6);
uint64_t cr_failed(const struct cr_counts *counts);

/* A checkpoint that an answer named.  ids: tokens of the history it stands in. */
void cr_learn(struct cr_writer *writer, struct cr_session *session,
              const struct ex_checkpoint *point, const uint32_t *ids, uint32_t count);
struct cr_point *cr_find(struct cr_session *session, const struct ex_id *id);
void cr_make_durable(struct cr_writer *writer, struct cr_session *session, struct cr_point *point);

struct cr_session *cr_session_add(struct cr_writer *writer);
static inline struct cr_session *cr_session_last(const struct cr_writer *writer)
{
    return writer->session_count == 0 ? NULL : writer->sessions[writer->session_count - 1];
}
/* Forgets all: a new state directory. */
void cr_forget(struct cr_run *run);

void cr_id_text(const struct ex_id *id, char text[33]);
void cr_counts_add(struct cr_counts *to, const struct cr_counts *more);

/* writer.c: calls until run->killing. */
void *cr_write(void *writer);
/* compare.c: everything this writer's sessions must have. */
void *cr_compare(void *writer);
/* What all users see, and that no byte came back wrong.  By the main thread, after the others. */
void cr_compare_users(struct cr_run *run);
