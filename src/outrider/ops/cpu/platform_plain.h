/* Other POSIX systems: what may be left undone is left undone (see platform.h). */
#pragma once
static inline void os_thread_prefer_speed(void) {}
static inline int os_core(void) { return -1; }
static inline void os_wait_on(atomic_int *at, int value) {
    (void)at;
    (void)value;
    os_yield();
}
static inline void os_wake_all(atomic_int *at, int sleepers) {
    (void)at;
    (void)sleepers;
}
static inline void os_prefer_huge_pages(void *memory, size_t size) {
    (void)memory;
    (void)size;
}
