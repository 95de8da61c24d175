/* A thread pool that enters a parallel region together: the caller is member 0.
 *
 * Members wait for a region by spinning briefly, then asleep, so an idle engine uses no CPU. Inside a region they
 * meet at `pool_barrier`, which also resets the shared task counter of `pool_next`. After a fork the child starts a
 * pool of its own.
 *
 * With fewer free cores than members, two of them may share one while other processes keep the rest busy. A member that
 * spins there delays the one it waits for, so members record their core: one that waits for a member on its own core
 * yields at once.
 *
 * `pool_claim` distributes even work: every member has its own share, takes pieces of it in order and, when it is done,
 * pieces of the others' shares. Cores of one speed keep to their own memory; a slow or busy core gets help and does not
 * set the pace.
 */
#pragma once
#include "platform.h"
#include "vec.h"

typedef struct ThreadPool ThreadPool;
typedef void (*Region)(ThreadPool *pool, int me, void *job);

#define SPIN 50000 /* about a millisecond: between two regions of a cycle the host is back sooner */

typedef struct { void *at; size_t size; } Scratch;
#define HUGE_PAGE (2u << 20)

typedef struct {
    _Alignas(64) _Atomic uint64_t taken; /* phase << 32 | pieces of the share that are taken; of another phase: none */
    atomic_int core;                  /* where the member ran when it last arrived at a barrier */
} Claim;

struct ThreadPool {
    int size;
    Claim *claims;                  /* [members] */
    _Alignas(64) atomic_int task;   /* the next unclaimed task of the phase */
    _Alignas(64) atomic_int ready;  /* members that have done the phase's first part (pool_ready) */
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_int phase;
    atomic_int asleep;              /* members that sleep at a barrier, or are about to */
    _Alignas(64) atomic_int round;  /* counts regions: a change starts one */
    _Alignas(64) atomic_int sleepers;
    Region region;
    void *job;
    int stop;
    int owner;                      /* the process that started the members */
    OsMutex use, lock;              /* use: one region at a time; lock + wake: sleeping members */
    OsCondition wake;
    OsThread *threads;
    Scratch scratch;                  /* grows, is never shared between regions */
};

INLINE void cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static _Thread_local int pool_me; /* a caller is member 0, of whichever pool */
static _Thread_local int pool_wary; /* so often this member does not yield to another on its core */

/* Does another member run on this core? */
static int pool_crowded(const ThreadPool *t, int core) {
    for (int i = 0; i < t->size; i++)
        if (i != pool_me && core >= 0 && atomic_load_explicit(&t->claims[i].core, memory_order_relaxed) == core)
            return 1;
    return 0;
}

/* Until the phase is another; returns now and then without reason. */
static void barrier_sleep(ThreadPool *t, int phase) {
    atomic_fetch_add(&t->asleep, 1);
    os_wait_on(&t->phase, phase);
    atomic_fetch_sub(&t->asleep, 1);
}
static void barrier_wake(ThreadPool *t) {
    atomic_thread_fence(memory_order_seq_cst); /* a member about to sleep sees the new phase, or is seen here */
    if (atomic_load(&t->asleep)) os_wake_all(&t->phase, t->size);
}

#define GLANCE 64     /* spins before a waiting member checks whether the other is on its core */
#define PATIENT 20000 /* spins, a third of a millisecond, after which another member must have lost its core */
#define WARY 256      /* waits */

/* Let a member on our own core run. By yielding: so the system sees that both want to run, and moves one to a core that
 * has come free. But a third one on this core is let run, too, and for milliseconds: where that happened we go to sleep
 * instead, for a while. */
static void barrier_give_way(ThreadPool *t, int phase) {
    if (pool_wary) { pool_wary--; barrier_sleep(t, phase); return; }
    const double began = os_seconds();
    os_yield();
    if (os_seconds() - began > 5e-4) pool_wary = WARY;
}

/* All members meet. The last to arrive resets the counters. */
static void pool_barrier(ThreadPool *t) {
    if (t->size == 1) { atomic_store_explicit(&t->task, 0, memory_order_relaxed); return; }
    int phase = atomic_load_explicit(&t->phase, memory_order_relaxed), core = os_core(), spins = 0, crowded = 0;
    if (atomic_load_explicit(&t->claims[pool_me].core, memory_order_relaxed) != core)
        atomic_store_explicit(&t->claims[pool_me].core, core, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&t->arrived, 1, memory_order_acq_rel) == t->size - 1) {
        atomic_store_explicit(&t->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&t->task, 0, memory_order_relaxed);
        atomic_store_explicit(&t->ready, 0, memory_order_relaxed);
        atomic_store_explicit(&t->phase, phase + 1, memory_order_release);
        barrier_wake(t);
        return;
    }
    while (atomic_load_explicit(&t->phase, memory_order_acquire) == phase) {
        if (++spins == GLANCE) crowded = pool_crowded(t, core);
        if (crowded) barrier_give_way(t, phase);
        else if (spins < PATIENT) cpu_relax();
        else barrier_sleep(t, phase);
    }
}

/* A phase whose later part reads what all members write in its first part: every member says once when it has done the
 * first, and waits before it begins to read. In between it does what needs neither. */
INLINE void pool_ready(ThreadPool *t) { atomic_fetch_add_explicit(&t->ready, 1, memory_order_release); }
INLINE void pool_await(ThreadPool *t) {
    if (t->size == 1) return;
    for (int spins = 0; atomic_load_explicit(&t->ready, memory_order_acquire) < t->size; spins++) {
        if (spins < GLANCE || (spins < PATIENT && !pool_crowded(t, os_core()))) cpu_relax();
        else os_yield();
    }
}

