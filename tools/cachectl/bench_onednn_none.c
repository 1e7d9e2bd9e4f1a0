/*
 * The anchor of `bench gemm` where it was built without oneDNN's header.
 */

#include "tools/cachectl/bench_onednn.h"

struct onednn *onednn_open(const char **ret_why)
{
    *ret_why = "this program was built without oneDNN (package libdnnl-dev)";
    return NULL;
}

void onednn_close(struct onednn *library)
{
    (void)library;
}

struct onednn_gemm *onednn_gemm_create(struct onednn *library, uint32_t n, uint32_t k,
                                       uint32_t rows, const uint16_t *weights, const uint16_t *x,
                                       float *y)
{
    (void)library;
    (void)n;
    (void)k;
    (void)rows;
    (void)weights;
    (void)x;
    (void)y;
    return NULL;
}

bool onednn_gemm_run(struct onednn_gemm *gemm)
{
    (void)gemm;
    return false;
}

void onednn_gemm_destroy(struct onednn_gemm *gemm)
{
    (void)gemm;
}
