/* A sampling loop over a key/value cache, as llm.c's has it: a small model of random weights on the host, attention on the GPU.

   Four requests with prompts of unlike lengths generate together. Each step every request brings one token: its key and value
   go into the request's last page, which the program takes from a list of free ones, and its query attends to all before it.
   Every step is compared with attention in plain C. CMakeLists.txt says how it is built. Exit status 0: everything is right;
   1: a number is wrong; 2: a call failed. */
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
#ifndef STEPS
#define STEPS 150
#endif
enum { REQUESTS = 4, HEADS_KV = 2, GROUP = 2, HEADS = GROUP * HEADS_KV, PAGE = 16 /* as it was exported */ };
enum { COLUMNS = (STEPS + PAGE - 1) / PAGE, PAGES = REQUESTS * COLUMNS };
enum { VOCABULARY = 64, WIDTH = HEADS * HEAD_DIM, KEYS = HEADS_KV * HEAD_DIM, ROWS = STEPS };

/* -- numbers --------------------------------------------------------------------------------------------------------- */

static float to_float(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint16_t to_half(float value) { /* bfloat16, to the nearest, of two the even one */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static uint64_t state = 1337;

static float random_number(void) { /* from 0 to 1, by xorshift* */
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (float)((uint32_t)((state * UINT64_C(0x2545F4914F6CDD1D)) >> 40)) / 16777216.0f;
}

/* -- the model: tokens and positions become q, k and v, and what attention makes of them scores of the next token ----- */

static float embedding[VOCABULARY][WIDTH], projection[WIDTH + 2 * KEYS][WIDTH], unembedding[VOCABULARY][WIDTH];

static void make_model(void) {
    const float scale = 1.7f / sqrtf((float)WIDTH);
    int i, j;
    for (i = 0; i < VOCABULARY; i++)
        for (j = 0; j < WIDTH; j++) {
            embedding[i][j] = 4.0f * random_number() - 2.0f;
            unembedding[i][j] = 4.0f * (random_number() - 0.5f);
        }
    for (i = 0; i < WIDTH + 2 * KEYS; i++)
        for (j = 0; j < WIDTH; j++) projection[i][j] = 2.0f * scale * (random_number() - 0.5f);
}

/* q, k and v of a token, one after another in `made`. */
static void project(int token, int position, uint16_t *made) {
    float x[WIDTH], sum;
    int i, j;
    for (j = 0; j < WIDTH; j++) x[j] = embedding[token][j] + cosf((float)position / (float)(j + 1));
    for (i = 0; i < WIDTH + 2 * KEYS; i++) {
        for (sum = 0.0f, j = 0; j < WIDTH; j++) sum += projection[i][j] * x[j];
        made[i] = to_half(sum);
    }
}

static int sample(const uint16_t *out) {
    float p[VOCABULARY], top = -1e30f, total = 0.0f, coin;
    int i, j;
    for (i = 0; i < VOCABULARY; i++) {
        for (p[i] = 0.0f, j = 0; j < WIDTH; j++) p[i] += unembedding[i][j] * to_float(out[j]);
        top = p[i] > top ? p[i] : top;
    }
    for (i = 0; i < VOCABULARY; i++) total += p[i] = expf(p[i] - top);
    for (coin = random_number() * total, i = 0; i < VOCABULARY - 1 && coin >= p[i]; i++) coin -= p[i];
    return i;
}

/* ||out - exact||^2 and ||exact||^2 of one request's query over its first `rows` keys, added up. */
static void judge(const uint16_t *q, const uint16_t (*k)[KEYS], const uint16_t (*v)[KEYS], int rows, const uint16_t *out,
                  double *gap, double *norm) {
    static double p[ROWS];
    double sum, exact;
    int h, j, d;
    for (h = 0; h < HEADS; h++) {
        const int key = h / GROUP * HEAD_DIM;
        for (sum = 0.0, j = 0; j < rows; j++) {
            for (p[j] = 0.0, d = 0; d < HEAD_DIM; d++) p[j] += to_float(q[h * HEAD_DIM + d]) * to_float(k[j][key + d]);
            sum += p[j] = exp(p[j] / sqrt((double)HEAD_DIM)); /* the numbers are small enough */
        }
        for (d = 0; d < HEAD_DIM; d++) {
            for (exact = 0.0, j = 0; j < rows; j++) exact += p[j] / sum * to_float(v[j][key + d]);
            *gap += pow(to_float(out[h * HEAD_DIM + d]) - exact, 2);
            *norm += exact * exact;
        }
    }
}

/* -- the program ----------------------------------------------------------------------------------------------------- */

static void must(flashtile_status status) {
    if (status != FLASHTILE_OK) {
        fprintf(stderr, "%s: %s\n", flashtile_status_text(status), flashtile_last_error());
        exit(2);
    }
}

int main(void) {
    static const int prompts[REQUESTS] = {1, 7, 20, 33};
    static uint16_t k[REQUESTS][ROWS][KEYS], v[REQUESTS][ROWS][KEYS]; /* all that ever was, for the comparison */
    static uint16_t new_q[REQUESTS][WIDTH], new_k[REQUESTS][KEYS], new_v[REQUESTS][KEYS], out[REQUESTS][WIDTH];
    uint16_t made[WIDTH + 2 * KEYS];
    int32_t table[REQUESTS][COLUMNS], used[REQUESTS];
    int token[REQUESTS] = {0, 1, 2, 3}, next_page = 0, step, i;
    const size_t pool = (size_t)PAGES * PAGE * KEYS * sizeof(uint16_t);
    const int64_t head_stride = HEAD_DIM, row_stride = KEYS, page_stride = (int64_t)PAGE * KEYS;
    double gap = 0.0, norm = 0.0;
    size_t bytes = 0;
    void *scratch = NULL;
    stream s;

    start_device();
    s = new_stream();
    make_model();
    memset(table, -1, sizeof table);
    void *const q_at = new_memory(sizeof new_q), *const k_at = new_memory(sizeof new_k), *const v_at = new_memory(sizeof new_v);
    void *const k_pool = new_memory(pool), *const v_pool = new_memory(pool), *const out_at = new_memory(sizeof out);
    void *const lse_at = new_memory(REQUESTS * HEADS * sizeof(float));
    void *const table_at = new_memory(sizeof table), *const used_at = new_memory(sizeof used);
    /* the order of the header's structures */
    const flashtile_decode_append_tensors append = {k_at, v_at, k_pool, v_pool, used_at, table_at};
    const flashtile_decode_forward_tensors forward = {q_at, k_pool, v_pool, used_at, out_at, lse_at, table_at};

    must(flashtile_decode_forward_scratch(REQUESTS, 1, HEADS_KV, PAGES, COLUMNS, page_stride, row_stride, head_stride, &bytes));
    if (bytes) scratch = new_memory(bytes);
    for (step = 0; step < STEPS; step++) {
        for (i = 0; i < REQUESTS; i++) {
            if (step % PAGE == 0) table[i][step / PAGE] = PAGES - 1 - next_page++; /* a page at a time, from the last one on */
            used[i] = step + 1;
            project(token[i], step, made);
            memcpy(new_q[i], made, sizeof new_q[i]);
            memcpy(k[i][step], made + WIDTH, sizeof new_k[i]);
            memcpy(v[i][step], made + WIDTH + KEYS, sizeof new_v[i]);
            memcpy(new_k[i], k[i][step], sizeof new_k[i]);
            memcpy(new_v[i], v[i][step], sizeof new_v[i]);
        }
        upload(q_at, new_q, sizeof new_q, s);
        upload(k_at, new_k, sizeof new_k, s);
        upload(v_at, new_v, sizeof new_v, s);
        upload(table_at, table, sizeof table, s);
        upload(used_at, used, sizeof used, s);
        must(flashtile_decode_append(&append, REQUESTS, 1, HEADS_KV, PAGES, COLUMNS, page_stride, row_stride, head_stride, NULL,
                                     0, s));
        must(flashtile_decode_forward(&forward, REQUESTS, 1, HEADS_KV, PAGES, COLUMNS, page_stride, row_stride, head_stride,
                                      scratch, bytes, s));
        download(out, out_at, sizeof out, s);
        wait_for(s);
        for (i = 0; i < REQUESTS; i++) {
            judge(new_q[i], (const uint16_t (*)[KEYS])k[i], (const uint16_t (*)[KEYS])v[i], step + 1, out[i], &gap, &norm);
            token[i] = step + 1 < prompts[i] ? (token[i] * 5 + 3) % VOCABULARY : sample(out[i]); /* the prompt's, or its own */
        }
        printf("step %3d:", step);
        for (i = 0; i < REQUESTS; i++) printf(" %2d", token[i]);
        putchar('\n');
    }
    {
        const double error = sqrt(gap / norm);
        const int wrong = !(error < 1e-2); /* of NaN, too */
        void *const all[] = {q_at, k_at, v_at, k_pool, v_pool, out_at, lse_at, table_at, used_at, scratch};
        for (i = 0; i < (int)(sizeof all / sizeof *all); i++)
            if (all[i]) free_memory(all[i]);
        free_stream(s);
        printf("relative error %.1e%s\n%s\n", error, wrong ? "  WRONG" : "", wrong ? "WRONG" : "all right");
        return wrong;
    }
}
