/*
 * One value between its text and its place in struct cached_config.
 *
 * Numbers carry their unit in the text, because "72" in a time is a mistake waiting to happen: only
 * 0 may stand alone there.  Reading is strict (no signs, no spaces inside, no rest), and an amount
 * that does not fit 64 bits is out of range, never wrapped.  What config_format() writes,
 * config_set() reads back to the same number (unit test).
 */

#include "cached/config_value.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define FRACTION_UNITS 1000u

struct unit {
    const char *name;
    uint64_t factor;
};

/* Largest first: config_format() takes the first that divides. */
static const struct unit byte_units[] = {
    {"TiB", 1ull << 40},
    {"GiB", 1ull << 30},
    {"MiB", 1ull << 20},
    {"KiB", 1ull << 10},
    {"B", 1},
    {"", 1},
};
static const struct unit time_units[] = {
    {"h", 3600000},
    {"min", 60000},
    {"s", 1000},
    {"ms", 1},
};

static bool digits(const char *text, const char **ret_end, uint64_t *ret_value)
{
    uint64_t value = 0;
    const char *p = text;
    for (; *p >= '0' && *p <= '9'; p++) {
        if (!kv_mul_u64(value, 10, &value)) return false;
        if (!kv_add_u64(value, (uint64_t)(*p - '0'), &value)) return false;
    }
    if (p == text) return false;
    *ret_end = p;
    *ret_value = value;
    return true;
}

static bool amount(const char *text, const struct unit *units, size_t unit_count, uint64_t *ret)
{
    const char *rest;
    uint64_t value;
    if (!digits(text, &rest, &value)) return false;
    if (*rest == '\0' && value == 0) {
        *ret = 0;
        return true;
    }
    while (*rest == ' ')
        rest++;
    for (size_t i = 0; i < unit_count; i++) {
        if (strcmp(rest, units[i].name) == 0) return kv_mul_u64(value, units[i].factor, ret);
    }
    return false;
}

static bool choice(const char *choices, const char *text, uint64_t *ret_index)
{
    const size_t length = strlen(text);
    uint64_t index = 0;
    for (const char *p = choices;; index++) {
        const size_t span = strcspn(p, "|");
        if (span == length && memcmp(p, text, length) == 0) {
            *ret_index = index;
            return true;
        }
        if (p[span] == '\0') return false;
        p += span + 1;
    }
}

/* Digits, a point, at most three digits. */
static bool fraction(const char *text, uint64_t *ret_thousandths)
{
    const char *rest;
    uint64_t whole;
    if (!digits(text, &rest, &whole) || whole > 1000) return false;
    uint64_t value = whole * FRACTION_UNITS;
    if (*rest == '.') {
        uint64_t place = FRACTION_UNITS / 10;
        for (rest++; *rest >= '0' && *rest <= '9' && place > 0; rest++, place /= 10)
            value += (uint64_t)(*rest - '0') * place;
    }
    if (*rest != '\0') return false;
    *ret_thousandths = value;
    return true;
}

/* What a file can hold: no control characters, no spaces at the ends, nothing like a comment. */
static bool plain_text(const char *text)
{
    const size_t count = strlen(text);
    if (count == 0) return true;
    if (text[0] == ' ' || text[count - 1] == ' ' || text[0] == ';') return false;
    if (strstr(text, " ;") != NULL) return false;
    for (size_t i = 0; i < count; i++) {
        const unsigned char c = (unsigned char)text[i];
        if (c < 0x20 || c == 0x7f) return false;
    }
    return true;
}

static bool parse(const struct config_item *item, const char *text, uint64_t *ret_value)
{
    const char *rest;
    switch (item->type) {
    case CONFIG_TYPE_COUNT:
        return digits(text, &rest, ret_value) && *rest == '\0';
    case CONFIG_TYPE_BYTES:
        return amount(text, byte_units, KV_ARRAY_COUNT(byte_units), ret_value);
    case CONFIG_TYPE_TIME:
        return amount(text, time_units, KV_ARRAY_COUNT(time_units), ret_value);
    case CONFIG_TYPE_FRACTION:
        return fraction(text, ret_value);
    case CONFIG_TYPE_CHOICE:
        return choice(item->choices, text, ret_value);
    case CONFIG_TYPE_TEXT:
        break;
    }
    *ret_value = strlen(text); /* A text's range is that of its length. */
    return plain_text(text);
}

static const char *form(enum config_type type)
{
    switch (type) {
    case CONFIG_TYPE_COUNT:
        return "a whole number";
    case CONFIG_TYPE_BYTES:
        return "a size such as 64MiB (B, KiB, MiB, GiB, TiB)";
    case CONFIG_TYPE_TIME:
        return "a time such as 5min (ms, s, min, h)";
    case CONFIG_TYPE_FRACTION:
        return "a share such as 0.10";
    case CONFIG_TYPE_CHOICE:
        return "one of the choices";
    case CONFIG_TYPE_TEXT:
        break;
    }
    return "a text without control characters or ` ;`";
}

