/*
 * GEMM on the tile unit.
 *
 * Weights are the first operand (16 outputs by 32 columns, as they lie in memory), inputs the
 * second (pairs of columns of 16 rows of x), so that a decoded weight needs no shuffling, and one
 * that is used for a single row costs no more than its decoding.  Two by two tiles of results stay
 * in registers.
 *
 * Work is a sequence of pieces, each 32 outputs by CHUNK steps of columns.  While one piece is
 * multiplied, the next is decoded in small jobs between the steps, so that the tile unit and the
 * vector units work at the same time.  With at most 32 rows the results of a unit stay in registers
 * through all its pieces; otherwise they wait in scratch, and a panel of 128 outputs goes through
 * the columns together, so that packed inputs are read from the second-level cache.
 *
 * The sum of one output runs over steps and parts in ascending order whatever the shape of the
 * pieces: what is stored and loaded between them is the fp32 sum itself.
 */

#include "engine/backend/kernels/gemm_amx.h"

#include "engine/backend/kernels/amx.h"
#include "engine/model/quant.h"
#include "kvstore/base/bytes.h"

#include <assert.h>

/* Steps of a piece; its decoded weights are 2 x 8 KiB. */
#define CHUNK 8u
#define CHUNK_F32 2u
_Static_assert(3 * CHUNK_F32 <= CHUNK, "three parts fit");

/* Units that go through the columns together, and blocks of inputs that do. */
#define PANEL 4u
#define PASS_BLOCKS 32u
/* Blocks of 8 rows by two steps that make up a piece. */
#define JOBS_PER_PAIR (ENG_GEMM_UNIT / AMX_JOB_ROWS)

/* The four tiles of results of 32 outputs and 32 rows, in the order of the registers:
 * outputs 0-15 rows 0-15, outputs 0-15 rows 16-31, outputs 16-31 rows 0-15, the rest. */
struct quad {
    uint8_t tile[4][AMX_TILE_BYTES];
};

/* [side][step and part] */
struct weights {
    uint8_t tile[2][CHUNK * AMX_TILE_BYTES];
};

struct scratch {
    struct weights weights[2];
    struct quad wait[PANEL * PASS_BLOCKS / 2];
    /* Results of a panel for 32 rows, on their way to y: rows of y are pages apart. */
    float stage[32][PANEL * ENG_GEMM_UNIT];
};
_Static_assert(sizeof(struct scratch) <= ENG_KERNEL_SCRATCH, "scratch");

struct piece {
    uint32_t unit, step, steps;
};

/* One pass over the matrix for the blocks [first, last) of inputs. */
struct pass {
    const struct eng_gemm_args *args;
    struct scratch *scratch;
    uint32_t total, chunk, parts; /* Steps. */
    uint32_t units_end;
    uint32_t panel_units;
    uint32_t panel; /* First unit of the panel of `next`. */
    uint32_t first, last;
    /* What is being decoded, and how far. */
    struct piece next;
    struct weights *to;
    struct amx_job job;
    uint32_t wild; /* Bit i: unit panel + i is decoded the slow way. */
    uint32_t jobs, jobs_done;
    uint32_t slots, credit; /* One job is due each jobs / slots steps. */
};

static uint32_t panel_end(const struct pass *pass, uint32_t panel)
{
    return KV_MIN(pass->units_end, panel + pass->panel_units);
}

/* Prepares decoding of pass->next; with no piece left there are no jobs. */
static void feed_begin(struct pass *pass, struct weights *to, uint32_t slots)
{
    const struct eng_matrix *m = pass->args->matrix;
    const struct piece *piece = &pass->next;
    const size_t bits = m->format == ENG_FORMAT_FP4    ? 4
                        : m->format == ENG_FORMAT_FP8  ? 8
                        : m->format == ENG_FORMAT_BF16 ? 16
                                                       : 32;
    const size_t row_bytes = m->k * bits / 8;
    const size_t chunk_bytes = AMX_STEP * pass->chunk * bits / 8;

    pass->to = to;
    pass->jobs_done = 0;
    pass->credit = 0;
    pass->slots = slots;
    pass->jobs = 0;
    if (piece->unit >= pass->units_end) return;
    pass->jobs = (piece->steps + 1) / 2 * JOBS_PER_PAIR;
    pass->job.matrix = m;
    /* The same rows' next piece, or the first of the next panel. */
    pass->job.ahead = piece->step + piece->steps < pass->total
                          ? chunk_bytes
                          : row_bytes * ENG_GEMM_UNIT * pass->panel_units -
                                (size_t)piece->step * AMX_STEP * bits / 8;
    const uint32_t bit = 1u << (piece->unit - pass->panel);
    if (piece->step == 0) {
        pass->wild &= ~bit;
        if (amx_is_wild(m, piece->unit * ENG_GEMM_UNIT)) pass->wild |= bit;
    }
    pass->job.is_wild = (pass->wild & bit) != 0;
}

