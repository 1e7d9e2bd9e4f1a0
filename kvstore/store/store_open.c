/*
 * Opening the store: build the tiers, then read what the last run left.
 *
 * Recovery claims the SSD pages that records name and counts checkpoints (store_recover.c); it
 * reads no page, and seldom a tree.  Space without a record is free by construction, so a crash
 * between write and record needs no repair.  Trees are loaded when a session is first touched.
 */

#include "kvstore/store/store.h"

#include "kvstore/base/bytes.h"
#include "kvstore/format/manifest_record.h"
#include "kvstore/store/directory.h"
#include "kvstore/store/store_internal.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint64_t kv_store_now_ms(const struct kv_store *store)
{
    return kv_timeline_now_ms(&store->time, kv_clock_mono_ns(store->options.clock));
}

uint64_t kv_store_now_ns(const struct kv_store *store)
{
    return kv_clock_mono_ns(store->options.clock);
}

uint64_t kv_store_next_generation(struct kv_store *store)
{
    return ++store->generation;
}

/* Names made inside `dir` are durable afterwards: this one, and the manifest's. */
static kv_status make_ssd_dir(struct kv_disk *disk, const char *dir, const char *path,
                              struct kv_error *err)
{
    const struct kv_disk_call make = {.verb = KV_DISK_MAKE_DIR, .name = path};
    const struct kv_disk_call open = {.verb = KV_DISK_OPEN_DIR, .name = dir};
    if (kv_disk_call(disk, &make) < 0 && errno != EEXIST)
        return KV_FAIL_ERRNO(err, KV_IO, "create directory '%s'", path);
    const int fd = (int)kv_disk_call(disk, &open);
    if (fd < 0) return KV_FAIL_ERRNO(err, KV_IO, "open directory '%s'", dir);
    const struct kv_disk_call sync = {.verb = KV_DISK_SYNC_DIR, .fd = fd};
    kv_status status = KV_OK;
    if (kv_disk_call(disk, &sync) < 0)
        status = KV_FAIL_ERRNO(err, KV_IO, "sync directory '%s'", dir);
    kv_disk_close_file(disk, fd);
    return status;
}

static void slot_evicted(void *context, uint32_t owner, uint32_t slot)
{
    struct kv_store *store = context;
    struct kv_page *page = kv_index_page(store->index, owner);
    assert(page->hbm_slot == slot);
    page->hbm_slot = KV_HBM_SLOT_NONE;
}

/* The last reference to a page went: its copy in memory is let go and, unless the tree only leaves
 * memory, its record is deleted and then its place on SSD is free. */
static void page_freed(void *context, uint32_t index, struct kv_page *page)
{
    struct kv_store *store = context;
    (void)index;
    if (page->hbm_slot != KV_HBM_SLOT_NONE)
        kv_hbm_set_owner(store->hbm, page->hbm_slot, KV_HBM_OWNER_NONE);
    if (store->unloading || page->ssd_page == KV_SSD_PAGE_NONE) return;
    if (store->removing != KV_REASON_NONE) store->counters.removed_pages[store->removing]++;
    struct kv_batch *dead = kv_store_dead_batch(store);
    if (dead == NULL || kv_batch_delete_page(dead, &page->session->tree->id, page->uid) != KV_OK ||
        kv_batch_free_ssd(dead, page->ssd_page) != KV_OK) {
        /* Out of memory: the page stays recorded and is found again at the next start. */
        kv_log(store->options.log, KV_LOG_ERROR, "page_leaked", "ssd_page=%u", page->ssd_page);
    }
}

struct store_visit {
    struct kv_store *store;
    struct kv_record_store record;
    bool found;
    struct kv_error *err;
};

static kv_status visit_store(void *context, const struct kv_manifest_put *put)
{
    struct store_visit *visit = context;
    if (kv_record_store_decode(put->value, put->value_bytes, &visit->record) != KV_OK)
        return KV_FAIL(visit->err, KV_CORRUPT, "state directory '%s': store record is damaged",
                       visit->store->options.dir);
    visit->found = true;
    return KV_OK;
}