/* Claim `grain` tasks of `count`; false when there are none left. */
INLINE int pool_next(ThreadPool *t, int count, int grain, int *lo, int *hi) {
    int at = atomic_fetch_add_explicit(&t->task, grain, memory_order_relaxed);
    if (at >= count) return 0;
    *lo = at;
    *hi = at + grain < count ? at + grain : count;
    return 1;
}

/* A piece of member `of`'s share, which has `count`: its number, or -1 when all are taken. One kind of work between two
 * barriers. */
INLINE int pool_claim(ThreadPool *t, int of, int count) {
    const uint64_t phase = (uint64_t)(unsigned)atomic_load_explicit(&t->phase, memory_order_relaxed) << 32;
    uint64_t seen = atomic_load_explicit(&t->claims[of].taken, memory_order_relaxed);
    for (;;) {
        const uint64_t at = seen >> 32 == phase >> 32 ? seen & 0xffffffffu : 0;
        if (at >= (uint64_t)count) return -1;
        if (atomic_compare_exchange_weak_explicit(&t->claims[of].taken, &seen, phase | (at + 1), memory_order_relaxed,
                                                  memory_order_relaxed))
            return (int)at;
    }
}

/* A fixed share of `count` items for member `me`. */
INLINE void pool_share(const ThreadPool *t, int me, int count, int *lo, int *hi) {
    *lo = (int)((int64_t)count * me / t->size);
    *hi = (int)((int64_t)count * (me + 1) / t->size);
}

#if ISA_AMX
__attribute__((visibility("hidden"))) void tiles_release(void); /* in tiles.c */
#endif
/* A member that waits holds no tiles: the system would save 8 KB of them whenever it switches threads. */
INLINE void region_left(void) {
#if ISA_AMX
    tiles_release();
#endif
}

typedef struct { ThreadPool *pool; int me; } Member;

static OsThreadResult pool_member(void *arg) {
    Member m = *(Member *)arg;
    free(arg);
    ThreadPool *t = m.pool;
    int seen = 0;
    pool_me = m.me;
    os_thread_prefer_speed();
    for (;;) {
        for (int spins = 0; atomic_load_explicit(&t->round, memory_order_acquire) == seen && spins < SPIN; spins++) {
            if (spins == GLANCE && seen && pool_crowded(t, os_core()))
                break; /* before the first round the pool is being made */
            cpu_relax();
        }
        if (atomic_load_explicit(&t->round, memory_order_acquire) == seen) {
            os_mutex_lock(&t->lock);
            atomic_fetch_add(&t->sleepers, 1);
            while (atomic_load(&t->round) == seen) os_condition_wait(&t->wake, &t->lock);
            atomic_fetch_sub(&t->sleepers, 1);
            os_mutex_unlock(&t->lock);
        }
        seen++;
        if (t->stop) return 0;
        t->region(t, m.me, t->job);
        region_left();
        pool_barrier(t); /* the caller may not leave before everyone has */
    }
}

static void pool_start(ThreadPool *t) {
    t->owner = os_process();
    atomic_store(&t->task, 0); atomic_store(&t->ready, 0); atomic_store(&t->arrived, 0); atomic_store(&t->phase, 0);
    atomic_store(&t->round, 0); atomic_store(&t->sleepers, 0); atomic_store(&t->asleep, 0);
    for (int i = 0; i < t->size; i++) {
        atomic_store(&t->claims[i].taken, ~0ull);
        atomic_store(&t->claims[i].core, -1);
    }
    t->stop = 0;
    os_mutex_init(&t->use);
    os_mutex_init(&t->lock);
    os_condition_init(&t->wake);
    int wanted = t->size;
    t->size = 1;
    for (int i = 1; i < wanted; i++) {
        Member *m = malloc(sizeof *m);
        if (!m) break;
        m->pool = t;
        m->me = i;
        if (os_thread_start(&t->threads[i], pool_member, m)) { free(m); break; }
        t->size++;
    }
}

SHARED void pool_begin(ThreadPool *t) {
    if (t->owner != os_process()) pool_start(t); /* forked: the old members did not come along */
    os_mutex_lock(&t->use);
}

SHARED void pool_end(ThreadPool *t) { os_mutex_unlock(&t->use); }

/* Between pool_begin and pool_end. */
SHARED void pool_run(ThreadPool *t, Region region, void *job) {
    atomic_store_explicit(&t->task, 0, memory_order_relaxed);
    if (t->size == 1) {
        region(t, 0, job);
        region_left();
        return;
    }
    t->region = region;
    t->job = job;
    atomic_fetch_add(&t->round, 1);
    if (atomic_load(&t->sleepers)) {
        os_mutex_lock(&t->lock);
        os_condition_wake_all(&t->wake);
        os_mutex_unlock(&t->lock);
    }
    region(t, 0, job);
    region_left();
    pool_barrier(t);
}

/* At least `size` bytes, 64-byte aligned, contents lost; valid until the next call. */
SHARED void *pool_scratch(ThreadPool *t, size_t size) {
    if (size > t->scratch.size || !t->scratch.at) { /* nothing is a size as well: NULL means no memory */
        os_free(t->scratch.at);
        size = size ? size : 1;
        size = (size + (size >> 2) + HUGE_PAGE - 1) & ~(size_t)(HUGE_PAGE - 1);
        t->scratch.at = os_allocate(HUGE_PAGE, size);
        if (t->scratch.at) os_prefer_huge_pages(t->scratch.at, size);
        t->scratch.size = t->scratch.at ? size : 0;
    }
    return t->scratch.at;
}
