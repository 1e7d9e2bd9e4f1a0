/*
 * Makes a toy model: config.json and model.safetensors with random weights in the released formats.
 *
 * Same seed, same bytes on every machine: the numbers come from integer arithmetic only (a sum of
 * uniforms, not a logarithm), and each tensor draws from its own stream named by seed and tensor.
 * Gains keep hidden states near one: unit gain everywhere, except that the shared expert's w1 and
 * w3 have gain 4 so that the clamp of the activation is reached, and indexer weights are never zero
 * so that selection means something.  Both files are written beside their place and renamed,
 * weights first, so a reader never sees half a model.
 */

#include "kvstore/base/bytes.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { EXIT_USAGE = 2 };

enum {
    VOCAB = 512,
    HIDDEN = 128,
    LAYERS = 16,
    ENCODER = 8,
    HEADS = 4,
    HEAD_DIM = 64,
    Q_LORA = 64,
    O_GROUPS = 2,
    O_LORA = 32,
    INDEX_HEADS = 2,
    INDEX_DIM = 32,
    EXPERTS = 8,
    WIDTH = 64,
};

static const char config_text[] =
    "{\n"
    "  \"_name_or_path\": \"tiny\",\n"
    "  \"architectures\": [\"DeepseekV41ForCausalLM\"],\n"
    "  \"model_type\": \"deepseek_v41\",\n"
    "  \"bos_token_id\": 0,\n"
    "  \"eos_token_id\": 1,\n"
    "  \"pad_token_id\": 2,\n"
    "  \"image_token_id\": 510,\n"
    "  \"quantization_config\": {\"quant_method\": \"fp8\", \"activation_scheme\": \"dynamic\",\n"
    "    \"weight_block_size\": [32, 32], \"scale_fmt\": \"ue8m0\", \"expert_dtype\": \"fp4\"},\n"
    "  \"text_config\": {\n"
    "    \"model_type\": \"deepseek_v41_text\",\n"
    "    \"vocab_size\": 512,\n"
    "    \"hidden_size\": 128,\n"
    "    \"num_hidden_layers\": 16,\n"
    "    \"num_attention_heads\": 4,\n"
    "    \"num_key_value_heads\": 1,\n"
    "    \"head_dim\": 64,\n"
    "    \"qk_rope_head_dim\": 16,\n"
    "    \"q_lora_rank\": 64,\n"
    "    \"o_groups\": 2,\n"
    "    \"o_lora_rank\": 32,\n"
    "    \"sliding_window\": 16,\n"
    "    \"compress_ratios\": [0, 0, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1],\n"
    "    \"kv_source_layer_ids\": [2, 4, 6, 8],\n"
    "    \"index_source_layer_ids\": [2, 4, 6, 8, 10, 12, 14],\n"
    "    \"index_n_heads\": 2,\n"
    "    \"index_head_dim\": 32,\n"
    "    \"index_topk\": 16,\n"
    "    \"candidate_source_layer_id\": 8,\n"
    "    \"candidate_topk_blocks\": 4,\n"
    "    \"candidate_block_size\": 8,\n"
    "    \"rope_theta\": 10000.0,\n"
    "    \"compress_rope_theta\": 160000.0,\n"
    "    \"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 16, \"beta_fast\": 32,\n"
    "      \"beta_slow\": 1, \"original_max_position_embeddings\": 64},\n"
    "    \"max_position_embeddings\": 1048576,\n"
    "    \"n_routed_experts\": 8,\n"
    "    \"num_experts_per_tok\": 2,\n"
    "    \"n_shared_experts\": 1,\n"
    "    \"moe_intermediate_size\": 64,\n"
    "    \"scoring_func\": \"sqrtsoftplus\",\n"
    "    \"topk_method\": \"noaux_tc\",\n"
    "    \"norm_topk_prob\": true,\n"
    "    \"routed_scaling_factor\": 1.5,\n"
    "    \"swiglu_limit\": 10.0,\n"
    "    \"rms_norm_eps\": 1e-20,\n"
    "    \"hc_mult\": 4,\n"
    "    \"hc_sinkhorn_iters\": 20,\n"
    "    \"hc_eps\": 1e-6,\n"
    "    \"engram_layer_ids\": [],\n"
    "    \"num_nextn_predict_layers\": 0\n"
    "  }\n"
    "}\n";

/* Both halves of the file while it is made. */
struct maker {
    uint64_t seed;
    uint8_t *data;
    size_t data_bytes, data_max;
    char *header;
    size_t header_bytes, header_max;
    bool failed;
};

struct stream {
    uint64_t state;
};