static void feed_one(struct pass *pass)
{
    const uint32_t pair = pass->jobs_done / JOBS_PER_PAIR;
    const uint32_t row = pass->jobs_done % JOBS_PER_PAIR * AMX_JOB_ROWS;
    const struct piece *piece = &pass->next;

    pass->jobs_done++;
    pass->job.n = piece->unit * ENG_GEMM_UNIT + row;
    pass->job.step = piece->step + 2 * pair;
    pass->job.steps = KV_MIN(2u, piece->steps - 2 * pair);
    amx_decode(&pass->job, pass->to->tile[row / 16] +
                               (size_t)(2 * pair) * pass->parts * AMX_TILE_BYTES + 64 * (row % 16));
}

static inline void feed_due(struct pass *pass)
{
    pass->credit += pass->jobs;
    while (pass->credit >= pass->slots) {
        pass->credit -= pass->slots;
        feed_one(pass);
    }
}

static void piece_advance(struct pass *pass)
{
    struct piece *piece = &pass->next;

    piece->unit++;
    if (piece->unit == panel_end(pass, pass->panel)) {
        piece->step += piece->steps;
        if (piece->step == pass->total) {
            pass->panel = piece->unit;
            piece->step = 0;
        }
        piece->unit = pass->panel;
    }
    piece->steps = KV_MIN(pass->chunk, pass->total - piece->step);
}

static const uint8_t *block_at(const struct pass *pass, uint32_t block, uint32_t step)
{
    return (const uint8_t *)pass->args->packed +
           ((size_t)block * pass->total + step) * AMX_TILE_BYTES;
}

AMX_TARGET static inline void load_quad(const struct quad *quad)
{
    AMX_LOAD(0, quad->tile[0], 64);
    AMX_LOAD(1, quad->tile[1], 64);
    AMX_LOAD(2, quad->tile[2], 64);
    AMX_LOAD(3, quad->tile[3], 64);
}

AMX_TARGET static inline void store_quad(struct quad *quad)
{
    AMX_STORE(0, quad->tile[0], 64);
    AMX_STORE(1, quad->tile[1], 64);
    AMX_STORE(2, quad->tile[2], 64);
    AMX_STORE(3, quad->tile[3], 64);
}

AMX_TARGET static inline void zero_quad(void)
{
    AMX_ZERO(0);
    AMX_ZERO(1);
    AMX_ZERO(2);
    AMX_ZERO(3);
}

/* The steps of a piece for two blocks of inputs, or for one. */
AMX_TARGET static void dot_two(struct pass *pass, const struct weights *weights, uint32_t steps,
                               const uint8_t *left, const uint8_t *right)
{
    const uint8_t *w0 = weights->tile[0], *w1 = weights->tile[1];

    for (uint32_t s = 0; s < steps; s++) {
        AMX_LOAD(6, left + (size_t)s * AMX_TILE_BYTES, 64);
        AMX_LOAD(7, right + (size_t)s * AMX_TILE_BYTES, 64);
        for (uint32_t p = 0; p < pass->parts; p++) {
            AMX_LOAD(4, w0, 64);
            AMX_LOAD(5, w1, 64);
            AMX_DOT(0, 4, 6);
            AMX_DOT(1, 4, 7);
            AMX_DOT(2, 5, 6);
            AMX_DOT(3, 5, 7);
            w0 += AMX_TILE_BYTES;
            w1 += AMX_TILE_BYTES;
        }
        feed_due(pass);
    }
}

AMX_TARGET static void dot_one(struct pass *pass, const struct weights *weights, uint32_t steps,
                               const uint8_t *left)
{
    const uint8_t *w0 = weights->tile[0], *w1 = weights->tile[1];

    for (uint32_t s = 0; s < steps; s++) {
        AMX_LOAD(6, left + (size_t)s * AMX_TILE_BYTES, 64);
        for (uint32_t p = 0; p < pass->parts; p++) {
            AMX_LOAD(4, w0, 64);
            AMX_LOAD(5, w1, 64);
            AMX_DOT(0, 4, 6);
            AMX_DOT(2, 5, 6);
            w0 += AMX_TILE_BYTES;
            w1 += AMX_TILE_BYTES;
        }
        feed_due(pass);
    }
}

