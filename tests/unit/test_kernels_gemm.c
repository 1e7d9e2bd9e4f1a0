/*
 * Products on weights as stored: each family gives the same bits for a row whoever stands beside
 * it, on however many threads, at any instruction set; each is near a sum in double precision; and
 * a planted error is seen by the same comparison.
 */

#include "engine/backend/kernels/compute.h"
#include "engine/backend/kernels/elementwise.h"
#include "engine/model/quant.h"
#include "tests/harness.h"
#include "tests/unit/kernels_draw.h"

#include <math.h>

#define ROWS 70u

/* Every code that a checkpoint may hold, the tiny ones more often; scales from low on. */
static struct eng_matrix make(enum eng_format format, uint32_t n, uint32_t k, uint8_t low,
                              uint8_t span)
{
    struct eng_matrix m = {.format = format, .n = n, .k = k};
    const size_t values = (size_t)n * k, scales = (size_t)n * (k / 32 + 1);
    /* Exact sizes, so that a read beyond the end is seen by the sanitizer. */
    uint8_t *data = malloc(eng_matrix_bytes(&m));
    uint8_t *scale = malloc(scales);

    EXPECT(data != NULL && scale != NULL);
    for (size_t i = 0; i < values; i++) {
        const uint32_t r = draw();
        const float f = r % 64 == 0 ? 0.0f : draw_float();
        const uint16_t half = eng_bf16_encode(f);
        if (format == ENG_FORMAT_FP8)
            data[i] = (uint8_t)(r % 5 == 0 ? r >> 8 & 0x87 : (r >> 8 & 0x7f) == 0x7f ? 3 : r >> 8);
        else if (format == ENG_FORMAT_FP4)
            data[i / 2] = (uint8_t)(r >> 8);
        else if (format == ENG_FORMAT_BF16)
            memcpy(data + 2 * i, &half, sizeof(half));
        else
            memcpy(data + 4 * i, &f, sizeof(f));
    }
    for (size_t i = 0; i < scales; i++)
        scale[i] = (uint8_t)(low + draw() % span);
    m.data = data;
    m.scale = scale;
    return m;
}

static void drop(struct eng_matrix *m)
{
    free((void *)(uintptr_t)m->data);
    free((void *)(uintptr_t)m->scale);
}

static float *make_x(uint32_t rows, uint32_t k)
{
    float *x = take((size_t)rows * k * sizeof(*x));
    for (size_t i = 0; i < (size_t)rows * k; i++)
        x[i] = draw() % 16 == 0 ? 0.0f : eng_bf16_round(4 * draw_float());
    return x;
}

/* y of `rows` rows from row `first` of x on. */
static void product(enum eng_isa isa, const struct eng_matrix *m, const float *x, uint32_t first,
                    uint32_t rows, bool round, float *y)
{
    void *packed = take(eng_packed_bytes(rows, m->k));
    void *scratch = take(ENG_KERNEL_SCRATCH);
    const struct eng_pack_args pack = {
        .x = x + (size_t)first * m->k, .x_stride = m->k, .rows = rows, .k = m->k, .packed = packed};
    const struct eng_gemm_args gemm = {
        .matrix = m, .packed = packed, .rows = rows, .y = y, .y_stride = m->n, .round_bf16 = round};

    eng_kernels_of(isa, false)->gemm->pack(&pack, 0, UINT32_MAX);
    eng_kernels_of(isa, false)->gemm->gemm(&gemm, 0, UINT32_MAX, scratch);
    free(packed);
    free(scratch);
}

/* Largest difference from the sum in double, relative to the largest result. */
static double distance(const struct eng_matrix *m, const float *x, uint32_t rows, const float *y)
{
    double worst = 0, most = 0;

    for (uint32_t t = 0; t < rows; t++)
        for (uint32_t n = 0; n < m->n; n++) {
            double want = 0;
            for (uint32_t k = 0; k < m->k; k++)
                want += (double)eng_matrix_value(m, n, k) * (double)x[(size_t)t * m->k + k];
            worst = fmax(worst, fabs(want - (double)y[(size_t)t * m->n + n]));
            most = fmax(most, fabs(want));
        }
    return worst / most;
}

/* Rows counted from 1 to 70 and beginning anywhere give the bits of the whole. */
static void check_bits(enum eng_isa isa, const struct eng_matrix *m, const float *x,
                       const float *whole)
{
    float *y = take((size_t)ROWS * m->n * sizeof(*y));

    for (uint32_t rows = 1; rows <= ROWS; rows++) {
        const uint32_t first = draw() % (ROWS - rows + 1);
        memset(y, 0x55, (size_t)rows * m->n * sizeof(*y));
        product(isa, m, x, first, rows, false, y);
        EXPECT_EQ_MEM(y, whole + (size_t)first * m->n, (size_t)rows * m->n * sizeof(*y));
    }
    free(y);
}