static kv_status visit_commit(void *context, const struct kv_manifest_put *put)
{
    struct store_visit *visit = context;
    struct kv_record_commit record;
    if (kv_record_commit_decode(put->value, put->value_bytes, &record) != KV_OK)
        return KV_FAIL(visit->err, KV_CORRUPT, "state directory '%s': commit record is damaged",
                       visit->store->options.dir);
    visit->store->commit = record.number;
    return KV_OK;
}

static kv_status visit_user(void *context, const struct kv_manifest_put *put)
{
    struct store_visit *visit = context;
    struct kv_record_user record;
    if (kv_record_user_decode(put->value, put->value_bytes, &record) != KV_OK)
        return KV_FAIL(visit->err, KV_CORRUPT, "state directory '%s': a user record is damaged",
                       visit->store->options.dir);
    const struct kv_user_id id = kv_user_id_of(record.name);
    uint8_t salt[KV_SALT_BYTES];
    const kv_status status = kv_keys_user_salt(visit->store, &record, salt, visit->err);
    if (status != KV_OK) return status;
    struct kv_user *user = kv_index_user_add(visit->store->index, &id, salt);
    explicit_bzero(salt, sizeof(salt));
    if (user == NULL) return KV_FAIL(visit->err, KV_NOMEM, "load users");
    memcpy(user->name, record.name, sizeof(user->name));
    kv_keys_user_found(visit->store, user);
    return KV_OK;
}

static kv_status visit_session(void *context, const struct kv_manifest_put *put)
{
    struct store_visit *visit = context;
    struct kv_record_session record;
    struct kv_session_id id;
    if (put->key_bytes != 1 + sizeof(id.bytes) ||
        kv_record_session_decode(put->value, put->value_bytes, &record) != KV_OK) {
        visit->store->recovery.dropped_sessions++;
        kv_log(visit->store->options.log, KV_LOG_ERROR, "session_dropped", "why=record_damaged");
        return KV_OK;
    }
    memcpy(id.bytes, put->key + 1, sizeof(id.bytes));
    struct kv_user *user = kv_index_user_find(visit->store->index, &record.user);
    if (user == NULL) {
        visit->store->recovery.dropped_sessions++;
        kv_log(visit->store->options.log, KV_LOG_ERROR, "session_dropped", "why=user_unknown");
        return KV_OK;
    }
    struct kv_session_entry *session =
        kv_index_entry_add(visit->store->index, &id, user, record.has_tree ? &record.tree : NULL);
    if (session == NULL) return KV_FAIL(visit->err, KV_NOMEM, "load sessions");
    kv_index_entry_kind(session, record.kind);
    session->created_ms = record.created_ms;
    session->used_ms = record.used_ms;
    session->ttl_ms = record.ttl_ms;
    session->epoch = record.epoch;
    session->head_tokens = record.head_tokens;
    session->recorded_nodes = record.checkpoints;
    session->fell_back = record.claimed_tokens > record.head_tokens;
    kv_index_session_pages(visit->store->index, session,
                           record.checkpoints == 0 ? 0 : kv_pages_for(record.head_tokens));
    kv_timeline_saw(&visit->store->time, record.used_ms);
    visit->store->life_max_ms = KV_MAX(visit->store->life_max_ms, record.ttl_ms);
    visit->store->recovery.sessions++;
    return KV_OK;
}

static void tell_limit(const struct kv_store *store)
{
    const struct kv_ssd_usage usage = kv_ssd_usage(store->ssd);
    if (usage.bytes_limit >= usage.bytes_max) return;
    kv_log(store->options.log, KV_LOG_WARN, "ssd_limited",
           "limit_bytes=%llu configured_bytes=%llu text=\"the file system of '%s' has no room for "
           "ssd.bytes: the SSD tier uses what it has, but for a reserve\"",
           (unsigned long long)usage.bytes_limit, (unsigned long long)usage.bytes_max,
           store->options.dir);
}

