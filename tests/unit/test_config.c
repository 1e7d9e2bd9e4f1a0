/*
 * The configuration: every key, every kind of value, both sides of each range.
 *
 * Goal: what is accepted ends in the struct as the number it says; what is not accepted is named by
 * line, key and nearest right key; print and parse are inverse.
 * Method: tables of texts; a walk over the whole schema.
 */

#include "cached/config.h"
#include "kvstore/base/limits.h"
#include "tests/harness.h"

static struct cached_config config;

static kv_status parse(const char *text, struct kv_error *err)
{
    config_defaults(&config);
    *err = (struct kv_error){0};
    return config_parse(&config, "f", text, strlen(text), err);
}

static void test_defaults(void)
{
    config_defaults(&config);
    EXPECT_EQ_STR(config.server_socket, "");
    EXPECT_EQ_U64(config.engine_backend, CONFIG_BACKEND_CPU);
    EXPECT_EQ_U64(config.engine_chunk_tokens, 128);
    EXPECT_EQ_U32(config_pass_rows(&config), 256);
    EXPECT_EQ_U64(config.engine_live_sessions, 64);
    EXPECT_EQ_U64(config.window_spare_tokens, 16);
    EXPECT_EQ_U64(config.hbm_bytes, 256ull << 20);
    EXPECT_EQ_U64(config.pool_bytes, 0);
    EXPECT(config.pool_fraction > 0.0999 && config.pool_fraction < 0.1001);
    EXPECT_EQ_U64(config.pool_ttl_ms, 300000);
    EXPECT_EQ_U64(config.ssd_bytes, 10ull << 30);
    EXPECT_EQ_U64(config.ssd_segment_bytes, 64ull << 20);
    EXPECT_EQ_U64(config.ssd_ttl_ms, 72ull * 3600000);
    EXPECT_EQ_U64(config.scrub_rate_bytes, 200ull << 20);
    EXPECT_EQ_U64(config.index_ram_bytes, 256ull << 20);
    EXPECT_EQ_U64(config.io_backend, CONFIG_IO_AUTO);
    EXPECT_EQ_U64(config.log_level, 1);
    EXPECT_EQ_U64(config.clock_mode, CONFIG_CLOCK_REAL);
    for (unsigned i = 0; i < CONFIG_KEY_COUNT; i++)
        EXPECT_EQ_STR(config.origins[i], "default");
}