static void check_threads(enum eng_isa isa, const struct eng_matrix *m, const float *x,
                          const float *whole)
{
    const size_t bytes = (size_t)ROWS * m->n * sizeof(float);
    const struct eng_matrix *matrices[] = {m, m};
    void *packed = take(eng_packed_bytes(ROWS, m->k));
    float *y = take(2 * bytes);

    for (uint32_t threads = 1; threads <= 4; threads++) {
        struct eng_compute compute;
        EXPECT(eng_compute_open(isa, threads, KV_THREAD_ANY, &compute, NULL) == KV_OK);
        struct eng_gemm_args gemm[2];
        memset(y, 0x55, 2 * bytes);
        eng_compute_pack(&compute,
                         &(struct eng_pack_args){
                             .x = x, .x_stride = m->k, .rows = ROWS, .k = m->k, .packed = packed},
                         1);
        for (int i = 0; i < 2; i++)
            gemm[i] = (struct eng_gemm_args){.matrix = matrices[i],
                                             .packed = packed,
                                             .rows = ROWS,
                                             .y = y + (size_t)i * ROWS * m->n,
                                             .y_stride = m->n};
        eng_compute_gemm(&compute, gemm, 2);
        EXPECT_EQ_MEM(y, whole, bytes);
        EXPECT_EQ_MEM(y + (size_t)ROWS * m->n, whole, bytes);
        eng_compute_close(&compute);
    }
    free(packed);
    free(y);
}

static void check_rounding(enum eng_isa isa, const struct eng_matrix *m, const float *x,
                           const float *whole)
{
    float *y = take((size_t)ROWS * m->n * sizeof(*y));

    product(isa, m, x, 0, ROWS, true, y);
    for (size_t i = 0; i < (size_t)ROWS * m->n; i++)
        EXPECT(eng_bits_of(y[i]) == eng_bits_of(eng_bf16_round(whole[i])));
    free(y);
}

/* One wrong code, in a row whose scale is the largest. */
static void plant(struct eng_matrix *m)
{
    uint32_t n = 0, k = 0;
    for (uint32_t i = 0; i < m->n * m->k; i++)
        if (fabsf(eng_matrix_value(m, i / m->k, i % m->k)) > fabsf(eng_matrix_value(m, n, k))) {
            n = i / m->k;
            k = i % m->k;
        }
    const size_t bits = m->format == ENG_FORMAT_FP4    ? 4
                        : m->format == ENG_FORMAT_FP8  ? 8
                        : m->format == ENG_FORMAT_BF16 ? 16
                                                       : 32;
    const size_t sign = ((size_t)n * m->k + k + 1) * bits - 1;
    ((uint8_t *)(uintptr_t)m->data)[sign / 8] ^= (uint8_t)(1u << sign % 8);
}

static void check_matrix(struct eng_matrix m, double bound)
{
    float *x = make_x(ROWS, m.k);
    float *whole[ENG_ISA_COUNT] = {NULL};
    const float *first_of[2] = {NULL, NULL};

    for (unsigned isa = ENG_ISA_PORTABLE; isa < ENG_ISA_COUNT; isa++) {
        if (eng_isa_missing((enum eng_isa)isa) != NULL) continue;
        whole[isa] = take((size_t)ROWS * m.n * sizeof(float));
        product((enum eng_isa)isa, &m, x, 0, ROWS, false, whole[isa]);
        EXPECT(distance(&m, x, ROWS, whole[isa]) <= bound);
        const float **family = &first_of[isa == ENG_ISA_AMX];
        if (*family == NULL) *family = whole[isa];
        EXPECT_EQ_MEM(whole[isa], *family, (size_t)ROWS * m.n * sizeof(float));
        check_bits((enum eng_isa)isa, &m, x, whole[isa]);
        check_threads((enum eng_isa)isa, &m, x, whole[isa]);
        check_rounding((enum eng_isa)isa, &m, x, whole[isa]);
    }
    plant(&m);
    EXPECT(distance(&m, x, ROWS, whole[ENG_ISA_PORTABLE]) > bound);
    for (unsigned isa = 0; isa < ENG_ISA_COUNT; isa++)
        free(whole[isa]);
    free(x);
    drop(&m);
}

static void test_formats(void)
{
    check_matrix(make(ENG_FORMAT_FP8, 100, 96, 122, 8), 1e-5);
    check_matrix(make(ENG_FORMAT_FP8, 33, 544, 120, 10), 1e-5);
    check_matrix(make(ENG_FORMAT_FP4, 70, 160, 122, 8), 1e-5);
    check_matrix(make(ENG_FORMAT_FP4, 300, 32, 122, 8), 1e-5);
    check_matrix(make(ENG_FORMAT_BF16, 129, 80, 0, 1), 1e-5);
    check_matrix(make(ENG_FORMAT_BF16, 7, 1040, 0, 1), 1e-5);
    check_matrix(make(ENG_FORMAT_F32, 24, 512, 0, 1), 2e-6);
    check_matrix(make(ENG_FORMAT_F32, 1, 48, 0, 1), 2e-6);
}

