/*
 * Every setting: name, type, range, default and what it means.
 *
 * This is the only list.  Parsing, range checks, --print-config (and with it deploy/cached.conf),
 * --check-config and GetConfig all read it, so a setting that is not here does not exist and one
 * that is here is documented.
 */

#include "cached/config.h"

#include "kvstore/base/limits.h"

#include <assert.h>
#include <stddef.h>

#define KIB 1024ull
#define MIB (1024ull * KIB)
#define GIB (1024ull * MIB)
#define TIB (1024ull * GIB)
#define HOUR_MS 3600000ull

#define AT(field) (uint32_t) offsetof(struct cached_config, field)

#define PATH_BYTES_MAX CONFIG_PATH_MAX
/* sun_path holds 108 bytes with the closing zero. */
#define SOCKET_PATH_MAX 107u

/* clang-format off */
static const struct config_item items[CONFIG_KEY_COUNT] = {
    [CONFIG_SERVER_SOCKET] = {"server.socket", CONFIG_TYPE_TEXT, AT(server_socket),
        0, SOCKET_PATH_MAX, "", NULL,
        "Unix socket to serve on; empty: none."},
    [CONFIG_SERVER_LISTEN] = {"server.listen", CONFIG_TYPE_TEXT, AT(server_listen),
        0, PATH_BYTES_MAX, "", NULL,
        "host:port to serve on, loopback only; port 0: any free port; empty: none."},
    [CONFIG_SERVER_TOKEN_FILE] = {"server.token_file", CONFIG_TYPE_TEXT, AT(server_token_file),
        0, PATH_BYTES_MAX, "", NULL,
        "Who may call: lines `user role sha256-of-token`; not readable by others."},
    [CONFIG_SERVER_PID_FILE] = {"server.pid_file", CONFIG_TYPE_TEXT, AT(server_pid_file),
        0, PATH_BYTES_MAX, "", NULL,
        "File to write the process id to; empty: none."},
    [CONFIG_STATE_DIR] = {"state.dir", CONFIG_TYPE_TEXT, AT(state_dir),
        0, PATH_BYTES_MAX, "", NULL,
        "Directory of the SSD tier and the manifest; one daemon at a time."},
    [CONFIG_ENGINE_BACKEND] = {"engine.backend", CONFIG_TYPE_CHOICE, AT(engine_backend),
        0, 0, "cpu", "cpu|synthetic",
        "cpu computes; synthetic only moves bytes of the right size, for load tests."},
    [CONFIG_ENGINE_MODEL_DIR] = {"engine.model_dir", CONFIG_TYPE_TEXT, AT(engine_model_dir),
        0, PATH_BYTES_MAX, "", NULL,
        "Directory with config.json and the weights, one file or shards; optional for synthetic."},
    [CONFIG_ENGINE_CHUNK_TOKENS] = {"engine.chunk_tokens", CONFIG_TYPE_COUNT,
        AT(engine_chunk_tokens), 1, KV_PASS_ROWS_MAX, "128", NULL,
        "Tokens of prefills that others wait for at most; never changes results."},
    [CONFIG_ENGINE_PASS_ROWS] = {"engine.pass_rows", CONFIG_TYPE_COUNT, AT(engine_pass_rows),
        0, KV_PASS_ROWS_MAX, "0", "0, or engine.chunk_tokens (at least 2)",
        "Tokens of all sessions computed together, of encoder and of decoder each (status adds the "
        "two); 0: twice chunk_tokens, at least 256."},
    [CONFIG_ENGINE_THREADS] = {"engine.threads", CONFIG_TYPE_COUNT, AT(engine_threads),
        0, KV_ENGINE_THREADS_MAX, "0", NULL,
        "Threads that compute; 0: one per core but one; never changes results."},
    [CONFIG_ENGINE_ISA] = {"engine.isa", CONFIG_TYPE_CHOICE, AT(engine_isa),
        0, 0, "auto", "auto|portable|avx2|avx512|amx",
        "Instructions to compute with; auto: the best of this machine; amx rounds differently."},
    [CONFIG_ENGINE_DRAFT] = {"engine.draft", CONFIG_TYPE_CHOICE, AT(engine_draft),
        0, 0, "auto", "auto|on|off",
        "Proposing tokens and verifying several at a time; auto: where it pays; same results."},
    [CONFIG_ENGINE_LIVE_SESSIONS] = {"engine.live_sessions", CONFIG_TYPE_COUNT,
        AT(engine_live_sessions), 1, 4096, "64", NULL,
        "Sessions whose windows stay in the engine; calls beyond wait, fair between users."},
    [CONFIG_WINDOW_SPARE_TOKENS] = {"window.spare_tokens", CONFIG_TYPE_COUNT,
        AT(window_spare_tokens), KV_SPARE_TOKENS_MIN, KV_SPARE_TOKENS_MAX, "16", NULL,
        "Trailing tokens a prompt may drop and still resume exactly."},
    [CONFIG_HBM_BYTES] = {"hbm.bytes", CONFIG_TYPE_BYTES, AT(hbm_bytes),
        MIB, 64 * TIB, "256MiB", NULL,
        "Memory for rows in use."},
    [CONFIG_POOL_BYTES] = {"pool.bytes", CONFIG_TYPE_BYTES, AT(pool_bytes),
        0, 64 * TIB, "0", NULL,
        "Memory for window images; 0: pool.fraction of the machine's RAM."},
    [CONFIG_POOL_FRACTION] = {"pool.fraction", CONFIG_TYPE_FRACTION, AT(pool_fraction),
        1, 900, "0.10", NULL,
        "Share of RAM for window images when pool.bytes is 0."},
    [CONFIG_POOL_TTL] = {"pool.ttl", CONFIG_TYPE_TIME, AT(pool_ttl_ms),
        1, 720 * HOUR_MS, "5min", NULL,
        "Life of a window image from its last use."},
    [CONFIG_SSD_BYTES] = {"ssd.bytes", CONFIG_TYPE_BYTES, AT(ssd_bytes),
        MIB, 1024 * TIB, "10GiB", NULL,
        "Space for rows on SSD."},
    [CONFIG_SSD_SEGMENT_BYTES] = {"ssd.segment_bytes", CONFIG_TYPE_BYTES, AT(ssd_segment_bytes),
        256 * KIB, GIB, "64MiB", NULL,
        "Size of one segment file, a multiple of 4KiB; fixed once the directory is in use."},
    [CONFIG_SSD_TTL] = {"ssd.ttl", CONFIG_TYPE_TIME, AT(ssd_ttl_ms),
        1, 8760 * HOUR_MS, "72h", NULL,
        "Life of rows from their last use."},
    [CONFIG_SSD_ERASE_WITHIN] = {"ssd.erase_within", CONFIG_TYPE_TIME, AT(ssd_erase_within_ms),
        0, 8760 * HOUR_MS, "10min", NULL,
        "Time until zeros are written over what was removed from SSD; 0: until others' rows are."},
    [CONFIG_SSD_COMPACT_BELOW] = {"ssd.compact_below", CONFIG_TYPE_FRACTION, AT(ssd_compact_below),
        0, 900, "0.50", NULL,
        "Segments of which less than this part lives are emptied into others; 0: never."},
    [CONFIG_SSD_COMPACT_RATE] = {"ssd.compact_rate", CONFIG_TYPE_BYTES, AT(ssd_compact_rate),
        MIB, 64 * GIB, "32MiB", NULL,
        "Bytes a second that compaction may move, each read and written once."},
    [CONFIG_SSD_ENCRYPTION] = {"ssd.encryption", CONFIG_TYPE_CHOICE, AT(ssd_encryption),
        0, 0, "off", "off|on",
        "on: pages on SSD are encrypted, with a key for each user; off: those that are stay so."},
    [CONFIG_SSD_MASTER_KEY_FILE] = {"ssd.master_key_file", CONFIG_TYPE_TEXT,
        AT(ssd_master_key_file), 0, CONFIG_PATH_MAX, "", NULL,
        "File with the master key: 32 bytes or 64 hex digits, for its owner only (chmod 600)."},
    [CONFIG_SSD_MASTER_KEY_CREDENTIAL] = {"ssd.master_key_credential", CONFIG_TYPE_TEXT,
        AT(ssd_master_key_credential), 0, CONFIG_PATH_MAX, "", NULL,
        "Instead of a file: the name that LoadCredential= of the systemd unit gives the key."},
    [CONFIG_SCRUB_RATE] = {"scrub.rate", CONFIG_TYPE_BYTES, AT(scrub_rate_bytes),
        KV_SCRUB_RATE_MIN, KV_SCRUB_RATE_MAX, "200MiB", NULL,
        "Bytes a second that a scrub reads when `cachectl scrub start` names no rate."},
    [CONFIG_SCRUB_EVERY] = {"scrub.every", CONFIG_TYPE_TIME, AT(scrub_every_ms),
        0, 8760 * HOUR_MS, "168h", NULL,
        "Time from the end of a scrub, or the start, until one begins by itself; 0: none does."},
    [CONFIG_QUOTA_SESSIONS] = {"quota.default_sessions", CONFIG_TYPE_COUNT,
        AT(quota_default_sessions), 0, 1000000, "20", NULL,
        "Sessions of kind MAIN of a user without a plan or limit of its own; 0: no limit."},
    [CONFIG_QUOTA_TURNS] = {"quota.default_turns", CONFIG_TYPE_COUNT, AT(quota_default_turns),
        0, 1000000, "10", NULL,
        "Turns of a session with checkpoints of their own, likewise; rows stay; 0: no limit."},
    [CONFIG_INDEX_RAM] = {"index.ram", CONFIG_TYPE_BYTES, AT(index_ram_bytes),
        MIB, TIB, "256MiB", NULL,
        "Memory for the index: session records and checkpoints."},
    [CONFIG_IO_BACKEND] = {"io.backend", CONFIG_TYPE_CHOICE, AT(io_backend),
        0, 0, "auto", "auto|io_uring|pool",
        "auto takes io_uring where the kernel allows it, else threads."},
    [CONFIG_LOG_LEVEL] = {"log.level", CONFIG_TYPE_CHOICE, AT(log_level),
        0, 0, "info", "debug|info|warn|error",
        "Lines below this level are not written."},
    [CONFIG_CLOCK_MODE] = {"clock.mode", CONFIG_TYPE_CHOICE, AT(clock_mode),
        0, 0, "real", "real|virtual",
        "virtual moves only by AdvanceClock, for trace replay and tests."},
};
/* clang-format on */

const struct config_item *config_item(enum config_key key)
{
    assert(key < CONFIG_KEY_COUNT);
    assert(items[key].key != NULL);
    return &items[key];
}
