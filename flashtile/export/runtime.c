#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* -- errors ---------------------------------------------------------------------------------------------------------- */

static __thread char last_error[512];

static flashtile_status fail(flashtile_status status, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 2, 3)))
#endif
    ;

static flashtile_status fail(flashtile_status status, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(last_error, sizeof last_error, format, values);
    va_end(values);
    return status;
}

const char *flashtile_last_error(void) { return last_error; }

const char *flashtile_status_text(flashtile_status status) {
    switch (status) {
    case FLASHTILE_OK: return "ok";
    case FLASHTILE_INVALID_ARGUMENT: return "invalid argument";
    case FLASHTILE_NOT_SUPPORTED: return "not supported";
    case FLASHTILE_NO_DRIVER: return "no driver";
    case FLASHTILE_NO_CONTEXT: return "no context";
    case FLASHTILE_UNKNOWN_DEVICE: return "unknown device";
    case FLASHTILE_DRIVER_ERROR: return "driver error";
    case FLASHTILE_OUT_OF_MEMORY: return "out of memory";
    }
    return "unknown status";
}

/* -- the driver ------------------------------------------------------------------------------------------------------ */

enum {
    SM_COUNT = 16, CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76, /* CUdevice_attribute */
    MAX_DYNAMIC_SHARED_BYTES = 8, PREFERRED_SHARED_PERCENT = 9,  /* CUfunction_attribute */
    STARTS_EARLY = 6 /* CUlaunchAttributeID: programmatic stream serialization */
};

struct tensor_map { /* CUtensorMap */
    uint64_t words[16];
} __attribute__((aligned(64)));

struct launch_attribute { /* CUlaunchAttribute */
    int id;
    int padding;
    union {
        int allowed;
        char bytes[64];
    } value;
};

struct launch_config { /* CUlaunchConfig */
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
    const struct launch_attribute *attributes;
    unsigned attribute_count;
};

static struct {
    int (*init)(unsigned);
    int (*get_context)(void **);
    int (*get_device)(int *);
    int (*get_attribute)(int *, int, int);
    int (*error_string)(int, const char **);
    int (*load_module)(void **, const void *);
    int (*get_function)(void **, void *, const char *);
    int (*set_function_attribute)(void *, int, int);
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
    int (*set_words)(uint64_t, size_t, unsigned, size_t, size_t, void *);
    int (*context_id)(void *, unsigned long long *);                     /* from CUDA 12.0 on, otherwise NULL */
    int (*launch_ex)(const struct launch_config *, void *, void **, void **); /* from CUDA 11.8 on, otherwise NULL */
    int (*encode_tiled)(struct tensor_map *, int, uint32_t, void *, const uint64_t *, const uint64_t *, const uint32_t *,
                        const uint32_t *, int, int, int, int);           /* from CUDA 12.0 on, otherwise NULL */
} driver;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* of all that follows, `driver` included */
static int driver_is_loaded;

static int find(void *library, const char *name, void *place) {
    void *symbol = dlsym(library, name);
    memcpy(place, &symbol, sizeof symbol);
    return symbol != NULL;
}

static flashtile_status load_driver(void) {
    void *library;
    int status;
    if (driver_is_loaded) return FLASHTILE_OK;
    library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *reason = dlerror();
        return fail(FLASHTILE_NO_DRIVER, "the CUDA driver cannot be loaded: %s", reason ? reason : "libcuda.so.1");
    }
    if (!find(library, "cuInit", &driver.init) || !find(library, "cuCtxGetCurrent", &driver.get_context) ||
        !find(library, "cuCtxGetDevice", &driver.get_device) ||
        !find(library, "cuDeviceGetAttribute", &driver.get_attribute) ||
        !find(library, "cuGetErrorString", &driver.error_string) ||
        !find(library, "cuModuleLoadData", &driver.load_module) ||
        !find(library, "cuModuleGetFunction", &driver.get_function) ||
        !find(library, "cuFuncSetAttribute", &driver.set_function_attribute) ||
        !find(library, "cuLaunchKernel", &driver.launch) || !find(library, "cuMemsetD2D32Async", &driver.set_words)) {
        dlclose(library);
        return fail(FLASHTILE_NO_DRIVER, "the CUDA driver lacks a function that is needed here");
    }
    find(library, "cuCtxGetId", &driver.context_id);
    find(library, "cuLaunchKernelEx", &driver.launch_ex);
    find(library, "cuTensorMapEncodeTiled", &driver.encode_tiled);
    status = driver.init(0);
    if (status != 0) {
        dlclose(library);
        return fail(FLASHTILE_NO_DRIVER, "the CUDA driver does not start: error %d", status);
    }
    driver_is_loaded = 1;
    return FLASHTILE_OK;
}

static flashtile_status driver_error(int error, const char *what, const char *name) {
    const char *text = NULL;
    if (driver.error_string(error, &text) != 0 || !text) text = "unknown error";
    return fail(FLASHTILE_DRIVER_ERROR, "%s of %s failed: %s (CUDA error %d)", what, name, text, error);
}

