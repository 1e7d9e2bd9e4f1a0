/*
 * Numbers for operators: tiers, counters, latencies.  Also the one call that moves virtual time.
 *
 * Every counter has a name by the metric conventions and a help text; what is not served yet is not
 * listed.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"

#include <stdio.h>
#include <string.h>

#define COUNTERS_MAX 160u

static void add(struct request_stats *stats, const char *name, const char *labels, double value,
                const char *help)
{
    if (stats->counter_count < COUNTERS_MAX)
        stats->counters[stats->counter_count++] =
            (struct request_counter){.name = name, .labels = labels, .help = help, .value = value};
}

static void fill_tiers(struct shard *shard, struct request_stats *stats)
{
    const struct kv_hbm_usage hbm = kv_hbm_usage(shard->store->hbm);
    const struct kv_pool_usage pool = kv_pool_usage(shard->store->pool);
    const struct kv_ssd_usage ssd = kv_ssd_usage(shard->store->ssd);
    const uint64_t page = shard->layout->page_bytes;
    stats->tiers[0] = (struct request_tier){
        .name = "hbm",
        .note = "rows in use (RAM arena)",
        .bytes_used = page * (hbm.pinned + hbm.cached),
        .bytes_capacity = hbm.bytes_capacity,
        .items_used = hbm.pinned + hbm.cached,
        .items_capacity = hbm.slots,
    };
    stats->tiers[1] = (struct request_tier){
        .name = "pool",
        .note = "windows",
        .bytes_used = pool.bytes_used,
        .bytes_capacity = pool.bytes_capacity,
        .items_used = pool.slots_used,
        .items_capacity = pool.slots,
    };
    stats->tiers[2] = (struct request_tier){
        .name = "ssd",
        .note = ssd.read_only ? ssd.read_only_reason
                : ssd.bytes_limit < ssd.bytes_max
                    ? "rows, durable; ssd.bytes is more than the file "
                      "system has"
                    : "rows, durable",
        .bytes_used = ssd.bytes_used,
        .bytes_capacity = ssd.bytes_limit,
        .items_used = ssd.bytes_used / page,
        .items_capacity = ssd.bytes_limit / page,
    };
}

static void fill_quotas(struct request_stats *stats, const struct shard_counters *counters)
{
    static const char help[] = "Calls and saves refused because a user's quota has no room.";
    static const char *const labels[KV_QUOTA_COUNT] = {
        [KV_QUOTA_SESSIONS] = "limit=\"sessions\"",
        [KV_QUOTA_TURNS] = "limit=\"turns\"",
        [KV_QUOTA_BYTES_SSD] = "limit=\"bytes_ssd\"",
        [KV_QUOTA_REQUESTS_PER_S] = "limit=\"requests_per_s\"",
        [KV_QUOTA_TOKENS_PER_S] = "limit=\"tokens_per_s\"",
        [KV_QUOTA_SAVES] = "limit=\"saves\"",
    };
    for (unsigned i = 0; i < KV_QUOTA_COUNT; i++)
        if (i != KV_QUOTA_TURNS) /* They are never a reason to refuse. */
            add(stats, "cached_quota_rejects_total", labels[i], (double)counters->quota_refused[i],
                help);
    add(stats, "cached_quota_sessions_total", NULL, (double)counters->quota_sessions,
        "Sessions deleted to make room within their user's quota.");
    add(stats, "cached_quota_checkpoints_total", NULL, (double)counters->quota_turns,
        "Checkpoints that lost id and window to a quota of turns; their rows stayed.");
}