static void test_values(void)
{
    const struct {
        const char *text;
        enum config_key key;
        const char *want; /* As config_format() says it; NULL: refused. */
    } cases[] = {
        {"[hbm]\nbytes = 1GiB", CONFIG_HBM_BYTES, "1GiB"},
        {"[hbm]\nbytes = 1024 MiB", CONFIG_HBM_BYTES, "1GiB"},
        {"[hbm]\nbytes=1048576", CONFIG_HBM_BYTES, "1MiB"},
        {"[hbm]\nbytes=1048577", CONFIG_HBM_BYTES, "1048577B"},
        {"[hbm]\nbytes=1048577B", CONFIG_HBM_BYTES, "1048577B"},
        {"[hbm]\nbytes=1048575", CONFIG_HBM_BYTES, NULL},
        {"[hbm]\nbytes=64TiB", CONFIG_HBM_BYTES, "64TiB"},
        {"[hbm]\nbytes=65TiB", CONFIG_HBM_BYTES, NULL},
        {"[hbm]\nbytes=99999999999999999999", CONFIG_HBM_BYTES, NULL},
        {"[hbm]\nbytes=18446744073709551615GiB", CONFIG_HBM_BYTES, NULL},
        {"[hbm]\nbytes=-1", CONFIG_HBM_BYTES, NULL},
        {"[hbm]\nbytes=1gib", CONFIG_HBM_BYTES, NULL},
        {"[hbm]\nbytes=1.5GiB", CONFIG_HBM_BYTES, NULL},
        {"[hbm]\nbytes=", CONFIG_HBM_BYTES, NULL},
        {"[pool]\nbytes=0", CONFIG_POOL_BYTES, "0"},
        {"[pool]\nttl=90s", CONFIG_POOL_TTL, "90s"},
        {"[pool]\nttl=60000ms", CONFIG_POOL_TTL, "1min"},
        {"[pool]\nttl=120min", CONFIG_POOL_TTL, "2h"},
        {"[pool]\nttl=72", CONFIG_POOL_TTL, NULL},
        {"[pool]\nttl=0", CONFIG_POOL_TTL, NULL},
        {"[pool]\nttl=721h", CONFIG_POOL_TTL, NULL},
        {"[pool]\nfraction=0.25", CONFIG_POOL_FRACTION, "0.25"},
        {"[pool]\nfraction=.25", CONFIG_POOL_FRACTION, NULL},
        {"[pool]\nfraction=0.125", CONFIG_POOL_FRACTION, "0.125"},
        {"[pool]\nfraction=0", CONFIG_POOL_FRACTION, NULL},
        {"[pool]\nfraction=0.901", CONFIG_POOL_FRACTION, NULL},
        {"[pool]\nfraction=1e-1", CONFIG_POOL_FRACTION, NULL},
        {"[engine]\nbackend=synthetic", CONFIG_ENGINE_BACKEND, "synthetic"},
        {"[engine]\nbackend=gpu", CONFIG_ENGINE_BACKEND, NULL},
        {"[engine]\nbackend=cpu|synthetic", CONFIG_ENGINE_BACKEND, NULL},
        {"[engine]\nchunk_tokens=1", CONFIG_ENGINE_CHUNK_TOKENS, "1"},
        {"[engine]\nchunk_tokens=4096", CONFIG_ENGINE_CHUNK_TOKENS, "4096"},
        {"[engine]\nchunk_tokens=0", CONFIG_ENGINE_CHUNK_TOKENS, NULL},
        {"[engine]\nchunk_tokens=4097", CONFIG_ENGINE_CHUNK_TOKENS, NULL},
        {"[engine]\nchunk_tokens=1 2", CONFIG_ENGINE_CHUNK_TOKENS, NULL},
        {"[engine]\npass_rows=4096", CONFIG_ENGINE_PASS_ROWS, "4096"},
        {"[engine]\npass_rows=4097", CONFIG_ENGINE_PASS_ROWS, NULL},
        {"[engine]\nthreads=256", CONFIG_ENGINE_THREADS, "256"},
        {"[engine]\nthreads=257", CONFIG_ENGINE_THREADS, NULL},
        {"[engine]\nisa=avx512", CONFIG_ENGINE_ISA, "avx512"},
        {"[engine]\nisa=sse", CONFIG_ENGINE_ISA, NULL},
        {"[engine]\ndraft=off", CONFIG_ENGINE_DRAFT, "off"},
        {"[engine]\ndraft=yes", CONFIG_ENGINE_DRAFT, NULL},
        {"[io]\nbackend=io_uring", CONFIG_IO_BACKEND, "io_uring"},
        {"[log]\nlevel=debug", CONFIG_LOG_LEVEL, "debug"},
        {"[server]\nsocket=/run/a b", CONFIG_SERVER_SOCKET, "/run/a b"},
        {"  [server]\n\t socket = /x ; comment", CONFIG_SERVER_SOCKET, "/x"},
        {"# comment\n\n[server]\r\nsocket = /y\r\n", CONFIG_SERVER_SOCKET, "/y"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct kv_error err;
        char got[CONFIG_TEXT_MAX];
        (void)printf("  %s\n", cases[i].text);
        const kv_status status = parse(cases[i].text, &err);
        EXPECT_EQ_U64(status, cases[i].want == NULL ? KV_INVALID : KV_OK);
        if (status != KV_OK) {
            EXPECT(strstr(err.text, config_item(cases[i].key)->key) != NULL);
            continue;
        }
        config_format(&config, cases[i].key, got, sizeof(got));
        EXPECT_EQ_STR(got, cases[i].want);
    }
}

static void test_messages(void)
{
    const struct {
        const char *text;
        const char *want;
    } cases[] = {
        {"[hbm]\n\nbites = 1", "f:3: unknown key \"hbm.bites\"; did you mean \"hbm.bytes\"?"},
        {"[pol]\nttl=1s", "f:2: unknown key \"pol.ttl\"; did you mean \"pool.ttl\"?"},
        {"socket=1", "f:1: unknown key \"socket\"; did you mean \"server.socket\"?"},
        {"[hbm]\nbytes=1GiB\nbytes=2GiB", "f:3: hbm.bytes is set already in line 2"},
        {"[hbm]\nbytes=1GiB\n   bytes=2GiB", "f:3: hbm.bytes is set already in line 2"},
        {"[hbm]\nwhat", "f:2: neither a [section] nor `name = value`"},
        {"[hbm\nbytes=1GiB", "f:1: neither a [section] nor `name = value`"},
        {"[window]\nspare_tokens=3", "f:2: window.spare_tokens must be 4 to 128, not \"3\""},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct kv_error err;
        EXPECT_EQ_U64(parse(cases[i].text, &err), KV_INVALID);
        EXPECT_EQ_STR(err.text, cases[i].want);
    }
}

static void test_long_and_binary(void)
{
    struct kv_error err = {0};
    char text[4096];
    memset(text, 'a', sizeof(text));
    config_defaults(&config);
    EXPECT_EQ_U64(config_parse(&config, "f", text, sizeof(text), &err), KV_INVALID);
    EXPECT(strstr(err.text, "f:1: a line has at most") != NULL);
    EXPECT_EQ_U64(config_parse(&config, "f", "[hbm]\nby\0tes=1", 14, &err), KV_INVALID);
    EXPECT_EQ_STR(err.text, "f:2: a zero byte is no text");
    EXPECT_EQ_U64(config_parse(&config, "f", "", 0, &err), KV_OK);

    (void)snprintf(text, sizeof(text), "server.socket=/%0107d", 0);
    EXPECT_EQ_U64(config_flag(&config, text, &err), KV_INVALID); /* 108 bytes. */
    (void)snprintf(text, sizeof(text), "server.socket=/%0106d", 0);
    EXPECT_EQ_U64(config_flag(&config, text, &err), KV_OK);
}

static void test_order(void)
{
    struct kv_error err = {0};
    const char *text = "[hbm]\nbytes=2MiB\n[pool]\nttl=2s\n[ssd]\nttl=2h\n";
    EXPECT_EQ_U64(parse(text, &err), KV_OK);
    const char *later = "[pool]\nttl=3s\n[ssd]\nttl=3h";
    EXPECT_EQ_U64(config_parse(&config, "g", later, strlen(later), &err), KV_OK);
    EXPECT_EQ_U64(config_flag(&config, "ssd.ttl=4h", &err), KV_OK);
    EXPECT_EQ_U64(config.hbm_bytes, 2u << 20);
    EXPECT_EQ_U64(config.pool_ttl_ms, 3000);
    EXPECT_EQ_U64(config.ssd_ttl_ms, 4ull * 3600000);
    EXPECT_EQ_STR(config.origins[CONFIG_HBM_BYTES], "f:2");
    EXPECT_EQ_STR(config.origins[CONFIG_POOL_TTL], "g:2");
    EXPECT_EQ_STR(config.origins[CONFIG_SSD_TTL], "flag");
    EXPECT_EQ_STR(config.origins[CONFIG_INDEX_RAM], "default");
}

static void test_flags(void)
{
    struct kv_error err = {0};
    config_defaults(&config);
    EXPECT_EQ_U64(config_flag(&config, "hbm.bytes", &err), KV_INVALID);
    EXPECT_EQ_STR(err.text, "--hbm.bytes needs a value: --hbm.bytes=...");
    EXPECT_EQ_U64(config_flag(&config, "hbm.byte=1MiB", &err), KV_INVALID);
    EXPECT_EQ_STR(err.text, "unknown flag --hbm.byte; did you mean --hbm.bytes=...?");
    EXPECT_EQ_U64(config_flag(&config, "server.socket=", &err), KV_OK);
    EXPECT_EQ_U64(config_flag(&config, "server.socket=a=b", &err), KV_OK);
    EXPECT_EQ_STR(config.server_socket, "a=b");
}

static void test_loopback(void)
{
    const char *const good[] = {"127.0.0.1:1", "127.255.0.9:0", "localhost:65535", "[::1]:7070"};
    const char *const bad[] = {
        "0.0.0.0:1",      "10.0.0.1:1",      "[::]:1",       "127.0.0.1",     "127.0.0.1:",
        "127.0.0.1:x",    "127.0.0.1:65536", ":1",           "128.0.0.1:1",   "::1:5",
        "example.org:80", "127.1:80",        "127.0.0.1:-1", "127.0.0.1:1:2", "",
        "localhost.:1"};
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++)
        EXPECT(config_is_loopback(good[i]));
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        EXPECT(!config_is_loopback(bad[i]));
}