/* -- GPUs and their kernels ------------------------------------------------------------------------------------------ */

struct kernel {
    int index;
    int arch;
    const char *name;
    const uint64_t *image;
    unsigned threads;
    unsigned shared_bytes;
};

struct gpu { /* one context */
    struct gpu *next;
    void *context;
    unsigned long long id;
    int arch; /* of the kernels that run here */
    int64_t sm_count;
    void *functions[KERNELS];
};

static struct gpu *gpus;

/* The kernels for a GPU: its own architecture's, or, but for those that name their architecture fully (from sm90 on), the
   newest of the same generation. 0 where there are none. */
static int kernels_for(int arch) {
    int best = 0;
    size_t i;
    for (i = 0; i < sizeof architectures / sizeof *architectures; i++) {
        const int candidate = architectures[i];
        if (candidate == arch || (candidate < 90 && candidate / 10 == arch / 10 && candidate < arch && candidate > best)) {
            best = candidate;
            if (candidate == arch) break;
        }
    }
    return best;
}

/* The current context's GPU. Call with the mutex held. */
static flashtile_status current_gpu(struct gpu **found) {
    struct gpu *gpu;
    void *context = NULL;
    unsigned long long id = 0;
    int device = 0, major = 0, minor = 0, count = 0, error;
    flashtile_status status = load_driver();
    if (status != FLASHTILE_OK) return status;
    error = driver.get_context(&context);
    if (error != 0) return driver_error(error, "the query", "the current context");
    if (!context) return fail(FLASHTILE_NO_CONTEXT, "no CUDA context is current in this thread; make one before, as cudaSetDevice does");
    if (driver.context_id && (error = driver.context_id(context, &id)) != 0)
        return driver_error(error, "the query", "the context's id");
    for (gpu = gpus; gpu; gpu = gpu->next) {
        if (gpu->context == context && gpu->id == id) {
            *found = gpu;
            return FLASHTILE_OK;
        }
    }
    if ((error = driver.get_device(&device)) != 0 || (error = driver.get_attribute(&major, CAPABILITY_MAJOR, device)) != 0 ||
        (error = driver.get_attribute(&minor, CAPABILITY_MINOR, device)) != 0 ||
        (error = driver.get_attribute(&count, SM_COUNT, device)) != 0)
        return driver_error(error, "the query", "the device");
    if (!kernels_for(10 * major + minor))
        return fail(FLASHTILE_UNKNOWN_DEVICE, "the GPU is sm_%d%d; kernels were exported for %s", major, minor, architecture_names);
    gpu = (struct gpu *)calloc(1, sizeof *gpu);
    if (!gpu) return fail(FLASHTILE_OUT_OF_MEMORY, "%lu bytes of host memory are missing", (unsigned long)sizeof *gpu);
    gpu->context = context;
    gpu->id = id;
    gpu->arch = kernels_for(10 * major + minor);
    gpu->sm_count = count;
    gpu->next = gpus;
    *found = gpus = gpu;
    return FLASHTILE_OK;
}

/* Call with the mutex held. */
static flashtile_status load_kernel(struct gpu *gpu, const struct kernel *kernel) {
    void *module = NULL, *function = NULL;
    int error;
    if (gpu->functions[kernel->index]) return FLASHTILE_OK;
    if ((error = driver.load_module(&module, kernel->image)) != 0) return driver_error(error, "loading", kernel->name);
    if ((error = driver.get_function(&function, module, kernel->name)) != 0) return driver_error(error, "the look-up", kernel->name);
    if (kernel->shared_bytes > 48 * 1024 && /* and as much as there is for all blocks of a multiprocessor, as Triton's launcher */
        ((error = driver.set_function_attribute(function, MAX_DYNAMIC_SHARED_BYTES, (int)kernel->shared_bytes)) != 0 ||
         (error = driver.set_function_attribute(function, PREFERRED_SHARED_PERCENT, 100)) != 0))
        return driver_error(error, "reserving shared memory", kernel->name);
    gpu->functions[kernel->index] = function;
    return FLASHTILE_OK;
}

/* -- what plans do --------------------------------------------------------------------------------------------------- */

/* early: the kernel itself waits for those before it in the stream, and may be brought to the GPU while they are at work. */
static flashtile_status launch(struct gpu *gpu, const struct kernel *kernel, int64_t x, int64_t y, int64_t z, int early,
                               void **parameters, void *stream) {
    flashtile_status status;
    void *function;
    int error;
    pthread_mutex_lock(&mutex);
    status = load_kernel(gpu, kernel);
    function = gpu->functions[kernel->index];
    pthread_mutex_unlock(&mutex);
    if (status != FLASHTILE_OK) return status;
    if (early && driver.launch_ex) {
        struct launch_attribute attribute = {STARTS_EARLY, 0, {1}};
        const struct launch_config config = {{(unsigned)x, (unsigned)y, (unsigned)z}, {kernel->threads, 1, 1},
                                             kernel->shared_bytes, stream, &attribute, 1};
        error = driver.launch_ex(&config, function, parameters, NULL);
    } else {
        error = driver.launch(function, (unsigned)x, (unsigned)y, (unsigned)z, kernel->threads, 1, 1, kernel->shared_bytes,
                              stream, parameters, NULL);
    }
    return error == 0 ? FLASHTILE_OK : driver_error(error, "the launch", kernel->name);
}

