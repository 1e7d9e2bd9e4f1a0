#pragma once

/* oneDNN's bf16 matrix product, the anchor of `bench gemm`: loaded when asked for, so that no other
 * command carries the library.  One thread. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct onednn;
struct onednn_gemm;

/* NULL: it is not here, and *ret_why says what is missing. */
struct onednn *onednn_open(const char **ret_why);
void onednn_close(struct onednn *library);

/* y = x W^T for bf16 weights [n][k] and inputs [rows][k], borrowed, to fp32 [rows][n].  Weights are
 * put in the order the library likes best, here and not in run.  NULL: it refused. */
struct onednn_gemm *onednn_gemm_create(struct onednn *library, uint32_t n, uint32_t k,
                                       uint32_t rows, const uint16_t *weights, const uint16_t *x,
                                       float *y);
bool onednn_gemm_run(struct onednn_gemm *gemm);
void onednn_gemm_destroy(struct onednn_gemm *gemm);