static uint64_t stream_next(struct stream *stream)
{
    stream->state += 0x9e3779b97f4a7c15u;
    uint64_t x = stream->state;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Mean 0, variance 1: twelve uniforms of 16 bits. */
static float stream_normal(struct stream *stream)
{
    int64_t sum = 0;
    for (int i = 0; i < 3; i++) {
        const uint64_t word = stream_next(stream);
        for (int part = 0; part < 4; part++)
            sum += (int64_t)(word >> (16 * part) & 0xffff);
    }
    return (float)(sum - 6 * 65535) / 65536.0f;
}

static struct stream stream_for(const struct maker *maker, const char *name)
{
    struct stream stream = {.state = maker->seed};
    for (const char *c = name; *c != '\0'; c++)
        stream.state = stream_next(&stream) ^ (uint64_t)(unsigned char)*c;
    return stream;
}

static bool grow(struct maker *maker, void *buffer_ptr, size_t used, size_t *max, size_t more)
{
    void **buffer = buffer_ptr;
    if (maker->failed) return false;
    if (used + more <= *max) return true;
    const size_t bigger = 2 * (used + more);
    void *moved = realloc(*buffer, bigger);
    if (moved == NULL) {
        maker->failed = true;
        return false;
    }
    *buffer = moved;
    *max = bigger;
    return true;
}

static uint8_t *add(struct maker *maker, const char *name, const char *suffix, const char *dtype,
                    size_t rows, size_t columns, size_t item_bytes)
{
    const size_t bytes = rows * (columns == 0 ? 1 : columns) * item_bytes;
    char shape[64], entry[320];

    if (columns == 0)
        (void)snprintf(shape, sizeof(shape), "[%zu]", rows);
    else
        (void)snprintf(shape, sizeof(shape), "[%zu,%zu]", rows, columns);
    const int length =
        snprintf(entry, sizeof(entry),
                 "%s\"%s%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%zu,%zu]}",
                 maker->header_bytes == 0 ? "{" : ",", name, suffix, dtype, shape,
                 maker->data_bytes, maker->data_bytes + bytes);
    if (!grow(maker, &maker->header, maker->header_bytes, &maker->header_max, (size_t)length + 16))
        return NULL;
    if (!grow(maker, &maker->data, maker->data_bytes, &maker->data_max, bytes)) return NULL;
    memcpy(maker->header + maker->header_bytes, entry, (size_t)length);
    maker->header_bytes += (size_t)length;
    maker->data_bytes += bytes;
    return maker->data + maker->data_bytes - bytes;
}

static void add_f32(struct maker *maker, const char *name, size_t rows, size_t columns, float mean,
                    float deviation)
{
    struct stream stream = stream_for(maker, name);
    uint8_t *data = add(maker, name, "", "F32", rows, columns, 4);
    for (size_t i = 0; data != NULL && i < rows * (columns == 0 ? 1 : columns); i++) {
        const float value = mean + deviation * stream_normal(&stream);
        uint32_t bits;
        memcpy(&bits, &value, sizeof(bits));
        kv_store32(data + 4 * i, bits);
    }
}

static void add_bf16(struct maker *maker, const char *name, size_t rows, size_t columns, float mean,
                     float deviation)
{
    struct stream stream = stream_for(maker, name);
    uint8_t *data = add(maker, name, "", "BF16", rows, columns, 2);
    for (size_t i = 0; data != NULL && i < rows * (columns == 0 ? 1 : columns); i++) {
        const float value = mean + deviation * stream_normal(&stream);
        uint32_t bits;
        memcpy(&bits, &value, sizeof(bits));
        kv_store16(data + 2 * i, (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16));
    }
}

/* Nearest of the first `count` codes of an ascending table; which way a tie goes does not matter
 * for random weights. */
static uint8_t nearest(const float *values, size_t count, float magnitude)
{
    size_t low = 0, high = count - 1;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (magnitude > (values[middle] + values[middle + 1]) / 2)
            low = middle + 1;
        else
            high = middle;
    }
    return (uint8_t)low;
}

/* Exponent e with amax <= most x 2^e, as small as it gets. */
static int scale_exponent(float amax, float most)
{
    int exponent = 0;
    const float fraction = frexpf(amax / most, &exponent);
    return fraction == 0.5f ? exponent - 1 : exponent;
}

