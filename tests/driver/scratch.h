#pragma once

/* What every program that drives a daemon needs besides: folders, time, numbers. */

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

/* Removes a file, or a folder with all in it; what is not there is fine. */
void ex_remove_tree(const char *path);
/* A new folder PATH/NAME-XXXXXX; false: errno says why. */
bool ex_make_scratch(const char *path, const char *name, char *ret_dir, uint32_t bytes);

/* From now on folders made by ex_make_scratch() go with this process, however it ends.  Before any
 * thread is made. */
void ex_clean_after(void);

double ex_seconds_since(const struct timespec *then); /* CLOCK_MONOTONIC */
bool ex_parse_number(const char *text, uint64_t max, uint64_t *ret_number);

/* A program of the same build: "cached/cached" next to BUILD/tests/THIS. */
void ex_build_path(const char *name, char *ret_path, uint32_t bytes);
