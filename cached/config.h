#pragma once

/*
 * The daemon's configuration: one table (config_schema.c), one struct, frozen before any thread
 * starts.  Order of sources: defaults < file < the files FILE.d/NAME.conf by name < flags; the
 * environment is not read.  Owned by: main; everyone else gets the few values it needs in its own
 * options.
 */

#include "kvstore/base/status.h"

#include <stdint.h>
#include <stdio.h>

#define CONFIG_TEXT_MAX 256u
#define CONFIG_PATH_MAX 160u /* A line of a file holds 198 bytes: name, equals sign and value. */
#define CONFIG_FILE_BYTES_MAX (1u << 20)

/* Numbers of the choices, in the order the schema lists them. */
enum config_backend { CONFIG_BACKEND_CPU, CONFIG_BACKEND_SYNTHETIC };
/* Like enum eng_isa and enum worker_draft. */
enum config_isa {
    CONFIG_ISA_AUTO,
    CONFIG_ISA_PORTABLE,
    CONFIG_ISA_AVX2,
    CONFIG_ISA_AVX512,
    CONFIG_ISA_AMX
};
enum config_draft { CONFIG_DRAFT_AUTO, CONFIG_DRAFT_ON, CONFIG_DRAFT_OFF };
enum config_io { CONFIG_IO_AUTO, CONFIG_IO_URING, CONFIG_IO_POOL };
enum config_encryption { CONFIG_ENCRYPTION_OFF, CONFIG_ENCRYPTION_ON };
enum config_clock { CONFIG_CLOCK_REAL, CONFIG_CLOCK_VIRTUAL };

/* Indices into the table and into `origins`. */
enum config_key {
    CONFIG_SERVER_SOCKET,
    CONFIG_SERVER_LISTEN,
    CONFIG_SERVER_TOKEN_FILE,
    CONFIG_SERVER_PID_FILE,
    CONFIG_STATE_DIR,
    CONFIG_ENGINE_BACKEND,
    CONFIG_ENGINE_MODEL_DIR,
    CONFIG_ENGINE_CHUNK_TOKENS,
    CONFIG_ENGINE_PASS_ROWS,
    CONFIG_ENGINE_THREADS,
    CONFIG_ENGINE_ISA,
    CONFIG_ENGINE_DRAFT,
    CONFIG_ENGINE_LIVE_SESSIONS,
    CONFIG_WINDOW_SPARE_TOKENS,
    CONFIG_HBM_BYTES,
    CONFIG_POOL_BYTES,
    CONFIG_POOL_FRACTION,
    CONFIG_POOL_TTL,
    CONFIG_SSD_BYTES,
    CONFIG_SSD_SEGMENT_BYTES,
    CONFIG_SSD_TTL,
    CONFIG_SSD_ERASE_WITHIN,
    CONFIG_SSD_COMPACT_BELOW,
    CONFIG_SSD_COMPACT_RATE,
    CONFIG_SSD_ENCRYPTION,
    CONFIG_SSD_MASTER_KEY_FILE,
    CONFIG_SSD_MASTER_KEY_CREDENTIAL,
    CONFIG_SCRUB_RATE,
    CONFIG_SCRUB_EVERY,
    CONFIG_QUOTA_SESSIONS,
    CONFIG_QUOTA_TURNS,
    CONFIG_INDEX_RAM,
    CONFIG_IO_BACKEND,
    CONFIG_LOG_LEVEL,
    CONFIG_CLOCK_MODE,
    CONFIG_KEY_COUNT,
};

