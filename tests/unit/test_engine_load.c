/*
 * Models that must be refused, each with the sentence that says why, and the one that must not.
 *
 * Cases are edits of a good model: of the header's text, of the data, or of the config.
 */

#include "tests/unit/test_engine_fixture.h"

#include "kvstore/base/bytes.h"

#include <fcntl.h>
#include <unistd.h>

static char dir[64];
static uint8_t *weights;
static size_t weights_bytes;
static char *config;
static size_t config_bytes;

static void *read_file(const char *name, size_t *ret_bytes)
{
    char path[128];
    (void)snprintf(path, sizeof(path), "%s/%s", dir, name);
    FILE *file = fopen(path, "rb");
    EXPECT(file != NULL);
    EXPECT(fseek(file, 0, SEEK_END) == 0);
    const long size = ftell(file);
    EXPECT(size > 0 && fseek(file, 0, SEEK_SET) == 0);
    uint8_t *data = calloc(1, (size_t)size + 1);
    EXPECT(data != NULL);
    EXPECT(fread(data, 1, (size_t)size, file) == (size_t)size);
    EXPECT(fclose(file) == 0);
    *ret_bytes = (size_t)size;
    return data;
}

static void write_file(const char *name, const void *data, size_t bytes)
{
    char path[128];
    (void)snprintf(path, sizeof(path), "%s/%s", dir, name);
    FILE *file = fopen(path, "wb");
    EXPECT(file != NULL);
    EXPECT(fwrite(data, 1, bytes, file) == bytes);
    EXPECT(fclose(file) == 0);
}

static void expect_refused(enum eng_backend backend, const char *word)
{
    const struct eng_options options = {.backend = backend, .model_dir = dir, .spare_tokens = 16};
    struct eng_model *model = NULL;
    struct kv_error err = {0};
    const kv_status status = eng_model_open(&options, &model, &err);
    if (status != KV_INVALID || strstr(err.text, word) == NULL)
        (void)fprintf(stderr, "wanted \"%s\", got %d \"%s\"\n", word, (int)status, err.text);
    EXPECT(status == KV_INVALID);
    EXPECT(strstr(err.text, word) != NULL);
    EXPECT(model == NULL);
}

static void restore(void)
{
    write_file("model.safetensors", weights, weights_bytes);
    write_file("config.json", config, config_bytes);
}

/* The first `from` in `text` becomes `to`; returns malloc'd text. */
static char *edit(const char *text, size_t bytes, const char *from, const char *to,
                  size_t *ret_bytes)
{
    const char *at = strstr(text, from);
    EXPECT(at != NULL);
    const size_t before = (size_t)(at - text), skip = strlen(from), add = strlen(to);
    char *result = calloc(1, bytes - skip + add + 1);
    EXPECT(result != NULL);
    memcpy(result, text, before);
    memcpy(result + before, to, add);
    memcpy(result + before + add, at + skip, bytes - before - skip);
    *ret_bytes = bytes - skip + add;
    return result;
}

static void refuse_config(enum eng_backend backend, const char *from, const char *to,
                          const char *word)
{
    size_t bytes = 0;
    char *text = edit(config, config_bytes, from, to, &bytes);
    write_file("config.json", text, bytes);
    expect_refused(backend, word);
    free(text);
    restore();
}

static void refuse_header(const char *from, const char *to, const char *word)
{
    const size_t header_bytes = (size_t)kv_load64(weights);
    char *header = calloc(1, header_bytes + 1);
    size_t bytes = 0;
    EXPECT(header != NULL);
    memcpy(header, weights + 8, header_bytes);
    char *text = edit(header, header_bytes, from, to, &bytes);
    uint8_t *file = malloc(8 + bytes + weights_bytes);
    EXPECT(file != NULL);
    kv_store64(file, bytes);
    memcpy(file + 8, text, bytes);
    memcpy(file + 8 + bytes, weights + 8 + header_bytes, weights_bytes - 8 - header_bytes);
    write_file("model.safetensors", file, weights_bytes - header_bytes + bytes);
    expect_refused(ENG_BACKEND_CPU, word);
    free(file);
    free(text);
    free(header);
    restore();
}

