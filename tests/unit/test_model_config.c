/*
 * The configs that come with the engine, and what each rule of a config refuses.
 *
 * The tensor counts are those of the released checkpoints (96,085 tensors, of which 266 belong to
 * the vision part) and of the specification's toy models, section 7.2; the layout's sizes stand in
 * its sections 4.1 and 7.2.
 */

#include "engine/model/config.h"
#include "engine/model/json_text.h"
#include "engine/model/primes.h"
#include "engine/model/safetensors.h"
#include "engine/model/tensors.h"
#include "kvstore/base/bytes.h"
#include "tests/harness.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char *read_text(const char *name)
{
    char path[4096];
    const char *root = getenv("CACHED_SOURCE_ROOT");
    char *text = calloc(1, 65536);
    if (root == NULL) SKIP("CACHED_SOURCE_ROOT is not set: run through meson test");
    (void)snprintf(path, sizeof(path), "%s/engine/model/configs/%s.json", root, name);
    FILE *file = fopen(path, "rb");
    EXPECT(file != NULL && text != NULL);
    const size_t bytes = fread(text, 1, 65535, file);
    EXPECT(bytes > 0 && bytes < 65535 && fclose(file) == 0);
    return text;
}

static struct eng_config read_config(const char *name)
{
    struct eng_config config;
    struct kv_error err = {0};
    char *text = read_text(name);
    const kv_status status = eng_config_parse(name, text, strlen(text), &config, &err);
    if (status != KV_OK) (void)fprintf(stderr, "%s\n", err.text);
    EXPECT(status == KV_OK);
    free(text);
    return config;
}

struct sums {
    uint64_t tensors, bytes, values;
    uint32_t compressors, gates, lists, keys, tables, experts;
};

static bool add(void *context, const struct eng_tensor_spec *spec)
{
    struct sums *sums = context;
    sums->tensors++;
    sums->bytes += eng_tensor_bytes(spec);
    sums->values += eng_tensor_values(spec);
    sums->compressors += spec->role == ENG_ROLE_CMP_WKV;
    sums->gates += spec->role == ENG_ROLE_CMP_WGATE;
    sums->lists += spec->role == ENG_ROLE_IX_WQ_B && !spec->is_scale;
    sums->keys += spec->role == ENG_ROLE_IX_WK;
    sums->tables += spec->role == ENG_ROLE_ENGRAM_ROWS && !spec->is_scale;
    sums->experts +=
        spec->role == ENG_ROLE_EXPERT_W1 && !spec->is_scale && strncmp(spec->name, "mtp", 3) != 0;
    EXPECT(!eng_tensor_is_ignored(spec->name));
    return true;
}

static struct sums sum(const struct eng_config *config)
{
    struct sums sums = {0};
    EXPECT(eng_tensors_each(config, add, &sums));
    EXPECT_EQ_U64(sums.tensors, eng_tensors_count(config));
    return sums;
}

static void test_released(void)
{
    const struct eng_config config = read_config("v41-flash");
    const struct sums sums = sum(&config);
    EXPECT_EQ_U64(sums.tensors, 96085 - 266);
    EXPECT_EQ_U32(sums.compressors, 4);
    EXPECT_EQ_U32(sums.gates, 3);
    EXPECT_EQ_U32(sums.lists, 8);
    EXPECT_EQ_U32(sums.keys, 4);
    EXPECT_EQ_U32(sums.tables, 2);
    EXPECT_EQ_U32(sums.experts, 15360);
    EXPECT_EQ_STR(config.name, "DeepSeek-V4.1-Flash");
    EXPECT_EQ_U32(config.draft_targets[2], 39);
    EXPECT_EQ_U32(config.pad, 2);
    EXPECT_EQ_U32(config.candidate_source, 20);
}