static void format_amount(uint64_t value, const struct unit *units, size_t unit_count, char *buf,
                          size_t room)
{
    if (value == 0) {
        (void)snprintf(buf, room, "0");
        return;
    }
    for (size_t i = 0; i < unit_count; i++) {
        if (value % units[i].factor != 0) continue;
        (void)snprintf(buf, room, "%" PRIu64 "%s", value / units[i].factor, units[i].name);
        return;
    }
    assert(false); /* The last factor is 1. */
}

static void format_value(const struct config_item *item, uint64_t value, char *buf, size_t room)
{
    const char *p = item->choices;
    switch (item->type) {
    case CONFIG_TYPE_BYTES:
        format_amount(value, byte_units, KV_ARRAY_COUNT(byte_units), buf, room);
        return;
    case CONFIG_TYPE_TIME:
        format_amount(value, time_units, KV_ARRAY_COUNT(time_units), buf, room);
        return;
    case CONFIG_TYPE_FRACTION:
        (void)snprintf(buf, room, "%" PRIu64 ".%03" PRIu64, value / FRACTION_UNITS,
                       value % FRACTION_UNITS);
        if (value % 10 == 0) buf[strlen(buf) - 1] = '\0';
        return;
    case CONFIG_TYPE_CHOICE:
        for (uint64_t i = 0; i < value; i++)
            p += strcspn(p, "|") + 1;
        (void)snprintf(buf, room, "%.*s", (int)strcspn(p, "|"), p);
        return;
    case CONFIG_TYPE_COUNT:
    case CONFIG_TYPE_TEXT:
        break;
    }
    (void)snprintf(buf, room, "%" PRIu64, value);
}

void config_range(const struct config_item *item, char *buf, size_t room)
{
    char low[64];
    char high[32];
    if (item->type == CONFIG_TYPE_CHOICE) {
        (void)snprintf(buf, room, "%s", item->choices);
        return;
    }
    format_value(item, item->min, low, sizeof(low));
    if (item->choices != NULL) (void)snprintf(low, sizeof(low), "%s", item->choices);
    format_value(item, item->max, high, sizeof(high));
    if (item->type == CONFIG_TYPE_TEXT) {
        (void)snprintf(buf, room, "at most %s bytes", high);
        return;
    }
    (void)snprintf(buf, room, "%s to %s", low, high);
}

kv_status config_set(struct cached_config *config, enum config_key key, const char *text,
                     struct kv_error *err)
{
    const struct config_item *item = config_item(key);
    uint8_t *place = (uint8_t *)config + item->offset;
    char range[128];
    uint64_t value;

    config_range(item, range, sizeof(range));
    if (!parse(item, text, &value))
        return KV_FAIL(err, KV_INVALID, "%s is %s (%s), not \"%.64s\"", item->key, form(item->type),
                       range, text);
    if (item->type != CONFIG_TYPE_CHOICE && (value < item->min || value > item->max))
        return KV_FAIL(err, KV_INVALID, "%s must be %s, not \"%.64s\"", item->key, range, text);

    switch (item->type) {
    case CONFIG_TYPE_TEXT:
        memcpy(place, text, value + 1);
        break;
    case CONFIG_TYPE_FRACTION: {
        const double share = (double)value / FRACTION_UNITS;
        memcpy(place, &share, sizeof(share));
        break;
    }
    case CONFIG_TYPE_COUNT:
    case CONFIG_TYPE_BYTES:
    case CONFIG_TYPE_TIME:
    case CONFIG_TYPE_CHOICE:
        memcpy(place, &value, sizeof(value));
        break;
    }
    return KV_OK;
}

void config_format(const struct cached_config *config, enum config_key key, char *buf, size_t room)
{
    const struct config_item *item = config_item(key);
    const uint8_t *place = (const uint8_t *)config + item->offset;
    uint64_t value = 0;
    double share = 0;

    switch (item->type) {
    case CONFIG_TYPE_TEXT:
        (void)snprintf(buf, room, "%s", (const char *)place);
        return;
    case CONFIG_TYPE_FRACTION:
        memcpy(&share, place, sizeof(share));
        value = (uint64_t)(share * FRACTION_UNITS + 0.5);
        break;
    case CONFIG_TYPE_COUNT:
    case CONFIG_TYPE_BYTES:
    case CONFIG_TYPE_TIME:
    case CONFIG_TYPE_CHOICE:
        memcpy(&value, place, sizeof(value));
        break;
    }
    format_value(item, value, buf, room);
}