/* Scales at which some or all values are not normal bf16 numbers; sums stay finite. */
static void test_extreme_scales(void)
{
    check_matrix(make(ENG_FORMAT_FP8, 40, 96, 8, 6), 1e-3);
    check_matrix(make(ENG_FORMAT_FP4, 40, 96, 1, 30), 1e-3);
    check_matrix(make(ENG_FORMAT_FP8, 40, 96, 225, 4), 1e-3);
    check_matrix(make(ENG_FORMAT_FP4, 40, 96, 228, 8), 1e-3);
}

/* Wider than one pass and one panel: results wait between pieces. */
static void test_many_rows(void)
{
    enum { MANY = 1100 };
    struct eng_matrix m = make(ENG_FORMAT_FP4, 200, 416, 122, 6);
    float *x = make_x(MANY, m.k), *y = take((size_t)MANY * m.n * sizeof(float));
    float *one = take(m.n * sizeof(float));

    for (unsigned isa = ENG_ISA_PORTABLE; isa < ENG_ISA_COUNT; isa++) {
        if (eng_isa_missing((enum eng_isa)isa) != NULL) continue;
        product((enum eng_isa)isa, &m, x, 0, MANY, false, y);
        for (uint32_t row = 0; row < MANY; row += 13) {
            product((enum eng_isa)isa, &m, x, row, 1, false, one);
            EXPECT_EQ_MEM(y + (size_t)row * m.n, one, m.n * sizeof(float));
        }
    }
    free(x);
    free(y);
    free(one);
    drop(&m);
}

/* Packing with an index and through FP8 is packing what the kernel `quantize` makes of those rows.
 */
static void test_pack(void)
{
    enum { K = 192, COUNT = 37 };
    float *x = make_x(ROWS, K), *quantized = take(COUNT * K * sizeof(float));
    uint32_t index[COUNT];
    const size_t bytes = eng_packed_bytes(COUNT, K);
    void *got = take(bytes), *want = take(bytes);

    for (size_t i = 0; i < ROWS * K; i += 7)
        x[i] = eng_bf16_round(ldexpf(draw_float(), (int)(draw() % 60) - 40));
    for (uint32_t i = 0; i < COUNT; i++) {
        index[i] = draw() % ROWS;
        eng_elementwise_base.quantize(x + (size_t)index[i] * K, K, quantized + (size_t)i * K);
    }
    for (unsigned isa = ENG_ISA_PORTABLE; isa < ENG_ISA_COUNT; isa++) {
        const struct eng_kernel_set *set = eng_kernels_of((enum eng_isa)isa, false);
        if (set == NULL) continue;
        const struct eng_gemm_ops *ops = set->gemm;
        memset(got, 0, bytes);
        memset(want, 0, bytes);
        ops->pack(&(struct eng_pack_args){.x = x,
                                          .x_stride = K,
                                          .index = index,
                                          .rows = COUNT,
                                          .k = K,
                                          .quantize = true,
                                          .packed = got},
                  0, UINT32_MAX);
        ops->pack(
            &(struct eng_pack_args){
                .x = quantized, .x_stride = K, .rows = COUNT, .k = K, .packed = want},
            0, UINT32_MAX);
        EXPECT_EQ_MEM(got, want, bytes);
    }
    free(x);
    free(quantized);
    free(got);
    free(want);
}

static void test_rows_of_a_matrix(void)
{
    for (int format = ENG_FORMAT_FP8; format <= ENG_FORMAT_F32; format++) {
        struct eng_matrix m = make((enum eng_format)format, 96, 64, 122, 5);
        const struct eng_matrix part = eng_matrix_rows(&m, 32, 50);
        for (uint32_t n = 0; n < part.n; n++)
            for (uint32_t k = 0; k < part.k; k++)
                EXPECT(eng_bits_of(eng_matrix_value(&part, n, k)) ==
                       eng_bits_of(eng_matrix_value(&m, n + 32, k)));
        drop(&m);
    }
}

static void test_names(void)
{
    enum eng_isa isa;
    for (unsigned i = 0; i < ENG_ISA_COUNT; i++) {
        EXPECT(eng_isa_parse(eng_isa_name((enum eng_isa)i), &isa) && isa == (enum eng_isa)i);
        if (eng_isa_missing((enum eng_isa)i) == NULL) continue;
        struct eng_compute compute;
        EXPECT(eng_compute_open((enum eng_isa)i, 1, KV_THREAD_ANY, &compute, NULL) == KV_INVALID);
    }
    EXPECT(!eng_isa_parse("sse", &isa));
    EXPECT(eng_isa_missing(ENG_ISA_PORTABLE) == NULL);
    EXPECT_EQ_STR(eng_isa_family(ENG_ISA_AVX2), "fp32");
    EXPECT_EQ_STR(eng_isa_family(ENG_ISA_AMX), "amx");
    EXPECT(eng_isa_missing(eng_isa_best()) == NULL);
}

int main(void)
{
    test_names();
    test_rows_of_a_matrix();
    test_pack();
    test_formats();
    test_extreme_scales();
    test_many_rows();
    HARNESS_END();
}
