/*
 * The records of a stopped daemon's manifest, for tests that damage them.
 *
 *   records DIR                     every record, a line each: key, space, value, in hexadecimal
 *   records DIR put KEY VALUE       writes one
 *   records DIR delete KEY
 *
 * DIR is the state directory.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/index/manifest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static kv_status print_record(void *context, const struct kv_manifest_put *put)
{
    (void)context;
    for (uint32_t i = 0; i < put->key_bytes; i++)
        (void)printf("%02x", put->key[i]);
    (void)printf(" ");
    for (uint32_t i = 0; i < put->value_bytes; i++)
        (void)printf("%02x", put->value[i]);
    (void)printf("\n");
    return KV_OK;
}

/* In place. */
static uint32_t from_hex(char *text)
{
    const uint32_t bytes = (uint32_t)(strlen(text) / 2);
    for (uint32_t i = 0; i < bytes; i++) {
        const char digits[3] = {text[2 * i], text[2 * i + 1], '\0'};
        text[i] = (char)strtoul(digits, NULL, 16);
    }
    return bytes;
}

static kv_status change(struct kv_manifest *manifest, int argc, char **argv, struct kv_error *err)
{
    struct kv_manifest_put put = {.key = (uint8_t *)argv[3]};
    put.key_bytes = from_hex(argv[3]);
    if (argc > 4) {
        put.value = (uint8_t *)argv[4];
        put.value_bytes = from_hex(argv[4]);
    }
    return kv_manifest_write_now(manifest, &put, 1, err);
}

int main(int argc, char **argv)
{
    struct kv_manifest *manifest;
    struct kv_error err = {0};
    char path[512];

    const bool puts = argc == 5 && strcmp(argv[2], "put") == 0;
    const bool deletes = argc == 4 && strcmp(argv[2], "delete") == 0;
    if (argc != 2 && !puts && !deletes) return 2;
    (void)snprintf(path, sizeof(path), "%s/manifest", argv[1]);
    kv_status status = kv_manifest_open(path, &manifest, &err);
    if (status == KV_OK) {
        status = argc == 2 ? kv_manifest_scan_now(manifest, NULL, 0, print_record, NULL, &err)
                           : change(manifest, argc, argv, &err);
        kv_manifest_close(manifest);
    }
    if (status == KV_OK) return 0;
    (void)fprintf(stderr, "records: %s\n", err.text);
    return 1;
}
