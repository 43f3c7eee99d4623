/* A CUDA driver without a GPU: it answers what Triton's host code asks, and records launches. See test_launch.py.

   A tensor map becomes a hash of what it was encoded from. A launch appends a line to $LAUNCHES: grid, block, shared
   memory, and the first four bytes of each of the first $PARAMETERS kernel parameters. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OK(name) int name(void) { return 0; }
OK(cuCtxGetLimit) OK(cuCtxSetCurrent) OK(cuCtxSetLimit) OK(cuDeviceGet) OK(cuFuncSetAttribute) OK(cuFuncSetCacheConfig)
OK(cuOccupancyMaxActiveClusters)

int cuCtxGetCurrent(void **context) { *context = (void *)16; return 0; }
int cuDevicePrimaryCtxRetain(void **context) { *context = (void *)16; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 232448; return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = 1024; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "recorded driver"; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)0x1234; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)0x4321; return 0; }
int cuPointerGetAttribute(uint64_t *value, int attribute, uint64_t pointer) { *value = pointer; return 0; }

static uint64_t mix(uint64_t hash, uint64_t value) { return (hash ^ value) * 1099511628211ull + 7; }

int cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const uint64_t *sizes, const uint64_t *strides,
                           const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int l2, int fill) {
  uint64_t hash = mix(mix(mix(14695981039346656037ull, type), rank), (uint64_t)address);
  for (uint32_t i = 0; i < rank; i++) hash = mix(mix(hash, sizes[i]), box[i]);
  for (uint32_t i = 0; i + 1 < rank; i++) hash = mix(hash, strides[i]);
  hash = mix(mix(hash, swizzle), fill);
  memset(map, 0, 128);
  memcpy(map, &hash, sizeof hash);
  return 0;
}

int cuLaunchKernelEx(const uint32_t *config, void *function, void **parameters, void **extra) {
  FILE *file = fopen(getenv("LAUNCHES"), "a");
  fprintf(file, "%u %u %u %u %u", config[0], config[1], config[2], config[3], config[6]);
  for (int i = 0, count = atoi(getenv("PARAMETERS")); i < count; i++) {
    uint32_t word;
    memcpy(&word, parameters[i], sizeof word);
    fprintf(file, " %08x", word);
  }
  fprintf(file, "\n");
  return fclose(file);
}
