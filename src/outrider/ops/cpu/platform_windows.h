/* Windows 10 and later: Win32 threads, slim locks, WaitOnAddress (see platform.h). */
#pragma once
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#define NOGDI
#include <malloc.h>
#include <windows.h>

typedef HANDLE OsThread;
typedef DWORD OsThreadResult;
typedef SRWLOCK OsMutex;
typedef CONDITION_VARIABLE OsCondition;

static inline int os_thread_start(OsThread *thread, OsThreadResult (*run)(void *), void *argument) {
    *thread = CreateThread(NULL, 0, run, argument, 0, NULL);
    return *thread == NULL;
}
static inline void os_thread_join(OsThread thread) {
    WaitForSingleObject(thread, INFINITE);
    CloseHandle(thread);
}
/* Not to be throttled to save power: such threads may be put on efficiency cores. */
static inline void os_thread_prefer_speed(void) {
    THREAD_POWER_THROTTLING_STATE state = {0};
    state.Version = THREAD_POWER_THROTTLING_CURRENT_VERSION;
    state.ControlMask = THREAD_POWER_THROTTLING_EXECUTION_SPEED;
    SetThreadInformation(GetCurrentThread(), ThreadPowerThrottling, &state, sizeof state);
}

static inline void os_mutex_init(OsMutex *mutex) { InitializeSRWLock(mutex); }
static inline void os_mutex_lock(OsMutex *mutex) { AcquireSRWLockExclusive(mutex); }
static inline void os_mutex_unlock(OsMutex *mutex) { ReleaseSRWLockExclusive(mutex); }
static inline void os_condition_init(OsCondition *condition) { InitializeConditionVariable(condition); }
static inline void os_condition_wait(OsCondition *condition, OsMutex *mutex) {
    SleepConditionVariableSRW(condition, mutex, INFINITE, 0);
}
static inline void os_condition_wake_all(OsCondition *condition) { WakeAllConditionVariable(condition); }

static inline void os_wait_on(atomic_int *at, int value) { WaitOnAddress(at, &value, sizeof value, INFINITE); }
static inline void os_wake_all(atomic_int *at, int sleepers) {
    (void)sleepers;
    WakeByAddressAll(at);
}

static inline void os_yield(void) { SwitchToThread(); }
static inline int os_core(void) { return (int)GetCurrentProcessorNumber(); }
static inline int os_process(void) { return (int)GetCurrentProcessId(); }
static inline double os_seconds(void) {
    LARGE_INTEGER count, frequency;
    QueryPerformanceCounter(&count);
    QueryPerformanceFrequency(&frequency);
    return (double)count.QuadPart / (double)frequency.QuadPart;
}

static inline void *os_allocate(size_t alignment, size_t size) { return _aligned_malloc(size, alignment); }
static inline void os_free(void *memory) { _aligned_free(memory); }
static inline void os_prefer_huge_pages(void *memory, size_t size) { /* large pages need a privilege */
    (void)memory;
    (void)size;
}
