#pragma once

/* The checks of `cachectl doctor` that look at this machine, and the list they write to. */

#include "tools/cachectl/ctl.h"

enum doctor_state { DOCTOR_OK, DOCTOR_WARN, DOCTOR_FAIL };

struct doctor_line {
    const char *name;
    enum doctor_state state;
    char found[200];
    char fix[200]; /* "" when nothing is to be done. */
};

/* Owned by: the caller's stack. */
struct doctor {
    struct doctor_line lines[24];
    size_t count;
};

void doctor_add(struct doctor *doctor, const char *name, enum doctor_state state, const char *fix,
                const char *fmt, ...) __attribute__((format(printf, 5, 6)));

void doctor_check_io_uring(struct doctor *doctor);
/* false: the disk does not answer, so nothing else is to be asked of it. */
bool doctor_check_direct(struct doctor *doctor, const char *state_dir);
void doctor_check_space(struct doctor *doctor, const char *state_dir, uint64_t needed_bytes);
/* pid 0: this process's own limit. */
void doctor_check_memlock(struct doctor *doctor, uint64_t pid);
/* NULL: not known. */
void doctor_check_model(struct doctor *doctor, const char *model_dir);
void doctor_check_clock(struct doctor *doctor);
void doctor_check_token(struct doctor *doctor, const char *token_file);
