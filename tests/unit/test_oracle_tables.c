/*
 * Every quantizer over its edges, and Engram's row numbers with the released model's constants,
 * against tables of the oracle (tests/oracle/fixtures.py).
 */

#include "engine/backend/cpu.h"
#include "engine/backend/kernels/compute.h"
#include "engine/backend/kernels/elementwise.h"
#include "engine/backend/kernels/gemm.h"
#include "engine/model/engram.h"
#include "engine/model/quant.h"
#include "engine/model/weights.h"
#include "tests/unit/oracle_fixture.h"

typedef void (*row_encode)(const float *values, size_t count, uint8_t *row);
typedef void (*row_decode)(const uint8_t *row, size_t count, float *values);

static uint64_t compared, differing;

static void count_bytes(const uint8_t *mine, const uint8_t *theirs, size_t count)
{
    compared += count;
    for (size_t i = 0; i < count; i++)
        differing += mine[i] != theirs[i];
}

static void compare_codes(const struct fixture *fixture, const char *name,
                          uint8_t (*encode)(float value))
{
    char in[32], out[32];
    (void)snprintf(in, sizeof(in), "%s.in", name);
    (void)snprintf(out, sizeof(out), "%s.codes", name);
    const struct fixture_tensor values = fixture_take(fixture, in, "F32");
    const struct fixture_tensor codes = fixture_take(fixture, out, "U8");
    EXPECT(values.rows == codes.rows);
    for (size_t i = 0; i < values.rows; i++) {
        const uint8_t code = encode(fixture_f32(&values, i));
        count_bytes(&code, codes.data + i, 1);
    }
}

static void compare_rows(const struct fixture *fixture, const char *in, const char *out,
                         row_encode encode)
{
    const struct fixture_tensor values = fixture_take(fixture, in, "BF16");
    const struct fixture_tensor rows = fixture_take(fixture, out, "U8");
    float row_values[512];
    uint8_t row[1024];

    EXPECT(values.width <= KV_ARRAY_COUNT(row_values));
    EXPECT(values.rows == rows.rows);
    for (size_t i = 0; i < values.rows; i++) {
        for (size_t k = 0; k < values.width; k++)
            row_values[k] = fixture_bf16(&values, i * values.width + k);
        encode(row_values, values.width, row);
        count_bytes(row, rows.data + i * rows.width, rows.width);
    }
}

static void compare_values(const struct fixture *fixture, const char *rows_name,
                           const char *values_name, row_decode decode)
{
    const struct fixture_tensor rows = fixture_take(fixture, rows_name, "U8");
    const struct fixture_tensor values = fixture_take(fixture, values_name, "F32");
    float row_values[512];

    for (size_t i = 0; i < rows.rows; i++) {
        decode(rows.data + i * rows.width, values.width, row_values);
        count_bytes((const uint8_t *)row_values, values.data + 4 * i * values.width,
                    4 * values.width);
    }
}

static void finish(const char *what)
{
    (void)printf("%s: %llu compared, %llu differ\n", what, (unsigned long long)compared,
                 (unsigned long long)differing);
    EXPECT(compared > 0);
    EXPECT_EQ_U64(differing, 0);
    compared = differing = 0;
}

static void test_quantizers(void)
{
    struct fixture fixture;
    fixture_open_file(&fixture, "quantizers");
    compare_codes(&fixture, "e4m3", eng_e4m3_encode);
    finish("e4m3");
    compare_codes(&fixture, "e2m1", eng_fp4_encode);
    finish("e2m1");
    const struct fixture_tensor in = fixture_take(&fixture, "bf16.in", "F32");
    const struct fixture_tensor codes = fixture_take(&fixture, "bf16.codes", "BF16");
    for (size_t i = 0; i < in.rows; i++) {
        const uint16_t code = eng_bf16_encode(fixture_f32(&in, i));
        const uint8_t bytes[2] = {(uint8_t)code, (uint8_t)(code >> 8)};
        count_bytes(bytes, codes.data + 2 * i, 2);
    }
    finish("bf16");
    compare_rows(&fixture, "fp8.in", "fp8.rows", eng_window_row_encode);
    compare_rows(&fixture, "wide.win.in", "wide.win.rows", eng_window_row_encode);
    compare_values(&fixture, "wide.win.rows", "wide.win.values", eng_window_row_decode);
    finish("window rows");
    compare_rows(&fixture, "key.in", "key.rows", eng_index_row_encode);
    compare_rows(&fixture, "wide.key.in", "wide.key.rows", eng_index_row_encode);
    compare_values(&fixture, "wide.key.rows", "wide.key.values", eng_index_row_decode);
    finish("index keys");
    compare_rows(&fixture, "main.in", "main.rows", eng_main_row_encode);
    compare_rows(&fixture, "wide.main.in", "wide.main.rows", eng_main_row_encode);
    compare_values(&fixture, "wide.main.rows", "wide.main.values", eng_main_row_decode);
    finish("main rows");
    fixture_close_file(&fixture);
}

