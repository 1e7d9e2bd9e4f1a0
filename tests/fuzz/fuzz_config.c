/*
 * Any bytes as a configuration and as a token file.
 *
 * What is refused says where ("f:LINE: ...").  What is accepted keeps every value in its range, and
 * printing and reading it again changes nothing.
 */

#include "tests/fuzz/fuzz_main.h"

#include "cached/auth.h"
#include "cached/config.h"

static void check_same(const struct cached_config *a, const struct cached_config *b)
{
    char text_a[CONFIG_TEXT_MAX];
    char text_b[CONFIG_TEXT_MAX];
    for (unsigned i = 0; i < CONFIG_KEY_COUNT; i++) {
        config_format(a, i, text_a, sizeof(text_a));
        config_format(b, i, text_b, sizeof(text_b));
        EXPECT_EQ_STR(text_b, text_a);
    }
}

/* Values that are texts may hold what a file cannot (a flag could set them); here all came from a
 * file, so all can be printed into one. */
static void check_accepted(const struct cached_config *config)
{
    static struct cached_config again;
    struct kv_error err = {0};
    char *text = NULL;
    size_t bytes = 0;

    EXPECT(config->engine_chunk_tokens >= 1 && config->engine_chunk_tokens <= 4096);
    EXPECT(config->window_spare_tokens >= 4 && config->window_spare_tokens <= 128);
    EXPECT(config->pool_fraction > 0.0 && config->pool_fraction <= 0.9);
    EXPECT(config->engine_backend <= CONFIG_BACKEND_SYNTHETIC);
    EXPECT(config->io_backend <= CONFIG_IO_POOL);
    EXPECT(strlen(config->server_socket) <= 107);
    (void)!config_check(config, &err); /* Either answer is fine; it must not fall over. */

    FILE *out = open_memstream(&text, &bytes);
    EXPECT(out != NULL);
    config_print(config, out);
    EXPECT(fclose(out) == 0);
    config_defaults(&again);
    EXPECT(config_parse(&again, "f", text, bytes, &err) == KV_OK);
    check_same(config, &again);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static struct cached_config config;
    struct kv_error err = {0};
    struct auth *auth = NULL;

    config_defaults(&config);
    if (config_parse(&config, "f", (const char *)data, bytes, &err) == KV_OK) {
        check_accepted(&config);
    } else {
        EXPECT(strncmp(err.text, "f:", 2) == 0);
    }
    if (auth_parse("f", (const char *)data, bytes, &auth, &err) != KV_OK) {
        EXPECT(strncmp(err.text, "f:", 2) == 0);
        EXPECT(auth == NULL);
    }
    auth_destroy(auth);
    return 0;
}

static size_t fuzz_seed(uint32_t index, uint8_t *buf, size_t bytes_max)
{
    static const char *const seeds[] = {
        "[hbm]\nbytes = 1GiB\n[pool]\nttl=5min\nfraction=0.25\n[engine]\nbackend=synthetic\n",
        "# c\n; d\n[server]\nsocket = /run/a b ; e\nlisten=127.0.0.1:0\r\n\n[state]\ndir=/x\n",
        "[ssd]\n  bytes: 10GiB\nsegment_bytes=64MiB\nttl=72h\n[log]\nlevel=debug\n",
        "ann harness ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad # x\n",
        ("b ops 3e23e8160039594a33894f6564e1b1348bbd7a0088d42c4acb73eeaed59c009d\n"
         "c stats 2e7d2c03a9507ae265ecf5b5356885a53393a2029d241394997265a1a25aefc6\n"),
    };
    if (index >= sizeof(seeds) / sizeof(seeds[0])) return 0;
    const size_t bytes = strlen(seeds[index]);
    EXPECT(bytes <= bytes_max);
    memcpy(buf, seeds[index], bytes);
    return bytes;
}