/* Results of one unit and 32 rows to the stage, whose columns begin at unit `panel`. */
AMX_TARGET static void stage_quad(const struct pass *pass, const struct quad *quad, uint32_t column,
                                  uint32_t rows)
{
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t row = 16 * (i % 2);
        float(*to)[PANEL * ENG_GEMM_UNIT] = pass->scratch->stage + row;
        __m512i out[16];
        if (row >= rows) continue;
        amx_transpose(quad->tile[i], 64, out);
        if (pass->args->round_bf16)
            _Pragma("GCC unroll 16") for (int r = 0; r < 16; r++) out[r] = _mm512_and_si512(
                amx_round(_mm512_castsi512_ps(out[r])), _mm512_set1_epi32((int)0xffff0000u));
        _Pragma("GCC unroll 16") for (int r = 0; r < 16; r++)
            _mm512_store_si512(&to[r][column + 16 * (i / 2)], out[r]);
    }
}

/* The stage to y: `columns` outputs from n on for `rows` rows. */
AMX_TARGET static void flush(const struct pass *pass, uint32_t n, uint32_t columns, uint32_t row,
                             uint32_t rows)
{
    const struct eng_gemm_args *a = pass->args;

    for (uint32_t r = 0; r < rows; r++) {
        float *y = a->y + (row + r) * a->y_stride + n;
        const float *from = pass->scratch->stage[r];
        for (uint32_t i = 0; i < columns; i += 16) {
            const __mmask16 here =
                columns - i >= 16 ? 0xffff : (__mmask16)((1u << (columns - i)) - 1);
            _mm512_mask_storeu_ps(y + i, here, _mm512_load_ps(from + i));
        }
    }
}

/* Units [unit, end) are complete; their results wait from `wait` on, `stride` quads a unit. */
static void finish(const struct pass *pass, uint32_t unit, uint32_t end, const struct quad *wait,
                   size_t stride)
{
    const uint32_t n = unit * ENG_GEMM_UNIT;
    const uint32_t columns = KV_MIN(pass->args->matrix->n, end * ENG_GEMM_UNIT) - n;

    for (uint32_t block = pass->first; block < pass->last; block += 2) {
        const uint32_t row = block * ENG_PACK_ROWS;
        const uint32_t rows = KV_MIN(32u, pass->args->rows - row);
        for (uint32_t u = unit; u < end; u++)
            stage_quad(pass, wait + (u - unit) * stride + (block - pass->first) / 2,
                       (u - unit) * ENG_GEMM_UNIT, rows);
        flush(pass, n, columns, row, rows);
    }
}

/* One piece for every block of the pass, while the next piece is decoded. */
AMX_TARGET static void multiply(struct pass *pass, const struct piece *piece,
                                const struct weights *weights, struct quad *wait)
{
    const bool stays = pass->panel_units == 1; /* In registers, from piece to piece. */

    for (uint32_t block = pass->first; block < pass->last; block += 2, wait++) {
        if (piece->step == 0)
            zero_quad();
        else if (!stays)
            load_quad(wait);
        if (block + 1 < pass->last)
            dot_two(pass, weights, piece->steps, block_at(pass, block, piece->step),
                    block_at(pass, block + 1, piece->step));
        else
            dot_one(pass, weights, piece->steps, block_at(pass, block, piece->step));
        if (!stays || piece->step + piece->steps == pass->total) store_quad(wait);
    }
    while (pass->jobs_done < pass->jobs)
        feed_one(pass);
}

static void run(struct pass *pass)
{
    struct scratch *scratch = pass->scratch;
    const uint32_t pairs = (pass->last - pass->first + 1) / 2;
    const size_t stride = PASS_BLOCKS / 2;
    uint32_t turn = 0, done = pass->next.unit; /* First unit whose results are not in y. */

    feed_begin(pass, &scratch->weights[0], 1);
    while (pass->jobs_done < pass->jobs)
        feed_one(pass);
    while (pass->next.unit < pass->units_end) {
        const struct piece piece = pass->next;
        const struct weights *weights = &scratch->weights[turn];
        turn ^= 1;
        piece_advance(pass);
        feed_begin(pass, &scratch->weights[turn], pairs * piece.steps);
        multiply(pass, &piece, weights, scratch->wait + (piece.unit - done) * stride);
        if (piece.step + piece.steps < pass->total) continue;
        const uint32_t end = piece.unit + 1;
        if (end - done == PANEL || end == pass->units_end) {
            finish(pass, done, end, scratch->wait, stride);
            done = end;
        }
    }
}