/* Activations: `rows` as a window row has them, decoded, are what a product is given of `values`.
 */
static void compare_activations(const struct fixture *fixture, const char *in, const char *out,
                                const struct eng_kernel_set *set)
{
    const struct fixture_tensor values = fixture_take(fixture, in, "BF16");
    const struct fixture_tensor rows = fixture_take(fixture, out, "U8");
    const size_t bytes = eng_packed_bytes(1, (uint32_t)values.width);
    uint8_t *mine = aligned_alloc(64, bytes), *theirs = aligned_alloc(64, bytes);
    float before[512], want[512], after[512];

    EXPECT(mine != NULL && theirs != NULL && values.width <= KV_ARRAY_COUNT(before));
    for (size_t i = 0; i < values.rows; i++) {
        for (size_t k = 0; k < values.width; k++)
            before[k] = fixture_bf16(&values, i * values.width + k);
        eng_window_row_decode(rows.data + i * rows.width, values.width, want);
        set->elementwise->quantize(before, values.width, after);
        count_bytes((const uint8_t *)after, (const uint8_t *)want, 4 * values.width);
        struct eng_pack_args pack = {.x = before,
                                     .x_stride = values.width,
                                     .rows = 1,
                                     .k = (uint32_t)values.width,
                                     .quantize = true,
                                     .packed = mine};
        memset(mine, 0, bytes);
        memset(theirs, 0, bytes);
        set->gemm->pack(&pack, 0, 1);
        pack.x = want;
        pack.quantize = false;
        pack.packed = theirs;
        set->gemm->pack(&pack, 0, 1);
        count_bytes(mine, theirs, bytes);
    }
    free(mine);
    free(theirs);
}

/* The same tables through what really runs: each instruction set's own row kernels. */
static void test_kernels(void)
{
    struct fixture fixture;
    fixture_open_file(&fixture, "quantizers");
    for (unsigned isa = ENG_ISA_PORTABLE; isa < ENG_ISA_COUNT; isa++) {
        const char *missing = eng_isa_missing((enum eng_isa)isa);
        if (missing != NULL) {
            (void)printf("%s: not run: %s\n", eng_isa_name((enum eng_isa)isa), missing);
            continue;
        }
        const struct eng_kernel_set *set = eng_kernels_of((enum eng_isa)isa, false);
        const struct eng_elementwise_ops *ops = set->elementwise;
        compare_rows(&fixture, "fp8.in", "fp8.rows", ops->window_row);
        compare_rows(&fixture, "wide.win.in", "wide.win.rows", ops->window_row);
        compare_rows(&fixture, "key.in", "key.rows", ops->index_row);
        compare_rows(&fixture, "wide.key.in", "wide.key.rows", ops->index_row);
        compare_rows(&fixture, "main.in", "main.rows", ops->main_row);
        compare_rows(&fixture, "wide.main.in", "wide.main.rows", ops->main_row);
        compare_activations(&fixture, "fp8.in", "fp8.rows", set);
        compare_activations(&fixture, "wide.win.in", "wide.win.rows", set);
        finish(eng_isa_name((enum eng_isa)isa));
    }
    fixture_close_file(&fixture);
}

