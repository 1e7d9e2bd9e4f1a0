/*
 * oneDNN 2.x through dlopen.
 *
 * The library is loaded by name and its functions by symbol, so that cachectl starts without it.
 * Its threads come from OpenMP, which reads their number when it is loaded: the environment is set
 * just before.
 */

#include "tools/cachectl/bench_onednn.h"

#include <dlfcn.h>
#include <dnnl.h>
#include <stdlib.h>
#include <string.h>

#define FUNCTIONS(F)                                                                               \
    F(dnnl_engine_create)                                                                          \
    F(dnnl_engine_destroy)                                                                         \
    F(dnnl_stream_create)                                                                          \
    F(dnnl_stream_destroy)                                                                         \
    F(dnnl_stream_wait)                                                                            \
    F(dnnl_memory_desc_init_by_tag)                                                                \
    F(dnnl_matmul_desc_init)                                                                       \
    F(dnnl_primitive_desc_create)                                                                  \
    F(dnnl_primitive_desc_destroy)                                                                 \
    F(dnnl_primitive_desc_query_md)                                                                \
    F(dnnl_memory_create)                                                                          \
    F(dnnl_memory_destroy)                                                                         \
    F(dnnl_reorder_primitive_desc_create)                                                          \
    F(dnnl_primitive_create)                                                                       \
    F(dnnl_primitive_destroy)                                                                      \
    F(dnnl_primitive_execute)

struct onednn {
    void *handle;
#define FIELD(name) __typeof__(name) *name;
    FUNCTIONS(FIELD)
#undef FIELD
    dnnl_engine_t engine;
    dnnl_stream_t stream;
};

struct onednn_gemm {
    struct onednn *library;
    dnnl_primitive_desc_t desc;
    dnnl_primitive_t primitive;
    dnnl_memory_t x, weights, y;
};