static void fill_resumes(struct shard *shard, struct request_stats *stats)
{
    const struct shard_counters *counters = &shard->counters;
    add(stats, "cached_resumes_total", "outcome=\"exact\"",
        (double)counters->outcomes[OUTCOME_EXACT],
        "Resumes (Prefill, and Decode on a stored head) by outcome.");
    add(stats, "cached_resumes_total", "outcome=\"replay\"",
        (double)counters->outcomes[OUTCOME_REPLAY],
        "Resumes (Prefill, and Decode on a stored head) by outcome.");
    add(stats, "cached_resumes_total", "outcome=\"miss\"", (double)counters->outcomes[OUTCOME_MISS],
        "Resumes (Prefill, and Decode on a stored head) by outcome.");
    add(stats, "cached_lookups_total", NULL, (double)counters->lookups, "Lookup calls answered.");
    add(stats, "cached_requested_tokens_total", NULL, (double)counters->prompt_tokens,
        "Prompt tokens of all prefills.");
    add(stats, "cached_hit_tokens_total", NULL, (double)counters->hit_tokens,
        "Prompt tokens that were not computed.");
    add(stats, "cached_replayed_tokens_total", NULL, (double)counters->replayed_tokens,
        "Stored tokens rerun to rebuild windows.");
    add(stats, "cached_computed_tokens_total", NULL, (double)counters->computed_tokens,
        "Prompt tokens computed.");
    add(stats, "cached_decoded_tokens_total", NULL, (double)counters->decoded_tokens,
        "Tokens generated or forced.");
    add(stats, "cached_weakened_plans_total", NULL, (double)counters->weakened,
        "Plans made weaker because stored bytes were missing or damaged.");
    add(stats, "cached_failed_requests_total", NULL, (double)counters->failures,
        "Requests that ended with an error.");
    add(stats, "cached_sessions_deleted_total", NULL, (double)counters->sessions_deleted,
        "Sessions removed by DeleteSession, EraseUser, and quotas.");
    add(stats, "cached_live_evictions_total", NULL, (double)counters->live_evictions,
        "Idle live sessions put back to their last checkpoint to make room.");
    for (uint32_t i = 0; i < KV_REASON_COUNT; i++) {
        if (counters->outcome_reasons[i] == 0 || i == KV_REASON_NONE) continue;
        char labels[64];
        (void)snprintf(labels, sizeof(labels), "reason=\"%s\"",
                       kv_reason_info((enum kv_reason)i)->name);
        add(stats, "cached_resume_reasons_total",
            kv_arena_strdup(stats->arena, labels, strlen(labels)),
            (double)counters->outcome_reasons[i], "Prefills that were not EXACT, by reason.");
    }
}

static void fill_sessions(struct shard *shard, struct request_stats *stats)
{
    const struct shard_counters *counters = &shard->counters;
    static const char help[] = "Calls repeated with their request_id: kept answers sent again, "
                               "running calls joined, streams cut off that went on.";
    add(stats, "cached_repeated_calls_total", "how=\"answer\"", (double)counters->answers_repeated,
        help);
    add(stats, "cached_repeated_calls_total", "how=\"joined\"", (double)counters->answers_joined,
        help);
    add(stats, "cached_repeated_calls_total", "how=\"continued\"",
        (double)counters->answers_continued, help);
    add(stats, "cached_repeated_refused_total", NULL, (double)counters->answers_refused,
        "Calls whose request_id another call had.");
    add(stats, "cached_answers", NULL, (double)shard->answers.count,
        "Answers kept by request_id now.");
    add(stats, "cached_answers_bytes", NULL, (double)shard->answers.bytes,
        "Memory of the answers kept by request_id.");
    add(stats, "cached_pins", NULL, (double)shard->store->pin_count, "Checkpoints pinned now.");
    add(stats, "cached_old_branches", NULL, (double)shard->store->old_branch_count,
        "Branches that Compact left and that stay for a while.");
}

static void fill_slots(struct shard *shard, struct request_stats *stats)
{
    const struct shard_counters *counters = &shard->counters;
    add(stats, "cached_live_in_use", NULL, (double)slots_in_use(shard, NULL),
        "Live sessions that running calls hold now, of engine.live_sessions.");
    add(stats, "cached_live_waiting", NULL, (double)shard->waiting.count,
        "Calls that wait for a live session now.");
    add(stats, "cached_live_waits_total", NULL, (double)counters->slot_waits,
        "Calls that had to wait for a live session.");
    add(stats, "cached_live_refused_total", NULL, (double)counters->slot_refused,
        "Calls refused because too many waited for a live session.");
}

static void fill_index(struct shard *shard, struct request_stats *stats)
{
    const struct kv_index_usage index = kv_index_usage(shard->store->index);
    add(stats, "cached_index_bytes", NULL, (double)index.bytes, "Memory of the index.");
    add(stats, "cached_index_nodes", NULL, (double)index.nodes, "Checkpoints in memory.");
    add(stats, "cached_index_pages", NULL, (double)index.pages, "Page objects in memory.");
    add(stats, "cached_index_unloads_total", NULL, (double)shard->store->counters.unloads,
        "Trees unloaded to keep index.ram.");
}