/* The released model's numbers: layers 1 and 14. */
static void test_engram(void)
{
    static const uint32_t layers[] = {1, 14};
    struct eng_config config = {.engram_count = 2,
                                .engram_layers = {1, 14},
                                .engram_max_ngram = 4,
                                .engram_heads = 8,
                                .engram_bucket_base = 16000000,
                                .engram_compressed = 99092};
    struct fixture fixture;
    struct eng_engram_hash hash;
    char name[32];

    fixture_open_file(&fixture, "engram");
    const struct fixture_tensor context = fixture_take(&fixture, "compressed", "I64");
    for (uint32_t i = 0; i < 2; i++) {
        eng_engram_hash_init(&hash, &config, i);
        EXPECT_EQ_U32(hash.columns, 24);
        (void)snprintf(name, sizeof(name), "multipliers.%u", layers[i]);
        count_bytes((const uint8_t *)hash.multipliers, fixture_take(&fixture, name, "I64").data,
                    4 * 8);
        (void)snprintf(name, sizeof(name), "primes.%u", layers[i]);
        count_bytes((const uint8_t *)hash.primes, fixture_take(&fixture, name, "I64").data, 24 * 8);
        (void)snprintf(name, sizeof(name), "rows.%u", layers[i]);
        const struct fixture_tensor rows = fixture_take(&fixture, name, "I64");
        for (size_t q = 0; q < context.rows; q++) {
            uint32_t ids[ENG_NGRAM_MAX] = {0};
            uint64_t mine[ENG_ENGRAM_COLUMNS_MAX];
            for (size_t s = 0; s < 4; s++)
                ids[s] = kv_load32(context.data + 8 * (4 * q + s));
            eng_engram_rows(&hash, ids, mine);
            count_bytes((const uint8_t *)mine, rows.data + q * 24 * 8, 24 * 8);
        }
    }
    finish("Engram");
    fixture_close_file(&fixture);
}

static void compare_rope(const struct fixture *fixture, const char *name, const float *frequencies,
                         uint32_t pairs)
{
    const struct fixture_tensor positions = fixture_take(fixture, "positions", "I32");
    char part[64];
    float row[4 * 32];

    EXPECT(pairs <= 32);
    (void)snprintf(part, sizeof(part), "%s.freq", name);
    const struct fixture_tensor freq = fixture_take(fixture, part, "F32");
    EXPECT_EQ_U64(freq.rows, pairs);
    count_bytes((const uint8_t *)frequencies, freq.data, 4 * pairs);
    (void)snprintf(part, sizeof(part), "%s.cos", name);
    const struct fixture_tensor cosines = fixture_take(fixture, part, "F32");
    (void)snprintf(part, sizeof(part), "%s.sin", name);
    const struct fixture_tensor sines = fixture_take(fixture, part, "F32");
    for (size_t p = 0; p < positions.rows; p++) {
        cpu_rotations(frequencies, pairs, kv_load32(positions.data + 4 * p), row);
        for (size_t i = 0; i < 2 * pairs; i++) {
            const float sine = i % 2 == 0 ? -row[2 * pairs + i] : row[2 * pairs + i];
            const size_t at = 4 * (p * pairs + i / 2);
            count_bytes((const uint8_t *)&row[i], cosines.data + at, 4);
            count_bytes((const uint8_t *)&sine, sines.data + at, 4);
        }
    }
}

/* Angles of the released model and of tiny, up to the last position. */
static void test_rope(void)
{
    struct eng_config configs[2];
    static const char *const texts[] = {"v41-flash", "tiny"}, *const names[] = {"real", "tiny"};
    struct fixture fixture;
    float plain[32], yarn[32];
    char name[32];

    fixture_open_file(&fixture, "rope");
    for (size_t i = 0; i < 2; i++) {
        const char *text = eng_config_text(texts[i]);
        EXPECT(text != NULL);
        EXPECT(eng_config_parse(texts[i], text, strlen(text), &configs[i], NULL) == KV_OK);
        EXPECT(configs[i].rope_dim <= 64);
        eng_rope_frequencies(&configs[i], plain, yarn);
        (void)snprintf(name, sizeof(name), "%s.plain", names[i]);
        compare_rope(&fixture, name, plain, configs[i].rope_dim / 2);
        (void)snprintf(name, sizeof(name), "%s.yarn", names[i]);
        compare_rope(&fixture, name, yarn, configs[i].rope_dim / 2);
    }
    finish("rope");
    fixture_close_file(&fixture);
}

int main(void)
{
    test_rope();
    test_quantizers();
    test_kernels();
    test_engram();
    HARNESS_END();
}
