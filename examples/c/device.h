/* Device memory and a stream, from the CUDA driver, without CUDA's toolkit. A program that has the toolkit calls cudaMalloc,
   cudaMemcpyAsync and cudaStreamCreate instead: flashtile's functions take their pointers and streams as they are. */
#ifndef DEVICE_H
#define DEVICE_H

#include <stddef.h>

typedef void *stream;

/* Loads the driver and makes the first GPU's context current. These functions end the program where the driver fails. */
void start_device(void);
stream new_stream(void);
void free_stream(stream s);
void *new_memory(size_t bytes);
void free_memory(void *at);
void upload(void *to, const void *from, size_t bytes, stream s);
void download(void *to, const void *from, size_t bytes, stream s);
void wait_for(stream s);

#endif