static kv_status recover(struct kv_store *store, struct kv_error *err)
{
    static const struct {
        const char *prefix;
        kv_manifest_visit_fn *visit;
    } passes[] = {{"U", visit_user}, {"S", visit_session}};
    struct store_visit visit = {.store = store, .err = err};
    const uint64_t begun = kv_clock_stopwatch_ns();

    kv_store_tell_progress(store, "reading sessions", 0);
    kv_status status = KV_OK;
    for (size_t i = 0; i < KV_ARRAY_COUNT(passes); i++) {
        status = kv_manifest_scan_now(store->manifest, (const uint8_t *)passes[i].prefix, 1,
                                      passes[i].visit, &visit, err);
        if (status != KV_OK) return status;
    }
    kv_store_time_judge(store);
    status = kv_keys_settle(store, err);
    if (status == KV_OK) status = kv_store_recover_quarantine(store, err);
    if (status == KV_OK) status = kv_store_quota_open(store, err);
    kv_store_history_feature(store);
    if (status == KV_OK) status = kv_store_recover_deleted(store, err);
    if (status == KV_OK) status = kv_store_recover_old_branches(store, err);
    if (status == KV_OK) status = kv_store_recover(store, err);
    if (status != KV_OK) return status;
    store->checkpoints = store->recovery.checkpoints;
    const uint64_t repaired = kv_ssd_usage(store->ssd).segments_repaired;
    if (repaired > 0)
        kv_log(store->options.log, KV_LOG_WARN, "segments_repaired",
               "count=%llu text=\"segment files were cut, empty or had a damaged header; the pages "
               "they lost are dropped\"",
               (unsigned long long)repaired);
    tell_limit(store);
    store->recovery.duration_ns = kv_clock_stopwatch_ns() - begun;
    return KV_OK;
}

static struct kv_ssd_options ssd_options(const struct kv_store_options *options, const char *dir)
{
    return (struct kv_ssd_options){
        .dir = dir,
        .bytes_max = options->ssd_bytes,
        .segment_bytes = options->segment_bytes,
        .page_bytes = options->layout->page_bytes,
        .directory = options->superblock.id,
        .erase_within_ns = options->erase_within_ms * 1000000u,
    };
}

/* A new directory's superblock: encrypted from the start. */
static kv_status want_master(const struct kv_store_options *options, struct kv_superblock *want,
                             struct kv_error *err)
{
    static const struct kv_directory_id none;
    kv_status status = KV_OK;
    if (kv_id_equal(want->id.bytes, none.bytes))
        status = kv_random(want->id.bytes, sizeof(want->id.bytes), err);
    if (status == KV_OK) status = kv_keys_check_of(options, &want->id, &want->master, err);
    want->features |= KV_FEATURE_ENCRYPTION;
    return status;
}

/* One that is there, and was not encrypted up to now. */
static kv_status add_master(struct kv_store_options *options, struct kv_error *err)
{
    struct kv_superblock next = options->superblock;
    next.features |= KV_FEATURE_ENCRYPTION;
    const kv_status status = kv_keys_check_of(options, &next.id, &next.master, err);
    if (status != KV_OK) return status;
    return kv_directory_replace(options->disk, options->dir, &next, &options->superblock, err);
}

kv_status kv_store_directory(struct kv_store_options *options, struct kv_error *err)
{
    struct kv_superblock found;
    struct kv_superblock want = {
        .id = options->superblock.id,
        .page_bytes = options->layout->page_bytes,
        .window_tokens = options->layout->window_tokens,
        .segment_bytes = options->segment_bytes,
        .features = KV_FEATURE_SEGMENTS | KV_FEATURE_HISTORY | KV_FEATURE_PLAN_TTL, /* A new one. */
        .created_ms = kv_clock_wall_ms(options->clock),
    };
    /* Settings that cannot work are refused before they are written into a new directory. */
    const struct kv_ssd_options ssd = ssd_options(options, options->dir);
    kv_status status = kv_ssd_check(&ssd, err);
    if (status != KV_OK) return status;
    uint32_t damaged;
    status = kv_directory_read(options->disk, options->dir, &found, &damaged, err);
    if (status == KV_OK)
        status = kv_keys_judge(options, &found, err);
    else if (status == KV_MISS)
        status = options->encryption.on ? want_master(options, &want, err) : KV_OK;
    if (status == KV_OK)
        status = kv_directory_open(options->disk, options->dir, &want, &options->superblock, err);
    if (status != KV_OK || !options->encryption.on ||
        (options->superblock.features & KV_FEATURE_ENCRYPTION) != 0)
        return status;
    return add_master(options, err);
}