struct cached_config {
    char server_socket[CONFIG_TEXT_MAX];
    char server_listen[CONFIG_TEXT_MAX];
    char server_token_file[CONFIG_TEXT_MAX];
    char server_pid_file[CONFIG_TEXT_MAX];
    char state_dir[CONFIG_TEXT_MAX];
    uint64_t engine_backend; /* enum config_backend */
    char engine_model_dir[CONFIG_TEXT_MAX];
    uint64_t engine_chunk_tokens;
    uint64_t engine_pass_rows; /* 0: config_pass_rows(). */
    uint64_t engine_threads;   /* 0: one per core but one. */
    uint64_t engine_isa;       /* enum config_isa */
    uint64_t engine_draft;     /* enum config_draft */
    uint64_t engine_live_sessions;
    uint64_t window_spare_tokens;
    uint64_t hbm_bytes;
    uint64_t pool_bytes; /* 0: pool_fraction of the machine's RAM. */
    double pool_fraction;
    uint64_t pool_ttl_ms;
    uint64_t ssd_bytes;
    uint64_t ssd_segment_bytes;
    uint64_t ssd_ttl_ms;
    uint64_t ssd_erase_within_ms;
    double ssd_compact_below; /* 0: no compaction. */
    uint64_t ssd_compact_rate;
    uint64_t ssd_encryption; /* enum config_encryption */
    char ssd_master_key_file[CONFIG_TEXT_MAX];
    char ssd_master_key_credential[CONFIG_TEXT_MAX];
    uint64_t scrub_rate_bytes;
    uint64_t scrub_every_ms;
    uint64_t quota_default_sessions, quota_default_turns; /* 0: no limit. */
    uint64_t index_ram_bytes;
    uint64_t io_backend; /* enum config_io */
    uint64_t log_level;  /* enum kv_log_level */
    uint64_t clock_mode; /* enum config_clock */
    /* "default", "FILE:LINE" or "flag". */
    char origins[CONFIG_KEY_COUNT][CONFIG_TEXT_MAX + 16];
};

enum config_type {
    CONFIG_TYPE_TEXT,     /* char[CONFIG_TEXT_MAX]; max: its longest length. */
    CONFIG_TYPE_COUNT,    /* uint64_t */
    CONFIG_TYPE_BYTES,    /* uint64_t; KiB, MiB, GiB, TiB. */
    CONFIG_TYPE_TIME,     /* uint64_t, ms; ms, s, min, h. */
    CONFIG_TYPE_FRACTION, /* double; min and max in thousandths. */
    CONFIG_TYPE_CHOICE,   /* uint64_t: index into `choices`. */
};

struct config_item {
    const char *key; /* "section.name" */
    enum config_type type;
    uint32_t offset; /* In struct cached_config. */
    uint64_t min, max;
    const char *fallback; /* The default, as it would be written in a file. */
    const char *choices;  /* CHOICE: "a|b|c".  Others: said for min where another key bounds it. */
    const char *doc;      /* One line. */
};

/* The table; CONFIG_KEY_COUNT rows in the order of enum config_key. */
const struct config_item *config_item(enum config_key key);

/* Every value at its default. */
void config_defaults(struct cached_config *config);

/* One file's text; `name` is for messages and origins.  KV_INVALID: "name:line: ..." with the key,
 * its limit and its value; an unknown key comes with the nearest right one. */
kv_status config_parse(struct cached_config *config, const char *name, const char *text,
                       size_t bytes, struct kv_error *err) KV_MUST_CHECK;

/* The file, then the files FILE.d/NAME.conf by name. */
kv_status config_read(struct cached_config *config, const char *path,
                      struct kv_error *err) KV_MUST_CHECK;

/* "section.key=value", without the leading dashes. */
kv_status config_flag(struct cached_config *config, const char *flag,
                      struct kv_error *err) KV_MUST_CHECK;

/* Rules about several values at once; what a daemon can be started with. */
kv_status config_check(const struct cached_config *config, struct kv_error *err) KV_MUST_CHECK;

/* engine.pass_rows, or what follows from engine.chunk_tokens. */
uint32_t config_pass_rows(const struct cached_config *config);

/* The value as one would write it, into buf. */
void config_format(const struct cached_config *config, enum config_key key, char *buf, size_t room);

/* The whole table as a commented INI with the values of `config`. */
void config_print(const struct cached_config *config, FILE *out);

/* host:port, host an address of this machine only: 127.0.0.0/8, ::1 in brackets, or localhost. */
bool config_is_loopback(const char *listen);
