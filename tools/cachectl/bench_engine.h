#pragma once

/*
 * The engine inside this process, for benchmarks of computing: a model (`small` with random
 * weights, made in a directory of its own, or one given), sessions with their pages, and runs of
 * tokens. One thread.
 */

#include "engine/engine.h"
#include "tools/cachectl/bench_progress.h"
#include "tools/cachectl/ctl.h"

#define BENCH_DIR_BYTES 160u

/* What the user chose. */
struct bench_engine_options {
    const char *model_dir; /* NULL: `small`, made and removed again. */
    uint64_t threads;      /* 0: one per core. */
    bool quick;
    const char *make_flag; /* One more flag for mkmodel; NULL: none. */
};

/* A directory with a model in it.  Owned by: the benchmark. */
struct bench_model_dir {
    char path[BENCH_DIR_BYTES];
    bool made; /* Removed by bench_model_dir_drop(). */
};

/* Where files of a benchmark's own go: $TMPDIR, or /tmp. */
const char *bench_tmp_dir(void);

/* Returns an exit code, with the sentence printed.  Not CLIENT_EXIT_OK: nothing is left behind. */
int bench_model_dir_make(struct bench_progress *progress,
                         const struct bench_engine_options *options,
                         struct bench_model_dir *ret_dir);
void bench_model_dir_drop(struct bench_model_dir *dir);

/* Opens it with the CPU backend.  NULL: not possible, the sentence is printed, or this program is
 * to end. */
struct eng_model *bench_model_open(const struct bench_model_dir *dir, uint32_t threads,
                                   bool prefill_all);

/* A session and memory for `tokens` tokens.  Owned by: the benchmark. */
struct bench_session {
    struct eng_model *model;
    struct eng_session *session;
    uint8_t *memory; /* page_count pages, one behind the other, KV_IO_ALIGN aligned. */
    uint8_t **pages;
    uint32_t page_count;
    bool all_layers;
    struct bench_progress *progress;
};

/* all_layers: the model was opened with prefill_all. */
bool bench_session_init(struct bench_session *own, struct eng_model *model, uint32_t tokens,
                        bool all_layers, struct bench_progress *progress);
void bench_session_fini(struct bench_session *own);
uint64_t bench_session_page_bytes(const struct bench_session *own);

/* Back to 0 with the same pages. */
void bench_session_reset(struct bench_session *own);
/* `to` becomes `from`: windows and pages. */
void bench_session_copy(struct bench_session *to, const struct bench_session *from);

/* Runs the begun runs of `count` sessions to their ends, pass after pass, all in one pass where
 * they fit.  false: this program is to end; the sessions can only be destroyed or reset. */
bool bench_finish_runs(struct bench_session *const *sessions, uint32_t count) KV_MUST_CHECK;

/* Tokens drawn from `seed`, without the special ones. */
void bench_ids(const struct eng_model *model, uint32_t seed, uint32_t *ids, uint32_t count);

double bench_now(void); /* Seconds. */
