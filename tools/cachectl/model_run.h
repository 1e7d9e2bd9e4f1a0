#pragma once

/* What `cachectl model run` was asked for.  Private to model_run*.c. */

#include "engine/engine.h"

#include <stdbool.h>
#include <stdint.h>

/* Owned by: run()'s stack. */
struct model_run_options {
    const char *dir, *tokens, *dump;
    enum eng_isa isa;
    uint32_t threads, chunk; /* 0: the default. */
    bool prefill_all, quant_off;
    bool resumes, replay;
    uint32_t resume_at;
};

/* Whether the dump may take its name: nothing that the run reads may be there, nor anything but a
 * file.  false: the sentence is printed. */
bool model_run_check_output(const struct model_run_options *options);