static void test_toys(void)
{
    struct kv_layout layout;
    struct eng_config config = read_config("tiny");
    EXPECT_EQ_U64(sum(&config).bytes, 6219390);
    EXPECT(eng_config_layout(&config, 16, &layout, NULL) == KV_OK);
    EXPECT_EQ_U32(layout.rows_bytes_per_page * 2, 265 * 128);
    EXPECT_EQ_U32(layout.draft_stages, 3);

    config = read_config("small");
    const uint64_t bytes = sum(&config).bytes;
    EXPECT(bytes > 246700000 && bytes < 246900000);
    EXPECT(eng_config_layout(&config, 16, &layout, NULL) == KV_OK);
    EXPECT_EQ_U32(layout.rows_bytes_per_page, 890 * 128);
    EXPECT_EQ_U32(layout.window_row_bytes, 528);
}

static bool stop_at_third(void *context, const struct eng_tensor_spec *spec)
{
    EXPECT(spec->name[0] != '\0');
    return ++*(int *)context < 3;
}

static void test_walk(void)
{
    const struct eng_config config = read_config("tiny");
    int seen = 0;
    EXPECT(!eng_tensors_each(&config, stop_at_third, &seen));
    EXPECT_EQ_I64(seen, 3);

    static const char *const ignored[] = {"vision.norm.weight", "aligner.w1.bias", "image_start",
                                          "mtp.0.embed.weight", "mtp.12.head.weight"};
    static const char *const known[] = {"visio", "image_starts", "mtp.embed.weight",
                                        "mtp.2.markov_head.embed.weight", "embed.weight"};
    for (size_t i = 0; i < 5; i++) {
        EXPECT(eng_tensor_is_ignored(ignored[i]));
        EXPECT(!eng_tensor_is_ignored(known[i]));
    }
}

/* The constants of the model's specification, section 2.8, rule 3. */
static void test_primes(void)
{
    uint32_t primes[24];
    eng_engram_primes(16000000, 24, 0, primes);
    EXPECT_EQ_U32(primes[0], 16000057);
    EXPECT_EQ_U32(primes[23], 16000463);
    eng_engram_primes(16000000, 24, 1, primes);
    EXPECT_EQ_U32(primes[0], 16000477);
    EXPECT_EQ_U32(primes[23], 16000889);
    eng_engram_primes(2, 8, 0, primes);
    EXPECT_EQ_U32(primes[0] + primes[1] + primes[2] + primes[7], 2 + 3 + 5 + 19);
}

/* The config of tiny with the first `from` turned into `to`. */
static char *edit(const char *from, const char *to)
{
    char *text = read_text("tiny");
    char *at = strstr(text, from);
    EXPECT(at != NULL);
    char *edited = calloc(1, strlen(text) + strlen(to) + 1);
    EXPECT(edited != NULL);
    memcpy(edited, text, (size_t)(at - text));
    memcpy(edited + (at - text), to, strlen(to));
    memcpy(edited + (at - text) + strlen(to), at + strlen(from), strlen(at + strlen(from)));
    free(text);
    return edited;
}

/* Every edit of the text `from` must be refused with a sentence that has `word` in it. */
static void refuse(const char *from, const char *to, const char *word)
{
    struct eng_config config;
    struct kv_error err = {0};
    char *edited = edit(from, to);
    const kv_status status = eng_config_parse("c.json", edited, strlen(edited), &config, &err);
    if (status != KV_INVALID || strstr(err.text, word) == NULL)
        (void)fprintf(stderr, "wanted \"%s\", got %d \"%s\"\n", word, (int)status, err.text);
    EXPECT(status == KV_INVALID);
    EXPECT(strstr(err.text, word) != NULL);
    free(edited);
}

static void test_head_dim(void)
{
    refuse("\"head_dim\": 64", "\"head_dim\": 544", "head_dim must be 32 to 512, found 544");
    refuse("\"head_dim\": 64", "\"head_dim\": 1024", "head_dim must be 32 to 512, found 1024");
}