/* The manifest stops reading its log at a damaged record, and what came behind it is as if it had
 * never been.  Here that is noticed: fewer batches are there than were acknowledged.  Numbers go on
 * behind the higher of the two, so that it is told once. */
static kv_status find_lost(struct kv_store *store, struct store_visit *visit, struct kv_error *err)
{
    uint8_t key[KV_RECORD_KEY_MAX];
    const uint32_t key_bytes = kv_key_commit(key);
    const uint64_t noted = kv_note_open(store);
    const kv_status status =
        kv_manifest_scan_now(store->manifest, key, key_bytes, visit_commit, visit, err);
    if (status != KV_OK || store->commit >= noted) return status;
    store->recovery.lost_batches = noted - store->commit;
    kv_log(store->options.log, KV_LOG_ERROR, "records_lost",
           "batches=%llu found=%llu acknowledged=%llu text=\"'%s/manifest' lacks the last %llu "
           "batches of records that were acknowledged: their checkpoints and deletions are "
           "forgotten, the rest is served; see docs/operations.md\"",
           (unsigned long long)store->recovery.lost_batches, (unsigned long long)store->commit,
           (unsigned long long)noted, store->options.dir,
           (unsigned long long)store->recovery.lost_batches);
    store->commit = noted;
    return KV_OK;
}

/* Reads the store record and counts this start: generations of different runs never meet. */
static kv_status begin_run(struct kv_store *store, struct kv_error *err)
{
    uint8_t key[KV_RECORD_KEY_MAX], value[KV_RECORD_STORE_MAX];
    const uint32_t key_bytes = kv_key_store(key);
    struct store_visit visit = {.store = store, .err = err};
    kv_status status =
        kv_manifest_scan_now(store->manifest, key, key_bytes, visit_store, &visit, err);
    if (status != KV_OK) return status;
    if (visit.found &&
        !kv_id_equal(visit.record.directory.bytes, store->options.superblock.id.bytes))
        return KV_FAIL(err, KV_INVALID,
                       "'%s/manifest' belongs to another state directory: put this one's own back",
                       store->options.dir);
    status = find_lost(store, &visit, err);
    if (status != KV_OK) return status;
    visit.record.directory = store->options.superblock.id;
    visit.record.model = store->options.model;
    /* Each start is a batch, so among those that were lost as many starts may have been; their
     * generations stand in pages. */
    visit.record.boots += 1 + store->recovery.lost_batches;
    store->generation = visit.record.boots << 32;
    const struct kv_manifest_put put = {key, key_bytes, value,
                                        kv_record_store_encode(&visit.record, value)};
    status = kv_store_commit_now(store, &put, 1, err);
    if (status == KV_OK) kv_note_first(store, store->commit);
    return status;
}

/* Pages are read into the arena and written from it, and nowhere else. */
static void register_arena(struct kv_store *store)
{
    uint64_t bytes = 0;
    uint8_t *base = kv_hbm_base(store->hbm, &bytes);
    kv_disk_register(store->options.disk, base, bytes);
}

static void forget_arena(struct kv_store *store)
{
    uint64_t bytes = 0;
    if (store->hbm != NULL) kv_disk_forget(store->options.disk, kv_hbm_base(store->hbm, &bytes));
}

/* Once: it is as right without, and only costs more. */
static void tell_refused(struct kv_store *store)
{
    const struct kv_disk_facts facts = kv_disk_facts(store->options.disk);
    if (store->told_refused || facts.refused_errno == 0) return;
    store->told_refused = true;
    kv_log(store->options.log, KV_LOG_WARN, "memory_not_registered",
           "text=\"the kernel registered %llu of %llu bytes of hbm.bytes for I/O and no more "
           "(errno %d, RLIMIT_MEMLOCK?): reads and writes of the rest cost more CPU\"",
           (unsigned long long)facts.bytes_in_use, (unsigned long long)facts.bytes,
           facts.refused_errno);
}

