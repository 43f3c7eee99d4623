/* Made by `flashtile export`; nothing here is to be edited.

   Attention (and what stands around it) on NVIDIA GPUs, without Python, without cuDNN and without CUDA's headers: kernels
   are part of the C file, and the driver's library is loaded when a function is first called.

   Where: a function works in the calling thread's current CUDA context. Programs that use CUDA's runtime have one after
   cudaSetDevice or any allocation. It puts work into `stream`, a CUstream or cudaStream_t, and returns before that is done.
   Several threads may call at once. Inside stream capture call flashtile_prepare() before.

   Tensors: each is device memory, dense with the strides that its comment says in elements, aligned to 16 bytes, and none may
   be NULL. The comment also says what is done with it:
       read            the function does not change it
       written         every element is written, and nothing is added to what it held
       written over    it is read, and then holds something else
   Gradients are written, too: to accumulate, add them up yourself. Tensors that are written overlap no other.

   lse: the natural logarithm of the sum of exp(score) over the keys that a query sees, with scale, modifiers and sink in the
   scores: so log(sum exp), positive where scores are, and not its negative. -infinity where a query sees no key. float32.

   What may be NULL: `stream`, which is then the default one; and `scratch`, where the function's namesake ending in _scratch
   says 0 bytes. `scratch` is device memory of at least so many bytes, aligned to 16; it is free again when the work in `stream`
   is done. Each size is at least 1.

   Errors: what a call refuses, it refuses before any work is done, and flashtile_last_error() says why. */
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