static void test_whole(void)
{
    const char *const flags[] = {"server.socket=/s", "server.token_file=/t", "state.dir=/d",
                                 "engine.model_dir=/m"};
    struct kv_error err = {0};
    config_defaults(&config);
    for (size_t i = 0; i < sizeof(flags) / sizeof(flags[0]); i++) {
        EXPECT_EQ_U64(config_check(&config, &err), KV_INVALID);
        EXPECT_EQ_U64(config_flag(&config, flags[i], &err), KV_OK);
    }
    EXPECT_EQ_U64(config_check(&config, &err), KV_OK);
    EXPECT_EQ_U64(config_flag(&config, "server.listen=0.0.0.0:5", &err), KV_OK);
    EXPECT_EQ_U64(config_check(&config, &err), KV_INVALID);
    EXPECT(strstr(err.text, "server.listen") != NULL);
    EXPECT_EQ_U64(config_flag(&config, "server.listen=127.0.0.1:5", &err), KV_OK);
    EXPECT_EQ_U64(config_flag(&config, "ssd.bytes=1MiB", &err), KV_OK);
    EXPECT_EQ_U64(config_check(&config, &err), KV_INVALID);
    EXPECT_EQ_U64(config_flag(&config, "ssd.segment_bytes=524289", &err), KV_OK);
    EXPECT_EQ_U64(config_check(&config, &err), KV_INVALID);
    EXPECT_EQ_U64(config_flag(&config, "ssd.segment_bytes=512KiB", &err), KV_OK);
    EXPECT_EQ_U64(config_check(&config, &err), KV_OK);

    EXPECT_EQ_U64(config_flag(&config, "engine.pass_rows=127", &err), KV_OK);
    EXPECT_EQ_U64(config_check(&config, &err), KV_INVALID);
    EXPECT(strcmp(err.text, "engine.pass_rows must be 0, or 128 to 4096 (at least 2 and "
                            "engine.chunk_tokens = 128), found 127") == 0);
    EXPECT_EQ_U64(config_flag(&config, "engine.pass_rows=128", &err), KV_OK);
    EXPECT_EQ_U64(config_check(&config, &err), KV_OK);
    EXPECT_EQ_U32(config_pass_rows(&config), 128);
    EXPECT_EQ_U64(config_flag(&config, "engine.chunk_tokens=1", &err), KV_OK);
    EXPECT_EQ_U64(config_flag(&config, "engine.pass_rows=1", &err), KV_OK);
    EXPECT_EQ_U64(config_check(&config, &err), KV_INVALID);
    EXPECT(strcmp(err.text, "engine.pass_rows must be 0, or 2 to 4096 (at least 2 and "
                            "engine.chunk_tokens = 1), found 1") == 0);
    EXPECT_EQ_U64(config_flag(&config, "engine.pass_rows=0", &err), KV_OK);
    EXPECT_EQ_U64(config_flag(&config, "engine.chunk_tokens=4096", &err), KV_OK);
    EXPECT_EQ_U64(config_check(&config, &err), KV_OK);
    EXPECT_EQ_U32(config_pass_rows(&config), KV_PASS_ROWS_MAX);
}

