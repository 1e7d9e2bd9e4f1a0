#pragma once

/* Arguments of iofail and crashimage.  Pure. */

#include "tests/seam/plant.h"

#include <stdbool.h>
#include <stdint.h>

#define OPTION_NONE UINT64_MAX

struct options {
    uint64_t count; /* --every of iofail, --images of crashimage. */
    uint64_t from;  /* iofail: the first call to fail. */
    uint64_t seed;
    uint64_t one; /* --case: only this; OPTION_NONE: all. */
    enum plant plant;
    bool expect_loss; /* --expect-loss: succeed only if something is found wrong. */
};

/* False, after a word about it: the arguments make no sense.  count_name: "--every". */
bool options_parse(int argc, char **argv, const char *count_name, struct options *options);

/* Exit code of a run that found `failures`, after a line if it is not what was expected. */
int options_exit(const struct options *options, uint64_t failures);