struct plan {
    int arch;
    int (*fits)(const int64_t *sizes);
    int (*within_limits)(const int64_t *sizes);
    void (*scratch)(const int64_t *sizes, int64_t *bytes);
    int scratch_count;
    flashtile_status (*run)(struct gpu *gpu, const int64_t *sizes, const uint64_t *at, void *stream);
};

enum { MOST_SIZES = 20, MOST_BUFFERS = @MOST_BUFFERS@ };

struct entry {
    const char *name;
    int size_count;
    const char *const *size_names;
    int tensor_count;
    const char *const *tensor_names;
    flashtile_status (*derive)(const struct gpu *gpu, int64_t *sizes);
    int plan_count;
    const struct plan *const *plans;
};

static int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

/* Run an entry, or, where `wanted` is not NULL, say how much scratch it needs. */
static flashtile_status execute(const struct entry *entry, const int64_t *given, const uint64_t *tensors, void *scratch,
                                size_t scratch_bytes, void *stream, size_t *wanted) {
    int64_t sizes[MOST_SIZES], bytes[MOST_BUFFERS], total = 0;
    uint64_t at[MOST_BUFFERS];
    const struct plan *plan = NULL;
    struct gpu *gpu = NULL;
    flashtile_status status;
    double product = 1.0;
    int i;
    for (i = 0; i < entry->size_count; i++) {
        if (given[i] < 1 || given[i] > INT32_MAX)
            return fail(FLASHTILE_INVALID_ARGUMENT, "%s: %s is %lld; it must be from 1 to 2147483647", entry->name,
                        entry->size_names[i], (long long)given[i]);
        sizes[i] = given[i];
        if (strstr(entry->size_names[i], "stride")) continue;
        product *= (double)given[i];
        if (strcmp(entry->size_names[i], "seqlen") == 0) product *= (double)given[i]; /* of queries and of keys */
    }
    if (product > 1e15) return fail(FLASHTILE_NOT_SUPPORTED, "%s: the product of all sizes is beyond 1e15", entry->name);
    if (!wanted) {
        for (i = 0; i < entry->tensor_count; i++) {
            if (!tensors[i]) return fail(FLASHTILE_INVALID_ARGUMENT, "%s: %s is NULL", entry->name, entry->tensor_names[i]);
            if (tensors[i] % 16)
                return fail(FLASHTILE_INVALID_ARGUMENT, "%s: %s is 0x%llx; it must be a multiple of 16", entry->name,
                            entry->tensor_names[i], (unsigned long long)tensors[i]);
            at[i] = tensors[i];
        }
    }
    pthread_mutex_lock(&mutex);
    status = current_gpu(&gpu);
    pthread_mutex_unlock(&mutex);
    if (status != FLASHTILE_OK) return status;
    status = entry->derive(gpu, sizes);
    if (status != FLASHTILE_OK) return status;
    for (i = 0; i < entry->plan_count; i++) {
        if (entry->plans[i]->arch == gpu->arch && entry->plans[i]->fits(sizes)) {
            plan = entry->plans[i];
            break;
        }
    }
    if (!plan) return fail(FLASHTILE_NOT_SUPPORTED, "%s: no kernel was exported for these sizes", entry->name);
    if (!plan->within_limits(sizes))
        return fail(FLASHTILE_NOT_SUPPORTED, "%s: a stride or the number of tiles is beyond 32 bits", entry->name);
    plan->scratch(sizes, bytes);
    for (i = 0; i < plan->scratch_count; i++) total += aligned(bytes[i]);
    if (wanted) {
        *wanted = (size_t)total;
        return FLASHTILE_OK;
    }
    if (total > 0 && !scratch)
        return fail(FLASHTILE_INVALID_ARGUMENT, "%s: scratch is NULL; %lld bytes are needed", entry->name, (long long)total);
    if ((uint64_t)(uintptr_t)scratch % 16)
        return fail(FLASHTILE_INVALID_ARGUMENT, "%s: scratch is %p; it must be a multiple of 16", entry->name, scratch);
    if ((uint64_t)total > scratch_bytes)
        return fail(FLASHTILE_INVALID_ARGUMENT, "%s: scratch_bytes is %lu; %lld are needed", entry->name,
                    (unsigned long)scratch_bytes, (long long)total);
    total = 0;
    for (i = 0; i < plan->scratch_count; i++) {
        at[entry->tensor_count + i] = (uint64_t)(uintptr_t)scratch + (uint64_t)total;
        total += aligned(bytes[i]);
    }
    return plan->run(gpu, sizes, at, stream);
}