/* What is printed reads back to the same values; every key and its meaning is in it. */
static void test_print(void)
{
    static struct cached_config again;
    struct kv_error err = {0};
    char *text = NULL;
    size_t bytes = 0;

    config_defaults(&config);
    EXPECT_EQ_U64(config_flag(&config, "server.socket=/run/x", &err), KV_OK);
    EXPECT_EQ_U64(config_flag(&config, "pool.fraction=0.333", &err), KV_OK);
    EXPECT_EQ_U64(config_flag(&config, "ssd.ttl=61s", &err), KV_OK);
    FILE *out = open_memstream(&text, &bytes);
    EXPECT(out != NULL);
    config_print(&config, out);
    EXPECT(fclose(out) == 0);

    config_defaults(&again);
    EXPECT_EQ_U64(config_parse(&again, "printed", text, bytes, &err), KV_OK);
    for (unsigned i = 0; i < CONFIG_KEY_COUNT; i++) {
        char a[CONFIG_TEXT_MAX];
        char b[CONFIG_TEXT_MAX];
        config_format(&config, i, a, sizeof(a));
        config_format(&again, i, b, sizeof(b));
        EXPECT_EQ_STR(b, a);
        EXPECT(strncmp(again.origins[i], "printed:", 8) == 0);
        EXPECT(strstr(text, config_item(i)->doc) != NULL);
        EXPECT(strchr(config_item(i)->key, '.') != NULL);
    }
    free(text);
}

int main(void)
{
    test_defaults();
    test_values();
    test_messages();
    test_long_and_binary();
    test_order();
    test_flags();
    test_loopback();
    test_whole();
    test_print();
    HARNESS_END();
}