static void test_context(void)
{
    static const struct {
        const char *to;
        uint32_t positions, context;
    } good[] = {{"1", 1, 1},
                {"1048575", 1048575, 1048575},
                {"1048577", 1048577, 1048576},
                {"2147483648", 2147483648u, 1048576}};
    static const struct {
        const char *to, *word;
    } bad[] = {
        {": 0", "max_position_embeddings must be 1 to 2147483648, found 0"},
        {": -1", "max_position_embeddings must be 1 to 2147483648, found -1"},
        {": 2147483649", "max_position_embeddings must be 1 to 2147483648, found 2147483649"},
        {": \"1048576\"", "max_position_embeddings must be an integer"},
        {": 1048576.0", "max_position_embeddings must be an integer"},
        {": null", "max_position_embeddings must be an integer"},
        {"2\": 7", "field max_position_embeddings is missing"},
    };
    for (size_t i = 0; i < KV_ARRAY_COUNT(good); i++) {
        struct eng_config config;
        struct kv_layout layout;
        char *text = edit("1048576", good[i].to);
        EXPECT(eng_config_parse("c.json", text, strlen(text), &config, NULL) == KV_OK);
        EXPECT_EQ_U32(config.positions, good[i].positions);
        EXPECT(eng_config_layout(&config, 16, &layout, NULL) == KV_OK);
        EXPECT_EQ_U32(layout.context_tokens, good[i].context);
        free(text);
    }
    for (size_t i = 0; i < KV_ARRAY_COUNT(bad); i++)
        refuse(bad[i].to[0] == ':' ? ": 1048576" : "\": 1048576", bad[i].to, bad[i].word);
}

static void test_engram(void)
{
    refuse("[1, 6]", "[6, 1]", "engram_layer_ids must ascend");
    refuse("[1, 6]", "[1, 8]", "layers of the encoder");
    refuse("[1, 6]", "[1, 16]", "engram_layer_ids[1] must be 0 to 15, found 16");
    refuse("[1618, 1824]", "[1618]", "one entry per Engram layer");
    refuse("[1618, 1824]", "[1618, 1825]", "[1] must be 1824, the sum of its 6 primes, found 1825");
    refuse("\"engram_vocab_size\": 257", "\"engram_vocab_size\": 258", "engram_num_embeddings[0]");
    refuse("\"engram_head_dim\": 32", "\"engram_head_dim\": 48", "engram_head_dim must be a mul");
    refuse("\"engram_max_ngram_size\": 4", "\"engram_max_ngram_size\": 5", "must be 2 to 4");
    refuse("\"engram_n_heads\": 2", "\"engram_n_heads\": 0", "engram_n_heads");
    refuse("_size\": 486", "_size\": 513", "engram_compressed_vocab_size must be 1 to 512");
    refuse("\"engram_pad_token_id\": 2", "\"engram_pad_token_id\": 512",
           "engram_pad_token_id must be 0 to 511, found 512");
    refuse("\"engram_head_dim\": 32,", "", "engram_head_dim is missing");
}

static void test_lists(void)
{
    refuse("\"compress_ratios\": [0", "\"compress_ratios\": [-2",
           "compress_ratios[0] must be 0 to 2, found -2");
    refuse("\"compress_ratios\": [0", "\"compress_ratios\": [3",
           "compress_ratios[0] must be 0 to 2, found 3");
    refuse("\"compress_ratios\": [0", "\"compress_ratios\": [\"\\u00e4\"",
           "compress_ratios[0] must be an integer 0 to 2, found \"??\"");
    refuse("\"compress_ratios\": [0",
           "\"compress_ratios\": [\"0123456789012345678901234567890123456789\"",
           "found \"012345678901234567890123456789012345678...");
}

