#pragma once

/* Arguments of iofail and crashimage. */

#include "tests/seam/plant.h"

#include <stdbool.h>
#include <stdint.h>

struct options {
    uint64_t seed;
    uint64_t every;        /* iofail: of so many calls one fails; 0: cases are named. */
    uint64_t from;         /* iofail: the first call to fail. */
    uint64_t first, count; /* Cases. */
    bool one;              /* --case: only that one. */
    enum kv_plant plant;
    bool idle;        /* The script does nothing: such a run must fail. */
    bool expect_loss; /* Succeed only if something is found wrong. */
    bool encrypt;     /* Every store is encrypted, and its master key rotated. */
};

/* `harness`: "iofail" or "crashimage".  Ends the program for --help (0), and for arguments that
 * make no sense or a bug that it cannot find (2, after a word about it). */
void options_parse(const char *harness, int argc, char **argv, struct options *options);

/* Exit code of a run that found `failures`, after a line if it is not what was expected. */
int options_exit(const struct options *options, uint64_t failures);