static void add_fp8(struct maker *maker, const char *name, size_t rows, size_t columns, float gain)
{
    const float deviation = gain / sqrtf((float)columns);
    struct stream stream = stream_for(maker, name);
    float values[127];
    for (int code = 0; code < 127; code++)
        values[code] = code < 8 ? (float)code * 0x1p-9f
                                : ldexpf(1.0f + (float)(code & 7) / 8.0f, (code >> 3) - 7);

    (void)add(maker, name, ".weight", "F8_E4M3", rows, columns, 1);
    const size_t at = maker->data_bytes - rows * columns;
    uint8_t *scales = add(maker, name, ".scale", "F8_E8M0", (rows + 31) / 32, columns / 32, 1);
    if (scales == NULL) return;
    uint8_t *data = maker->data + at;
    for (size_t tile = 0; tile < (rows + 31) / 32 * (columns / 32); tile++) {
        const size_t row = tile / (columns / 32) * 32, column = tile % (columns / 32) * 32;
        float block[32 * 32], amax = 1e-6f;
        for (size_t i = 0; i < 32 * 32; i++) {
            block[i] = deviation * stream_normal(&stream);
            amax = fmaxf(amax, fabsf(block[i]));
        }
        const int exponent = scale_exponent(amax, 448.0f);
        scales[tile] = (uint8_t)(exponent + 127);
        for (size_t i = 0; i < 32 * 32 && row + i / 32 < rows; i++) {
            const uint8_t code = nearest(values, 127, ldexpf(fabsf(block[i]), -exponent));
            data[(row + i / 32) * columns + column + i % 32] =
                (uint8_t)(code | (block[i] < 0 ? 0x80 : 0));
        }
    }
}

