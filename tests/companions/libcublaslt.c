/* cuBLASLt without a GPU, as far as flashtile asks it: bf16 products on the host's memory, with the epilogues that have names
   below. See test_cublaslt.py. Attributes and epilogues are numbered as cublasLt.h does. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { GELU_AUX = 160, GELU_AUX_BIAS = 164, DGELU = 192, BGRADB = 512 };
enum { SUCCESS = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15, BF16 = 14 };

typedef struct { int compute, scale, a_transposed, b_transposed, epilogue, bias_type, aux_type; uint16_t *bias, *aux; int64_t aux_ld; } Desc;
typedef struct { int type; uint64_t rows, columns; int64_t ld; } Layout;
typedef struct { uint64_t algorithm[8]; size_t workspace; int status; float waves; int reserved[4]; } Result;

static float wide(uint16_t x) { uint32_t bits = (uint32_t)x << 16; float f; memcpy(&f, &bits, 4); return f; }
static uint16_t narrow(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static float gate(float x) { return 0.5f * (1 + tanhf(0.7978845608f * (x + 0.044715f * x * x * x))); }
static float slope(float x) {
  float t = 2 * gate(x) - 1;
  return gate(x) + 0.5f * x * (1 - t * t) * 0.7978845608f * (1 + 0.134145f * x * x);
}

int destroyed; /* descriptions and layouts */
int cublasLtCreate(void **handle) { *handle = malloc(1); return SUCCESS; }
int cublasLtMatmulDescCreate(Desc **desc, int compute, int scale) {
  *desc = calloc(1, sizeof **desc);
  (*desc)->compute = compute, (*desc)->scale = scale;
  return compute == 68 && scale == 0 ? SUCCESS : NOT_SUPPORTED;
}
int cublasLtMatmulDescSetAttribute(Desc *d, int attribute, const void *value, size_t size) {
  struct { int attribute; void *place; size_t size; } known[] = {
    {3, &d->a_transposed, 4}, {4, &d->b_transposed, 4}, {7, &d->epilogue, 4}, {8, &d->bias, 8}, {11, &d->aux, 8},
    {12, &d->aux_ld, 8}, {22, &d->aux_type, 4}, {26, &d->bias_type, 4},
  };
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i].attribute == attribute && known[i].size == size) return memcpy(known[i].place, value, size), SUCCESS;
  return INVALID_VALUE;
}
int cublasLtMatrixLayoutCreate(Layout **made, int type, uint64_t rows, uint64_t columns, int64_t ld) {
  *made = malloc(sizeof **made);
  **made = (Layout){type, rows, columns, ld};
  return SUCCESS;
}
int cublasLtMatmulDescDestroy(Desc *desc) { destroyed++; free(desc); return SUCCESS; }
int cublasLtMatrixLayoutDestroy(Layout *layout) { destroyed++; free(layout); return SUCCESS; }
int cublasLtMatmulPreferenceCreate(void **made) { *made = malloc(1); return SUCCESS; }
int cublasLtMatmulPreferenceDestroy(void *made) { free(made); return SUCCESS; }
int cublasLtMatmulPreferenceSetAttribute(void *made, int attribute, const void *value, size_t size) {
  (void)made, (void)value;
  return (attribute == 1 && size == 8) || (attribute >= 5 && attribute <= 8 && size == 4) ? SUCCESS : INVALID_VALUE;
}
int cublasLtMatmulAlgoGetHeuristic(void *handle, Desc *d, Layout *a, Layout *b, Layout *c, Layout *out, void *preference, int asked,
                                   Result *found, int *count) {
  (void)handle, (void)a, (void)b, (void)preference;
  int biased = d->epilogue == GELU_AUX_BIAS || d->epilogue == BGRADB;
  *count = 0;
  if (asked < 1 || c != out || (biased && (!d->bias || d->bias_type != BF16))) return INVALID_VALUE;
  if (d->epilogue != BGRADB && (!d->aux || d->aux_ld < (int64_t)out->rows || d->aux_type != BF16)) return INVALID_VALUE;
  if (out->type != BF16) return NOT_SUPPORTED;
  memset(found, 0, sizeof *found);
  found->algorithm[0] = 7, found->workspace = 64, *count = 1;
  return SUCCESS;
}
int cublasLtMatmul(void *handle, Desc *d, const float *alpha, const uint16_t *a, Layout *al, const uint16_t *b, Layout *bl,
                   const float *beta, const uint16_t *c, Layout *cl, uint16_t *out, Layout *ol, const uint64_t *algorithm,
                   void *workspace, size_t workspace_bytes, void *stream) {
  (void)handle, (void)stream;
  uint64_t m = ol->rows, n = ol->columns, k = d->a_transposed ? al->rows : al->columns;
  if (*alpha != 1 || *beta != 0 || c != out || cl != ol || algorithm[0] != 7 || workspace_bytes != 64 || !workspace) return INVALID_VALUE;
  if ((d->a_transposed ? al->columns : al->rows) != m || (d->b_transposed ? bl->rows : bl->columns) != n) return INVALID_VALUE;
  if ((d->b_transposed ? bl->columns : bl->rows) != k) return INVALID_VALUE;
  for (uint64_t j = 0; j < n; j++) {
    float total = 0;
    for (uint64_t l = 0; l < k; l++) total += wide(d->b_transposed ? b[j + l * bl->ld] : b[l + j * bl->ld]);
    if (d->epilogue == BGRADB) d->bias[j] = narrow(total);
    for (uint64_t i = 0; i < m; i++) {
      float sum = 0;
      for (uint64_t l = 0; l < k; l++)
        sum += wide(d->a_transposed ? a[l + i * al->ld] : a[i + l * al->ld]) *
               wide(d->b_transposed ? b[j + l * bl->ld] : b[l + j * bl->ld]);
      uint16_t *other = d->aux + i + j * d->aux_ld;
      if (d->epilogue == GELU_AUX_BIAS) sum += wide(d->bias[i]);
      if (d->epilogue == GELU_AUX || d->epilogue == GELU_AUX_BIAS) *other = narrow(sum), sum *= gate(sum);
      if (d->epilogue == DGELU) sum *= slope(wide(*other));
      out[i + j * ol->ld] = narrow(sum);
    }
  }
  return SUCCESS;
}