static kv_status open_tiers(struct kv_store *store, struct kv_error *err)
{
    const struct kv_store_options *options = &store->options;
    char path[512];
    kv_status status =
        kv_index_create(&(struct kv_index_options){.bytes = options->index_bytes,
                                                   .model = options->model,
                                                   .kernels = options->kernels,
                                                   .sessions_max = options->sessions_max},
                        &store->index, err);
    if (status != KV_OK) return status;
    kv_index_on_page_free(store->index, page_freed, store);

    status = kv_hbm_create(&(struct kv_hbm_options){.bytes = options->hbm_bytes,
                                                    .page_bytes = store->layout.page_bytes,
                                                    .evicted = slot_evicted,
                                                    .context = store},
                           &store->hbm, err);
    if (status != KV_OK) return status;
    register_arena(store);
    status = kv_pool_create(&(struct kv_pool_options){.bytes = options->pool_bytes,
                                                      .image_bytes = store->layout.image_bytes,
                                                      .ttl_ns = options->pool_ttl_ms * 1000000u,
                                                      .generation_base = store->generation + 1},
                            &store->pool, err);
    if (status != KV_OK) return status;
    (void)snprintf(path, sizeof(path), "%s/ssd", options->dir);
    status = make_ssd_dir(options->disk, options->dir, path, err);
    if (status != KV_OK) return status;
    const struct kv_ssd_options ssd = ssd_options(options, path);
    kv_store_tell_progress(store, "opening segments", 0);
    status = kv_ssd_open(&ssd, options->disk, &store->ssd, err);
    if (status != KV_OK) return status;
    uint32_t segments;
    const uint32_t pages = kv_ssd_shape(store->ssd, &segments);
    status = kv_segments_create(pages, segments, &store->segments);
    return status == KV_OK ? KV_OK : KV_FAIL(err, status, "make the table of segments");
}

kv_status kv_store_open(const struct kv_store_options *options, struct kv_store **ret_store,
                        struct kv_error *err)
{
    struct kv_store *store = calloc(1, sizeof(*store));
    if (store == NULL) return KV_FAIL(err, KV_NOMEM, "allocate the store");
    store->options = *options;
    store->layout = *options->layout;
    store->options.layout = &store->layout;

    store->manifest = options->manifest;

    kv_status status = kv_store_time_begin(store, err);
    if (status != KV_OK) goto fail;
    status = kv_keys_open(store, err);
    if (status != KV_OK) goto fail;
    status = begin_run(store, err);
    if (status != KV_OK) goto fail;
    status = open_tiers(store, err);
    if (status != KV_OK) goto fail;
    status = recover(store, err);
    if (status != KV_OK) goto fail;
    *ret_store = store;
    return KV_OK;

fail:
    kv_store_close(store);
    return status;
}

void kv_store_rest(struct kv_store *store)
{
    assert(store->operations == 0);
    kv_ssd_rest(store->ssd);
}

void kv_store_close(struct kv_store *store)
{
    if (store == NULL) return;
    assert(store->operations == 0);
    kv_batch_discard(store->dead);
    kv_note_close(store);
    kv_segments_destroy(store->segments);
    kv_ssd_close(store->ssd);
    kv_pool_destroy(store->pool);
    forget_arena(store);
    kv_hbm_destroy(store->hbm);
    kv_index_destroy(store->index);
    kv_encrypter_close(store);
    kv_keys_close(store);
    free(store->quarantined);
    free(store->old_branches);
    free(store->deleted);
    kv_store_quota_close(store);
    free(store);
}

void kv_store_tick(struct kv_store *store)
{
    kv_ssd_look(store->ssd, kv_clock_stopwatch_ns());
    kv_store_time_tick(store);
    kv_store_tell(store);
    kv_store_resume(store);
    if (store->dead != NULL) {
        struct kv_batch *dead = store->dead;
        store->dead = NULL;
        kv_batch_post(dead, NULL, NULL);
    }
    kv_ssd_tick(store->ssd, kv_store_now_ns(store));
    tell_refused(store);
    (void)kv_pool_tick(store->pool, kv_store_now_ns(store), 64);
}
