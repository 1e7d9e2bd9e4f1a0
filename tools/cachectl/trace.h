#pragma once

/* `cachectl trace convert` and `cachectl trace stats`: argv[0] is the verb, flags and --help are
 * parsed here.  Both return the exit code: 0 done, 1 failed, 2 wrong usage. */

int cachectl_trace_convert(int argc, char **argv);
int cachectl_trace_stats(int argc, char **argv);