static void add_fp4(struct maker *maker, const char *name, size_t rows, size_t columns, float gain)
{
    static const float values[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    const float deviation = gain / sqrtf((float)columns);
    struct stream stream = stream_for(maker, name);

    (void)add(maker, name, ".weight", "I8", rows, columns / 2, 1);
    const size_t at = maker->data_bytes - rows * columns / 2;
    uint8_t *scales = add(maker, name, ".scale", "F8_E8M0", rows, columns / 32, 1);
    if (scales == NULL) return;
    uint8_t *data = maker->data + at;
    for (size_t group = 0; group < rows * (columns / 32); group++) {
        float block[32], amax = 1e-6f;
        uint8_t codes[32];
        for (int i = 0; i < 32; i++) {
            block[i] = deviation * stream_normal(&stream);
            amax = fmaxf(amax, fabsf(block[i]));
        }
        const int exponent = scale_exponent(amax, 6.0f);
        scales[group] = (uint8_t)(exponent + 127);
        for (int i = 0; i < 32; i++)
            codes[i] = (uint8_t)(nearest(values, 8, ldexpf(fabsf(block[i]), -exponent)) |
                                 (block[i] < 0 ? 8 : 0));
        for (int i = 0; i < 16; i++)
            data[group * 16 + (size_t)i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
    }
}

static const char *layer_name(char *buffer, size_t max, int layer, const char *rest)
{
    (void)snprintf(buffer, max, "layers.%d.%s", layer, rest);
    return buffer;
}

#define NAME(rest) layer_name(name, sizeof(name), layer, rest)

static void add_mixes(struct maker *maker, int layer)
{
    static const char *const which[] = {"hc_attn", "hc_ffn"};
    char name[96], part[32];

    for (int i = 0; i < 2; i++) {
        (void)snprintf(part, sizeof(part), "%s_fn", which[i]);
        add_f32(maker, NAME(part), 24, (size_t)4 * HIDDEN, 0, 0.5f / sqrtf(4.0f * HIDDEN));
        (void)snprintf(part, sizeof(part), "%s_base", which[i]);
        struct stream stream = stream_for(maker, NAME(part));
        uint8_t *base = add(maker, name, "", "F32", 24, 0, 4);
        for (int k = 0; base != NULL && k < 24; k++) {
            /* A stream mostly keeps itself: the diagonal of the 4 x 4 mix leads. */
            const float value =
                0.3f * stream_normal(&stream) + (k >= 8 && (k - 8) % 5 == 0 ? 2 : 0);
            uint32_t bits;
            memcpy(&bits, &value, sizeof(bits));
            kv_store32(base + 4 * k, bits);
        }
        (void)snprintf(part, sizeof(part), "%s_scale", which[i]);
        add_f32(maker, NAME(part), 3, 0, 1.0f, 0.1f);
    }
}

static void add_attention(struct maker *maker, int layer)
{
    const bool owns_rows = layer >= 2 && layer <= ENCODER && layer % 2 == 0;
    const bool owns_list = layer >= 2 && layer % 2 == 0;
    const float unit = 1.0f / sqrtf((float)HIDDEN);
    char name[96];

    add_bf16(maker, NAME("attn_norm.weight"), HIDDEN, 0, 1.0f, 0.1f);
    add_f32(maker, NAME("attn.attn_sink"), HEADS, 0, 0, 0.5f);
    add_bf16(maker, NAME("attn.q_norm.weight"), Q_LORA, 0, 1.0f, 0.1f);
    add_bf16(maker, NAME("attn.kv_norm.weight"), HEAD_DIM, 0, 1.0f, 0.1f);
    add_fp8(maker, NAME("attn.wq_a"), Q_LORA, HIDDEN, 1.0f);
    add_fp8(maker, NAME("attn.wq_b"), (size_t)HEADS * HEAD_DIM, Q_LORA, 1.0f);
    add_fp8(maker, NAME("attn.wkv"), HEAD_DIM, HIDDEN, 1.0f);
    add_fp8(maker, NAME("attn.wo_a"), (size_t)O_GROUPS * O_LORA, HEADS * HEAD_DIM / O_GROUPS, 1.0f);
    add_fp8(maker, NAME("attn.wo_b"), HIDDEN, (size_t)O_GROUPS * O_LORA, 1.0f);
    if (owns_rows) {
        add_bf16(maker, NAME("attn.compressor.wkv.weight"), HEAD_DIM, HIDDEN, 0, unit);
        if (layer < ENCODER)
            add_bf16(maker, NAME("attn.compressor.wgate.weight"), HEAD_DIM, HIDDEN, 0, unit);
        add_bf16(maker, NAME("attn.compressor.norm.weight"), HEAD_DIM, 0, 1.0f, 0.1f);
        add_bf16(maker, NAME("attn.indexer.wk.weight"), INDEX_DIM, HEAD_DIM, 0,
                 1.0f / sqrtf((float)HEAD_DIM));
        add_bf16(maker, NAME("attn.indexer.k_norm.weight"), INDEX_DIM, 0, 1.0f, 0.1f);
    }
    if (owns_list) {
        add_fp8(maker, NAME("attn.indexer.wq_b"), (size_t)INDEX_HEADS * INDEX_DIM, Q_LORA, 1.0f);
        add_bf16(maker, NAME("attn.indexer.weights_proj.weight"), INDEX_HEADS, HIDDEN, 0, unit);
    }
}

static void add_ffn(struct maker *maker, int layer)
{
    static const struct {
        const char *name;
        size_t rows, columns;
        float shared_gain;
    } parts[] = {
        {"w1", WIDTH, HIDDEN, 4.0f}, {"w3", WIDTH, HIDDEN, 4.0f}, {"w2", HIDDEN, WIDTH, 1}};
    char name[96], part[64];

    add_bf16(maker, NAME("ffn_norm.weight"), HIDDEN, 0, 1.0f, 0.1f);
    add_bf16(maker, NAME("ffn.gate.weight"), EXPERTS, HIDDEN, 0, 1.0f / sqrtf((float)HIDDEN));
    add_f32(maker, NAME("ffn.gate.bias"), EXPERTS, 0, 0, 0.1f);
    add_f32(maker, NAME("ffn.gate.bias_vl"), EXPERTS, 0, 0, 0.1f);
    for (size_t i = 0; i < KV_ARRAY_COUNT(parts); i++) {
        (void)snprintf(part, sizeof(part), "ffn.shared_experts.%s", parts[i].name);
        add_fp8(maker, NAME(part), parts[i].rows, parts[i].columns, parts[i].shared_gain);
    }
    for (int expert = 0; expert < EXPERTS; expert++)
        for (size_t i = 0; i < KV_ARRAY_COUNT(parts); i++) {
            (void)snprintf(part, sizeof(part), "ffn.experts.%d.%s", expert, parts[i].name);
            add_fp4(maker, NAME(part), parts[i].rows, parts[i].columns, 1.0f);
        }
}

static void make_tiny(struct maker *maker)
{
    add_bf16(maker, "embed.weight", VOCAB, HIDDEN, 0, 1.0f);
    add_bf16(maker, "head.weight", VOCAB, HIDDEN, 0, 2.0f / sqrtf((float)HIDDEN));
    add_bf16(maker, "norm.weight", HIDDEN, 0, 1.0f, 0.1f);
    for (int layer = 0; layer < LAYERS; layer++) {
        add_mixes(maker, layer);
        add_attention(maker, layer);
        add_ffn(maker, layer);
    }
    if (maker->failed) return;
    maker->header[maker->header_bytes++] = '}';
    /* Readers like their data aligned; spaces after the object are part of the format. */
    while (maker->header_bytes % 8 != 0)
        maker->header[maker->header_bytes++] = ' ';
}

static int complain(const char *path)
{
    (void)fprintf(stderr, "mkmodel: %s: %s\n", path, strerror(errno));
    return EXIT_FAILURE;
}

static bool write_all(int fd, const void *data, size_t bytes)
{
    const uint8_t *at = data;
    while (bytes > 0) {
        const ssize_t n = write(fd, at, bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        at += n;
        bytes -= (size_t)n;
    }
    return true;
}

static int write_file(const char *dir, const char *name, const struct kv_bytes *parts, size_t count)
{
    char path[4096], temporary[4096 + 8];
    const int length = snprintf(path, sizeof(path), "%s/%s", dir, name);
    if (length < 0 || (size_t)length >= sizeof(path)) {
        errno = ENAMETOOLONG;
        return complain(dir);
    }
    (void)snprintf(temporary, sizeof(temporary), "%s.tmp", path);
    const int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0) return complain(temporary);

    bool ok = true;
    for (size_t i = 0; ok && i < count; i++)
        ok = write_all(fd, parts[i].data, parts[i].count);
    ok = ok && fsync(fd) == 0;
    const int cause = errno;
    if (close(fd) != 0 && ok) return complain(temporary);
    if (!ok) {
        (void)unlink(temporary);
        errno = cause;
        return complain(temporary);
    }
    if (rename(temporary, path) != 0) return complain(path);
    return EXIT_SUCCESS;
}

static int make_model(uint64_t seed, const char *dir)
{
    struct maker maker = {.seed = seed};
    uint8_t length[8];

    if (mkdir(dir, 0755) != 0 && errno != EEXIST) return complain(dir);
    make_tiny(&maker);
    if (maker.failed) {
        (void)fprintf(stderr, "mkmodel: out of memory\n");
        free(maker.data);
        free(maker.header);
        return EXIT_FAILURE;
    }
    kv_store64(length, maker.header_bytes);
    const struct kv_bytes weights[] = {
        {length, sizeof(length)},
        {(const uint8_t *)maker.header, maker.header_bytes},
        {maker.data, maker.data_bytes},
    };
    const struct kv_bytes config[] = {{(const uint8_t *)config_text, sizeof(config_text) - 1}};
    int result = write_file(dir, "model.safetensors", weights, KV_ARRAY_COUNT(weights));
    if (result == EXIT_SUCCESS)
        result = write_file(dir, "config.json", config, KV_ARRAY_COUNT(config));
    if (result == EXIT_SUCCESS)
        (void)printf("%s: tiny, seed %llu, %zu bytes of weights\n", dir, (unsigned long long)seed,
                     maker.data_bytes);
    free(maker.data);
    free(maker.header);
    return result;
}

static void print_usage(FILE *out)
{
    (void)fprintf(out, "usage: mkmodel --seed N --out DIR [--model tiny]\n"
                       "\n"
                       "Writes config.json and model.safetensors with random weights to DIR.\n"
                       "\n"
                       "  --seed N      same seed, same bytes (default 1)\n"
                       "  --out DIR     made if it is not there\n"
                       "  --model NAME  tiny is the only one\n"
                       "  --help        this text\n"
                       "\n"
                       "exit code: 0 done, 1 failed, 2 wrong usage\n");
}

static int usage_error(const char *text, const char *value)
{
    (void)fprintf(stderr, "mkmodel: %s%s\n", text, value);
    print_usage(stderr);
    return EXIT_USAGE;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"seed", required_argument, NULL, 's'},
        {"out", required_argument, NULL, 'o'},
        {"model", required_argument, NULL, 'm'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    const char *dir = NULL;
    char *end = NULL;
    uint64_t seed = 1;
    int option;

    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (option) {
        case 's':
            errno = 0;
            seed = strtoull(optarg, &end, 10);
            if (errno != 0 || *end != '\0' || *optarg < '0' || *optarg > '9')
                return usage_error("--seed must be a number, found ", optarg);
            break;
        case 'o':
            dir = optarg;
            break;
        case 'm':
            if (strcmp(optarg, "tiny") != 0)
                return usage_error("--model must be tiny, found ", optarg);
            break;
        case 'h':
            print_usage(stdout);
            return EXIT_SUCCESS;
        default:
            print_usage(stderr);
            return EXIT_USAGE;
        }
    }
    if (optind < argc) return usage_error("unexpected argument ", argv[optind]);
    if (dir == NULL) return usage_error("--out is missing", "");
    return make_model(seed, dir);
}
