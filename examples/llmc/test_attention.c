/* Checks and times llm.c's attention functions of an exported flashtile_attention.c, against a CPU reference in double.

       flashtile export --layout llmc -o .
       cc -O3 test_attention.c flashtile_attention.c -o test_attention -ldl -lpthread -lm
       ./test_attention                            a list of shapes, every dtype that was exported
       ./test_attention bf16 8 1024 12 768         dtype B T NH C

   -DTF32 if fp32 was exported with the precision tf32.
   It needs nothing but the driver, from which it takes a context, memory and events. Of large problems the first and the last
   head of the first and the last batch entry are checked. Exit status 0: everything is right. */
#include "flashtile_attention.h"

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef TF32 /* relative errors of fp32 */
#define MOST_OUT 3e-3
#define MOST_GRAD 5e-3
#else
#define MOST_OUT 1e-5
#define MOST_GRAD 2e-5
#endif

/* -- the driver ------------------------------------------------------------------------------------------------------ */

typedef uint64_t address;

static int (*init)(unsigned), (*get_device)(int *, int), (*retain_context)(void **, int), (*set_context)(void *);
static int (*allocate)(address *, size_t), (*release)(address), (*upload)(address, const void *, size_t);
static int (*download)(void *, address, size_t), (*fill)(address, unsigned char, size_t), (*synchronise)(void);
static int (*create_event)(void **, unsigned), (*record_event)(void *, void *), (*elapsed)(float *, void *, void *);

static void must(int error, const char *what) {
    if (error != 0) {
        fprintf(stderr, "%s failed with CUDA error %d\n", what, error);
        exit(2);
    }
}

static void find(void *library, const char *name, void *place) {
    void *symbol = dlsym(library, name);
    must(symbol == NULL, name);
    memcpy(place, &symbol, sizeof symbol);
}

static void start_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *context;
    int device;
    must(library == NULL, "loading libcuda.so.1");
    find(library, "cuInit", &init);
    find(library, "cuDeviceGet", &get_device);
    find(library, "cuDevicePrimaryCtxRetain", &retain_context);
    find(library, "cuCtxSetCurrent", &set_context);
    find(library, "cuMemAlloc_v2", &allocate);
    find(library, "cuMemFree_v2", &release);
    find(library, "cuMemcpyHtoD_v2", &upload);
    find(library, "cuMemcpyDtoH_v2", &download);
    find(library, "cuMemsetD8_v2", &fill);
    find(library, "cuCtxSynchronize", &synchronise);
    find(library, "cuEventCreate", &create_event);
    find(library, "cuEventRecord", &record_event);
    find(library, "cuEventElapsedTime", &elapsed);
    must(init(0), "cuInit");
    must(get_device(&device, 0), "cuDeviceGet");
    must(retain_context(&context, device), "cuDevicePrimaryCtxRetain");
    must(set_context(context), "cuCtxSetCurrent");
}

static address new_memory(size_t bytes) {
    address at;
    must(allocate(&at, bytes ? bytes : 16), "cuMemAlloc");
    must(fill(at, 0xff, bytes ? bytes : 16), "cuMemsetD8"); /* NaN in every dtype */
    return at;
}

static void *pointer(address at) { return (void *)(uintptr_t)at; }

static void *new_array(size_t count, size_t size) {
    void *made = calloc(count ? count : 1, size);
    must(made == NULL, "calloc");
    return made;
}

/* -- dtypes ---------------------------------------------------------------------------------------------------------- */

static size_t size_of(flashtile_dtype dtype) { return dtype == FLASHTILE_FP32 ? 4 : 2; }