static void fill_store(struct shard *shard, struct request_stats *stats)
{
    const struct kv_store_counters *store = &shard->store->counters;
    const struct kv_pool_usage pool = kv_pool_usage(shard->store->pool);
    const struct kv_hbm_usage hbm = kv_hbm_usage(shard->store->hbm);
    const struct kv_ssd_usage ssd = kv_ssd_usage(shard->store->ssd);
    const struct kv_manifest_stats manifest = kv_manifest_stats(shard->store->manifest);
    const struct kv_disk_facts disk = kv_disk_facts(shard->options.disk);
    add(stats, "cached_saves_total", "result=\"ok\"", (double)store->saves,
        "Checkpoints made durable.");
    add(stats, "cached_saves_total", "result=\"failed\"", (double)store->saves_failed,
        "Saves that did not reach SSD.");
    add(stats, "cached_save_bytes_total", "tier=\"ssd\"", (double)store->bytes_saved,
        "Bytes written to SSD.");
    add(stats, "cached_load_bytes_total", "tier=\"ssd\"", (double)store->bytes_loaded,
        "Bytes read from SSD.");
    add(stats, "cached_checksum_failures_total", "tier=\"ssd\",where=\"read\"",
        (double)store->corrupt_pages, "Pages that were not what the index says.");
    add(stats, "cached_ssd_late_total", "op=\"read\"", (double)store->late_reads,
        "Pages and saves that calls did not wait for, because the device did not answer.");
    add(stats, "cached_ssd_late_total", "op=\"save\"", (double)shard->counters.late_saves,
        "Pages and saves that calls did not wait for, because the device did not answer.");
    add(stats, "cached_read_failures_total", "tier=\"ssd\"", (double)store->unread_pages,
        "Pages that could not be read; they stay stored.");
    add(stats, "cached_checksum_failures_total", "tier=\"pool\",where=\"read\"",
        (double)store->corrupt_images, "Windows that failed verification.");
    add(stats, "cached_checkpoints_dropped_total", NULL, (double)store->nodes_dropped,
        "Checkpoints removed (expired, damaged).");
    add(stats, "cached_evictions_total", "tier=\"pool\",cause=\"capacity\"",
        (double)pool.evicted_capacity, "Windows evicted to make room.");
    add(stats, "cached_evictions_total", "tier=\"pool\",cause=\"expired\"",
        (double)pool.evicted_expired, "Windows whose time was up.");
    add(stats, "cached_evictions_total", "tier=\"hbm\",cause=\"capacity\"", (double)hbm.evictions,
        "Cached pages dropped from memory; SSD has them.");
    add(stats, "cached_io_errors_total", NULL, (double)ssd.io_errors, "Failed reads and writes.");
    add(stats, "cached_ssd_pages_total", "place=\"ahead\"", (double)ssd.pages_ahead,
        "Free places on SSD written through before they were needed.");
    add(stats, "cached_ssd_pages_total", "place=\"behind\"", (double)ssd.pages_behind,
        "Places given out before that was done: their first flush takes longer.");
    add(stats, "cached_io_memory_bytes", "state=\"given\"", (double)disk.bytes,
        "Memory of pages that the kernel may be told of; it is as pages are used.");
    add(stats, "cached_io_memory_bytes", "state=\"registered\"", (double)disk.bytes_in_use,
        "Memory of pages registered with io_uring.");
    add(stats, "cached_io_memory_refused_errno", NULL, (double)disk.refused_errno,
        "Why the kernel registers no more of it; 0: it does.");
    add(stats, "cached_ssd_flushes_total", NULL, (double)ssd.flushes, "fdatasync rounds.");
    add(stats, "cached_manifest_batches_total", NULL, (double)manifest.batches,
        "Manifest changes asked for.");
    add(stats, "cached_manifest_syncs_total", NULL, (double)manifest.syncs,
        "Synced writes that served them.");
    add(stats, "cached_lost_batches", NULL, (double)shard->store->recovery.lost_batches,
        "Batches of acknowledged records that this start did not find any more.");
    add(stats, "cached_clock_jumps_total", NULL, (double)shard->store->time.jumps,
        "Jumps of the wall clock by more than 5 min, also since the last use on record.");
    add(stats, "cached_clock_off_seconds", NULL, (double)shard->store->time.off_ms / 1000,
        "How far the wall clock is ahead of the time that ages are counted by.");
    add(stats, "cached_unreadable_sessions", NULL, (double)store->unreadable_trees,
        "Sessions whose records could not be read since the start; they take no saves.");
    add(stats, "cached_notes_total", "result=\"ok\"", (double)(store->notes - store->notes_failed),
        "Writes of the file acknowledged.");
    add(stats, "cached_notes_total", "result=\"failed\"", (double)store->notes_failed,
        "Writes of the file acknowledged.");
}

