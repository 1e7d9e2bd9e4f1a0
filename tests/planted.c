/* Planted bugs and the tests that find them. */

#include "tests/planted.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/plant.h"

#include <string.h>

/* Who finds it: harnesses, or a script with its case; separated as people read them. */
#define FOUND_ACK_BEFORE_FLUSH "crash, powercut, crashimage, iofail"
#define FOUND_ACK_BEFORE_SYNC "crash, powercut, crashimage, iofail"
#define FOUND_CHECKSUM_OFF "bitflip, crashimage"
#define FOUND_NO_GENERATION "crashimage"
#define FOUND_HEADER_UNBOUND "it_badluck.py records_that_name_anothers_page"
#define FOUND_TORN_RECORD "crash, powercut"
#define FOUND_REUSE_BEFORE_DELETE "crash, powercut, crashimage"
#define FOUND_ACK_BEFORE_DELETE "crash, powercut"
#define FOUND_SEGMENTS_BEHIND "crash, powercut, crashimage, iofail"
#define FOUND_TTL_ONLY_SWEPT "it_symptoms_disk.py t56_time_is_up_before_any_sweep"
#define FOUND_ROTATE_CUT_BEFORE "it_encryption.py, which has it for a way to stop"
#define FOUND_ROTATE_CUT_AFTER "it_encryption.py, which has it for a way to stop"
#define FOUND_SHORT_ACCEPTED "iofail"
#define FOUND_FLUSH_IGNORED "crashimage, iofail"
#define FOUND_NAMES_NOT_FLUSHED "crashimage, iofail"

static const struct planted {
    const char *name;
    const char *found_by;
} bugs[] = {
#define PLANTED(id, text) {text, FOUND_##id},
    KV_PLANTS(PLANTED)
#undef PLANTED
};

/* Is it one of the words of `list`? */
static bool finds(const char *list, const char *harness)
{
    const size_t count = strlen(harness);
    for (const char *at = strstr(list, harness); at != NULL; at = strstr(at + 1, harness))
        if ((at == list || at[-1] == ' ') && (at[count] == '\0' || at[count] == ',')) return true;
    return false;
}

void planted_list(const char *harness, FILE *out)
{
    for (size_t i = 0; i < KV_ARRAY_COUNT(bugs); i++)
        if (finds(bugs[i].found_by, harness)) (void)fprintf(out, "  %s\n", bugs[i].name);
}

bool planted_check(const char *harness, const char *plant)
{
    for (size_t i = 0; i < KV_ARRAY_COUNT(bugs); i++) {
        if (strcmp(bugs[i].name, plant) != 0) continue;
        if (finds(bugs[i].found_by, harness)) return true;
        (void)fprintf(stderr, "%s: cannot find the planted bug '%s', these can: %s\n", harness,
                      plant, bugs[i].found_by);
        return false;
    }
    (void)fprintf(stderr, "%s: no planted bug '%s'; it finds:\n", harness, plant);
    planted_list(harness, stderr);
    return false;
}