static void test_header(void)
{
    refuse_header("\"dtype\":\"BF16\"", "\"dtype\":\"BF17\"", "dtype must be");
    refuse_header("\"dtype\":\"BF16\"", "\"dtype\":16", "dtype must be");
    refuse_header("\"shape\":[512,128]", "\"shape\":[512,-128]", "shape");
    refuse_header("\"shape\":[512,128]", "\"shape\":[512,0]", "shape");
    refuse_header("\"shape\":[512,128]", "\"shape\":[4294967296,4294967296]", "shape");
    refuse_header("\"shape\":[512,128]", "\"shape\":[9223372036854775807,2]", "shape");
    refuse_header("\"shape\":[512,128]", "\"shape\":[512,128,1]", "[512,128,1]");
    refuse_header("\"shape\":[512,128]", "\"shape\":[512,127]", "data_offsets hold");
    refuse_header("\"shape\":[512,128]", "\"shape\":[128,512]", "expected BF16 [512,128]");
    refuse_header("\"data_offsets\":[0,131072]", "\"data_offsets\":[0]", "data_offsets");
    refuse_header("\"data_offsets\":[0,131072]", "\"data_offsets\":[-1,131071]", "data_offsets");
    refuse_header("\"data_offsets\":[0,131072]", "\"data_offsets\":[131072,0]", "data_offsets");
    refuse_header("\"data_offsets\":[0,131072]", "\"data_offsets\":[0.0,131072]", "data_offsets");
    refuse_header("\"data_offsets\":[0,131072]", "\"data_offsets\":[0,99999999999]", "truncated");
    refuse_header("\"data_offsets\":[0,131072]", "\"data_offsets\":[2,131074]", "hole");
    refuse_header("\"data_offsets\":[131072,262144]", "\"data_offsets\":[0,131072]", "");
    refuse_header("\"head.weight\"", "\"embed.weight\"", "duplicate");
    refuse_header("\"head.weight\"", "\"heads.weight\"", "tensor head.weight is missing");
    refuse_header("\"layers.3.attn.wkv.weight\"", "\"layers.3.attn.wkx.weight\"",
                  "layers.3.attn.wkv.weight is missing");
    refuse_header("\"dtype\":\"F8_E4M3\"", "\"dtype\":\"I8\"", "expected F8_E4M3");
    refuse_header("{\"__metadata__", "[{\"__metadata__", "header");
    refuse_header("\"dtype\":\"BF16\",", "", "dtype, shape and data_offsets");
    refuse_header("\"dtype\":\"BF16\",", "\"x\":1,\"dtype\":\"BF16\",", "dtype, shape and");
}

static void test_whole_file(void)
{
    const size_t cuts[] = {0, 1, 7, 8, 9, 5000, weights_bytes / 2, weights_bytes - 1};
    for (size_t i = 0; i < KV_ARRAY_COUNT(cuts); i++) {
        write_file("model.safetensors", weights, cuts[i]);
        expect_refused(ENG_BACKEND_CPU, "model.safetensors");
    }
    uint8_t *file = malloc(weights_bytes + 16);
    EXPECT(file != NULL);
    memcpy(file, weights, weights_bytes);
    memset(file + weights_bytes, 0, 16);
    write_file("model.safetensors", file, weights_bytes + 1);
    expect_refused(ENG_BACKEND_CPU, "after the last tensor");
    static const uint64_t lengths[] = {UINT64_MAX, UINT64_MAX - 7, 1ull << 40, 104857601, 0, 2};
    for (size_t i = 0; i < KV_ARRAY_COUNT(lengths); i++) {
        kv_store64(file, lengths[i]);
        write_file("model.safetensors", file, weights_bytes);
        expect_refused(ENG_BACKEND_CPU, "header");
    }
    free(file);
    restore();
}

/* One tensor more than the model has, properly placed at the end. */
static void test_extra_tensor(void)
{
    const size_t header_bytes = (size_t)kv_load64(weights);
    const size_t data_bytes = weights_bytes - 8 - header_bytes;
    char entry[160];
    (void)snprintf(entry, sizeof(entry),
                   "\"mtp.0.x\":{\"dtype\":\"I8\",\"shape\":[4],\"data_offsets\":[%zu,%zu]},"
                   "\"embed.weight\"",
                   data_bytes, data_bytes + 4);
    char *header = calloc(1, header_bytes + 1);
    size_t bytes = 0;
    EXPECT(header != NULL);
    memcpy(header, weights + 8, header_bytes);
    char *text = edit(header, header_bytes, "\"embed.weight\"", entry, &bytes);
    uint8_t *file = calloc(1, 8 + bytes + data_bytes + 4);
    EXPECT(file != NULL);
    kv_store64(file, bytes);
    memcpy(file + 8, text, bytes);
    memcpy(file + 8 + bytes, weights + 8 + header_bytes, data_bytes);
    write_file("model.safetensors", file, 8 + bytes + data_bytes + 4);
    expect_refused(ENG_BACKEND_CPU, "mtp.0.x is not part of this model");
    free(file);
    free(text);
    free(header);
    restore();
}

