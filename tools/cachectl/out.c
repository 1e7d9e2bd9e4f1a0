/*
 * How data looks on stdout.
 *
 * The same rows serve people and scripts: a terminal gets aligned columns with headings, a pipe
 * gets one line a row, tab-separated, with the same headings, so `cut -f` and `awk -F'\t'` work.
 * Texts that come from the daemon may not contain tabs or newlines by its own rules; they are
 * replaced anyway.
 */

#include "tools/cachectl/out.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int out_json_take(struct json_t *object)
{
    if (!object) {
        ctl_error("out of memory");
        return CLIENT_EXIT_FAILED;
    }
    json_t *document = json_pack("{s:i}", "schema", 1);
    const bool ok = document && json_object_update(document, object) == 0 &&
                    json_dumpf(document, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(12)) == 0 &&
                    putchar('\n') == '\n';
    json_decref(document);
    json_decref(object);
    if (ok) return CLIENT_EXIT_OK;
    ctl_error("cannot write the JSON document");
    return CLIENT_EXIT_FAILED;
}

static void add_cell(struct out_table *table, const char *text)
{
    if (table->cells_count == table->cells_max) {
        table->cells_max = table->cells_max == 0 ? 64 : table->cells_max * 2;
        table->cells = realloc(table->cells, table->cells_max * sizeof(char *));
        if (!table->cells) abort();
    }
    char *copy = strdup(text);
    if (!copy) abort();
    for (char *p = copy; *p != '\0'; p++) {
        if ((unsigned char)*p < ' ') *p = ' ';
    }
    table->cells[table->cells_count++] = copy;
}

void out_table_init(struct out_table *table, const char *const *names, size_t columns,
                    uint64_t right_mask)
{
    *table = (struct out_table){.names = names, .columns = columns, .right_mask = right_mask};
    for (size_t i = 0; i < columns; i++)
        add_cell(table, names[i]);
}

void out_table_cell(struct out_table *table, const char *fmt, ...)
{
    char text[512];
    va_list list;

    va_start(list, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, list);
    va_end(list);
    add_cell(table, text);
}

static size_t column_width(const struct out_table *table, size_t column)
{
    size_t width = 0;

    for (size_t i = column; i < table->cells_count; i += table->columns)
        width = KV_MAX(width, strlen(table->cells[i]));
    return width;
}

void out_table_print(const struct ctl *ctl, struct out_table *table)
{
    int widths[64] = {0};

    assert(table->columns <= KV_ARRAY_COUNT(widths));
    assert(table->cells_count % table->columns == 0);
    for (size_t i = 0; ctl->terminal && i < table->columns; i++)
        widths[i] = (int)column_width(table, i);

    for (size_t i = 0; i < table->cells_count; i++) {
        const size_t column = i % table->columns;
        const bool last = column + 1 == table->columns;
        if ((table->right_mask >> column & 1) != 0) {
            (void)printf("%*s", widths[column], table->cells[i]);
        } else {
            (void)printf("%-*s", last ? 0 : widths[column], table->cells[i]);
        }
        (void)fputs(last ? "\n" : ctl->terminal ? "  " : "\t", stdout);
    }
    out_table_drop(table);
}

void out_table_drop(struct out_table *table)
{
    for (size_t i = 0; i < table->cells_count; i++)
        free(table->cells[i]);
    free(table->cells);
    *table = (struct out_table){0};
}

const char *out_bytes(char text[OUT_TEXT_BYTES], uint64_t bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    double value = (double)bytes;
    size_t unit = 0;

    for (; value >= 1024 && unit + 1 < KV_ARRAY_COUNT(units); unit++)
        value /= 1024;
    (void)snprintf(text, OUT_TEXT_BYTES, "%.*f %s", unit == 0 || value >= 100 ? 0 : 1, value,
                   units[unit]);
    return text;
}

const char *out_duration(char text[OUT_TEXT_BYTES], uint64_t ms)
{
    const uint64_t s = ms / 1000;

    if (ms < 1000) {
        (void)snprintf(text, OUT_TEXT_BYTES, "%u ms", (unsigned)ms);
    } else if (s < 60) {
        (void)snprintf(text, OUT_TEXT_BYTES, "%u s", (unsigned)s);
    } else if (s < 3600) {
        (void)snprintf(text, OUT_TEXT_BYTES, "%um %us", (unsigned)(s / 60), (unsigned)(s % 60));
    } else if (s < 86400) {
        (void)snprintf(text, OUT_TEXT_BYTES, "%uh %um", (unsigned)(s / 3600),
                       (unsigned)(s / 60 % 60));
    } else {
        (void)snprintf(text, OUT_TEXT_BYTES, "%llud %uh", (unsigned long long)(s / 86400),
                       (unsigned)(s / 3600 % 24));
    }
    return text;
}

const char *out_hex(char text[OUT_TEXT_BYTES], const uint8_t *bytes, size_t count)
{
    assert(count <= 15);
    text[0] = '\0';
    for (size_t i = 0; i < count; i++)
        (void)snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    return text;
}
