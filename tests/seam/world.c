/* One store and its loop. */

#include "tests/seam/world.h"

#include "kvstore/base/bytes.h"
#include "kvstore/format/manifest_record.h"
#include "kvstore/format/segment_header.h"
#include "kvstore/store/segments.h"
#include "tests/seam/content.h"
#include "tests/seam/plant.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define TURNS_MAX 100000u
#define WAIT_MS 1
#define TURN_NS 200000u

#define MASTERS 2u

static const uint8_t masters[MASTERS][KV_KEY_BYTES] = {{'a', 1}, {'b', 2}};
static bool encrypts;

void world_encrypt(bool on)
{
    encrypts = on;
}

bool world_encrypts(void)
{
    return encrypts;
}

static struct kv_store_options options_of(const struct kv_layout *layout, struct kv_disk *disk,
                                          const char *dir)
{
    const uint64_t segment_bytes =
        KV_SEGMENT_HEADER_BYTES + (uint64_t)WORLD_SEGMENT_PAGES * layout->page_bytes;
    return (struct kv_store_options){
        .dir = dir,
        .superblock.id = content_directory(),
        .layout = layout,
        .model = content_model(),
        .kernels = 1,
        .kernels_made = 1,
        .disk = disk,
        .hbm_bytes = (uint64_t)WORLD_HBM_PAGES * layout->page_bytes,
        .pool_bytes = 64u << 10,
        .ssd_bytes = WORLD_PAGES_MAX / WORLD_SEGMENT_PAGES * segment_bytes,
        .segment_bytes = segment_bytes,
        .index_bytes = 64u << 20,
        .pool_ttl_ms = 1000,
        .rows_ttl_ms = KV_TTL_MS_MAX,
        .erase_within_ms = 64,
        .sessions_max = CONTENT_SESSIONS,
        .encryption = {.on = encrypts, .master = encrypts ? masters[0] : NULL},
        .plant = plant_now(),
    };
}

static void rotated(void *context, kv_status status)
{
    struct world *world = context;
    if (status == KV_OK) world->master = 1 - world->master;
}

void world_rotate(struct world *world)
{
    /* Refused while one runs, and where the superblock cannot be written. */
    (void)!kv_store_rotate_start(world->store, masters[1 - world->master], rotated, world, NULL);
}

kv_status world_directory(struct kv_disk *disk, const char *dir, struct kv_error *err)
{
    const struct kv_layout layout = content_layout();
    struct kv_store_options options = options_of(&layout, disk, dir);
    options.clock = kv_clock_create_virtual();
    assert(options.clock != NULL);
    kv_status status = kv_store_directory(&options, err);
    if (status == KV_INVALID && encrypts) {
        options.encryption.master = masters[1];
        status = kv_store_directory(&options, err);
    }
    kv_clock_destroy(options.clock);
    return status;
}

kv_status world_open(struct world *world, struct kv_disk *disk, struct kv_manifest *manifest,
                     const char *dir, struct kv_error *err)
{
    *world = (struct world){.layout = content_layout(), .disk = disk, .manifest = manifest};
    world->clock = kv_clock_create_virtual();
    kv_status status = kv_mailbox_create(&world->mailbox, err);
    assert(world->clock != NULL && status == KV_OK);

    struct kv_store_options options = options_of(&world->layout, disk, dir);
    options.clock = world->clock;
    options.manifest = manifest;
    options.mailbox = world->mailbox;
    /* A rotation may have been cut off or lost: the key that is not refused is the right one. */
    for (world->master = 0; world->master < (encrypts ? MASTERS : 1); world->master++) {
        if (encrypts) options.encryption.master = masters[world->master];
        status = kv_store_directory(&options, err);
        if (status == KV_OK) status = kv_store_open(&options, &world->store, err);
        if (status != KV_INVALID && status != KV_CORRUPT) break;
    }
    if (status != KV_OK) world_close(world);
    return status;
}

void world_close(struct world *world)
{
    kv_store_close(world->store);
    world->store = NULL;
    kv_mailbox_destroy(world->mailbox);
    world->mailbox = NULL;
    kv_clock_destroy(world->clock);
    world->clock = NULL;
}

void world_turn(struct world *world)
{
    kv_clock_advance(world->clock, TURN_NS); /* So that what goes by time does its part. */
    /* One: between the steps of a batch the disk does something. */
    (void)kv_mailbox_run(world->mailbox, 1);
    kv_store_tick(world->store);
    const bool waits = world->store->operations > 0 || kv_disk_inflight(world->disk) > 0;
    (void)kv_disk_run(world->disk, kv_mailbox_fd(world->mailbox), waits ? WAIT_MS : 0);
}

bool world_settle(struct world *world)
{
    for (uint32_t i = 0; i < TURNS_MAX; i++) {
        if (world->store->operations == 0 && world->store->dead == NULL &&
            kv_disk_inflight(world->disk) == 0)
            return true;
        world_turn(world);
    }
    return false;
}

struct kv_session *world_session(struct world *world, uint32_t session)
{
    const struct kv_user_id user_id = content_user(session);
    const struct kv_session_id id = content_session(session);
    struct kv_index *index = world->store->index;
    struct kv_session *found = kv_index_session_find(index, &id);
    if (found != NULL) return found;
    struct kv_user *user = kv_index_user_find(index, &user_id);
    if (user == NULL) user = kv_index_user_add(index, &user_id, content_salt(session));
    assert(user != NULL);
    found = kv_index_session_add(index, &id, user, content_session_name(session), "");
    assert(found != NULL);
    found->ttl_ms = KV_TTL_MS_MAX;
    found->tree->load = KV_LOAD_DONE;
    return found;
}

static void loaded(void *context, struct kv_session *session, kv_status status)
{
    (void)session;
    *(kv_status *)context = status;
}

bool world_load(struct world *world, struct kv_session *session)
{
    kv_status status = KV_STATUS_COUNT; /* Not yet. */
    if (session->tree->load == KV_LOAD_DONE) return true;
    kv_store_load_start(world->store, session, loaded, &status);
    for (uint32_t i = 0; i < TURNS_MAX && status == KV_STATUS_COUNT; i++)
        world_turn(world);
    return status == KV_OK;
}

struct count {
    const struct kv_store *store;
    uint32_t pages, astray;
};

static kv_status count_page(void *context, const struct kv_manifest_put *put)
{
    struct count *count = context;
    struct kv_record_page record;
    if (put->key_bytes <= 17 || put->key[17] != 'P') return KV_OK;
    count->pages++;
    const kv_status status = kv_record_page_decode(put->value, put->value_bytes, &record);
    assert(status == KV_OK);
    count->astray += !kv_store_segment_recorded(count->store, record.ssd_page);
    return KV_OK;
}

uint32_t world_page_records(struct world *world, uint32_t *ret_astray)
{
    struct count count = {.store = world->store};
    const kv_status status =
        kv_manifest_scan_now(world->manifest, (const uint8_t *)"T", 1, count_page, &count, NULL);
    assert(status == KV_OK);
    *ret_astray = count.astray;
    return count.pages;
}