static void test_config(void)
{
    refuse_config(ENG_BACKEND_CPU, "\"engram_layer_ids\": []", "\"engram_layer_ids\": [1, 6]",
                  "engram_num_embeddings is missing");
    refuse_config(ENG_BACKEND_CPU, "\"num_nextn_predict_layers\": 0",
                  "\"num_nextn_predict_layers\": 3", "dspark_block_size is missing");
    refuse_config(ENG_BACKEND_CPU, "\"vocab_size\": 512,", "", "vocab_size is missing");
    refuse_config(ENG_BACKEND_CPU, "\"vocab_size\": 512", "\"vocab_size\": \"512\"", "integer");
    refuse_config(ENG_BACKEND_CPU, "\"hidden_size\": 128", "\"hidden_size\": 100", "multiple");
    refuse_config(ENG_BACKEND_CPU, "\"hidden_size\": 128", "\"hidden_size\": -128", "hidden_size");
    refuse_config(ENG_BACKEND_CPU, "\"hidden_size\": 128", "\"hidden_size\": 160", "expected");
    refuse_config(ENG_BACKEND_CPU, "\"vocab_size\": 512",
                  "\"vocab_size\": 512, \"vocab_size\": 512", "duplicate");
    refuse_config(ENG_BACKEND_CPU, "\"sqrtsoftplus\"", "\"sigmoid\"", "scoring_func");
    refuse_config(ENG_BACKEND_CPU, "\"norm_topk_prob\": true", "\"norm_topk_prob\": false",
                  "norm_topk_prob");
    refuse_config(ENG_BACKEND_CPU, "[2, 4, 6, 8],", "[2, 6, 4, 8],", "ascend");
    refuse_config(ENG_BACKEND_CPU, "\"candidate_source_layer_id\": 8",
                  "\"candidate_source_layer_id\": 6", "candidate_source_layer_id");
    refuse_config(ENG_BACKEND_CPU, "[0, 0, 2,", "[0, 2, 2,", "before the first source");
    refuse_config(ENG_BACKEND_CPU, "[0, 0, 2,", "[0, 0, 3,", "compress_ratios");
    refuse_config(ENG_BACKEND_CPU, "[0, 0, 2,", "[0, 2,", "compress_ratios must have 16");
    refuse_config(ENG_BACKEND_CPU, "\"index_source_layer_ids\": [2, 4, 6, 8,",
                  "\"index_source_layer_ids\": [2, 6, 8,", "every kv source");
    refuse_config(ENG_BACKEND_CPU, "\"candidate_topk_blocks\": 4", "\"candidate_topk_blocks\": 2",
                  "must reach index_topk");
    refuse_config(ENG_BACKEND_CPU, "\"hc_mult\": 4", "\"hc_mult\": 2", "hc_mult");
    refuse_config(ENG_BACKEND_CPU, "\"deepseek_v41\"", "\"llama\"", "model_type");
    refuse_config(ENG_BACKEND_CPU, "\"rope_type\": \"yarn\"", "\"rope_type\": \"linear\"",
                  "rope_type");
    refuse_config(ENG_BACKEND_CPU, "{\n", "{\n,", "config.json");
    refuse_config(ENG_BACKEND_SYNTHETIC, "\"num_hidden_layers\": 16", "\"num_hidden_layers\": 99",
                  "num_hidden_layers");
}

static void test_missing_files(void)
{
    struct eng_options options = {.backend = ENG_BACKEND_CPU, .model_dir = "/nowhere"};
    struct eng_model *model = NULL;
    struct kv_error err = {0};
    options.spare_tokens = 16;
    EXPECT(eng_model_open(&options, &model, &err) == KV_IO);
    EXPECT(strstr(err.text, "/nowhere/config.json") != NULL);
    options.model_dir = NULL;
    EXPECT(eng_model_open(&options, &model, &err) == KV_INVALID);
    options.model_dir = dir;
    options.spare_tokens = 1000;
    EXPECT(eng_model_open(&options, &model, &err) == KV_INVALID);
    EXPECT(strstr(err.text, "spare_tokens") != NULL);
    EXPECT(eng_model_open(&options, &model, NULL) == KV_INVALID);
}

