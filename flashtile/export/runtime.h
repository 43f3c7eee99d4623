/* Made by `flashtile export`; nothing here is to be edited.

   Attention (and what stands around it) on NVIDIA GPUs, without Python, without cuDNN and without CUDA's headers: kernels
   are part of the C file, and the driver's library is loaded when a function is first called.

   Every function works in the calling thread's current CUDA context (programs that use CUDA's runtime have one after
   cudaSetDevice or any allocation), only puts work into `stream` (a CUstream or cudaStream_t; NULL is the default one), and
   may be called by several threads at once. Tensors are device memory, aligned to 16 bytes. Each size is at least 1.
   `scratch` is device memory of at least so many bytes as the function's namesake ending in _scratch says, aligned to 16
   bytes; it is free again when the work in `stream` is done. What a call refuses, it refuses before any work is done.
   Inside stream capture call flashtile_prepare() before. */
#ifndef FLASHTILE_ATTENTION_H
#define FLASHTILE_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum flashtile_status {
    FLASHTILE_OK = 0,
    FLASHTILE_INVALID_ARGUMENT = 1,   /* a pointer or a size is wrong */
    FLASHTILE_NOT_SUPPORTED = 2,      /* no kernel here runs these sizes or this problem */
    FLASHTILE_NO_DRIVER = 3,          /* there is no CUDA driver, or an old one */
    FLASHTILE_NO_CONTEXT = 4,         /* no CUDA context is current in this thread */
    FLASHTILE_UNKNOWN_DEVICE = 5,     /* nothing was exported for the current GPU's architecture */
    FLASHTILE_DRIVER_ERROR = 6,       /* the driver refused something */
    FLASHTILE_OUT_OF_MEMORY = 7       /* of the host */
} flashtile_status;

/* A status in one or two words. */
const char *flashtile_status_text(flashtile_status status);

/* What was wrong when a function last failed in this thread: the thing, its value and what it must be. */
const char *flashtile_last_error(void);

/* Load all kernels for the current context, which otherwise happens at each one's first launch. */
flashtile_status flashtile_prepare(void);
