/*
 * Any bytes as model.safetensors.index.json: shards are plain names, ascending, each once, and
 * every tensor's shard is among them.
 */

#define FUZZ_TRIES 200000
#define FUZZ_JSON
#include "tests/fuzz/fuzz_main.h"

#include "engine/model/checkpoint_index.h"

struct walk {
    const struct eng_index *index;
};

static kv_status check_tensor(void *context, const char *tensor, const char *shard)
{
    const struct walk *walk = context;
    bool found = false;

    EXPECT(tensor[0] != '\0' && strpbrk(tensor, "\n\033 ") == NULL);
    EXPECT_EQ_STR(eng_index_shard_of(walk->index, tensor), shard);
    for (uint32_t i = 0; i < eng_index_shard_count(walk->index); i++)
        found = found || strcmp(eng_index_shard(walk->index, i), shard) == 0;
    EXPECT(found);
    return KV_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct eng_index *index = NULL;
    struct kv_error err = {0};

    const kv_status status = eng_index_parse("i.json", (const char *)data, bytes, &index, &err);
    if (status != KV_OK) {
        EXPECT(status == KV_INVALID && index == NULL);
        EXPECT(strncmp(err.text, "i.json: ", 8) == 0);
        for (const char *c = err.text; *c != '\0'; c++)
            EXPECT(*c >= ' ' && *c <= '~');
        return 0;
    }
    EXPECT(eng_index_shard_count(index) > 0 && eng_index_shard_count(index) <= 256);
    for (uint32_t i = 0; i < eng_index_shard_count(index); i++) {
        const char *shard = eng_index_shard(index, i);
        EXPECT(strchr(shard, '/') == NULL && shard[0] != '.');
        EXPECT(i == 0 || strcmp(eng_index_shard(index, i - 1), shard) < 0);
    }
    struct walk walk = {.index = index};
    EXPECT(eng_index_each(index, check_tensor, &walk) == KV_OK);
    EXPECT(eng_index_shard_of(index, "no tensor") == NULL);
    (void)eng_index_total_bytes(index);
    eng_index_destroy(index);
    return 0;
}

static size_t fuzz_seed(uint32_t index, uint8_t *buf, size_t bytes_max)
{
    static const char *const seeds[] = {
        "{\"weight_map\":{\"a\":\"a.safetensors\"}}",
        ("{\"metadata\":{\"total_size\":6219390},\"weight_map\":{"
         "\"embed.weight\":\"model-00001-of-00003.safetensors\","
         "\"head.weight\":\"model-00002-of-00003.safetensors\","
         "\"norm.weight\":\"model-00003-of-00003.safetensors\"}}"),
        ("{\n \"metadata\": {},\n \"weight_map\": {\n  \"x\": \"b.safetensors\",\n"
         "  \"y\": \"a.safetensors\",\n  \"z\": \"b.safetensors\"\n }\n}\n"),
    };
    if (index >= sizeof(seeds) / sizeof(seeds[0])) return 0;
    EXPECT(strlen(seeds[index]) <= bytes_max);
    memcpy(buf, seeds[index], strlen(seeds[index]));
    return strlen(seeds[index]);
}