static void fill_space(struct shard *shard, struct request_stats *stats)
{
    static const struct {
        enum kv_reason cause;
        const char *labels;
    } causes[] = {
        {KV_REASON_CAPACITY, "tier=\"ssd\",cause=\"capacity\""},
        {KV_REASON_EXPIRED, "tier=\"ssd\",cause=\"expired\""},
        {KV_REASON_CORRUPT, "tier=\"ssd\",cause=\"corrupt\""},
        {KV_REASON_ROLLED_BACK, "tier=\"ssd\",cause=\"rolled_back\""},
    };
    const struct kv_store_counters *store = &shard->store->counters;
    const struct shard_counters *counters = &shard->counters;
    const struct kv_ssd_usage ssd = kv_ssd_usage(shard->store->ssd);
    const uint64_t page = shard->layout->page_bytes;
    for (uint32_t i = 0; i < KV_ARRAY_COUNT(causes); i++)
        add(stats, "cached_evictions_total", causes[i].labels,
            (double)store->removed_nodes[causes[i].cause],
            "Checkpoints removed from SSD, by cause.");
    for (uint32_t i = 0; i < KV_ARRAY_COUNT(causes); i++)
        add(stats, "cached_evicted_bytes_total", causes[i].labels,
            (double)(store->removed_pages[causes[i].cause] * page),
            "Bytes on SSD freed by removing checkpoints, by cause.");
    add(stats, "cached_saves_waited_total", NULL, (double)counters->room_waits,
        "Saves that waited until something was evicted.");
    add(stats, "cached_saves_refused_total", "cause=\"full\"", (double)counters->room_refused,
        "Saves that found no room although they waited, or larger than the tier.");
    add(stats, "cached_compactions_total", NULL, (double)counters->compact_rounds,
        "Times that segments were emptied of what still lived in them.");
    add(stats, "cached_compacted_bytes_total", NULL, (double)(store->moved_pages * page),
        "Bytes that compaction moved.");
    add(stats, "cached_ssd_limit_bytes", NULL, (double)ssd.bytes_limit,
        "What the SSD tier may hold now: ssd.bytes, or less where its file system has less.");
    add(stats, "cached_ssd_file_bytes", NULL, (double)ssd.bytes_files,
        "Size of all segment files.");
    add(stats, "cached_ssd_pages_total", "place=\"erased\"", (double)ssd.pages_erased,
        "Free places on SSD written over because of what had been stored in them.");
    add(stats, "cached_ssd_unerased_bytes", NULL, (double)(ssd.pages_unerased * page),
        "Free places on SSD that may still hold what was stored in them.");
}

static void fill_scrub(struct shard *shard, struct request_stats *stats)
{
    const struct kv_store_counters *store = &shard->store->counters;
    const struct kv_ssd_usage ssd = kv_ssd_usage(shard->store->ssd);
    add(stats, "cached_checksum_failures_total", "tier=\"ssd\",where=\"scrub\"",
        (double)store->scrub_corrupt_pages, "Pages that were not what the index says.");
    add(stats, "cached_missing_pages_total", "tier=\"ssd\"", (double)store->missing_pages,
        "Pages that are gone: their file ends before them, or they have no place.");
    add(stats, "cached_scrub_read_failures_total", NULL, (double)store->scrub_unread_pages,
        "Pages that a scrub could not read; they stay stored.");
    add(stats, "cached_scrub_bytes_total", NULL, (double)store->scrubbed_bytes,
        "Bytes that scrubs read and compared.");
    add(stats, "cached_scrub_pages_total", NULL, (double)store->scrubbed_pages,
        "Pages that scrubs read and compared.");
    add(stats, "cached_scrub_passes_total", NULL, (double)shard->scrub.passes,
        "Whole passes of the scrub.");
    add(stats, "cached_scrub_running", NULL, shard->scrub.run != NULL, "A scrub runs now.");
    add(stats, "cached_scrub_age_seconds", NULL, scrub_age_s(shard),
        "Since the last whole pass ended; since the start where none did.");
    add(stats, "cached_tier_free_bytes", "tier=\"ssd\"",
        (double)ssd.pages_free * shard->layout->page_bytes,
        "Places on SSD that are free, in the segment files that are there.");
    add(stats, "cached_tier_quarantined_bytes", "tier=\"ssd\"",
        (double)ssd.pages_quarantined * shard->layout->page_bytes,
        "Places on SSD that are given to nobody until they are released.");
    add(stats, "cached_quarantined_pages_total", NULL, (double)store->quarantined,
        "Places that were quarantined since the start.");
    add(stats, "cached_quarantine_released_total", NULL, (double)store->released,
        "Quarantined places that were tried and are used again, since the start.");
}