/* Ids that the model uses and such that only others use: all are of the vocabulary. */
static void test_token_ids(void)
{
    static const struct {
        const char *name, *from;
    } ids[] = {{"bos_token_id", "\"bos_token_id\": 0"},
               {"eos_token_id", "\"eos_token_id\": 1"},
               {"pad_token_id", "\"pad_token_id\": 2"},
               {"image_token_id", "\"image_token_id\": 510"}};
    static const char *const bad[][2] = {{"512", "0 to 511, found 512"},
                                         {"-1", "0 to 511, found -1"},
                                         {"4294967295", "0 to 511, found 4294967295"},
                                         {"1.5", "an integer 0 to 511, found 1.5"},
                                         {"\"x\"", "an integer 0 to 511, found \"x\""},
                                         {"[1, 2]", "an integer 0 to 511, found [1,2]"}};
    static const char *const optional[][2] = {{"\"bos_token_id\": 0,", ""},
                                              {"\"bos_token_id\": 0", "\"bos_token_id\": null"},
                                              {"\"bos_token_id\": 0", "\"bos_token_id\": 511"},
                                              {"\"pad_token_id\": 2,", ""},
                                              {"\"image_token_id\": 510,", ""}};
    char to[64], word[96];

    for (size_t i = 0; i < KV_ARRAY_COUNT(ids); i++)
        for (size_t n = 0; n < KV_ARRAY_COUNT(bad); n++) {
            (void)snprintf(to, sizeof(to), "\"%s\": %s", ids[i].name, bad[n][0]);
            (void)snprintf(word, sizeof(word), ": %s must be %s", ids[i].name, bad[n][1]);
            refuse(ids[i].from, to, word);
        }
    for (size_t i = 0; i < KV_ARRAY_COUNT(optional); i++) {
        struct eng_config config;
        struct kv_error err = {0};
        char *text = edit(optional[i][0], optional[i][1]);
        EXPECT(eng_config_parse("c.json", text, strlen(text), &config, &err) == KV_OK);
        free(text);
    }
    refuse("\"eos_token_id\": 1,", "", "field eos_token_id is missing");
}

static void test_draft(void)
{
    refuse("[13, 14, 15]", "[14, 13, 15]", "dspark_target_layer_ids must ascend");
    refuse("[13, 14, 15]", "[]", "dspark_target_layer_ids must not be empty");
    refuse("[13, 14, 15]", "[13, 14, 16]", "dspark_target_layer_ids[2] must be 0 to 15, found 16");
    refuse("[13, 14, 15]", "[7, 14, 15]", "layers of the decoder");
    refuse("\"dspark_block_size\": 3", "\"dspark_block_size\": 0", "dspark_block_size");
    refuse("\"dspark_noise_token_id\": 511", "\"dspark_noise_token_id\": 512", "noise_token_id");
    refuse("\"dspark_markov_rank\": 32", "\"dspark_markov_rank\": 40", "multiple of 32");
    refuse("dspark_num_experts_per_tok\": 2", "dspark_num_experts_per_tok\": 9",
           "dspark_num_experts_per_tok exceeds");
}

/* ---- A machine without memory: the allocations of the parser fail from one of them on. ---- */

static uint32_t allocations_left;

static void *scarce_malloc(size_t bytes)
{
    if (allocations_left == 0) return NULL;
    allocations_left--;
    return malloc(bytes);
}

