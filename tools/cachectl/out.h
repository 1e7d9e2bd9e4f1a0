#pragma once

/* Data on stdout: aligned columns for a terminal, tabs for a pipe, JSON when asked; and the texts
 * of numbers in them. */

#include "tools/cachectl/ctl.h"

struct json_t;

/* Prints {"schema": 1, ...members of object} and takes the object over.  Returns the exit code. */
int out_json_take(struct json_t *object);

/* Rows of texts.  Owned by: the caller's stack, between init and print. */
struct out_table {
    const char *const *names;
    size_t columns;
    char **cells; /* The first row is the names. */
    size_t cells_count, cells_max;
    uint64_t right_mask; /* Bit i: column i is a number, aligned to the right. */
};

void out_table_init(struct out_table *table, const char *const *names, size_t columns,
                    uint64_t right_mask);
void out_table_cell(struct out_table *table, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
/* Prints and frees. */
void out_table_print(const struct ctl *ctl, struct out_table *table);

/* Frees without printing. */
void out_table_drop(struct out_table *table);

/* Short texts for people.  Each writes at most 32 bytes and returns its argument. */
#define OUT_TEXT_BYTES 32u
const char *out_bytes(char text[OUT_TEXT_BYTES], uint64_t bytes);                   /* "1.5 GiB" */
const char *out_duration(char text[OUT_TEXT_BYTES], uint64_t ms);                   /* "3m 12s" */
const char *out_hex(char text[OUT_TEXT_BYTES], const uint8_t *bytes, size_t count); /* <= 15 */