static void fill_encryption(const struct shard *shard, struct request_stats *stats)
{
    const struct kv_encryption_facts facts = kv_store_encryption(shard->store);
    const struct kv_store_counters *store = &shard->store->counters;
    char labels[64];
    const int used = snprintf(labels, sizeof(labels), "master_key=\"%s\"", facts.master);
    add(stats, "cached_encryption_on", NULL, facts.on, "Pages that are written are encrypted.");
    if (!facts.is_encrypted) return;
    add(stats, "cached_encryption_keys", kv_arena_strdup(stats->arena, labels, (size_t)used),
        facts.keys, "Keys of users, and the master key that they are under.");
    add(stats, "cached_encryption_unlocked_errno", NULL, facts.unlocked_errno,
        "Why memory of keys is not locked; 0: it is.");
    add(stats, "cached_pages_encrypted_total", NULL, (double)store->pages_encrypted,
        "Pages written encrypted.");
    add(stats, "cached_pages_decrypted_total", NULL, (double)store->pages_decrypted,
        "Pages read that were encrypted.");
    add(stats, "cached_pages_read_plain_total", NULL, (double)store->pages_plain,
        "Pages read that were not encrypted, although the directory is.");
    add(stats, "cached_key_rotations_total", NULL, (double)store->key_rotations,
        "Times that the master key was replaced.");
}

/* What the start found; the same until the next one. */
static void fill_recovery(const struct shard *shard, struct request_stats *stats)
{
    const struct kv_store_recovery *recovery = &shard->store->recovery;
    const struct {
        const char *label;
        uint64_t value;
    } found[] =
        {
            {"what=\"checkpoints\"", recovery->checkpoints},
            {"what=\"sessions\"", recovery->sessions},
            {"what=\"bytes\"", recovery->bytes},
        },
      dropped[] = {
          {"what=\"checkpoints\",cause=\"place_gone\"", recovery->dropped_lost},
          {"what=\"checkpoints\",cause=\"record_damaged\"", recovery->dropped_damaged},
          {"what=\"checkpoints\",cause=\"session_unknown\"", recovery->dropped_orphans},
          {"what=\"sessions\",cause=\"record_damaged\"", recovery->dropped_sessions},
          {"what=\"bytes\",cause=\"place_gone\"", recovery->dropped_bytes},
      };
    for (size_t i = 0; i < KV_ARRAY_COUNT(found); i++)
        add(stats, "cached_start_recovered", found[i].label, (double)found[i].value,
            "Found at this start.");
    for (size_t i = 0; i < KV_ARRAY_COUNT(dropped); i++)
        add(stats, "cached_start_dropped", dropped[i].label, (double)dropped[i].value,
            "Lost at this start.");
    add(stats, "cached_start_seconds", NULL, (double)recovery->duration_ns / 1e9,
        "Reading of records at this start.");
    add(stats, "cached_start_trees_read", NULL, recovery->scan_why != NULL,
        "1: this start had to read all trees; its line `recovered` in the log says why.");
}

static double ratio(double part, double whole)
{
    return whole > 0 ? part / whole : 0;
}

