/* The CPU library with what benchmarks/cpu_scaling.py measures beside it: plain reading, barriers, products alone. */
int probe_phase_ahead;
#define PHASE_AHEAD probe_phase_ahead
#include "kernels.c"

typedef struct { const char *from; int64_t bytes; int hint; int64_t ahead; } ReadJob;

#define READ_LOOP(FETCH)                                                                          \
    for (const char *at = from; at < to; at += 256) {                                             \
        FETCH;                                                                                    \
        for (int i = 0; i < 4; i++) sum[i] = vi_add(sum[i], vi_load((const int32_t *)at + 16 * i)); \
    }
#define FETCH_LINES(hint) for (int i = 0; i < 4; i++) __builtin_prefetch(at + job->ahead + 64 * i, 0, hint)

static void read_region(ThreadPool *pool, int me, void *arg) {
    const ReadJob *job = arg;
    int lo, hi;
    pool_share(pool, me, (int)(job->bytes / 4096), &lo, &hi);
    const char *from = job->from + (int64_t)lo * 4096, *to = job->from + (int64_t)hi * 4096;
    vi sum[4] = {vi_set(0), vi_set(0), vi_set(0), vi_set(0)};
    switch (job->hint) {
    case 0: READ_LOOP(FETCH_LINES(0)) break; /* past all caches */
    case 1: READ_LOOP(FETCH_LINES(1)) break;
    case 2: READ_LOOP(FETCH_LINES(2)) break;
    case 3: READ_LOOP(FETCH_LINES(3)) break;
    default: READ_LOOP((void)0)
    }
    volatile float used = vf_sum(vi_to_float(vi_add(vi_add(sum[0], sum[1]), vi_add(sum[2], sum[3]))));
    (void)used;
}
void probe_read(ThreadPool *pool, const char *from, int64_t bytes, int hint, int64_t ahead) {
    ReadJob job = {from, bytes, hint, ahead};
    pool_begin(pool);
    pool_run(pool, read_region, &job);
    pool_end(pool);
}

static void barrier_region(ThreadPool *pool, int me, void *count) {
    (void)me;
    for (int i = 0; i < *(int *)count; i++) pool_barrier(pool);
}
void probe_barriers(ThreadPool *pool, int count) {
    pool_begin(pool);
    pool_run(pool, barrier_region, &count);
    pool_end(pool);
}

typedef struct { const Weight *const *w; int count, rows, phases; char *acts; float *out; } ProductsJob;

static void products_region(ThreadPool *pool, int me, void *arg) {
    const ProductsJob *job = arg;
    Changes changes;
    changes.base = -1;
    for (int i = 0; i < job->count; i++) {
        const Weight *w = job->w[i];
        const QActs a = acts_at(job->acts, job->rows, w->k, job->out, w->k);
        const Epilogue to = {.how = TO_STORE, .out = job->out, .ldo = w->n};
        if (job->phases) {
            product_phase(pool, me, w, &a, job->rows, &to);
            if (job->phases > 1 && i + 1 < job->count) product_ahead(pool, me, job->w[i + 1], 0, 1, job->rows);
            pool_barrier(pool);
            continue;
        }
        int lo, hi;
        pool_share(pool, me, w_groups(w), &lo, &hi);
        product_units(w, &a, &to, w->n, 1, lo, hi, 0, job->rows, &changes);
    }
}
/* Products of weights with rows of zeros, one after another. phases: 0: members do not wait for each other; 1: a barrier behind each; 2: and
 * they fetch the next one's weights before it. acts and out: room for the largest, zero. */
void probe_products(ThreadPool *pool, const Weight *const *w, int count, int rows, int phases, char *acts, float *out) {
    ProductsJob job = {w, count, rows, phases, acts, out};
    pool_begin(pool);
    pool_run(pool, products_region, &job);
    pool_end(pool);
}
