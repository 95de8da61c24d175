/* What Linux, macOS and other POSIX systems share: pthreads, a clock, aligned memory (see platform.h). */
#pragma once
#include <pthread.h>
#include <sched.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

typedef pthread_t OsThread;
typedef void *OsThreadResult;
typedef pthread_mutex_t OsMutex;
typedef pthread_cond_t OsCondition;

static inline int os_thread_start(OsThread *thread, OsThreadResult (*run)(void *), void *argument) {
    return pthread_create(thread, NULL, run, argument);
}
static inline void os_thread_join(OsThread thread) { pthread_join(thread, NULL); }

static inline void os_mutex_init(OsMutex *mutex) { pthread_mutex_init(mutex, NULL); }
static inline void os_mutex_lock(OsMutex *mutex) { pthread_mutex_lock(mutex); }
static inline void os_mutex_unlock(OsMutex *mutex) { pthread_mutex_unlock(mutex); }
static inline void os_condition_init(OsCondition *condition) { pthread_cond_init(condition, NULL); }
static inline void os_condition_wait(OsCondition *condition, OsMutex *mutex) { pthread_cond_wait(condition, mutex); }
static inline void os_condition_wake_all(OsCondition *condition) { pthread_cond_broadcast(condition); }

static inline void os_yield(void) { sched_yield(); }
static inline int os_process(void) { return (int)getpid(); }
static inline double os_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline void *os_allocate(size_t alignment, size_t size) { return aligned_alloc(alignment, size); }
static inline void os_free(void *memory) { free(memory); }
