/* cuda_pipeline.h - asynchronous copies from global to shared memory. They land when the thread waits for them, no
 * sooner: until then the destination must not be touched. */
#ifndef EMULATOR_CUDA_PIPELINE_H
#define EMULATOR_CUDA_PIPELINE_H

extern "C++" {

#include "cuda_runtime.h"

static inline void __pipeline_memcpy_async(void *dst, const void *src, size_t bytes, size_t zeros = 0)
{
    emulator::copy_async(dst, src, bytes, zeros);
}
static inline void __pipeline_commit() { emulator::copy_commit(); }
static inline void __pipeline_wait_prior(unsigned groups_left) { emulator::copy_wait(groups_left); }

}
#endif
