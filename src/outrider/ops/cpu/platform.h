/* What the kernels need of the operating system; each system's file defines all of it:
 *
 *   OsThread, OsThreadResult     os_thread_start (0: started), os_thread_join, os_thread_prefer_speed
 *   OsMutex, OsCondition         os_mutex_*, os_condition_*
 *   os_wait_on, os_wake_all      sleep while an atomic int has a value (may return early), and wake its sleepers
 *   os_yield, os_core            let another thread run; the core of this thread, -1 if unknown
 *   os_process, os_seconds       this process's number; a monotonic clock
 *   os_allocate, os_free         aligned memory
 *   os_prefer_huge_pages         advice about memory that has not been written yet
 */
#pragma once
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#if defined(_WIN32)
#include "platform_windows.h"
#elif defined(__APPLE__)
#include "platform_darwin.h"
#elif defined(__linux__)
#include "platform_linux.h"
#else
#include "platform_posix.h"
#include "platform_plain.h"
#endif
