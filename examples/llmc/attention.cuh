/* The attention of llm.c (https://github.com/karpathy/llm.c) by exported flashtile kernels: in the place of llmc/attention.cuh, or
   of llmc/cudnn_att.cpp and cuDNN. It has cudnn_att's functions: attention on the packed (B, T, 3, NH, HS) tensor that the
   matrix product before it leaves, without a permutation and without the (B, NH, T, T) matrix.

       flashtile export --layout llmc -o llmc
       cc -O2 -c llmc/flashtile_attention.c -o flashtile_attention.o
       nvcc ... train_gpt2.cu flashtile_attention.o -ldl

   In train_gpt2.cu include this file and take the code of ENABLE_CUDNN: acts.att is then the statistics, whose size is
   attention_stats_bytes(B, T, NH, C), and create_cudnn / destroy_cudnn become create_attention / destroy_attention. */
#ifndef LLMC_ATTENTION_CUH
#define LLMC_ATTENTION_CUH

#include "flashtile_attention.h"

#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>

#if defined(ENABLE_FP32)
static const flashtile_dtype attention_dtype = FLASHTILE_FP32;
#elif defined(ENABLE_FP16)
static const flashtile_dtype attention_dtype = FLASHTILE_FP16;
#else
static const flashtile_dtype attention_dtype = FLASHTILE_BF16;
#endif

static void *attention_scratch = NULL;
static size_t attention_scratch_bytes = 0;

static inline void attention_check(flashtile_status status) {
    if (status == FLASHTILE_OK) return;
    fprintf(stderr, "[flashtile] %s: %s\n", flashtile_status_text(status), flashtile_last_error());
    exit(EXIT_FAILURE);
}

/* Bytes of the tensor that attention_forward leaves for attention_backward. */
static inline size_t attention_stats_bytes(int B, int T, int NH, int C) {
    size_t stats_bytes, scratch_bytes;
    attention_check(flashtile_attention_bytes(attention_dtype, B, T, NH, C, &stats_bytes, &scratch_bytes));
    return stats_bytes;
}

/* Load the kernels and allocate what the backward needs: before the first step, and before anything is captured. */
static inline void create_attention(int B, int T, int NH, int C) {
    size_t stats_bytes;
    attention_check(flashtile_prepare());
    attention_check(flashtile_attention_bytes(attention_dtype, B, T, NH, C, &stats_bytes, &attention_scratch_bytes));
    if (cudaMalloc(&attention_scratch, attention_scratch_bytes) != cudaSuccess) {
        fprintf(stderr, "[flashtile] %zu bytes of scratch cannot be allocated\n", attention_scratch_bytes);
        exit(EXIT_FAILURE);
    }
}

static inline void destroy_attention(void) {
    cudaFree(attention_scratch);
    attention_scratch = NULL;
    attention_scratch_bytes = 0;
}

/* out (B, T, C), stats as large as attention_stats_bytes says, inp (B, T, 3, NH, C / NH). */
static inline void attention_forward(void *out, void *stats, const void *inp, int B, int T, int NH, int C, cudaStream_t stream) {
    attention_check(flashtile_attention_forward(attention_dtype, out, stats, inp, B, T, NH, C, stream));
}

/* dinp (B, T, 3, NH, C / NH), dout and out (B, T, C). */
static inline void attention_backward(void *dinp, const void *dout, const void *inp, const void *out, const void *stats, int B, int T,
                                      int NH, int C, cudaStream_t stream) {
    attention_check(flashtile_attention_backward(attention_dtype, dinp, dout, inp, out, stats, attention_scratch,
                                                 attention_scratch_bytes, B, T, NH, C, stream));
}

#endif
