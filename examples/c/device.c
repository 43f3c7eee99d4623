#include "device.h"

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t address;

static int (*init)(unsigned), (*get_device)(int *, int), (*retain_context)(void **, int), (*set_context)(void *);
static int (*create_stream)(void **, unsigned), (*destroy_stream)(void *), (*synchronise)(void *);
static int (*allocate)(address *, size_t), (*release)(address);
static int (*to_device)(address, const void *, size_t, void *), (*to_host)(void *, address, size_t, void *);

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

void start_device(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *context;
    int device;
    must(library == NULL, "loading libcuda.so.1");
    find(library, "cuInit", &init);
    find(library, "cuDeviceGet", &get_device);
    find(library, "cuDevicePrimaryCtxRetain", &retain_context);
    find(library, "cuCtxSetCurrent", &set_context);
    find(library, "cuStreamCreate", &create_stream);
    find(library, "cuStreamDestroy_v2", &destroy_stream);
    find(library, "cuStreamSynchronize", &synchronise);
    find(library, "cuMemAlloc_v2", &allocate);
    find(library, "cuMemFree_v2", &release);
    find(library, "cuMemcpyHtoDAsync_v2", &to_device);
    find(library, "cuMemcpyDtoHAsync_v2", &to_host);
    must(init(0), "cuInit");
    must(get_device(&device, 0), "cuDeviceGet");
    must(retain_context(&context, device), "cuDevicePrimaryCtxRetain");
    must(set_context(context), "cuCtxSetCurrent");
}

stream new_stream(void) {
    stream s;
    must(create_stream(&s, 1), "cuStreamCreate"); /* 1: it does not wait for the default stream */
    return s;
}

void *new_memory(size_t bytes) {
    address at;
    must(allocate(&at, bytes), "cuMemAlloc"); /* aligned to 256 bytes */
    return (void *)(uintptr_t)at;
}

void free_stream(stream s) { must(destroy_stream(s), "cuStreamDestroy"); }
void free_memory(void *at) { must(release((address)(uintptr_t)at), "cuMemFree"); }
void upload(void *to, const void *from, size_t bytes, stream s) { must(to_device((address)(uintptr_t)to, from, bytes, s), "an upload"); }
void download(void *to, const void *from, size_t bytes, stream s) { must(to_host(to, (address)(uintptr_t)from, bytes, s), "a download"); }
void wait_for(stream s) { must(synchronise(s), "cuStreamSynchronize"); }