/* Every way to run out of memory is told as that, and not as a fault of the file. */
static void test_no_memory(void)
{
    char *text = read_text("tiny"), path[] = "/tmp/test_model_config.XXXXXX";
    const char header[] = "{\"__metadata__\":{\"a\":\"b\"},\"a tensor of a name that is long\":1}";
    const uint64_t header_bytes = sizeof(header) - 1;
    kv_status config_status = KV_NOMEM, file_status = KV_NOMEM;
    uint32_t configs = 0, files = 0;

    const int fd = mkstemp(path);
    EXPECT(fd >= 0 && write(fd, &header_bytes, 8) == 8);
    EXPECT(write(fd, header, header_bytes) == (ssize_t)header_bytes && close(fd) == 0);
    json_set_alloc_funcs(scarce_malloc, free);
    for (uint32_t max = 0; max < 100000 && config_status != KV_OK; max++, configs++) {
        struct eng_config config;
        struct kv_error err = {0};
        allocations_left = max;
        config_status = eng_config_parse("c.json", text, strlen(text), &config, &err);
        if (config_status == KV_INVALID) (void)fprintf(stderr, "%u: %s\n", max, err.text);
        EXPECT(config_status == KV_OK || config_status == KV_NOMEM);
        EXPECT(config_status == KV_OK || strstr(err.text, "c.json: no memory for its") != NULL);
    }
    for (uint32_t max = 0; max < 1000 && file_status == KV_NOMEM; max++, files++) {
        struct eng_safetensors *file = NULL;
        struct kv_error err = {0};
        allocations_left = max;
        file_status = eng_safetensors_open(path, &file, &err);
        EXPECT(file_status == KV_INVALID || strstr(err.text, ": no memory for its header") != NULL);
        EXPECT(file_status == KV_NOMEM || strstr(err.text, "printable ASCII") != NULL);
    }
    json_set_alloc_funcs(malloc, free);
    EXPECT(config_status == KV_OK && configs > 100);
    EXPECT(file_status == KV_INVALID && files > 10);
    EXPECT(unlink(path) == 0);
    free(text);
}

static void test_json_text(void)
{
    static const struct {
        const char *text;
        size_t at;
        const char *member;
    } members[] = {
        {"{\"a\":1,\"b\":{\"c\":2},\"d\":3}", 5, "a"},
        {"{\"a\":1,\"b\":{\"c\":2},\"d\":3}", 7, "a+"}, /* Behind the comma. */
        {"{\"a\":1,\"b\":{\"c\":2},\"d\":3}", 10, "b"}, /* Behind its key. */
        {"{\"a\":1,\"b\":{\"c\":2},\"d\":3}", 17, "b"}, /* In its value: c is no member. */
        {"{ \"x\\\"{\" : \"}\", \"bro", 20, "bro"},     /* A key that does not end. */
        {"{ \"x\\\"{\" : \"}\", \"bro", 13, "x\\\"{"},
        {"{\"\x01\x80\":1", 6, "??"},
        {"{\"a\":1", 1, NULL},
        {"[\"a\",\"b\"]", 8, "b"}, /* No object, but as much is to be seen as in one. */
        {"", 0, NULL},
    };
    for (size_t i = 0; i < KV_ARRAY_COUNT(members); i++) {
        char name[8];
        bool after = false;
        const bool found =
            eng_json_member(members[i].text, members[i].at, name, sizeof(name) - 1, &after);
        EXPECT(found == (members[i].member != NULL));
        if (after) (void)snprintf(name + strlen(name), 2, "+");
        if (found) EXPECT_EQ_STR(name, members[i].member);
    }
    char cut[3];
    bool after = true;
    EXPECT(eng_json_member("{\"abc\":", 7, cut, sizeof(cut), &after) && !after);
    EXPECT_EQ_STR(cut, "ab");
    EXPECT_EQ_U32(eng_json_depth("7", 1), 0);
    EXPECT_EQ_U32(eng_json_depth("{\"[[[[\":[{}]}", 13), 3);
    EXPECT_EQ_U32(eng_json_depth("]]}[", 4), 1);
}

int main(void)
{
    test_json_text();
    test_no_memory();
    test_released();
    test_toys();
    test_walk();
    test_primes();
    test_head_dim();
    test_context();
    test_engram();
    test_lists();
    test_token_ids();
    test_draft();
    refuse("1, 1, 0, 0, 0]", "1, 1, 0, 1, 0]", "draft stages must be 0");
    refuse("[0, 0, 2, 2, 2,", "[0, 0, 2, 2, 0,", "a kv source has compress ratio 0");
    refuse("\"quant_method\": \"fp8\"", "\"quant_method\": \"awq\"", "quant_method must be");
    refuse("[32, 32]", "[128, 128]", "weight_block_size");
    refuse("\"fp4\"", "\"fp8\"", "expert_dtype");
    refuse("\"o_lora_rank\": 32", "\"o_lora_rank\": 48", "o_lora_rank");
    HARNESS_END();
}
