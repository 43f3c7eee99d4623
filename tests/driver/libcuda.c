/* A CUDA driver without a GPU: it answers what Triton's host code and exported C ask, and records launches. See
   test_launch.py and ../export.

   A tensor map becomes a hash of what it was encoded from. A launch appends a line to $LAUNCHES: the kernel's name, grid,
   block, shared memory, and the first four bytes of each kernel parameter, as many as $PARAMETERS says: a number, or
   " name=number" for every kernel. Filling appends "fill",
   the address' lower half, the words in a row, the rows and the bytes between their beginnings. The GPU is an H100, or what
   $CAPABILITY says; $CONTEXT=0: no context is current; $FAIL: the name of a function that fails. $EARLY: where the names of
   kernels go that may be launched before those before them are done. A graph is the lines of the launches that it captured,
   and appends them when it is launched. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int fails(const char *name) {
  const char *failing = getenv("FAIL");
  return failing && !strcmp(failing, name) ? 999 : 0;
}

#define OK(name) int name(void) { return fails(#name); }
OK(cuInit) OK(cuCtxGetLimit) OK(cuCtxSetCurrent) OK(cuCtxSetLimit) OK(cuDeviceGet) OK(cuFuncSetAttribute)
OK(cuFuncSetCacheConfig) OK(cuOccupancyMaxActiveClusters)

int cuCtxGetCurrent(void **context) {
  const char *given = getenv("CONTEXT");
  *context = given ? (void *)strtoull(given, NULL, 0) : (void *)16;
  return 0;
}
int cuCtxGetId(void *context, unsigned long long *id) { *id = (unsigned long long)(uintptr_t)context + 1; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return fails("cuCtxGetDevice"); }
int cuDevicePrimaryCtxRetain(void **context) { *context = (void *)16; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  const char *given = getenv("CAPABILITY");
  int capability = given ? atoi(given) : 90;
  *value = attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : attribute == 16 ? 132 : 232448;
  return 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = 1024; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "recorded driver"; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)name; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)image; return fails("cuModuleLoadData"); }
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

static FILE *opened(const char *variable) {
  const char *path = getenv(variable);
  return path ? fopen(path, "a") : NULL;
}

static int parameters_of(const char *name) {
  const char *text = getenv("PARAMETERS");
  char word[100];
  if (!strchr(text, '=')) return atoi(text);
  snprintf(word, sizeof word, " %s=", name);
  return atoi(strstr(text, word) + strlen(word));
}

static char *captured; /* lines of launches on the stream that is captured; cuStreamCreate makes one stream alone */
static size_t captured_bytes;
static FILE *capturing;

static int record(const void *function, const uint32_t *config, unsigned shared_bytes, void **parameters, int captures) {
  FILE *file = captures ? capturing : opened("LAUNCHES");
  if (!file) return 0;
  fprintf(file, "%s %u %u %u %u %u", (const char *)function, config[0], config[1], config[2], config[3], shared_bytes);
  for (int i = 0, count = parameters_of(function); i < count; i++) {
    uint32_t word;
    memcpy(&word, parameters[i], sizeof word);
    fprintf(file, " %08x", word);
  }
  fprintf(file, "\n");
  return captures ? 0 : fclose(file);
}

struct launch_config { uint32_t sizes[7]; void *stream; const int *attributes; uint32_t count; };

int cuLaunchKernelEx(const struct launch_config *config, void *function, void **parameters, void **extra) {
  const int failed = fails("cuLaunchKernelEx");
  const char *path = getenv("EARLY");
  for (uint32_t i = 0; path && i < config->count; i++) { /* an attribute is 72 bytes: its id, padding, its value */
    if (config->attributes[18 * i] == 6 && config->attributes[18 * i + 2]) {
      FILE *file = fopen(path, "a");
      fprintf(file, "%s\n", (const char *)function);
      fclose(file);
    }
  }
  return failed ? failed : record(function, config->sizes, config->sizes[6], parameters, capturing && config->stream == (void *)&capturing);
}

int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                   unsigned threads_z, unsigned shared_bytes, void *stream, void **parameters, void **extra) {
  const uint32_t config[] = {x, y, z, threads};
  const int failed = fails("cuLaunchKernel");
  return failed ? failed : record(function, config, shared_bytes, parameters, 0);
}

/* Memory is the host's: what a program uploads it downloads again, and what kernels would write stays as it was. */
int cuMemAlloc_v2(uint64_t *at, size_t bytes) {
  void *made = NULL;
  const int failed = posix_memalign(&made, 256, bytes);
  *at = (uint64_t)(uintptr_t)made;
  return failed || !made ? 2 : fails("cuMemAlloc_v2");
}
int cuMemFree_v2(uint64_t at) { free((void *)(uintptr_t)at); return 0; }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) {
  memcpy((void *)(uintptr_t)to, from, bytes);
  return 0;
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) {
  memcpy(to, (void *)(uintptr_t)from, bytes);
  return 0;
}
int cuStreamSynchronize(void *stream) { return fails("cuStreamSynchronize"); }
int cuStreamDestroy_v2(void *stream) { return 0; }

int cuStreamCreate(void **stream, unsigned flags) { *stream = &capturing; return fails("cuStreamCreate"); }
int cuStreamBeginCapture_v2(void *stream, int mode) {
  capturing = open_memstream(&captured, &captured_bytes);
  return fails("cuStreamBeginCapture_v2");
}
int cuStreamEndCapture(void *stream, void **graph) {
  fclose(capturing);
  capturing = NULL;
  *graph = captured;
  return fails("cuStreamEndCapture");
}
int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags) {
  *executable = strdup(graph);
  return fails("cuGraphInstantiateWithFlags");
}
int cuGraphDestroy(void *graph) { free(graph); return 0; }
int cuGraphExecDestroy(void *executable) { free(executable); return 0; }
int cuGraphLaunch(void *executable, void *stream) {
  FILE *file = opened("LAUNCHES");
  if (file) fputs(executable, file);
  return (file && fclose(file)) || fails("cuGraphLaunch");
}

int cuMemsetD2D32Async(uint64_t at, size_t pitch, unsigned value, size_t width, size_t height, void *stream) {
  FILE *file = fopen(getenv("LAUNCHES"), "a");
  fprintf(file, "fill %08x %lu %lu %lu\n", (uint32_t)at, (unsigned long)width, (unsigned long)height, (unsigned long)pitch);
  return fclose(file) || fails("cuMemsetD2D32Async");
}