static float to_float(const void *data, size_t i, flashtile_dtype dtype) {
    uint32_t bits;
    uint16_t half;
    float value;
    if (dtype == FLASHTILE_FP32) return ((const float *)data)[i];
    half = ((const uint16_t *)data)[i];
    if (dtype == FLASHTILE_BF16) {
        bits = (uint32_t)half << 16;
    } else {
        const uint32_t exponent = (half >> 10) & 31, fraction = half & 1023;
        if (exponent == 0) return (half >> 15 ? -1.0f : 1.0f) * ldexpf((float)fraction, -24);
        bits = (uint32_t)(half >> 15) << 31 | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
    }
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Store a number whose lower bits are 0: multiples of 1/64 below 4 are exact in every dtype. */
static void from_float(void *data, size_t i, flashtile_dtype dtype, float value) {
    uint32_t bits;
    if (dtype == FLASHTILE_FP32) {
        ((float *)data)[i] = value;
        return;
    }
    memcpy(&bits, &value, sizeof bits);
    if (dtype == FLASHTILE_BF16)
        ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
    else
        ((uint16_t *)data)[i] = value == 0 ? 0 : (uint16_t)(bits >> 31 << 15 | (((bits >> 23) & 255) - 112) << 10 | ((bits >> 13) & 1023));
}

/* -- the reference --------------------------------------------------------------------------------------------------- */

typedef struct problem {
    flashtile_dtype dtype;
    int64_t B, T, NH, C;
} problem;

/* out, dq, dk, dv of one head, each (T, D), from rows that are `step` elements apart. */
static void reference(const double *q, const double *k, const double *v, const double *dout, int64_t T, int64_t D, double *out,
                      double *dq, double *dk, double *dv) {
    const double scale = 1.0 / sqrt((double)D);
    double *p = (double *)new_array((size_t)T, sizeof *p);
    int64_t i, j, d;
    memset(dk, 0, (size_t)(T * D) * sizeof *dk);
    memset(dv, 0, (size_t)(T * D) * sizeof *dv);
    for (i = 0; i < T; i++) {
        double most = -1e300, total = 0.0, delta = 0.0;
        double *o = out + i * D, *g = dq + i * D;
        for (d = 0; d < D; d++) o[d] = g[d] = 0.0;
        for (j = 0; j <= i; j++) {
            double s = 0.0;
            for (d = 0; d < D; d++) s += q[i * D + d] * k[j * D + d];
            p[j] = s * scale;
            if (p[j] > most) most = p[j];
        }
        for (j = 0; j <= i; j++) total += p[j] = exp(p[j] - most);
        for (j = 0; j <= i; j++) {
            p[j] /= total;
            for (d = 0; d < D; d++) o[d] += p[j] * v[j * D + d];
        }
        for (d = 0; d < D; d++) delta += o[d] * dout[i * D + d];
        for (j = 0; j <= i; j++) {
            double dp = 0.0, ds;
            for (d = 0; d < D; d++) {
                dp += dout[i * D + d] * v[j * D + d];
                dv[j * D + d] += p[j] * dout[i * D + d];
            }
            ds = p[j] * (dp - delta) * scale;
            for (d = 0; d < D; d++) {
                g[d] += ds * k[j * D + d];
                dk[j * D + d] += ds * q[i * D + d];
            }
        }
    }
    free(p);
}

/* Rows of one head as doubles: part 0 .. 2 of a packed tensor of 3 parts, or the whole of one of 1 part. */
static void take(const void *data, const problem *p, int64_t b, int64_t h, int64_t part, int64_t parts, double *rows) {
    const int64_t D = p->C / p->NH;
    int64_t t, d;
    for (t = 0; t < p->T; t++)
        for (d = 0; d < D; d++)
            rows[t * D + d] = to_float(data, (size_t)(((b * p->T + t) * parts + part) * p->C + h * D + d), p->dtype);
}

/* ||found - exact|| / ||exact||; NaN if anything is not finite. */
static double relative_error(const double *found, const double *exact, int64_t count) {
    double gap = 0.0, norm = 0.0;
    int64_t i;
    for (i = 0; i < count; i++) {
        gap += (found[i] - exact[i]) * (found[i] - exact[i]);
        norm += exact[i] * exact[i];
    }
    return norm > 0.0 ? sqrt(gap / norm) : sqrt(gap); /* a query that sees one key has no gradient */
}

/* -- one problem ----------------------------------------------------------------------------------------------------- */

static int failed(flashtile_status status) {
    if (status != FLASHTILE_OK) printf("  %s: %s\n", flashtile_status_text(status), flashtile_last_error());
    return status != FLASHTILE_OK;
}

/* Milliseconds of a call, the mean of several that follow each other; `backward` or forward. */
static float time_calls(const problem *p, const address *at, size_t scratch_bytes, int backward) {
    void *start, *end;
    float ms = 0.0f;
    int i, calls = 20;
    must(create_event(&start, 0), "cuEventCreate");
    must(create_event(&end, 0), "cuEventCreate");
    for (i = -3; i < calls; i++) {
        if (i == 0) must(record_event(start, NULL), "cuEventRecord");
        if (backward)
            flashtile_attention_backward(p->dtype, pointer(at[4]), pointer(at[3]), pointer(at[0]), pointer(at[1]), pointer(at[2]),
                                         pointer(at[5]), scratch_bytes, p->B, p->T, p->NH, p->C, NULL);
        else
            flashtile_attention_forward(p->dtype, pointer(at[1]), pointer(at[2]), pointer(at[0]), p->B, p->T, p->NH, p->C, NULL);
    }
    must(record_event(end, NULL), "cuEventRecord");
    must(synchronise(), "cuCtxSynchronize");
    must(elapsed(&ms, start, end), "cuEventElapsedTime");
    return ms / (float)calls;
}

/* 1 if it is wrong or cannot be run. */
static int run(const problem *p) {
    static const char *const names[] = {"out", "dq", "dk", "dv"};
    static const char *const dtypes[] = {"fp32", "fp16", "bf16"};
    static const double most_out[] = {MOST_OUT, 2e-3, 1e-2}, most_grad[] = {MOST_GRAD, 1e-2, 2e-2};
    const int64_t D = p->C / p->NH, count = p->B * p->T * p->C;
    const size_t bytes = (size_t)count * size_of(p->dtype);
    size_t stats_bytes, scratch_bytes, i;
    int64_t place;
    address at[6]; /* inp, out, stats, dout, dinp, scratch */
    void *inp, *dout, *out, *dinp;
    double *rows[12], worst[4] = {0, 0, 0, 0};
    uint32_t state = 12345;
    int wrong = 0, n;
    printf("%s B %lld T %lld NH %lld C %lld\n", dtypes[p->dtype], (long long)p->B, (long long)p->T, (long long)p->NH, (long long)p->C);
    if (failed(flashtile_attention_bytes(p->dtype, p->B, p->T, p->NH, p->C, &stats_bytes, &scratch_bytes))) return 1;
    inp = new_array((size_t)count * 3, size_of(p->dtype));
    dout = new_array((size_t)count, size_of(p->dtype));
    out = new_array((size_t)count, size_of(p->dtype));
    dinp = new_array((size_t)count * 3, size_of(p->dtype));
    for (i = 0; i < (size_t)count * 4; i++) {
        float value = 0.0f;
        for (n = 0; n < 4; n++) value += (float)((state = state * 1664525u + 1013904223u) >> 24) - 127.5f; /* nearly normal */
        value = roundf(value / 148.0f * 64.0f) / 64.0f;
        value = value > 3.9f ? 3.9375f : value < -3.9f ? -3.9375f : value;
        from_float(i < (size_t)count * 3 ? inp : dout, i < (size_t)count * 3 ? i : i - (size_t)count * 3, p->dtype, value);
    }
    at[0] = new_memory(3 * bytes);
    at[1] = new_memory(bytes);
    at[2] = new_memory(stats_bytes);
    at[3] = new_memory(bytes);
    at[4] = new_memory(3 * bytes);
    at[5] = new_memory(scratch_bytes);
    must(upload(at[0], inp, 3 * bytes), "cuMemcpyHtoD");
    must(upload(at[3], dout, bytes), "cuMemcpyHtoD");
    wrong = failed(flashtile_attention_forward(p->dtype, pointer(at[1]), pointer(at[2]), pointer(at[0]), p->B, p->T, p->NH, p->C, NULL)) ||
            failed(flashtile_attention_backward(p->dtype, pointer(at[4]), pointer(at[3]), pointer(at[0]), pointer(at[1]),
                                                pointer(at[2]), pointer(at[5]), scratch_bytes, p->B, p->T, p->NH, p->C, NULL));
    must(synchronise(), "cuCtxSynchronize");
    must(download(out, at[1], bytes), "cuMemcpyDtoH");
    must(download(dinp, at[4], 3 * bytes), "cuMemcpyDtoH");
    for (n = 0; n < 12; n++) rows[n] = (double *)new_array((size_t)(p->T * D), sizeof(double));
    for (place = 0; !wrong && place < p->B * p->NH; place++) {
        const int64_t b = place / p->NH, h = place % p->NH;
        if (p->T > 512 && place > 0 && (p->T > 2048 || place + 1 < p->B * p->NH)) continue;
        for (n = 0; n < 3; n++) take(inp, p, b, h, n, 3, rows[n]);
        take(dout, p, b, h, 0, 1, rows[3]);
        reference(rows[0], rows[1], rows[2], rows[3], p->T, D, rows[4], rows[5], rows[6], rows[7]);
        take(out, p, b, h, 0, 1, rows[8]);
        for (n = 0; n < 3; n++) take(dinp, p, b, h, n, 3, rows[9 + n]);
        for (n = 0; n < 4; n++) {
            const double error = relative_error(rows[8 + n], rows[4 + n], p->T * D);
            if (!(error <= worst[n])) worst[n] = error;
        }
    }
    for (n = 0; !wrong && n < 4; n++) {
        const int right = worst[n] <= (n == 0 ? most_out : most_grad)[p->dtype];
        printf("  %-4s relative error %.2e%s\n", names[n], worst[n], right ? "" : "  WRONG");
        if (!right) wrong = 1;
    }
    if (!wrong) {
        const double pairs = (double)p->B * (double)p->NH * (double)p->T * (double)(p->T + 1) / 2;
        const float forward = time_calls(p, at, scratch_bytes, 0), backward = time_calls(p, at, scratch_bytes, 1);
        printf("  forward %.4f ms, %.0f TFLOP/s; backward %.4f ms, %.0f TFLOP/s\n", forward, 4 * pairs * (double)D / forward * 1e-9,
               backward, 10 * pairs * (double)D / backward * 1e-9);
    }
    for (n = 0; n < 12; n++) free(rows[n]);
    for (n = 0; n < 6; n++) must(release(at[n]), "cuMemFree");
    free(inp);
    free(dout);
    free(out);
    free(dinp);
    return wrong;
}

int main(int count, char **words) {
    static const int64_t shapes[][4] = {{1, 1, 1, 64}, {2, 63, 3, 192}, {1, 64, 2, 128}, {3, 257, 2, 128}, {2, 1000, 4, 256},
                                        {8, 1024, 12, 768}, {6, 4096, 12, 768}, {1, 8192, 12, 768}};
    static const char *const dtypes[] = {"fp32", "fp16", "bf16"};
    int wrong = 0, checked = 0, dtype;
    size_t i, stats_bytes, scratch_bytes;
    if (count != 1 && count != 6) {
        fprintf(stderr, "usage: %s [dtype B T NH C]\n", words[0]);
        return 2;
    }
    start_driver();
    for (dtype = 0; dtype < 3; dtype++) {
        if (count == 6) {
            const problem p = {(flashtile_dtype)dtype, atoll(words[2]), atoll(words[3]), atoll(words[4]), atoll(words[5])};
            if (strcmp(words[1], dtypes[dtype]) == 0) return run(&p);
            continue;
        }
        if (flashtile_attention_bytes((flashtile_dtype)dtype, 1, 1, 1, 64, &stats_bytes, &scratch_bytes) == FLASHTILE_NOT_SUPPORTED) {
            printf("%s: not exported for head_dim 64\n", dtypes[dtype]);
            continue;
        }
        for (i = 0; i < sizeof shapes / sizeof *shapes; i++, checked++) {
            const problem p = {(flashtile_dtype)dtype, shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3]};
            wrong += run(&p);
        }
    }
    if (wrong) printf("%d WRONG\n", wrong);
    else printf(checked ? "all right\n" : "nothing to check\n");
    return wrong || !checked;
}
