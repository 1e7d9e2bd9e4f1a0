/*
 * Any bytes as config.json: what is accepted keeps every relation that later code relies on, and
 * can be counted over.
 */

#define FUZZ_TRIES 200000
#define FUZZ_JSON
#include "tests/fuzz/fuzz_main.h"

#include "engine/model/config.h"
#include "engine/model/inspect.h"
#include "kvstore/base/bytes.h"

static void check_layers(const struct eng_config *c)
{
    for (uint32_t layer = 0; layer < c->layers; layer++) {
        EXPECT(c->ratio[layer] <= 2);
        if (c->ratio[layer] == 0) continue;
        EXPECT(c->rows_source[layer] < c->source_count);
        EXPECT(c->source_layers[c->rows_source[layer]] <= layer);
        EXPECT(c->index_source[layer] <= layer);
        EXPECT(c->ratio[c->source_layers[c->rows_source[layer]]] == c->ratio[layer]);
    }
    for (uint32_t i = 0; i < c->engram_count; i++)
        EXPECT(c->engram_layers[i] < c->encoder_layers && c->engram_rows[i] > 0);
    for (uint32_t i = 0; i < c->draft_target_count; i++)
        EXPECT(c->draft_targets[i] >= c->encoder_layers && c->draft_targets[i] < c->layers);
}

static void check_accepted(const struct eng_config *c)
{
    struct eng_inspect inspect;
    struct kv_error err = {0};

    EXPECT(c->layers >= 2 && c->layers <= KV_LAYERS_MAX);
    EXPECT(c->encoder_layers >= 1 && c->encoder_layers < c->layers);
    EXPECT(c->encoder_layers == c->candidate_source && c->eos < c->vocab);
    EXPECT(c->source_count >= 1 && c->source_count <= KV_SOURCES_MAX);
    EXPECT(c->hidden % 32 == 0 && c->head_dim % 32 == 0 && c->index_dim % 32 == 0);
    EXPECT(c->q_lora % 32 == 0 && c->o_lora % 32 == 0 && c->moe_width % 32 == 0);
    EXPECT(c->heads % c->o_groups == 0 && c->rope_dim <= c->head_dim);
    EXPECT(c->experts_active >= 1 && c->experts_active <= c->experts);
    EXPECT(c->draft_stages == 0 || (c->draft_target_count > 0 && c->draft_block > 0 &&
                                    c->draft_active <= c->draft_experts &&
                                    c->draft_noise < c->vocab && c->draft_rank % 32 == 0));
    EXPECT(c->engram_count == 0 ||
           (c->pad < c->vocab && c->engram_compressed <= c->vocab && c->engram_dim % 32 == 0));
    check_layers(c);
    /* Thousands of experts take long to list and say nothing new. */
    if ((uint64_t)c->layers * c->experts > 1024 || c->draft_experts > 64) return;
    if (eng_inspect(c, &inspect, &err) != KV_OK) return;
    EXPECT(inspect.total_bytes > inspect.bytes[ENG_PART_EXPERTS]);
    EXPECT(inspect.active_prefill < inspect.active_decode);
    EXPECT(inspect.layout.image_bytes >= inspect.image_window_bytes + inspect.image_draft_bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct eng_config config;
    struct kv_error err = {0};

    const kv_status status = eng_config_parse("c.json", (const char *)data, bytes, &config, &err);
    if (status == KV_OK) {
        check_accepted(&config);
    } else {
        EXPECT(status == KV_INVALID);
        EXPECT(strncmp(err.text, "c.json: ", 8) == 0);
        for (const char *c = err.text; *c != '\0'; c++)
            EXPECT(*c >= ' ' && *c <= '~');
    }
    return 0;
}

static size_t fuzz_seed(uint32_t index, uint8_t *buf, size_t bytes_max)
{
    static const char *const names[] = {"tiny", "small", "v41-flash"};
    const char *root = getenv("CACHED_SOURCE_ROOT");
    char path[4096];

    if (index >= KV_ARRAY_COUNT(names)) return 0;
    if (root == NULL) SKIP("CACHED_SOURCE_ROOT is not set: run through meson test");
    (void)snprintf(path, sizeof(path), "%s/engine/model/configs/%s.json", root, names[index]);
    FILE *file = fopen(path, "rb");
    EXPECT(file != NULL);
    const size_t bytes = fread(buf, 1, bytes_max, file);
    EXPECT(fclose(file) == 0 && bytes > 0);
    return bytes;
}
