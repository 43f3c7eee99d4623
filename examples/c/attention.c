/* Attention in a C program: memory and a stream, a forward, its backward, and a comparison with plain C.

   CMakeLists.txt says how it is built. Exit status 0: everything is right; 1: a number is wrong; 2: a call failed. */
#include "flashtile_attention.h"

#include "device.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef HEAD_DIM
#define HEAD_DIM 64 /* as it was exported */
#endif
enum { BATCH = 2, QUERIES = 100, KEYS = 130, HEADS_KV = 3, GROUP = 2, HEADS = GROUP * HEADS_KV };
enum { ROWS = BATCH * QUERIES * HEADS, Q = ROWS * HEAD_DIM, K = BATCH * KEYS * HEADS_KV * HEAD_DIM };

/* -- bfloat16 -------------------------------------------------------------------------------------------------------- */

static float to_float(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A multiple of 1/32 between -2 and 2, which bfloat16 holds exactly. */
static uint16_t some_number(void) {
    static uint32_t state = 12345;
    float value;
    uint32_t bits;
    state = state * 1664525u + 1013904223u;
    value = (float)((int)(state >> 25) - 64) / 32.0f;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

/* -- the same in plain C --------------------------------------------------------------------------------------------- */

/* Element of a (batch, seqlen, heads, head_dim) tensor. */
static size_t at(int b, int i, int h, int length, int heads) { return (size_t)((b * length + i) * heads + h) * HEAD_DIM; }

/* out, lse, and dq, dk, dv, which begin as zeros. Query i stands at position i + KEYS - QUERIES, and sees the keys up to there. */
static void plain(const uint16_t *q, const uint16_t *k, const uint16_t *v, const uint16_t *dout, double *out, double *lse,
                  double *dq, double *dk, double *dv) {
    const double scale = 1.0 / sqrt((double)HEAD_DIM);
    double p[KEYS];
    int b, h, i, j, d;
    for (b = 0; b < BATCH; b++)
        for (h = 0; h < HEADS; h++)
            for (i = 0; i < QUERIES; i++) {
                const size_t row = at(b, i, h, QUERIES, HEADS);
                const int seen = i + KEYS - QUERIES + 1;
                double sum = 0.0, delta = 0.0;
                for (j = 0; j < seen; j++) {
                    const size_t key = at(b, j, h / GROUP, KEYS, HEADS_KV);
                    p[j] = 0.0;
                    for (d = 0; d < HEAD_DIM; d++) p[j] += to_float(q[row + d]) * to_float(k[key + d]) * scale;
                    sum += exp(p[j]); /* the numbers are small enough */
                }
                lse[(b * HEADS + h) * QUERIES + i] = log(sum);
                for (d = 0; d < HEAD_DIM; d++) out[row + d] = 0.0;
                for (j = 0; j < seen; j++) {
                    p[j] = exp(p[j]) / sum;
                    for (d = 0; d < HEAD_DIM; d++) out[row + d] += p[j] * to_float(v[at(b, j, h / GROUP, KEYS, HEADS_KV) + d]);
                }
                for (d = 0; d < HEAD_DIM; d++) delta += out[row + d] * to_float(dout[row + d]);
                for (j = 0; j < seen; j++) {
                    const size_t key = at(b, j, h / GROUP, KEYS, HEADS_KV);
                    double dp = 0.0, ds;
                    for (d = 0; d < HEAD_DIM; d++) dp += to_float(dout[row + d]) * to_float(v[key + d]);
                    ds = p[j] * (dp - delta) * scale;
                    for (d = 0; d < HEAD_DIM; d++) {
                        dq[row + d] += ds * to_float(k[key + d]);
                        dk[key + d] += ds * to_float(q[row + d]);
                        dv[key + d] += p[j] * to_float(dout[row + d]);
                    }
                }
            }
}

/* ||found - exact|| / ||exact||, printed; whether it is too large. */
static int compare(const char *name, const void *found, int is_float, const double *exact, size_t count) {
    double gap = 0.0, norm = 0.0;
    size_t i;
    int wrong;
    for (i = 0; i < count; i++) {
        const double value = is_float ? ((const float *)found)[i] : to_float(((const uint16_t *)found)[i]);
        gap += (value - exact[i]) * (value - exact[i]);
        norm += exact[i] * exact[i];
    }
    wrong = !(sqrt(gap / norm) < (is_float ? 1e-5 : 1e-2)); /* of NaN, too */
    printf("%-4s relative error %.1e%s\n", name, sqrt(gap / norm), wrong ? "  WRONG" : "");
    return wrong;
}

/* -- the program ----------------------------------------------------------------------------------------------------- */

static void must(flashtile_status status) {
    if (status != FLASHTILE_OK) {
        fprintf(stderr, "%s: %s\n", flashtile_status_text(status), flashtile_last_error());
        exit(2);
    }
}

int main(void) {
    enum { IN_Q, IN_K, IN_V, DOUT, OUT, LSE, DQ, DK, DV, TENSORS };
    static const char *const names[] = {"q", "k", "v", "dout", "out", "lse", "dq", "dk", "dv"};
    const size_t counts[] = {Q, K, K, Q, Q, ROWS, Q, K, K};
    void *host[TENSORS], *device[TENSORS], *scratch;
    double *exact[TENSORS];
    size_t scratch_bytes, n;
    int t, wrong = 0;
    stream s;

    start_device();
    s = new_stream();
    for (t = 0; t < TENSORS; t++) { /* host[t] and device[t]: bfloat16, but lse, which is float */
        const size_t bytes = counts[t] * (t == LSE ? sizeof(float) : sizeof(uint16_t));
        host[t] = calloc(1, bytes);
        exact[t] = (double *)calloc(counts[t], sizeof(double));
        if (!host[t] || !exact[t]) return 2;
        device[t] = new_memory(bytes);
        for (n = 0; t <= DOUT && n < counts[t]; n++) ((uint16_t *)host[t])[n] = some_number();
        upload(device[t], host[t], bytes, s);
    }

    { /* the forward: it needs no scratch here, else it is asked for as below */
        const flashtile_example_forward_tensors tensors = {device[IN_Q], device[IN_K], device[IN_V], device[OUT], device[LSE]};
        must(flashtile_example_forward(&tensors, BATCH, QUERIES, KEYS, HEADS_KV, NULL, 0, s));
    }
    { /* the backward: scratch by size, and free again once the stream is done */
        const flashtile_example_backward_tensors tensors = {device[IN_Q], device[IN_K], device[IN_V], device[OUT], device[DOUT],
                                                            device[LSE],  device[DQ],   device[DK],   device[DV]};
        must(flashtile_example_backward_scratch(BATCH, QUERIES, KEYS, HEADS_KV, &scratch_bytes));
        scratch = new_memory(scratch_bytes);
        must(flashtile_example_backward(&tensors, BATCH, QUERIES, KEYS, HEADS_KV, scratch, scratch_bytes, s));
    }
    for (t = OUT; t < TENSORS; t++) download(host[t], device[t], counts[t] * (t == LSE ? sizeof(float) : sizeof(uint16_t)), s);
    wait_for(s);

    plain((uint16_t *)host[IN_Q], (uint16_t *)host[IN_K], (uint16_t *)host[IN_V], (uint16_t *)host[DOUT], exact[OUT], exact[LSE],
          exact[DQ], exact[DK], exact[DV]);
    for (t = OUT; t < TENSORS; t++) wrong += compare(names[t], host[t], t == LSE, exact[t], counts[t]);
    for (t = 0; t < TENSORS; t++) {
        free_memory(device[t]);
        free(host[t]);
        free(exact[t]);
    }
    free_memory(scratch);
    free_stream(s);
    puts(wrong ? "WRONG" : "all right");
    return wrong != 0;
}