static struct kv_digest fingerprint(enum eng_backend backend, uint32_t spare)
{
    const struct eng_options options = {
        .backend = backend, .model_dir = dir, .spare_tokens = spare};
    struct eng_model *model = NULL;
    EXPECT(eng_model_open(&options, &model, NULL) == KV_OK);
    const struct kv_digest digest = eng_model_fingerprint(model);
    eng_model_close(model);
    return digest;
}

static void test_fingerprint(void)
{
    const struct kv_digest good = fingerprint(ENG_BACKEND_CPU, 16);
    const struct kv_digest spare = fingerprint(ENG_BACKEND_CPU, 8);
    const struct kv_digest synthetic = fingerprint(ENG_BACKEND_SYNTHETIC, 16);
    EXPECT_EQ_MEM(good.bytes, spare.bytes, 32);
    EXPECT(memcmp(good.bytes, synthetic.bytes, 32) != 0);

    weights[weights_bytes - 40] ^= 1;
    restore();
    const struct kv_digest other_weights = fingerprint(ENG_BACKEND_CPU, 16);
    EXPECT(memcmp(good.bytes, other_weights.bytes, 32) != 0);
    weights[weights_bytes - 40] ^= 1;
    size_t bytes = 0;
    char *text =
        edit(config, config_bytes, "\"swiglu_limit\": 10.0", "\"swiglu_limit\": 9.0", &bytes);
    restore();
    write_file("config.json", text, bytes);
    const struct kv_digest other_config = fingerprint(ENG_BACKEND_CPU, 16);
    EXPECT(memcmp(good.bytes, other_config.bytes, 32) != 0);
    free(text);
    restore();
    const struct kv_digest again = fingerprint(ENG_BACKEND_CPU, 16);
    EXPECT_EQ_MEM(good.bytes, again.bytes, 32);
}

/* KV_OK, or KV_IO with the file's name. */
static kv_status check_files(const struct eng_model *model)
{
    struct kv_error err = {0};
    const kv_status status = eng_model_check(model, &err);
    EXPECT(status == KV_OK || (status == KV_IO && strstr(err.text, ".safetensors") != NULL));
    return status;
}

/* Weights are read where they lie: a file that shrinks or is written to is no crash, but said. */
static void test_lost(void)
{
    char whole[64], path[128];
    uint32_t ids[40];
    struct rig a;

    fixture_make_model(whole, 5);
    struct eng_model *model = fixture_open(whole, ENG_BACKEND_CPU);
    rig_init(&a, model);
    fixture_ids(ids, 40, 1);
    rig_prefill(&a, ids, 20);
    EXPECT_EQ_I64(check_files(model), KV_OK);
    (void)snprintf(path, sizeof(path), "%s/model.safetensors", whole);
    EXPECT(truncate(path, 4096) == 0);
    rig_prefill(&a, ids, 40);
    EXPECT_EQ_I64(check_files(model), KV_IO);
    rig_fini(&a);
    eng_model_close(model);
    fixture_remove_model(whole);

    fixture_make_model(whole, 5);
    model = fixture_open(whole, ENG_BACKEND_CPU);
    (void)snprintf(path, sizeof(path), "%s/model.safetensors", whole);
    const int fd = open(path, O_WRONLY | O_CLOEXEC);
    EXPECT(fd >= 0 && pwrite(fd, ids, sizeof(ids), 8192) == (ssize_t)sizeof(ids));
    EXPECT_EQ_I64(check_files(model), KV_IO);
    EXPECT(close(fd) == 0);
    eng_model_close(model);
    fixture_remove_model(whole);
    model = fixture_open(NULL, ENG_BACKEND_SYNTHETIC);
    EXPECT_EQ_I64(check_files(model), KV_OK);
    eng_model_close(model);
}

int main(void)
{
    fixture_make_plain_model(dir, 5);
    weights = read_file("model.safetensors", &weights_bytes);
    config = read_file("config.json", &config_bytes);
    test_fingerprint();
    test_header();
    test_whole_file();
    test_extra_tensor();
    test_config();
    test_missing_files();
    test_lost();
    fixture_remove_model(dir);
    free(weights);
    free(config);
    HARNESS_END();
}
