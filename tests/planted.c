/* Planted bugs and the tests that find them. */

#include "tests/planted.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/plant.h"

#include <string.h>

static const char *const names[] = {
#define PLANTED_NAME(id, name) [KV_PLANT_##id] = name,
    KV_PLANTS(PLANTED_NAME)
#undef PLANTED_NAME
};

/* Harnesses, or scripts with their case; separated as people read them. */
static const char *const finders[] = {
    [KV_PLANT_ACK_BEFORE_FLUSH] = "crash, powercut, crashimage, iofail",
    [KV_PLANT_ACK_BEFORE_SYNC] = "crash, powercut, crashimage, iofail",
    [KV_PLANT_CHECKSUM_OFF] = "bitflip, crashimage",
    [KV_PLANT_NO_GENERATION] = "crashimage",
    [KV_PLANT_HEADER_UNBOUND] = "it_badluck.py records_that_name_anothers_page",
    [KV_PLANT_TORN_RECORD] = "crash, powercut",
    [KV_PLANT_REUSE_BEFORE_DELETE] = "crash, powercut, crashimage",
    [KV_PLANT_ACK_BEFORE_DELETE] = "crash, powercut",
    [KV_PLANT_SEGMENTS_BEHIND] = "crashimage, iofail",
    [KV_PLANT_TTL_ONLY_SWEPT] = "it_symptoms_disk.py t56_time_is_up_before_any_sweep",
    [KV_PLANT_SHORT_ACCEPTED] = "iofail",
    [KV_PLANT_FLUSH_IGNORED] = "crashimage, iofail",
    [KV_PLANT_NAMES_NOT_FLUSHED] = "crashimage, iofail",
};
_Static_assert(KV_ARRAY_COUNT(names) == KV_ARRAY_COUNT(finders), "every bug has who finds it");

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
    for (size_t i = KV_PLANT_NONE + 1; i < KV_ARRAY_COUNT(names); i++)
        if (finds(finders[i], harness)) (void)fprintf(out, "  %s\n", names[i]);
}

bool planted_check(const char *harness, const char *plant)
{
    for (size_t i = KV_PLANT_NONE + 1; i < KV_ARRAY_COUNT(names); i++) {
        if (strcmp(names[i], plant) != 0) continue;
        if (finds(finders[i], harness)) return true;
        (void)fprintf(stderr, "%s: cannot find the planted bug '%s', these can: %s\n", harness,
                      plant, finders[i]);
        return false;
    }
    (void)fprintf(stderr, "%s: no planted bug '%s'; it finds:\n", harness, plant);
    planted_list(harness, stderr);
    return false;
}
