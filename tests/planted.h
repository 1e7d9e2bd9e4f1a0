#pragma once

/* Which fault harness finds which planted bug (kvstore/base/plant.h).  A run with a bug that the
 * harness cannot meet would pass and prove nothing, so it is refused. */

#include <stdbool.h>
#include <stdio.h>

/* Whether `harness` ("crash") finds the bug `plant`.  false: told on stderr, with the tests that do
 * or the bugs there are. */
bool planted_check(const char *harness, const char *plant);

/* Lines of a help text: the bugs that it finds. */
void planted_list(const char *harness, FILE *out);
