/* Linux: futexes, the number of the core, transparent huge pages (see platform.h). */
#pragma once
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "platform_posix.h"

static inline void os_thread_prefer_speed(void) {} /* the scheduler knows which cores are fast */
static inline int os_core(void) { return sched_getcpu(); }

static inline void os_wait_on(atomic_int *at, int value) {
    syscall(SYS_futex, at, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}
static inline void os_wake_all(atomic_int *at, int sleepers) {
    syscall(SYS_futex, at, FUTEX_WAKE_PRIVATE, sleepers, NULL, NULL, 0);
}

static inline void os_prefer_huge_pages(void *memory, size_t size) {
#ifdef MADV_HUGEPAGE
    madvise(memory, size, MADV_HUGEPAGE);
#endif
}
