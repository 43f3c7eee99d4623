/* The two functions of examples/c/decode.c in plain C, over the host's memory: what the kernels do, as the header says it. */
#include "flashtile_attention.h"

#include <math.h>
#include <string.h>

enum { D = HEAD_DIM, GROUP = 2, ROWS = 16 };

static float to_float(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint16_t to_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

const char *flashtile_last_error(void) { return ""; }
const char *flashtile_status_text(flashtile_status status) { return status ? "wrong" : "ok"; }

flashtile_status flashtile_decode_forward_scratch(int64_t batch, int64_t seqlen_q, int64_t heads_kv, int64_t pages,
                                                  int64_t columns, int64_t page_stride, int64_t row_stride,
                                                  int64_t head_stride, size_t *bytes) {
    (void)batch, (void)seqlen_q, (void)heads_kv, (void)pages, (void)columns, (void)page_stride, (void)row_stride;
    (void)head_stride;
    *bytes = 1024;
    return FLASHTILE_OK;
}

flashtile_status flashtile_decode_append(const flashtile_decode_append_tensors *t, int64_t batch, int64_t seqlen_q,
                                         int64_t heads_kv, int64_t pages, int64_t columns, int64_t page_stride,
                                         int64_t row_stride, int64_t head_stride, void *scratch, size_t scratch_bytes,
                                         void *stream) {
    int64_t i, j, h;
    (void)scratch, (void)scratch_bytes, (void)stream;
    for (i = 0; i < batch; i++)
        for (j = 0; j < seqlen_q; j++)
            for (h = 0; h < heads_kv; h++) {
                const int64_t row = ((const int32_t *)t->seqused_k)[i] - seqlen_q + j;
                const int64_t page = ((const int32_t *)t->page_table)[i * columns + row / ROWS];
                const int64_t to = page * page_stride + row % ROWS * row_stride + h * head_stride;
                const int64_t from = ((i * seqlen_q + j) * heads_kv + h) * D;
                if (row < 0 || row >= columns * ROWS || page < 0 || page >= pages) return FLASHTILE_INVALID_ARGUMENT;
                memcpy((uint16_t *)t->k_cache + to, (const uint16_t *)t->k + from, 2 * D);
                memcpy((uint16_t *)t->v_cache + to, (const uint16_t *)t->v + from, 2 * D);
            }
    return FLASHTILE_OK;
}

flashtile_status flashtile_decode_forward(const flashtile_decode_forward_tensors *t, int64_t batch, int64_t seqlen_q,
                                          int64_t heads_kv, int64_t pages, int64_t columns, int64_t page_stride,
                                          int64_t row_stride, int64_t head_stride, void *scratch, size_t scratch_bytes,
                                          void *stream) {
    int64_t i, h, row, d;
    (void)stream, (void)pages;
    if (seqlen_q != 1 || !scratch || scratch_bytes != 1024) return FLASHTILE_INVALID_ARGUMENT;
    for (i = 0; i < batch; i++)
        for (h = 0; h < heads_kv * GROUP; h++) {
            const uint16_t *q = (const uint16_t *)t->q + (i * heads_kv * GROUP + h) * D;
            double sum = 0.0, acc[D] = {0.0};
            for (row = 0; row < ((const int32_t *)t->seqused_k)[i]; row++) {
                const int64_t page = ((const int32_t *)t->page_table)[i * columns + row / ROWS];
                const int64_t at = page * page_stride + row % ROWS * row_stride + h / GROUP * head_stride;
                double score = 0.0;
                for (d = 0; d < D; d++) score += to_float(q[d]) * to_float(((const uint16_t *)t->k)[at + d]);
                score = exp(score / sqrt((double)D));
                sum += score;
                for (d = 0; d < D; d++) acc[d] += score * to_float(((const uint16_t *)t->v)[at + d]);
            }
            for (d = 0; d < D; d++) ((uint16_t *)t->out)[(i * heads_kv * GROUP + h) * D + d] = to_half((float)(acc[d] / sum));
            ((float *)t->lse)[i * heads_kv * GROUP + h] = (float)log(sum);
        }
    return FLASHTILE_OK;
}