/* Time of a pass is shared out by rows, so the speed of one kind counts only what it cost. */
static void fill_engine(struct shard *shard, struct request_stats *stats)
{
    const struct worker_stats w = worker_stats(shard->options.worker);
    const struct {
        const char *labels;
        uint64_t tokens, ns;
    } kinds[] = {
        {"kind=\"prefill\"", w.prefill_tokens, w.prefill_ns},
        {"kind=\"replay\"", w.replay_tokens, w.replay_ns},
        {"kind=\"decode\"", w.decode_tokens, w.decode_ns},
    };
    add(stats, "cached_engine_prefill_tokens_total", NULL, (double)w.prefill_tokens,
        "Tokens the engine ran through the encoder for prompts.");
    add(stats, "cached_engine_replay_tokens_total", NULL, (double)w.replay_tokens,
        "Tokens the engine reran.");
    add(stats, "cached_engine_decode_tokens_total", NULL, (double)w.decode_tokens,
        "Tokens the engine decoded.");
    for (uint32_t i = 0; i < KV_ARRAY_COUNT(kinds); i++)
        add(stats, "cached_engine_busy_seconds_total", kinds[i].labels, (double)kinds[i].ns / 1e9,
            "Time the engine computed, shared out by rows.");
    for (uint32_t i = 0; i < KV_ARRAY_COUNT(kinds); i++)
        add(stats, "cached_engine_tokens_per_second", kinds[i].labels,
            ratio((double)kinds[i].tokens, (double)kinds[i].ns / 1e9),
            "Tokens since the start by busy seconds of their kind.");
    add(stats, "cached_engine_passes_total", NULL, (double)w.passes,
        "Passes of the engine, each over rows of many sessions.");
    add(stats, "cached_engine_pass_rows", "stat=\"mean\"",
        ratio((double)w.pass_rows, (double)w.passes),
        "Rows of a pass, of encoder and decoder together.");
    add(stats, "cached_engine_pass_rows", "stat=\"max\"", (double)w.pass_rows_max,
        "Rows of a pass, of encoder and decoder together.");
    add(stats, "cached_engine_pass_sessions", "stat=\"mean\"",
        ratio((double)w.pass_sessions, (double)w.passes), "Sessions in a pass.");
    add(stats, "cached_engine_pass_sessions", "stat=\"max\"", (double)w.pass_sessions_max,
        "Sessions in a pass.");
    if (shard->options.model != NULL)
        add(stats, "cached_engine_engram_rows_total", NULL,
            (double)eng_model_engram_rows(shard->options.model),
            "Rows read of the Engram tables; 0 for a model without.");
    add(stats, "cached_engine_drafts_total", "result=\"accepted\"", (double)w.drafts_accepted,
        "Drafted tokens verified, by what became of them.");
    add(stats, "cached_engine_drafts_total", "result=\"refused\"",
        (double)(w.drafts_proposed - KV_MIN(w.drafts_accepted, w.drafts_proposed)),
        "Drafted tokens verified, by what became of them.");
}

static void fill_latencies(struct shard *shard, struct request_stats *stats)
{
    static const char *const names[LATENCY_COUNT] = {
        [LATENCY_PREFILL] = "prefill",
        [LATENCY_DECODE] = "decode",
        [LATENCY_LOOKUP] = "lookup",
        [LATENCY_READ] = "stage_read",
        [LATENCY_RUN] = "stage_run",
        [LATENCY_COMMIT] = "stage_commit",
        [LATENCY_QUEUE] = "stage_queue",
        [LATENCY_LIVE_QUEUE] = "stage_live_queue",
        [LATENCY_ENGINE_QUEUE] = "stage_engine_queue",
    };
    for (uint32_t i = 0; i < LATENCY_COUNT; i++) {
        const struct kv_histogram *histogram = &shard->latencies[i];
        stats->latencies[stats->latency_count++] = (struct request_latency){
            .name = names[i],
            .count = histogram->count,
            .p50_ms = (double)kv_histogram_quantile(histogram, 0.5) / 1e6,
            .p99_ms = (double)kv_histogram_quantile(histogram, 0.99) / 1e6,
            .max_ms = (double)histogram->max / 1e6,
        };
    }
}

/* A clock that is off keeps nobody from being served. */
static const char *health_text(struct shard *shard, struct kv_arena *arena)
{
    char text[160];
    const char *health = shard_health(shard);
    const int64_t off_ms = shard->store->time.off_ms;
    if (health != NULL || off_ms == 0) return health == NULL ? "serving" : health;
    (void)snprintf(text, sizeof(text),
                   "serving, but the wall clock is off by %lld s: ages go on without it, see "
                   "clock_jumped in the log",
                   (long long)(off_ms / 1000));
    health = kv_arena_strdup(arena, text, strlen(text));
    return health == NULL ? "serving" : health;
}