static void gemm(const struct eng_gemm_args *a, uint32_t first, uint32_t last, void *scratch)
{
    const struct eng_matrix *m = a->matrix;
    const uint32_t blocks = eng_pack_blocks(a->rows);

    assert((uintptr_t)a->packed % 64 == 0 && (uintptr_t)scratch % 64 == 0);
    assert(m->k % 16 == 0);
    last = KV_MIN(last, eng_gemm_units(m->n));
    if (first >= last) return;
    amx_begin();
    for (uint32_t block = 0; block < blocks; block += PASS_BLOCKS) {
        struct pass pass = {
            .args = a,
            .scratch = scratch,
            .total = amx_steps(m->k),
            .chunk = m->format == ENG_FORMAT_F32 ? CHUNK_F32 : CHUNK,
            .parts = amx_parts(m->format),
            .units_end = last,
            .panel_units = blocks <= 2 ? 1 : PANEL,
            .panel = first,
            .first = block,
            .last = KV_MIN(blocks, block + PASS_BLOCKS),
        };
        pass.next = (struct piece){first, 0, KV_MIN(pass.chunk, pass.total)};
        run(&pass);
    }
    amx_end();
}

/* e4m3 of v, times scale; v is within +-448 or rounds to it. */
AMX_TARGET static inline __m512i quantize_lanes(__m512 v, __m512 scale)
{
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i sign = _mm512_set1_epi32((int)0x80000000u);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(1));
    const __m512i big =
        _mm512_and_si512(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7ffff))),
                         _mm512_set1_epi32((int)0xfff00000u));
    /* Below 2^-6 the step is 2^-9: adding 1.5 x 2^14 rounds to it. */
    const __m512 shift = _mm512_set1_ps(0x1.8p14f);
    const __m512i small = _mm512_castps_si512(_mm512_sub_ps(_mm512_add_ps(v, shift), shift));
    const __m512i signed_small =
        _mm512_or_si512(_mm512_andnot_si512(sign, small), _mm512_and_si512(bits, sign));
    const __mmask16 is_small =
        _mm512_cmplt_epu32_mask(_mm512_andnot_si512(sign, bits), _mm512_set1_epi32(121 << 23));
    const __m512i code = _mm512_mask_blend_epi32(is_small, big, signed_small);
    return _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(code), scale));
}

/* FP8 and back for 32 values, bit for bit what the kernel `quantize` does. */
AMX_TARGET static inline void quantize_group(__m512i *low, __m512i *high)
{
    const __m512 a = _mm512_castsi512_ps(*low), b = _mm512_castsi512_ps(*high);
    const __m512 size = _mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b));
    const float most = _mm512_reduce_max_ps(size);
    const uint8_t code = eng_ue8m0_ceil((most > 1e-4f ? most : 1e-4f) / 448.0f);
    const __m512 scale = _mm512_set1_ps(eng_ue8m0_decode(code));
    const __m512 inverse = _mm512_set1_ps(eng_float_of((uint32_t)(254 - code) << 23));
    *low = quantize_lanes(_mm512_mul_ps(a, inverse), scale);
    *high = quantize_lanes(_mm512_mul_ps(b, inverse), scale);
}

/* 16 rows by 32 columns to one tile: pairs of columns, one row of x per 32-bit lane. */
AMX_TARGET static void pack_tile(const float *const rows[16], uint32_t count, uint32_t column,
                                 uint32_t columns, bool quantize, uint8_t *tile)
{
    uint32_t pairs[16][16] __attribute__((aligned(64)));
    __m512i out[16];

    for (uint32_t r = 0; r < 16; r++) {
        __m512i low = _mm512_setzero_si512(), high = low;
        if (r < count) {
            low = _mm512_loadu_si512(rows[r] + column);
            if (columns > 16) high = _mm512_loadu_si512(rows[r] + column + 16);
            if (quantize) quantize_group(&low, &high);
        }
        _mm512_store_si512(pairs[r], amx_upper_halves(low, high));
    }
    amx_transpose(pairs, 64, out);
    for (uint32_t i = 0; i < 16; i++)
        _mm512_store_si512(tile + 64 * i, out[i]);
}

AMX_TARGET static void pack(const struct eng_pack_args *a, uint32_t first, uint32_t last)
{
    const uint32_t steps = amx_steps(a->k);

    for (uint32_t block = first; block < last && block < eng_pack_blocks(a->rows); block++) {
        uint8_t *tiles = (uint8_t *)a->packed + (size_t)block * steps * AMX_TILE_BYTES;
        const uint32_t count = KV_MIN(16u, a->rows - 16 * block);
        const float *rows[16];
        for (uint32_t r = 0; r < count; r++) {
            const uint32_t row = 16 * block + r;
            rows[r] = a->x + (a->index == NULL ? row : a->index[row]) * a->x_stride;
        }
        for (uint32_t s = 0; s < steps; s++)
            pack_tile(rows, count, 32 * s, KV_MIN(32u, a->k - 32 * s), a->quantize,
                      tiles + (size_t)s * AMX_TILE_BYTES);
    }
}

const struct eng_gemm_ops eng_gemm_amx = {.pack = pack, .gemm = gemm};
