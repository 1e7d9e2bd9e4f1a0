#pragma once

/* Private to compute.c: products of inputs that are any fp32 numbers, on the tile unit. */

#include "engine/backend/kernels/gemm.h"

/* Packed inputs take three times the room of eng_gemm_amx. */
#define AMX_SPLIT_PARTS 3u

extern const struct eng_gemm_ops eng_gemm_amx_split;
