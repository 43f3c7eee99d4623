/* -- llm.c ----------------------------------------------------------------------------------------------------------- */

/* A problem of llm.c's. `maxima`: in fp32 the backward needs each row's maximum and sum too, which stand behind lse. */
struct packed {
    flashtile_dtype dtype;
    int64_t head_dim, element_bytes;
    int maxima;
    const struct entry *forward, *backward;
    int forward_places[6], backward_places[10]; /* in the entries' tensors, -1 of what they do not have, of: */
};

enum { Q, K, V, OUT, LSE, MAXIMA, DOUT, DQ, DK, DV };

static void put(uint64_t *tensors, const int *places, int which, uint64_t address) {
    if (places[which] >= 0) tensors[places[which]] = address;
}

@TABLE@
static flashtile_status find_packed(const char *function, flashtile_dtype dtype, int64_t NH, int64_t C, const struct packed **found) {
    size_t i;
    if (NH < 1 || C < 1 || C % NH)
        return fail(FLASHTILE_INVALID_ARGUMENT, "%s: C is %lld and NH is %lld; C must be a multiple of NH", function, (long long)C,
                    (long long)NH);
    for (i = 0; i < sizeof packed_problems / sizeof *packed_problems; i++) {
        if (packed_problems[i].dtype == dtype && packed_problems[i].head_dim == C / NH) {
            *found = &packed_problems[i];
            return FLASHTILE_OK;
        }
    }
    return fail(FLASHTILE_NOT_SUPPORTED, "%s: dtype is %d and C / NH is %lld; exported were %s", function, (int)dtype,
                (long long)(C / NH), packed_names);
}

/* Bytes of lse, after which maxima and sums begin. */
static uint64_t lse_bytes(int64_t B, int64_t T, int64_t NH) { return ((uint64_t)B * (uint64_t)NH * (uint64_t)T * 4 + 15) / 16 * 16; }

flashtile_status flashtile_attention_bytes(flashtile_dtype dtype, int64_t B, int64_t T, int64_t NH, int64_t C,
                                           size_t *stats_bytes, size_t *scratch_bytes) {
    const int64_t sizes[] = {B, T, NH};
    const struct packed *p = NULL;
    flashtile_status status = find_packed("flashtile_attention_bytes", dtype, NH, C, &p);
    if (status != FLASHTILE_OK) return status;
    if (!stats_bytes || !scratch_bytes) return fail(FLASHTILE_INVALID_ARGUMENT, "flashtile_attention_bytes: a result is NULL");
    status = execute(p->backward, sizes, NULL, NULL, 0, NULL, scratch_bytes);
    if (status == FLASHTILE_OK) *stats_bytes = (size_t)(lse_bytes(B, T, NH) + (p->maxima ? (uint64_t)(B * NH * T) * 8 : 0));
    return status;
}

flashtile_status flashtile_attention_forward(flashtile_dtype dtype, void *out, void *stats, const void *inp, int64_t B, int64_t T,
                                             int64_t NH, int64_t C, void *stream) {
    const int64_t sizes[] = {B, T, NH};
    const struct packed *p = NULL;
    flashtile_status status = find_packed("flashtile_attention_forward", dtype, NH, C, &p);
    uint64_t tensors[6], part;
    int i;
    if (status != FLASHTILE_OK) return status;
    if (!inp || !stats)
        return fail(FLASHTILE_INVALID_ARGUMENT, "flashtile_attention_forward: %s is NULL", inp ? "stats" : "inp");
    part = (uint64_t)(C * p->element_bytes);
    for (i = 0; i < 3; i++) put(tensors, p->forward_places, Q + i, (uint64_t)(uintptr_t)inp + (uint64_t)i * part);
    put(tensors, p->forward_places, OUT, (uint64_t)(uintptr_t)out);
    put(tensors, p->forward_places, LSE, (uint64_t)(uintptr_t)stats);
    put(tensors, p->forward_places, MAXIMA, (uint64_t)(uintptr_t)stats + lse_bytes(B, T, NH));
    return execute(p->forward, sizes, tensors, NULL, 0, stream, NULL);
}

flashtile_status flashtile_attention_backward(flashtile_dtype dtype, void *dinp, const void *dout, const void *inp,
                                              const void *out, const void *stats, void *scratch, size_t scratch_bytes, int64_t B,
                                              int64_t T, int64_t NH, int64_t C, void *stream) {
    const int64_t sizes[] = {B, T, NH};
    const struct packed *p = NULL;
    flashtile_status status = find_packed("flashtile_attention_backward", dtype, NH, C, &p);
    uint64_t tensors[10], part;
    int i;
    if (status != FLASHTILE_OK) return status;
    if (!inp || !stats || !dinp)
        return fail(FLASHTILE_INVALID_ARGUMENT, "flashtile_attention_backward: %s is NULL", !inp ? "inp" : !stats ? "stats" : "dinp");
    part = (uint64_t)(C * p->element_bytes);
    for (i = 0; i < 3; i++) {
        put(tensors, p->backward_places, Q + i, (uint64_t)(uintptr_t)inp + (uint64_t)i * part);
        put(tensors, p->backward_places, DQ + i, (uint64_t)(uintptr_t)dinp + (uint64_t)i * part);
    }
    put(tensors, p->backward_places, OUT, (uint64_t)(uintptr_t)out);
    put(tensors, p->backward_places, DOUT, (uint64_t)(uintptr_t)dout);
    put(tensors, p->backward_places, LSE, (uint64_t)(uintptr_t)stats);
    put(tensors, p->backward_places, MAXIMA, (uint64_t)(uintptr_t)stats + lse_bytes(B, T, NH));
    return execute(p->backward, sizes, tensors, scratch, scratch_bytes, stream, NULL);
}
