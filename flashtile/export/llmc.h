/* llm.c's attention: inp (B, T, 3, NH, C / NH) holds q, k and v, out (B, T, C), all of one dtype; causal, scale
   1 / sqrt(C / NH). out, stats and dinp (like inp) are written, and nothing is added to what they held. `stats` is what the
   backward needs of the forward, float32: the first B * NH * T numbers are lse, (B, NH, T). Of the pointers only `stream`, and
   `scratch` where it has 0 bytes, may be NULL. */
typedef enum flashtile_dtype { FLASHTILE_FP32 = 0, FLASHTILE_FP16 = 1, FLASHTILE_BF16 = 2 } flashtile_dtype;

/* Bytes of `stats` and, for the backward, of `scratch`. */
flashtile_status flashtile_attention_bytes(flashtile_dtype dtype, int64_t B, int64_t T, int64_t NH, int64_t C,
                                           size_t *stats_bytes, size_t *scratch_bytes);
flashtile_status flashtile_attention_forward(flashtile_dtype dtype, void *out, void *stats, const void *inp, int64_t B, int64_t T,
                                             int64_t NH, int64_t C, void *stream);
flashtile_status flashtile_attention_backward(flashtile_dtype dtype, void *dinp, const void *dout, const void *inp,
                                              const void *out, const void *stats, void *scratch, size_t scratch_bytes, int64_t B,
                                              int64_t T, int64_t NH, int64_t C, void *stream);