static void fill_identity(struct shard *shard, struct request_stats *stats)
{
    const struct kv_store *store = shard->store;
    const struct kv_layout *layout = shard->layout;
    stats->uptime_ms = (kv_clock_stopwatch_ns() - shard->started_ns) / 1000000u;
    stats->model_name = shard->options.model_name;
    stats->engine_backend = shard->options.engine_backend;
    stats->engine_isa = shard->options.engine_isa;
    stats->engine_family = shard->options.engine_family;
    stats->io_backend = kv_disk_backend(shard->options.disk);
    stats->clock_mode = kv_clock_is_virtual(shard->options.clock) ? "virtual" : "real";
    stats->health = health_text(shard, stats->arena);
    stats->model = store->options.model;
    stats->sessions = kv_index_usage(store->index).sessions;
    for (uint32_t i = 0; i < shard->live_count; i++)
        stats->sessions_live += shard->lives[i].session != NULL;
    stats->recovered = store->recovery.checkpoints;
    stats->dropped = store->recovery.dropped;
    stats->checkpoints = store->checkpoints;
    stats->rss_budget_bytes = shard->options.rss_budget_bytes;
    stats->page_bytes = layout->page_bytes;
    stats->image_bytes = layout->image_bytes;
    stats->bytes_per_token = (double)layout->rows_bytes_per_page / KV_PAGE_TOKENS;
    stats->window_tokens = layout->window_tokens;
    stats->spare_tokens = layout->spare_tokens;
    stats->vocab_tokens = layout->vocab_tokens;
    if (shard->options.model != NULL)
        stats->wrong_bytes = eng_model_wrong_bytes(shard->options.model);
}

void flow_get_stats(struct flow *flow)
{
    struct kv_arena *arena = flow->req->arena;
    struct request_stats *stats = kv_arena_alloc(arena, sizeof(*stats));
    if (stats != NULL) {
        stats->arena = arena;
        stats->counters = kv_arena_alloc(arena, sizeof(*stats->counters) * COUNTERS_MAX);
        stats->latencies = kv_arena_alloc(arena, sizeof(*stats->latencies) * LATENCY_COUNT);
    }
    if (stats == NULL || stats->counters == NULL || stats->latencies == NULL) {
        flow_fail_status(flow, KV_NOMEM);
        flow_finish(flow);
        return;
    }
    fill_identity(flow->shard, stats);
    fill_tiers(flow->shard, stats);
    fill_resumes(flow->shard, stats);
    fill_quotas(stats, &flow->shard->counters);
    fill_sessions(flow->shard, stats);
    fill_slots(flow->shard, stats);
    fill_store(flow->shard, stats);
    fill_index(flow->shard, stats);
    fill_space(flow->shard, stats);
    fill_scrub(flow->shard, stats);
    fill_encryption(flow->shard, stats);
    fill_recovery(flow->shard, stats);
    fill_engine(flow->shard, stats);
    fill_latencies(flow->shard, stats);
    flow->req->out.stats = stats;
    flow_finish(flow);
}

void flow_advance_clock(struct flow *flow)
{
    struct kv_clock *clock = flow->shard->options.clock;
    if (!kv_clock_is_virtual(clock)) {
        flow_fail(flow, KV_REASON_CLOCK_NOT_VIRTUAL, "clock.mode", "virtual", "real");
    } else if (kv_clock_wall_ms(clock) + flow->req->in.u.advance.ms > KV_CLOCK_WALL_MS_MAX) {
        flow_fail(flow, KV_REASON_CLOCK_STEP_INVALID, "ms",
                  request_u64(flow->req, KV_CLOCK_WALL_MS_MAX - kv_clock_wall_ms(clock)),
                  request_u64(flow->req, flow->req->in.u.advance.ms));
    } else {
        kv_clock_advance(clock, flow->req->in.u.advance.ms * 1000000u);
        flow->req->out.wall_ms = kv_clock_wall_ms(clock);
        flow->wake = flow_finish;
        sweep_wait(flow);
        return;
    }
    flow_finish(flow);
}
