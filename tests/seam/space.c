/* Counts what records say and compares it with allocator, index and files. */

#include "tests/seam/space.h"

#include "kvstore/base/bytes.h"
#include "kvstore/format/manifest_record.h"
#include "tests/seam/content.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct count {
    struct world *world;
    bool places[2 * WORLD_PAGES_MAX];
    uint32_t records;                    /* Of pages whose places are in use. */
    uint32_t sessions[CONTENT_SESSIONS]; /* Records of each. */
    char *why;
};

static kv_status differ(struct count *count, const char *what, uint64_t got, uint64_t want)
{
    (void)snprintf(count->why, SPACE_WHY_BYTES, "%s: %llu, expected %llu", what,
                   (unsigned long long)got, (unsigned long long)want);
    return KV_CORRUPT;
}

static uint32_t session_of(const uint8_t *key)
{
    for (uint32_t s = 0; s < CONTENT_SESSIONS; s++) {
        const struct kv_session_id id = content_session(s);
        if (memcmp(id.bytes, key + 1, sizeof(id.bytes)) == 0) return s;
    }
    return CONTENT_SESSIONS;
}

static kv_status visit(void *context, const struct kv_manifest_put *put)
{
    struct count *count = context;
    struct kv_record_page page;
    if (put->key_bytes < 18 || put->key[17] != 'P') return KV_OK;
    if (kv_record_page_decode(put->value, put->value_bytes, &page) != KV_OK)
        return differ(count, "a record that cannot be read", 1, 0);
    const uint32_t session = session_of(put->key);
    if (session == CONTENT_SESSIONS) return differ(count, "a record of nobody", 1, 0);
    if (page.ssd_page >= KV_ARRAY_COUNT(count->places))
        return differ(count, "a place beyond the tier", page.ssd_page, 2 * WORLD_PAGES_MAX);
    if (count->places[page.ssd_page]) return differ(count, "records of one place", 2, 1);
    /* Found damaged, and nobody has dropped yet what needs it. */
    const bool is_out = kv_ssd_quarantined(count->world->store->ssd, page.ssd_page);
    if (!is_out && !kv_ssd_claimed(count->world->store->ssd, page.ssd_page))
        return differ(count, "a recorded place that is free", page.ssd_page, UINT32_MAX);
    count->places[page.ssd_page] = true;
    count->sessions[session]++;
    count->records += !is_out;
    return KV_OK;
}

/* Of a loaded tree the objects are the records; another's count is as it last was, or estimated
 * before its first load. */
static kv_status charges(struct count *count)
{
    struct kv_index *index = count->world->store->index;
    for (uint32_t s = 0; s < CONTENT_SESSIONS; s++) {
        const struct kv_session_id id = content_session(s);
        const struct kv_session *session = kv_index_session_find(index, &id);
        if (session == NULL || session->tree->load != KV_LOAD_DONE) continue;
        if (session->pages != count->sessions[s])
            return differ(count, "pages of a session", session->pages, count->sessions[s]);
    }
    uint64_t of_sessions = 0, of_users = 0;
    uint32_t bucket = 0, users = 0;
    const struct kv_session_entry *at = NULL;
    while ((at = kv_index_entry_next(index, &bucket, at)) != NULL)
        of_sessions += at->pages;
    for (uint32_t s = 0; s < CONTENT_SESSIONS; s++) {
        const struct kv_user_id id = content_user(s);
        const struct kv_user *user = kv_index_user_find(index, &id);
        bool is_seen = false;
        for (uint32_t other = 0; other < s; other++) {
            const struct kv_user_id other_id = content_user(other);
            is_seen |= kv_id_equal(other_id.bytes, id.bytes) != 0;
        }
        if (user == NULL || is_seen) continue;
        of_users += user->pages;
        users += user->pages > 0;
    }
    if (of_users != of_sessions) return differ(count, "pages of all users", of_users, of_sessions);
    const uint32_t holding = kv_index_usage(index).users_with_pages;
    return holding == users ? KV_OK : differ(count, "users with pages", holding, users);
}

bool space_is_even(struct world *world, bool may_leak, char why[SPACE_WHY_BYTES])
{
    struct count *count = calloc(1, sizeof(*count));
    if (count == NULL) return false;
    count->world = world;
    count->why = why;
    why[0] = '\0';
    const struct kv_ssd_usage usage = kv_ssd_usage(world->store->ssd);
    const uint64_t pages = (uint64_t)usage.pages_free + usage.pages_used + usage.pages_closed +
                           usage.pages_quarantined;
    const uint64_t all =
        usage.bytes_files / world->store->options.segment_bytes * WORLD_SEGMENT_PAGES;
    kv_status status =
        kv_manifest_scan_now(world->manifest, (const uint8_t *)"T", 1, visit, count, NULL);
    if (status == KV_OK && pages != all) status = differ(count, "pages of the files", pages, all);
    if (status == KV_OK && usage.pages_closed > 0)
        status = differ(count, "closed pages", usage.pages_closed, 0);
    if (status == KV_OK && world->store->freeing > 0)
        status = differ(count, "pages that never become free", world->store->freeing, 0);
    const uint64_t used = usage.pages_used;
    if (status == KV_OK && (may_leak ? used < count->records : used != count->records))
        status = differ(count, "pages in use", used, count->records);
    if (status == KV_OK && !may_leak) status = charges(count);
    free(count);
    return status == KV_OK;
}
