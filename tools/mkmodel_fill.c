/*
 * The numbers of a toy model's weights.
 *
 * Same seed, same bytes on every machine: they come from integer arithmetic only (a sum of
 * uniforms, not a logarithm), and each tensor draws from its own stream named by seed and tensor.
 * Gains keep hidden states near one: unit gain everywhere, except that the shared expert's w1 and
 * w3 have gain 4 so that the clamp of the activation is reached, and indexer weights are never zero
 * so that selection means something.  A tensor is made strip by strip: none is in memory as a
 * whole.
 */

#include "kvstore/base/bytes.h"
#include "tools/mkmodel.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static uint64_t stream_next(struct stream *stream)
{
    stream->state += 0x9e3779b97f4a7c15u;
    uint64_t x = stream->state;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Twelve uniforms of 16 bits. */
float stream_normal(struct stream *stream)
{
    int64_t sum = 0;
    for (int i = 0; i < 3; i++) {
        const uint64_t word = stream_next(stream);
        for (int part = 0; part < 4; part++)
            sum += (int64_t)(word >> (16 * part) & 0xffff);
    }
    return (float)(sum - 6 * 65535) / 65536.0f;
}

struct stream stream_for(uint64_t seed, const char *name)
{
    struct stream stream = {.state = seed};
    for (const char *c = name; *c != '\0'; c++)
        stream.state = stream_next(&stream) ^ (uint64_t)(unsigned char)*c;
    return stream;
}

/* Mean and deviation of the values of a role, for `columns` inputs. */
static void numbers_of(const struct eng_tensor_spec *weight, float *ret_mean, float *ret_deviation)
{
    const uint64_t inputs = weight->dtype == ENG_I8 ? 2 * weight->columns : weight->columns;
    const float unit = 1.0f / sqrtf((float)inputs);
    float mean = 0, deviation = unit;

    switch (weight->role) {
    case ENG_ROLE_EMBED:
    case ENG_ROLE_MARKOV_EMBED:
    case ENG_ROLE_ENGRAM_ROWS:
        deviation = 1;
        break;
    case ENG_ROLE_HEAD:
        deviation = 2.0f / sqrtf((float)inputs);
        break;
    case ENG_ROLE_NORM:
    case ENG_ROLE_ATTN_NORM:
    case ENG_ROLE_FFN_NORM:
    case ENG_ROLE_Q_NORM:
    case ENG_ROLE_KV_NORM:
    case ENG_ROLE_CMP_NORM:
    case ENG_ROLE_IX_K_NORM:
    case ENG_ROLE_MAIN_NORM:
    case ENG_ROLE_ENGRAM_Q:
    case ENG_ROLE_ENGRAM_K:
    case ENG_ROLE_HC_SCALE:
        mean = 1;
        deviation = 0.1f;
        break;
    case ENG_ROLE_HC_FN:
        deviation = 0.5f / sqrtf((float)inputs);
        break;
    case ENG_ROLE_HC_BASE:
        deviation = 0.3f;
        break;
    case ENG_ROLE_SINK:
        deviation = 0.5f;
        break;
    case ENG_ROLE_GATE_BIAS:
    case ENG_ROLE_GATE_BIAS_VL:
        deviation = 0.1f;
        break;
    case ENG_ROLE_SHARED_W1:
    case ENG_ROLE_SHARED_W3:
        deviation = 4.0f / sqrtf((float)inputs);
        break;
    default:
        break;
    }
    *ret_mean = mean;
    *ret_deviation = deviation;
}

/* Nearest codes of a magnitude up to 448 or 6; ties go down, which does not matter for random
 * weights. */
static uint8_t nearest_e4m3(float magnitude)
{
    uint32_t bits;
    if (magnitude < 0x1p-6f) return (uint8_t)ceilf(magnitude * 512.0f - 0.5f);
    memcpy(&bits, &magnitude, sizeof(bits));
    const uint32_t code = ((bits + 0x7ffffu) >> 20) - ((127 - 7) << 3);
    return (uint8_t)KV_MIN(code, 126u);
}

static uint8_t nearest_e2m1(float m)
{
    return (uint8_t)((m > 0.25f) + (m > 0.75f) + (m > 1.25f) + (m > 1.75f) + (m > 2.5f) +
                     (m > 3.5f) + (m > 5.0f));
}

/* Exponent e with amax <= most x 2^e, as small as it gets. */
static int scale_exponent(float amax, float most)
{
    int exponent = 0;
    const float fraction = frexpf(amax / most, &exponent);
    return fraction == 0.5f ? exponent - 1 : exponent;
}

static void store(enum eng_dtype dtype, uint8_t *to, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    if (dtype == ENG_F32)
        kv_store32(to, bits);
    else
        kv_store16(to, (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16));
}

/* F32 and BF16, a row at a time. */
static bool fill_plain(const struct plan *plan, const struct eng_tensor_spec *weight,
                       struct stream *stream, fill_write *write, void *context)
{
    const uint64_t rows = weight->columns == 0 ? 1 : weight->rows;
    const uint64_t columns = weight->columns == 0 ? weight->rows : weight->columns;
    const size_t item_bytes = eng_dtype_bytes(weight->dtype);
    const bool is_base = weight->role == ENG_ROLE_HC_BASE;
    float mean, deviation;
    float *values = malloc(columns * sizeof(*values));
    uint8_t *data = malloc(columns * item_bytes);
    bool ok = values != NULL && data != NULL;

    numbers_of(weight, &mean, &deviation);
    for (uint64_t row = 0; ok && row < rows; row++) {
        if (!plan->bigram || !bigram_row(plan, weight, row, values))
            for (uint64_t i = 0; i < columns; i++) {
                /* A stream mostly keeps itself: the diagonal of the 4 x 4 mix leads. */
                const float lead = is_base && i >= 8 && (i - 8) % 5 == 0 ? 2 : 0;
                values[i] = mean + deviation * stream_normal(stream) + lead;
            }
        for (uint64_t i = 0; i < columns; i++)
            store(weight->dtype, data + i * item_bytes, values[i]);
        ok = write(context, false, row * columns * item_bytes, data, columns * item_bytes);
    }
    free(values);
    free(data);
    return ok;
}

/* What quantising needs, made once per tensor. */
struct quantiser {
    struct stream *stream;
    float deviation;
    uint64_t zero_from; /* Rows from here on are zeros. */
};

/* `count` values and the exponent that brings their largest to at most `most`. */
static int draw(const struct quantiser *quantiser, float *values, size_t count, float most)
{
    float amax = 1e-6f;
    for (size_t i = 0; i < count; i++) {
        values[i] = quantiser->deviation * stream_normal(quantiser->stream);
        amax = fmaxf(amax, fabsf(values[i]));
    }
    return scale_exponent(amax, most);
}

/* One tile of `tile_rows` x 32 values, of which `rows` are in the tensor. */
static uint8_t fp8_tile(const struct quantiser *quantiser, uint64_t row, uint64_t rows,
                        uint64_t tile_rows, uint64_t columns, uint8_t *data)
{
    float block[32 * 32];
    const int exponent = draw(quantiser, block, tile_rows * 32, 448.0f);
    const float scale = ldexpf(1.0f, -exponent);

    for (uint64_t i = 0; i < rows * 32; i++) {
        const uint8_t code = nearest_e4m3(fabsf(block[i]) * scale);
        const bool zero = row + i / 32 >= quantiser->zero_from;
        data[i / 32 * columns + i % 32] = zero ? 0 : (uint8_t)(code | (block[i] < 0 ? 0x80 : 0));
    }
    return (uint8_t)(exponent + 127);
}

/* FP8 in tiles of 32 x 32; the rows of an Engram table have scales of their own. */
static bool fill_fp8(const struct eng_tensor_spec *weight, const struct quantiser *quantiser,
                     fill_write *write, void *context)
{
    const uint64_t tile_rows = weight->role == ENG_ROLE_ENGRAM_ROWS ? 1 : 32;
    const uint64_t columns = weight->columns, tiles = columns / 32;
    uint8_t *data = malloc(tile_rows * columns);
    uint8_t *scales = malloc(tiles);
    bool ok = data != NULL && scales != NULL;

    for (uint64_t row = 0; ok && row < weight->rows; row += tile_rows) {
        const uint64_t rows = KV_MIN(weight->rows - row, tile_rows);
        for (uint64_t tile = 0; tile < tiles; tile++)
            scales[tile] = fp8_tile(quantiser, row, rows, tile_rows, columns, data + tile * 32);
        ok = write(context, false, row * columns, data, rows * columns) &&
             write(context, true, row / tile_rows * tiles, scales, tiles);
    }
    free(data);
    free(scales);
    return ok;
}

/* MXFP4 in groups of 32 columns, two values a byte, the even one in the low nibble. */
static bool fill_fp4(const struct eng_tensor_spec *weight, const struct quantiser *quantiser,
                     fill_write *write, void *context)
{
    const uint64_t groups = weight->columns / 16;
    uint8_t *data = malloc(weight->columns);
    uint8_t *scales = malloc(groups);
    bool ok = data != NULL && scales != NULL;

    for (uint64_t row = 0; ok && row < weight->rows; row++) {
        for (uint64_t group = 0; group < groups; group++) {
            float block[32];
            uint8_t codes[32];
            const int exponent = draw(quantiser, block, 32, 6.0f);
            const float scale = ldexpf(1.0f, -exponent);
            scales[group] = (uint8_t)(exponent + 127);
            for (int i = 0; i < 32; i++)
                codes[i] =
                    (uint8_t)(nearest_e2m1(fabsf(block[i]) * scale) | (block[i] < 0 ? 8 : 0));
            for (int i = 0; i < 16; i++)
                data[group * 16 + (size_t)i] =
                    (uint8_t)(row >= quantiser->zero_from ? 0
                                                          : codes[2 * i] | codes[2 * i + 1] << 4);
        }
        ok = write(context, false, row * weight->columns, data, weight->columns) &&
             write(context, true, row * groups, scales, groups);
    }
    free(data);
    free(scales);
    return ok;
}

bool fill_tensor(const struct plan *plan, const struct eng_tensor_spec *weight, fill_write *write,
                 void *context)
{
    static const char suffix[] = ".weight";
    char name[ENG_TENSOR_NAME_MAX];
    struct quantiser quantiser = {.zero_from = UINT64_MAX};
    float mean;

    assert(!weight->is_scale);
    memcpy(name, weight->name, sizeof(name));
    const bool quantised = weight->dtype == ENG_F8_E4M3 || weight->dtype == ENG_I8;
    /* A weight and its scale have one stream, named without the suffix. */
    if (quantised) name[strlen(name) - sizeof(suffix) + 1] = '\0';
    struct stream stream = stream_for(plan->seed, name);
    if (!quantised) return fill_plain(plan, weight, &stream, write, context);
    numbers_of(weight, &mean, &quantiser.deviation);
    quantiser.stream = &stream;
    if (plan->bigram) (void)bigram_zeroed(plan->config, weight, &quantiser.zero_from);
    return weight->dtype == ENG_I8 ? fill_fp4(weight, &quantiser, write, context)
                                   : fill_fp8(weight, &quantiser, write, context);
}

void fill_compressed_ids(const struct eng_config *config, uint32_t *ids)
{
    uint32_t next = 0;

    /* Ids 3 to 258 are bytes: upper case shares the id of lower case, which comes later. */
    for (uint32_t i = 0; i < config->vocab; i++) {
        const bool lower = i >= 3 + 'a' && i <= 3 + 'z';
        ids[i] = lower ? ids[i - 'a' + 'A'] : next++;
    }
    if (next == config->engram_compressed) return;
    for (uint32_t i = 0; i < config->vocab; i++)
        ids[i] = KV_MIN(i, config->engram_compressed - 1);
}