static bool load(struct onednn *library)
{
    void *symbol;
#define LOAD(name)                                                                                 \
    symbol = dlsym(library->handle, #name);                                                        \
    if (symbol == NULL) return false;                                                              \
    memcpy(&library->name, &symbol, sizeof(symbol));
    FUNCTIONS(LOAD)
#undef LOAD
    return true;
}

struct onednn *onednn_open(const char **ret_why)
{
    struct onednn *library = calloc(1, sizeof(*library));

    *ret_why = "out of memory";
    if (library == NULL) return NULL;
    (void)setenv("OMP_NUM_THREADS", "1", 1);
    *ret_why = "libdnnl.so.2 cannot be loaded (package libdnnl2)";
    library->handle = dlopen("libdnnl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (library->handle == NULL) goto fail;
    *ret_why = "libdnnl.so.2 lacks a function or refuses this machine";
    if (!load(library)) goto fail;
    if (library->dnnl_engine_create(&library->engine, dnnl_cpu, 0) != dnnl_success) goto fail;
    if (library->dnnl_stream_create(&library->stream, library->engine, dnnl_stream_default_flags) !=
        dnnl_success)
        goto fail;
    return library;

fail:
    onednn_close(library);
    return NULL;
}

void onednn_close(struct onednn *library)
{
    if (library == NULL) return;
    if (library->stream != NULL) (void)library->dnnl_stream_destroy(library->stream);
    if (library->engine != NULL) (void)library->dnnl_engine_destroy(library->engine);
    /* Not unloaded: OpenMP's threads do not survive that. */
    free(library);
}

/* The bytes of a caller as the library takes them; it only reads x and weights. */
static void *plain(const void *memory)
{
    return (void *)(uintptr_t)memory;
}

static bool reorder(struct onednn_gemm *gemm, const dnnl_memory_desc_t *from_desc,
                    const dnnl_memory_desc_t *to_desc, const uint16_t *weights)
{
    struct onednn *l = gemm->library;
    dnnl_primitive_desc_t desc = NULL;
    dnnl_primitive_t primitive = NULL;
    dnnl_memory_t from = NULL;

    bool ok = l->dnnl_memory_create(&from, from_desc, l->engine, plain(weights)) == dnnl_success &&
              l->dnnl_memory_create(&gemm->weights, to_desc, l->engine, DNNL_MEMORY_ALLOCATE) ==
                  dnnl_success &&
              l->dnnl_reorder_primitive_desc_create(&desc, from_desc, l->engine, to_desc, l->engine,
                                                    NULL) == dnnl_success &&
              l->dnnl_primitive_create(&primitive, desc) == dnnl_success;
    if (ok) {
        const dnnl_exec_arg_t args[] = {{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, gemm->weights}};
        ok = l->dnnl_primitive_execute(primitive, l->stream, 2, args) == dnnl_success &&
             l->dnnl_stream_wait(l->stream) == dnnl_success;
    }
    if (primitive != NULL) (void)l->dnnl_primitive_destroy(primitive);
    if (desc != NULL) (void)l->dnnl_primitive_desc_destroy(desc);
    if (from != NULL) (void)l->dnnl_memory_destroy(from);
    return ok;
}

static bool build(struct onednn_gemm *gemm, uint32_t n, uint32_t k, uint32_t rows,
                  const uint16_t *weights, const uint16_t *x, float *y)
{
    struct onednn *l = gemm->library;
    const dnnl_dims_t x_dims = {rows, k}, w_dims = {k, n}, y_dims = {rows, n};
    dnnl_memory_desc_t x_desc, w_any, w_plain, y_desc;
    dnnl_matmul_desc_t desc;

    if (l->dnnl_memory_desc_init_by_tag(&x_desc, 2, x_dims, dnnl_bf16, dnnl_ab) != dnnl_success ||
        l->dnnl_memory_desc_init_by_tag(&w_any, 2, w_dims, dnnl_bf16, dnnl_format_tag_any) !=
            dnnl_success ||
        l->dnnl_memory_desc_init_by_tag(&w_plain, 2, w_dims, dnnl_bf16, dnnl_ba) != dnnl_success ||
        l->dnnl_memory_desc_init_by_tag(&y_desc, 2, y_dims, dnnl_f32, dnnl_ab) != dnnl_success ||
        l->dnnl_matmul_desc_init(&desc, &x_desc, &w_any, NULL, &y_desc) != dnnl_success ||
        l->dnnl_primitive_desc_create(&gemm->desc, &desc, NULL, l->engine, NULL) != dnnl_success)
        return false;
    const dnnl_memory_desc_t *best =
        l->dnnl_primitive_desc_query_md(gemm->desc, dnnl_query_weights_md, 0);
    return best != NULL && reorder(gemm, &w_plain, best, weights) &&
           l->dnnl_memory_create(&gemm->x, &x_desc, l->engine, plain(x)) == dnnl_success &&
           l->dnnl_memory_create(&gemm->y, &y_desc, l->engine, y) == dnnl_success &&
           l->dnnl_primitive_create(&gemm->primitive, gemm->desc) == dnnl_success;
}

struct onednn_gemm *onednn_gemm_create(struct onednn *library, uint32_t n, uint32_t k,
                                       uint32_t rows, const uint16_t *weights, const uint16_t *x,
                                       float *y)
{
    struct onednn_gemm *gemm = calloc(1, sizeof(*gemm));

    if (gemm == NULL) return NULL;
    gemm->library = library;
    if (build(gemm, n, k, rows, weights, x, y)) return gemm;
    onednn_gemm_destroy(gemm);
    return NULL;
}

bool onednn_gemm_run(struct onednn_gemm *gemm)
{
    struct onednn *l = gemm->library;
    const dnnl_exec_arg_t args[] = {
        {DNNL_ARG_SRC, gemm->x}, {DNNL_ARG_WEIGHTS, gemm->weights}, {DNNL_ARG_DST, gemm->y}};

    return l->dnnl_primitive_execute(gemm->primitive, l->stream, 3, args) == dnnl_success &&
           l->dnnl_stream_wait(l->stream) == dnnl_success;
}

void onednn_gemm_destroy(struct onednn_gemm *gemm)
{
    if (gemm == NULL) return;
    struct onednn *l = gemm->library;
    if (gemm->primitive != NULL) (void)l->dnnl_primitive_destroy(gemm->primitive);
    if (gemm->x != NULL) (void)l->dnnl_memory_destroy(gemm->x);
    if (gemm->weights != NULL) (void)l->dnnl_memory_destroy(gemm->weights);
    if (gemm->y != NULL) (void)l->dnnl_memory_destroy(gemm->y);
    if (gemm->desc != NULL) (void)l->dnnl_primitive_desc_destroy(gemm->desc);
    free(gemm);
}
