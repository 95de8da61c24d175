/* macOS: its own wait on an address, threads for performance cores (see platform.h). */
#pragma once
#include <pthread/qos.h>

#include "platform_posix.h"

/* Apple's futex, which libc++ uses, too. Its public form, os_sync_wait_on_address, needs macOS 14.4. */
extern int __ulock_wait(uint32_t operation, void *at, uint64_t value, uint32_t timeout_us);
extern int __ulock_wake(uint32_t operation, void *at, uint64_t value);
#define ULOCK_COMPARE_AND_WAIT 1u
#define ULOCK_WAKE_ALL 0x100u
#define ULOCK_NO_ERRNO 0x1000000u

/* Threads of a lower class may be put on efficiency cores, and every barrier would wait for them. */
static inline void os_thread_prefer_speed(void) { pthread_set_qos_class_self_np(QOS_CLASS_USER_INITIATED, 0); }
static inline int os_core(void) { return -1; }

static inline void os_wait_on(atomic_int *at, int value) {
    __ulock_wait(ULOCK_COMPARE_AND_WAIT | ULOCK_NO_ERRNO, at, (uint32_t)value, 0); /* 0: no timeout */
}
static inline void os_wake_all(atomic_int *at, int sleepers) {
    (void)sleepers;
    __ulock_wake(ULOCK_COMPARE_AND_WAIT | ULOCK_WAKE_ALL | ULOCK_NO_ERRNO, at, 0);
}

static inline void os_prefer_huge_pages(void *memory, size_t size) { /* pages are 16 KiB, and there is no advice */
    (void)memory;
    (void)size;
}
