/* Included before every source of the kernels by test_cpu_out_of_memory.py: after `allocations_left` allocations all fail. */
#pragma once
#include <stdlib.h>

__attribute__((weak)) int allocations_left = -1; /* -1: none fails */

static inline int allocation_fails(void) {
    if (allocations_left == 0) return 1;
    if (allocations_left > 0) allocations_left--;
    return 0;
}
static inline void *failing_malloc(size_t size) { return allocation_fails() ? NULL : malloc(size); }
static inline void *failing_calloc(size_t count, size_t size) { return allocation_fails() ? NULL : calloc(count, size); }
static inline void *failing_aligned_alloc(size_t unit, size_t size) { return allocation_fails() ? NULL : aligned_alloc(unit, size); }
#define malloc failing_malloc
#define calloc failing_calloc
#define aligned_alloc failing_aligned_alloc
