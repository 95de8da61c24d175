/* Every family of CPU kernels on fixed inputs: prints a name and the FNV-1a hash of all output bits for each case.
 *
 *     kernel_driver LIBRARY
 *
 * LIBRARY is one that a wheel ships, or that a compiler made here. The program needs no Python and no other file, so it runs
 * wherever the library does: tests/systems/kernels.py compares what it prints on Linux, under Wine and under qemu.
 * kernel_api.h is written by kernels.py from the library's sources: its structs, its functions, the numbers of its formats.
 */
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernel_api.h"

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
static void *open_library(const char *path) { return (void *)LoadLibraryA(path); }
static void *find_symbol(void *library, const char *name) { return (void *)GetProcAddress((HMODULE)library, name); }
#else
#include <dlfcn.h>
static void *open_library(const char *path) { return dlopen(path, RTLD_NOW); }
static void *find_symbol(void *library, const char *name) { return dlsym(library, name); }
#endif

/* ---- inputs: integers and exact sums of them, so that no library's rounding is part of them ---- */
static uint64_t random_state;
static void seed(uint64_t number) { random_state = 88172645463325252ull + 0x9E3779B97F4A7C15ull * number; }
static uint32_t random32(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 16);
}
static float normal(void) {
    float sum = 0.0f;
    for (int i = 0; i < 6; i++) sum += (float)(random32() & 0xffff) / 65536.0f - 0.5f;
    return sum;
}
static float *normals(int64_t count, float scale, float offset) {
    float *x = malloc((size_t)count * 4);
    for (int64_t i = 0; i < count; i++) x[i] = offset + scale * normal();
    return x;
}
static void *zeros(int64_t bytes) { return calloc(1, (size_t)bytes); }

/* ---- results ---- */
static uint64_t hash_state;
static int64_t not_finite;
static int cases, failures;
static void hash(const void *data, int64_t bytes) {
    const uint8_t *byte = data;
    for (int64_t i = 0; i < bytes; i++) hash_state = (hash_state ^ byte[i]) * 1099511628211ull;
}
static void hash_floats(const float *x, int64_t count) {
    for (int64_t i = 0; i < count; i++) not_finite += !isfinite(x[i]);
    hash(x, 4 * count);
}
static void report(int failed, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    if (failed || not_finite) {
        failures++;
        printf(" FAILED: %s\n", failed ? "no memory" : "a result is not finite");
    } else printf(" %016llx\n", (unsigned long long)hash_state);
    cases++;
    hash_state = 14695981039346656037ull;
    not_finite = 0;
}

enum { POOLS = 2 };
static const int pool_sizes[POOLS] = {1, 3};
static ThreadPool *pools[POOLS];

/* ---- weights ---- */
static const int row_counts[] = {1, 2, 3, 4, 5, 6, 8, 9, 13, 16, 17, 33, 40};
enum { ROW_COUNTS = sizeof row_counts / sizeof *row_counts, MAX_ROWS = 40 };

static int64_t row_bytes(int type, int k) { return (int64_t)k / file_formats[type].block * file_formats[type].bytes; }
/* Rows as a file holds them: random codes, positive scales of a thousandth */
static uint8_t *file_rows(int type, int n, int k) {
    const FileFormat *format = &file_formats[type];
    const int64_t blocks = (int64_t)n * (k / format->block);
    uint8_t *rows = malloc((size_t)(blocks * format->bytes));
    for (int64_t b = 0; b < blocks; b++) {
        uint8_t *block = rows + b * format->bytes;
        for (int i = 0; i < format->bytes; i++) block[i] = (uint8_t)random32();
        for (int i = 0; i < format->scales; i++) {
            const uint16_t scale = (uint16_t)(0x1000 + (random32() & 0x3ff)); /* a float16 from 2^-11 on */
            memcpy(block + format->scale_at[i], &scale, 2);
        }
        if (type == F_IQ1_M) for (int i = 0; i < 4; i++) block[49 + 2 * i] = (uint8_t)((block[49 + 2 * i] & 15) | (i == 3 ? 0x10 : 0));
        if (type == F_MXFP4) block[0] = (uint8_t)(116 + (random32() & 3));
    }
    return rows;
}
static Weight packed_weight(int type, int n, int k) {
    const int kind = or_file_kind(type);
    uint8_t *rows = file_rows(type, n, k);
    Weight w = {kind, n, k, or_file_table(type), zeros(or_packed_bytes(kind, n, k, 0) + 64), zeros(or_packed_bytes(kind, n, k, 1) + 64)};
    or_pack(pools[1], &w, type, 0, rows, row_bytes(type, k), n);
    free(rows);
    return w;
}
static Weight dense_weight(int dtype, int n, int k) {
    const int64_t count = (int64_t)n * k;
    float *x = normals(count, 0.05f, 0.0f);
    Weight w = {W_DENSE, n, k, dtype, x, NULL};
    if (dtype == DT_F32) return w;
    uint16_t *half = malloc((size_t)count * 2);
    for (int64_t i = 0; i < count; i++) {
        if (dtype == DT_BF16) memcpy(half + i, (char *)(x + i) + 2, 2);
        else half[i] = (uint16_t)((random32() & 0x8000) | (0x1c00 + (random32() & 0xfff)));
    }
    w.data = half;
    free(x);
    return w;
}
/* A file's type, or below zero a dense type */
static Weight weight(int type, int n, int k) { return type < 0 ? dense_weight(-1 - type, n, k) : packed_weight(type, n, k); }
static const char *type_name(int type) { return type >= 0 ? file_formats[type].name : type == -1 ? "float32" : type == -2 ? "float16" : "bfloat16"; }

static void check_products(void) {
    enum { N = 48, K = 512 };
    static float out[MAX_ROWS * N], rows[N * K];
    int64_t ids[N];
    for (int i = 0; i < N; i++) ids[i] = (i * 7 + 3) % N;
    for (int type = -3; type < FILE_FORMATS; type++) {
        seed(100 + (uint64_t)(type + 3));
        float *x = normals(MAX_ROWS * K, 1.0f, 0.0f), *bias = normals(N, 1.0f, 0.0f);
        uint8_t *file = type < 0 ? NULL : file_rows(type, N, K);
        seed(200 + (uint64_t)(type + 3));
        Weight w = weight(type, N, K);
        if (type >= 0) {
            Weight in_file = {W_FILE, N, K, type, file, NULL};
            or_rows(&in_file, ids, N, 1.5f, rows);
            hash_floats(rows, N * K);
            report(0, "file-rows/%s", type_name(type));
        }
        or_rows(&w, ids, N, 1.0f, rows);
        hash_floats(rows, N * K);
        report(0, "rows/%s", type_name(type));
        for (int p = 0; p < POOLS; p++)
            for (int i = 0; i < ROW_COUNTS; i++) {
                const int failed = or_linear(pools[p], &w, x, row_counts[i], i & 1 ? bias : NULL, out);
                hash_floats(out, (int64_t)row_counts[i] * N);
                report(failed, "linear/%s/rows%d/threads%d", type_name(type), row_counts[i], pool_sizes[p]);
            }
        free(x); free(bias); free(file);
    }
    static const int types[] = {F_Q4_K, F_Q8_0, F_Q4_0, F_Q6_K, -1, -3};
    for (int t = 0; t < 6; t++) {
        seed(300 + (uint64_t)t);
        float *x = normals(MAX_ROWS * K, 1.0f, 0.0f);
        Weight w = weight(types[t], 2 * N - 32, K);
        for (int p = 0; p < POOLS; p++)
            for (int i = 0; i < ROW_COUNTS; i++)
                for (int act = 0; act < 2; act++) {
                    const int failed = or_gated_linear(pools[p], &w, x, row_counts[i], act, out);
                    hash_floats(out, (int64_t)row_counts[i] * w.n / 2);
                    report(failed, "gated/%s/act%d/rows%d/threads%d", type_name(types[t]), act, row_counts[i], pool_sizes[p]);
                }
        Weight head = weight(types[t], N, K);
        for (int p = 0; p < POOLS; p++)
            for (int rows_now = 1; rows_now <= 9; rows_now += 4) {
                const int failed = or_logits(pools[p], &head, x, rows_now, 30.0f, out);
                hash_floats(out, (int64_t)rows_now * N);
                report(failed, "logits/%s/rows%d/threads%d", type_name(types[t]), rows_now, pool_sizes[p]);
            }
        free(x);
    }
    static const int fine[] = {F_Q8_0, F_Q6_K, F_Q5_K, F_Q4_K};
    for (int t = 0; t < 4; t++) {
        seed(400 + (uint64_t)t);
        Weight from = packed_weight(fine[t], N, K);
        Weight to = {or_file_kind(F_Q4_0), N, K, 0, zeros(or_packed_bytes(or_file_kind(F_Q4_0), N, K, 0)), zeros(or_packed_bytes(or_file_kind(F_Q4_0), N, K, 1))};
        for (int p = 0; p < POOLS; p++) {
            const int failed = or_coarse(pools[p], &from, &to);
            or_rows(&to, ids, N, 1.0f, rows);
            hash_floats(rows, N * K);
            report(failed, "coarse/%s/threads%d", type_name(fine[t]), pool_sizes[p]);
        }
        Weight taken = {from.kind, N, K, from.dtype, zeros(or_packed_bytes(from.kind, N, K, 0)), zeros(or_packed_bytes(from.kind, N, K, 1))};
        or_take(&from, ids, &taken);
        or_rows(&taken, ids, N, 1.0f, rows);
        hash_floats(rows, N * K);
        report(0, "take/%s", type_name(fine[t]));
    }
}

/* ---- adapters ---- */
/* A change of a weight with `count` matrices of `outputs` rows; next to a quantised weight in 8 bits */
static LowRank low_rank(int quantised, int k, int count, const int *outputs, int rank) {
    LowRank change = {0};
    const int padded = (rank + 15) / 16 * 16, item = quantised ? 1 : 4, columns = quantised ? (rank + 1) / 2 * 2 : rank;
    int groups = 0, first = 0;
    change.a = quantised ? packed_weight(F_Q8_0, padded * count, k) : dense_weight(DT_F32, rank * count, k);
    int64_t bytes = 0;
    for (int i = 0; i < count; i++) {
        groups += outputs[i] / 16;
        change.piece[i].end = groups;
        change.piece[i].first = first;
        change.piece[i].rank = rank;
        change.piece[i].at = bytes;
        bytes += (int64_t)outputs[i] / 16 * (64 + 16 * columns * item);
        first += quantised ? padded : rank;
    }
    uint8_t *b = zeros(bytes + 64), *at = b;
    for (int g = 0; g < groups; g++) {
        for (int i = 0; i < 16; i++, at += 4) {
            const float scale = 0.001f + 0.001f * (float)(random32() & 7);
            memcpy(at, &scale, 4);
        }
        for (int i = 0; i < 16 * columns; i++, at += item) {
            const float value = normal() * 0.3f;
            const int odd_pad = quantised && columns > rank && i / 32 == columns / 2 - 1 && i % 2;
            if (quantised) *at = odd_pad ? 0 : (uint8_t)random32();
            else memcpy(at, &value, 4);
        }
    }
    change.b = b;
    return change;
}
static void check_adapters(void) {
    enum { K = 256, GROUPS = 8 };
    static const int ranks[] = {1, 4, 8, 16, 21, 32};
    for (int quantised = 0; quantised < 2; quantised++)
        for (int i = 0; i < 6; i++) {
            seed(500 + (uint64_t)(10 * quantised + i));
            float *x = normals(MAX_ROWS * K, 1.0f, 0.0f), *before = normals(MAX_ROWS * GROUPS * 16, 1.0f, 0.0f);
            static float y[MAX_ROWS * GROUPS * 16];
            const int outputs = GROUPS * 16;
            LowRank change = low_rank(quantised, K, 1, &outputs, ranks[i]);
            for (int p = 0; p < POOLS; p++)
                for (int r = 0; r < ROW_COUNTS; r += 2) {
                    memcpy(y, before, sizeof y);
                    const int failed = or_lowrank(pools[p], &change, x, row_counts[r], GROUPS, y);
                    hash_floats(y, (int64_t)row_counts[r] * GROUPS * 16);
                    report(failed, "adapter/%s/rank%d/rows%d/threads%d", quantised ? "int8" : "float32", ranks[i], row_counts[r], pool_sizes[p]);
                }
            free(x); free(before);
        }
}

/* ---- rows, and choosing ---- */
static void check_rows(void) {
    static const int widths[] = {16, 33, 64, 96, 250, 1024};
    for (int i = 0; i < 6; i++) {
        const int n = widths[i], rows = 3;
        seed(600 + (uint64_t)i);
        float *x = normals((int64_t)rows * n, 1.0f, 0.0f), *y = normals((int64_t)rows * n, 1.0f, 0.0f), *w = normals(n, 0.1f, 1.0f);
        float *out = zeros((int64_t)rows * n * 4), *h = zeros((int64_t)rows * n * 4), *tmp = zeros((int64_t)n * 4), scale = 0.75f;
        or_rms_norm(x, rows, n, w, 1e-6f, out);
        hash_floats(out, (int64_t)rows * n);
        report(0, "norm/width%d", n);
        or_residual_norm(x, y, rows, n, w, &scale, w, 1e-6f, out, h, tmp);
        hash_floats(out, (int64_t)rows * n);
        hash_floats(h, (int64_t)rows * n);
        report(0, "residual/width%d", n);
        for (int act = 0; act < 2; act++) {
            or_act_mul(x, n, y, n, rows, n, act, out);
            hash_floats(out, (int64_t)rows * n);
            report(0, "activation/act%d/width%d", act, n);
        }
        free(x); free(y); free(w); free(out); free(h); free(tmp);
    }
    enum { POSITIONS = 64, HALF = 32 };
    static float frequency[HALF], cosine[POSITIONS * HALF], sine[POSITIONS * HALF];
    int64_t positions[POSITIONS];
    for (int i = 0; i < HALF; i++) frequency[i] = i == HALF - 1 ? 0.0f : 1.0f / (float)(1 + 3 * i * i);
    for (int i = 0; i < POSITIONS; i++) positions[i] = (int64_t)i * i * 31;
    or_angles(positions, POSITIONS, frequency, HALF, cosine, sine);
    hash_floats(cosine, POSITIONS * HALF);
    hash_floats(sine, POSITIONS * HALF);
    report(0, "angles");
}
static void check_choosing(void) {
    enum { ROWS = 4, N = 1003, TOP = 5 };
    seed(700);
    float *z = normals(ROWS * N, 4.0f, 0.0f), *changed = zeros(ROWS * N * 4), *logprobs = zeros(ROWS * (1 + 2 * TOP) * 4);
    int64_t seeds[ROWS], positions[ROWS], chosen[ROWS], top_k[ROWS], tokens[ROWS * N];
    uint8_t sampled[ROWS];
    double top_p[ROWS];
    float min_logp[ROWS];
    for (int i = 0; i < ROWS * N; i++) tokens[i] = (i * 17) % 50021;
    for (int variant = 0; variant < 12; variant++) {
        for (int i = 0; i < ROWS; i++) {
            seeds[i] = 1000 * variant + i;
            positions[i] = 17 * i + variant;
            sampled[i] = (uint8_t)((variant + i) % 3 != 0);
            top_k[i] = variant % 3 == 0 ? N : 1 + 40 * i;
            top_p[i] = variant % 2 == 0 ? 1.0 : 0.5 + 0.125 * i;
            min_logp[i] = variant % 4 == 3 ? -3.0f : -INFINITY;
        }
        for (int p = 0; p < POOLS; p++) {
            or_choose(pools[p], z, ROWS, N, seeds, positions, variant & 1 ? tokens : NULL, sampled, chosen);
            hash(chosen, sizeof chosen);
            report(0, "choose/%d/threads%d", variant, pool_sizes[p]);
            memcpy(changed, z, ROWS * N * 4);
            const int failed = or_filter(pools[p], changed, ROWS, N, top_k, top_p, min_logp);
            hash(changed, ROWS * N * 4);
            report(failed, "filter/%d/threads%d", variant, pool_sizes[p]);
        }
    }
    for (int i = 0; i < ROWS; i++) chosen[i] = 11 * i;
    for (int top = 0; top <= TOP; top += TOP)
        for (int p = 0; p < POOLS; p++) {
            or_logprobs(pools[p], z, ROWS, N, chosen, top, logprobs);
            hash_floats(logprobs, ROWS * (1 + 2 * top));
            report(0, "logprobs/top%d/threads%d", top, pool_sizes[p]);
        }
    enum { CLUSTERS = 32, SIZE = 20, K = 256, BEST = 6 };
    int32_t *hashes = zeros(CLUSTERS * SIZE * 4);
    for (int i = 0; i < CLUSTERS * SIZE; i++) hashes[i] = (int32_t)random32();
    float temperature[ROWS], *bonus = zeros(ROWS * CLUSTERS * 4), *x = normals(ROWS * K, 1.0f, 0.0f), *scores = normals(ROWS * CLUSTERS, 1.0f, 0.0f);
    float *out = zeros(ROWS * BEST * SIZE * 4);
    int64_t best[ROWS * BEST];
    for (int i = 0; i < ROWS; i++) temperature[i] = 0.5f + 0.25f * (float)i;
    static const int types[] = {F_Q8_0, F_Q4_K, -3};
    for (int p = 0; p < POOLS; p++) {
        memset(bonus, 0, ROWS * CLUSTERS * 4);
        or_cluster_bonus(pools[p], hashes, CLUSTERS, SIZE, ROWS, temperature, sampled, seeds, positions, bonus);
        hash_floats(bonus, ROWS * CLUSTERS);
        report(0, "cluster-bonus/threads%d", pool_sizes[p]);
    }
    for (int t = 0; t < 3; t++) {
        seed(750 + (uint64_t)t);
        Weight w = weight(types[t], CLUSTERS * SIZE, K);
        for (int p = 0; p < POOLS; p++) {
            const int failed = or_clustered(pools[p], &w, x, ROWS, scores, CLUSTERS, BEST, SIZE, best, out);
            hash(best, sizeof best);
            hash_floats(out, ROWS * BEST * SIZE);
            report(failed, "clustered/%s/threads%d", type_name(types[t]), pool_sizes[p]);
        }
    }
}

/* ---- experts ---- */
static Moe experts(int up, int down, int count, int hidden, int inter, int top) {
    Moe m = {.router = dense_weight(DT_F32, count, hidden), .gate_up = weight(up, count * 2 * inter, hidden), .down = weight(down, count * hidden, inter)};
    m.expert_scale = normals(count, 0.1f, 1.0f);
    m.router_norm = normals(hidden, 0.1f, 1.0f);
    m.norm = normals(hidden, 0.1f, 1.0f);
    m.post_norm = normals(hidden, 0.1f, 1.0f);
    m.post_dense_norm = normals(hidden, 0.1f, 1.0f);
    m.experts = count;
    m.top = top;
    return m;
}
static void check_experts(void) {
    enum { H = 256, INTER = 256 };
    static float out[MAX_ROWS * H];
    static const int types[][2] = {{F_Q4_K, F_Q6_K}, {F_Q4_0, F_Q8_0}, {F_MXFP4, F_MXFP4}, {-1, -1}, {-3, -3}};
    for (int t = 0; t < 5; t++) {
        seed(800 + (uint64_t)t);
        float *x = normals(MAX_ROWS * H, 1.0f, 0.0f);
        Moe m = experts(types[t][0], types[t][1], 5, H, INTER, 2);
        for (int p = 0; p < POOLS; p++)
            for (int i = 0; i < ROW_COUNTS; i++) {
                const int failed = or_moe(pools[p], &m, x, x, row_counts[i], i & 1, out);
                hash_floats(out, (int64_t)row_counts[i] * H);
                report(failed, "experts/%s/rows%d/threads%d", type_name(types[t][0]), row_counts[i], pool_sizes[p]);
            }
        free(x);
    }
}

/* ---- attention ---- */
static const char *const dtype_names[] = {"float32", "float16", "bfloat16", "int8"};
static int64_t slot_bytes(int dtype, int dim) { return dtype == DT_I8 ? dim + 4 : dim * (dtype == DT_F32 ? 4 : 2); }

/* One sequence: a text in pieces, then a tree of five rows, then its best path moved to the front */
static void attention_case(int dtype, int dim, int page, int window, int k_eq_v, int p, int pieces) {
    enum { HEADS = 4, KV = 2, TEXT = 100, ALL = TEXT + 6 };
    Spec s = {.heads = HEADS, .kv_heads = KV, .dim = dim, .writes = 1, .window = window, .k_eq_v = k_eq_v, .norm_v = k_eq_v, .scale = 0.125f, .eps = 1e-6f};
    const int width = (HEADS + (k_eq_v ? 1 : 2) * KV) * dim, half = dim / 2, pages = (ALL + page - 1) / page + 1;
    seed(900 + (uint64_t)(dtype + 10 * dim + window));
    float *qkv = normals((int64_t)ALL * width, 1.0f, 0.0f), *out = zeros((int64_t)ALL * HEADS * dim * 4);
    float *cosine = normals((int64_t)ALL * half, 0.3f, 0.0f), *sine = normals((int64_t)ALL * half, 0.3f, 0.0f);
    float *q_norm = normals(dim, 0.1f, 1.0f), *k_norm = normals(dim, 0.1f, 1.0f);
    const int64_t bytes = (int64_t)pages * page * KV * slot_bytes(dtype, dim);
    void *keys = zeros(bytes), *values = zeros(bytes);
    int64_t positions[ALL], row_seq[ALL], places[ALL];
    int32_t table[32], paths[6 * 4];
    for (int i = 0; i < pages; i++) table[i] = (i * 5 + 2) % pages;
    if (pages % 5 == 0) for (int i = 0; i < pages; i++) table[i] = pages - 1 - i;
    for (int i = 0; i < ALL; i++) { positions[i] = places[i] = i; row_seq[i] = 0; }
    static const int sizes[] = {1, 2, 5, 9, 33, 50};
    int failed = 0;
    for (int at = 0, i = 0; at < TEXT; i++) {
        const int rows = pieces ? sizes[i] : TEXT;
        int32_t starts[2] = {0, rows};
        Batch b = {.rows = rows, .seqs = 1, .page_size = page, .kv_dtype = dtype, .positions = positions + at, .row_seq = row_seq, .row_start = starts};
        b.tables[0] = table;
        b.width[0] = pages;
        b.keys = &keys;
        b.values = &values;
        or_rope_write(pools[p], &s, &b, qkv + (int64_t)at * width, cosine + (int64_t)at * half, sine + (int64_t)at * half, q_norm, k_norm);
        failed |= or_attend(pools[p], &s, &b, qkv + (int64_t)at * width, width, out + (int64_t)at * HEADS * dim);
        at += rows;
    }
    hash_floats(out, (int64_t)TEXT * HEADS * dim);
    report(failed, "attention/%s/dim%d/page%d/window%d/shared%d/%s/threads%d", dtype_names[dtype], dim, page, window, k_eq_v, pieces ? "pieces" : "whole", pool_sizes[p]);
    static const int parents[6] = {-1, 0, 0, 1, 1, 2};
    int32_t starts[2] = {0, 6};
    for (int j = 0; j < 6; j++) {
        const int parent = parents[j], depth = parent < 0 ? 0 : (int)positions[TEXT + parent] - TEXT + 1;
        positions[TEXT + j] = TEXT + depth;
        for (int i = 0; i < 4; i++) paths[j * 4 + i] = i < depth ? paths[parent * 4 + i] : j;
    }
    Batch b = {.rows = 6, .seqs = 1, .page_size = page, .kv_dtype = dtype, .positions = positions + TEXT, .row_seq = row_seq, .row_start = starts, .places = places + TEXT, .paths = paths, .path_width = 4};
    b.tables[0] = table;
    b.width[0] = pages;
    b.keys = &keys;
    b.values = &values;
    or_rope_write(pools[p], &s, &b, qkv + (int64_t)TEXT * width, cosine + (int64_t)TEXT * half, sine + (int64_t)TEXT * half, q_norm, k_norm);
    failed = or_attend(pools[p], &s, &b, qkv + (int64_t)TEXT * width, width, out + (int64_t)TEXT * HEADS * dim);
    hash_floats(out + (int64_t)TEXT * HEADS * dim, 6 * HEADS * dim);
    report(failed, "tree/%s/dim%d/page%d/window%d/shared%d/%s/threads%d", dtype_names[dtype], dim, page, window, k_eq_v, pieces ? "pieces" : "whole", pool_sizes[p]);
    const int64_t seqs[2] = {0, 0}, from[2] = {TEXT + 2, TEXT + 5}, to[2] = {TEXT + 1, TEXT + 2};
    or_move_kv(&s, &b, seqs, from, to, 2);
    positions[0] = TEXT + 3;
    starts[1] = 1;
    Batch next = {.rows = 1, .seqs = 1, .page_size = page, .kv_dtype = dtype, .positions = positions, .row_seq = row_seq, .row_start = starts, .tables = {table}, .width = {pages}, .keys = &keys, .values = &values};
    or_rope_write(pools[p], &s, &next, qkv, cosine, sine, q_norm, k_norm);
    failed = or_attend(pools[p], &s, &next, qkv, width, out);
    hash_floats(out, HEADS * dim);
    report(failed, "moved/%s/dim%d/page%d/window%d/shared%d/%s/threads%d", dtype_names[dtype], dim, page, window, k_eq_v, pieces ? "pieces" : "whole", pool_sizes[p]);
    free(qkv); free(out); free(cosine); free(sine); free(q_norm); free(k_norm); free(keys); free(values);
}
static void check_attention(void) {
    for (int dtype = DT_F32; dtype <= DT_I8; dtype++)
        for (int p = 0; p < POOLS; p++)
            for (int pieces = 0; pieces < 2; pieces++) {
                attention_case(dtype, 64, 16, 0, 0, p, pieces);
                attention_case(dtype, 128, 32, 24, 0, p, pieces);
                attention_case(dtype, 256, 16, 0, 1, p, pieces);
                if (dtype != DT_I8) attention_case(dtype, 64, 8, 24, 0, p, pieces);
            }
}

/* ---- whole models ---- */
enum { LAYERS = 3, H = 256, DIM = 32, HEADS = 8, KV_HEADS = 2, INTER = 256, PLE = 32, VOCAB = 304, SLOTS = 2, PAGE = 16, WIDTH = 6, MOST = 16 };
typedef struct {
    Stack stack;
    Layer layer[LAYERS];
    Weight head;
    const float *frequencies[2];
    int32_t halves[2];
    void *keys[LAYERS], *values[LAYERS];
    int32_t tables[2][SLOTS * WIDTH];
    int dtype;
    int64_t kv_bytes;
} Model;
typedef struct { const char *name; int type, second, with_ple, with_experts, dtype; } Kind;
static const Kind kinds[] = {
    {"Q4_K", F_Q4_K, F_Q6_K, 1, 0, 2}, {"Q4_0", F_Q4_0, F_Q8_0, 0, 1, 1}, {"float32", -1, -1, 1, 0, 0},
    {"bfloat16", -3, -3, 0, 0, 2},     {"Q5_K", F_Q5_K, F_Q2_K, 0, 0, 3},
};
enum { KINDS = sizeof kinds / sizeof *kinds };

/* Layer 0 sees everything, layer 1 a window, layer 2 reads the keys and values of layer 0. A drafter's layers write none. */
static Model *model(const Kind *kind, int drafter) {
    Model *m = zeros(sizeof *m);
    float *frequency = malloc(DIM / 2 * 4);
    for (int i = 0; i < DIM / 2; i++) frequency[i] = 1.0f / (float)(1 + i * i);
    m->frequencies[0] = m->frequencies[1] = frequency;
    m->halves[0] = m->halves[1] = DIM / 2;
    m->dtype = kind->dtype;
    m->kv_bytes = (int64_t)SLOTS * WIDTH * PAGE * KV_HEADS * slot_bytes(kind->dtype, DIM);
    for (int i = 0; i < SLOTS * WIDTH; i++) {
        m->tables[0][i] = (i * 5 + 1) % (SLOTS * WIDTH);
        m->tables[1][i] = (i * 7 + 3) % (SLOTS * WIDTH);
    }
    for (int i = 0; i < LAYERS; i++) {
        Layer *l = &m->layer[i];
        const int writes = !drafter && i < 2;
        l->attn = (Spec){.heads = HEADS, .kv_heads = KV_HEADS, .dim = DIM, .kv_layer = i == 1, .writes = writes, .group = i == 1, .window = i == 1 ? 20 : 0, .scale = 0.2f, .eps = 1e-6f};
        l->rope = i == 1;
        l->inter = INTER;
        l->qkv = weight(kind->type, (HEADS + 2 * writes * KV_HEADS) * DIM, H);
        l->out = weight(kind->second, H, HEADS * DIM);
        l->gate_up = weight(kind->type, 2 * INTER, H);
        l->down = weight(kind->second, H, INTER);
        l->attn_norm = normals(H, 0.1f, 1.0f);
        l->q_norm = normals(DIM, 0.1f, 1.0f);
        l->k_norm = normals(DIM, 0.1f, 1.0f);
        l->post_attn_norm = normals(H, 0.1f, 1.0f);
        l->mlp_norm = normals(H, 0.1f, 1.0f);
        l->post_mlp_norm = normals(H, 0.1f, 1.0f);
        l->next_norm = normals(H, 0.1f, 1.0f);
        if (i == 1) l->qkv_bias = normals(l->qkv.n, 0.1f, 0.0f);
        if (kind->with_ple && !drafter) {
            const int side = kind->type < 0 ? kind->type : F_Q8_0;
            l->ple_gate = weight(side, PLE, H);
            l->ple_out = weight(side, H, PLE);
            l->ple_post_norm = normals(H, 0.1f, 1.0f);
            l->scalar = normals(1, 0.1f, 1.0f);
        }
        if (kind->with_experts && !drafter && i == 1) l->moe = experts(kind->type, kind->second, 4, H, INTER, 2);
        if (writes) {
            m->keys[i] = zeros(m->kv_bytes);
            m->values[i] = zeros(m->kv_bytes);
        }
    }
    m->stack = (Stack){.layers = LAYERS, .hidden = H, .act = 1, .ropes = 2, .eps = 1e-6f, .embed_scale = 16.0f, .layer = m->layer, .inv_freq = m->frequencies, .rope_half = m->halves};
    m->head = weight(kind->second, VOCAB, H);
    if (drafter) {
        m->stack.pre = weight(kind->type, H, 3 * H);
        m->stack.post = weight(kind->second, H, H);
    } else m->stack.embed = m->head;
    if (kind->with_ple && !drafter) {
        const int side = kind->type < 0 ? kind->type : F_Q8_0;
        m->stack.ple = PLE;
        m->stack.ple_embed = weight(side, VOCAB, PLE * LAYERS);
        m->stack.ple_proj = weight(side, PLE * LAYERS, H);
        m->stack.ple_norm = normals(PLE, 0.1f, 1.0f);
        m->stack.ple_token_scale = 5.5f;
        m->stack.ple_proj_scale = 0.0625f;
    }
    return m;
}
static void clear(Model *m) {
    for (int i = 0; i < 2; i++) {
        memset(m->keys[i], 0, (size_t)m->kv_bytes);
        memset(m->values[i], 0, (size_t)m->kv_bytes);
    }
}
static void bind(Batch *b, Model *m) {
    b->page_size = PAGE;
    b->kv_dtype = m->dtype;
    b->keys = m->keys;
    b->values = m->values;
    for (int g = 0; g < 2; g++) {
        b->tables[g] = m->tables[g];
        b->width[g] = WIDTH;
    }
}
/* Rows of two sequences, and the arrays behind their batch */
typedef struct { int64_t ids[64], positions[64], row_seq[64]; int32_t row_start[SLOTS + 1]; } Rows;
static Batch batch_of(Model *m, Rows *rows, const int *first, const int *counts) {
    Batch b = {.seqs = SLOTS};
    bind(&b, m);
    for (int s = 0; s < SLOTS; s++) {
        rows->row_start[s] = b.rows;
        for (int i = 0; i < counts[s]; i++, b.rows++) {
            rows->ids[b.rows] = (first[s] + i) * 37 % VOCAB;
            rows->positions[b.rows] = first[s] + i;
            rows->row_seq[b.rows] = s;
        }
    }
    rows->row_start[SLOTS] = b.rows;
    b.ids = rows->ids;
    b.positions = rows->positions;
    b.row_seq = rows->row_seq;
    b.row_start = rows->row_start;
    return b;
}
static const int text_first[SLOTS] = {0, 0}, text_rows[SLOTS] = {26, 11};

static void hash_kv(const Model *m) {
    for (int i = 0; i < 2; i++) {
        hash(m->keys[i], m->kv_bytes);
        hash(m->values[i], m->kv_bytes);
    }
}
/* The text of both sequences. hidden [37, H] */
static int read_text(ThreadPool *pool, Model *m, float *hidden, float *const *taps) {
    Rows rows;
    clear(m);
    Call call = {.stack = &m->stack, .batch = batch_of(m, &rows, text_first, text_rows), .hidden = hidden, .taps = taps};
    return or_forward(pool, &call);
}
static void check_models(void) {
    static float hidden[64 * H], tap[64 * H];
    for (int k = 0; k < KINDS; k++) {
        seed(1000 + (uint64_t)k);
        Model *m = model(&kinds[k], 0);
        LowRank *table = zeros((LAYERS * ADAPTED_WEIGHTS + 1) * (int64_t)sizeof *table);
        const int qkv[3] = {HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM}, down[1] = {H};
        const LowRank *tables[1] = {table};
        table[0] = low_rank(kinds[k].type >= 0, H, 3, qkv, 8);
        table[ADAPTED_WEIGHTS + ADAPTED_DOWN] = low_rank(kinds[k].type >= 0, INTER, 1, down, 16);
        for (int p = 0; p < POOLS; p++) {
            float *taps[LAYERS] = {NULL, tap, NULL};
            int failed = read_text(pools[p], m, hidden, taps);
            hash_floats(hidden, 37 * H);
            hash_floats(tap, 37 * H);
            hash_kv(m);
            report(failed, "forward/%s/text/threads%d", kinds[k].name, pool_sizes[p]);
            for (int step = 0; step < 3; step++) {
                Rows rows, few_rows;
                const int first[SLOTS] = {26 + 4 * step, 11 + 2 * step}, counts[SLOTS] = {4, step ? 2 : 9};
                int32_t of[64];
                Call call = {.stack = &m->stack, .batch = batch_of(m, &rows, first, counts), .hidden = hidden};
                for (int i = 0; i < call.batch.rows; i++) of[i] = i % 3 ? 0 : -1;
                if (step == 1) call.adapters = (Adapters){tables, of, 1};
                int64_t wanted[SLOTS];
                if (step == 2) { /* only the last row of each */
                    const int last_first[SLOTS] = {first[0] + counts[0] - 1, first[1] + counts[1] - 1}, ones[SLOTS] = {1, 1};
                    call.few = batch_of(m, &few_rows, last_first, ones);
                    for (int s = 0; s < SLOTS; s++) wanted[s] = rows.row_start[s + 1] - 1;
                    call.wanted = wanted;
                    call.narrow = 1;
                }
                failed = or_forward(pools[p], &call);
                hash_floats(hidden, (int64_t)(step == 2 ? SLOTS : call.batch.rows) * H);
                hash_kv(m);
                report(failed, "forward/%s/%s/threads%d", kinds[k].name, step == 0 ? "rows" : step == 1 ? "adapters" : "narrow", pool_sizes[p]);
            }
        }
    }
}

/* ---- drafts, and decode cycles ---- */
enum { STEPS = 4, CLUSTERS = 16, CLUSTER_SIZE = VOCAB / CLUSTERS, STREAMS = 1 };
/* A drafter whose layers read the target's keys and values: `from` 0 a whole head, 1 one in clusters */
static Draft drafter_of(const Kind *kind, Model *target, int clustered) {
    Model *m = model(kind, 1);
    static int64_t cluster_ids[VOCAB];
    static int32_t hashes[VOCAB];
    Draft d = {.table = target->head, .head = m->head, .table_scale = 16.0f, .tied = 1, .unit = clustered};
    d.call.stack = &m->stack;
    bind(&d.call.batch, target);
    if (!clustered) return d;
    for (int i = 0; i < VOCAB; i++) {
        cluster_ids[i] = i * 5 % VOCAB; /* 5 and 304 have no common divisor */
        hashes[i] = (int32_t)random32();
    }
    d.clusters = CLUSTERS;
    d.size = CLUSTER_SIZE;
    d.top = 4;
    d.centroids = weight(kind->second, CLUSTERS, H);
    d.cluster_ids = cluster_ids;
    d.hashes = hashes;
    return d;
}
static const double trust[16] = {0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.55, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99};

static void check_drafts(void) {
    static float hidden[64 * H];
    for (int k = 0; k < KINDS; k++)
        for (int clustered = 0; clustered < 2; clustered++) {
            seed(1100 + (uint64_t)(2 * k + clustered));
            Model *m = model(&kinds[k], 0);
            Draft d = drafter_of(&kinds[k], m, clustered);
            float *start = normals(SLOTS * H, 1.0f, 0.0f), *taps = normals(SLOTS * H, 1.0f, 0.0f);
            for (int variant = 0; variant < 3; variant++)
                for (int p = 0; p < POOLS; p++) {
                    int failed = read_text(pools[p], m, hidden, NULL);
                    int64_t last[SLOTS] = {5, 77}, seeds[SLOTS] = {3, 4}, position[SLOTS] = {27, 12}, out[SLOTS * STEPS] = {0}, lengths[SLOTS];
                    int64_t at[SLOTS] = {25, 10}, row_seq[SLOTS] = {0, 1}, top_k[SLOTS] = {20, VOCAB};
                    int64_t runner_ups[SLOTS * STEPS * 2] = {0};
                    int32_t row_start[SLOTS + 1] = {0, 1, 2};
                    float temperature[SLOTS] = {variant ? 0.7f : 1.0f, 1.0f}, confidence[SLOTS * STEPS] = {0}, runner_up_confidence[SLOTS * STEPS * 2] = {0};
                    float min_logp[SLOTS] = {-INFINITY, -4.0f}, state[SLOTS * H];
                    double stop[SLOTS] = {0.0, 0.0}, drop[SLOTS] = {0.0, 0.0}, top_p[SLOTS] = {0.9, 1.0};
                    uint8_t sampled[SLOTS] = {variant > 0, variant > 1};
                    Draft now = d;
                    now.call.batch.rows = now.call.batch.seqs = SLOTS;
                    now.call.batch.positions = at;
                    now.call.batch.row_seq = row_seq;
                    now.call.batch.row_start = row_start;
                    now.call.batch.rope_shift = 1;
                    now.steps = STEPS;
                    now.last = last; now.start = start; now.taps = taps; now.temperature = temperature; now.sampled = sampled;
                    now.seed = seeds; now.position = position; now.out = out; now.confidence = confidence; now.lengths = lengths; now.state = state;
                    if (variant == 1) { now.top_k = top_k; now.top_p = top_p; now.min_logp = min_logp; now.stop = stop; now.drop = drop; now.trust = trust; }
                    if (variant == 2) { now.runner_ups = runner_ups; now.runner_up_confidence = runner_up_confidence; }
                    failed |= or_draft(pools[p], &now);
                    hash(out, sizeof out);
                    hash(lengths, sizeof lengths);
                    hash_floats(confidence, SLOTS * STEPS);
                    hash(runner_ups, sizeof runner_ups);
                    hash_floats(state, SLOTS * H);
                    report(failed, "draft/%s/%s/%s/threads%d", kinds[k].name, clustered ? "clusters" : "head", variant == 0 ? "greedy" : variant == 1 ? "filtered" : "runner-ups", pool_sizes[p]);
                }
        }
    for (int k = 0; k < KINDS; k++) { /* a draft model */
        seed(1200 + (uint64_t)k);
        Model *m = model(&kinds[k], 0);
        for (int variant = 0; variant < 2; variant++)
            for (int p = 0; p < POOLS; p++) {
                Rows rows;
                clear(m);
                int64_t listed[160], seen[3] = {300, 301, 7}, seeds[SLOTS] = {8, 9}, position[SLOTS] = {26, 11}, out[SLOTS * STEPS] = {0}, lengths[SLOTS];
                int32_t seen_start[SLOTS + 1] = {0, 2, 3};
                float temperature[SLOTS] = {0.8f, 1.0f}, confidence[SLOTS * STEPS] = {0};
                double none[SLOTS] = {0.0, 0.0};
                uint8_t sampled[SLOTS] = {(uint8_t)variant, 0};
                for (int i = 0; i < 160; i++) listed[i] = i;
                Chain c = {.head = m->head, .all = m->head, .listed = listed, .seen = seen, .seen_start = seen_start, .cap = variant ? 30.0f : 0.0f, .steps = STEPS};
                c.head.n = 160;
                c.call = (Call){.stack = &m->stack, .batch = batch_of(m, &rows, text_first, text_rows)};
                c.temperature = temperature; c.sampled = sampled; c.seed = seeds; c.position = position; c.out = out; c.confidence = confidence;
                c.lengths = lengths;
                c.stop = c.drop = none;
                c.trust = variant ? trust : NULL;
                const int failed = or_draft_model_steps(pools[p], &c);
                hash(out, sizeof out);
                hash(lengths, sizeof lengths);
                hash_floats(confidence, SLOTS * STEPS);
                hash_kv(m);
                report(failed, "draft-model/%s/%s/threads%d", kinds[k].name, variant ? "sampled" : "greedy", pool_sizes[p]);
            }
    }
}

typedef struct { const char *name; int proposer, nodes, sampled, likely, filtered; } CycleKind;
static const CycleKind cycle_kinds[] = {
    {"given", 0, 0, 0, -1, 0}, {"drafted", 1, 0, 0, -1, 0}, {"sampled", 1, 0, 1, -1, 0}, {"filtered", 1, 0, 1, 3, 1}, {"tree", 1, 8, 0, -1, 0}, {"block", 2, 0, 0, -1, 0},
};
static void check_cycles(void) {
    enum { CYCLES = 4, FEATURES = (1 + STREAMS) * H, LIKELY = 3, ROWS = SLOTS * (MOST + 1), KEPT = 64 };
    static float hidden[64 * H], tap[64 * H], features[SLOTS * FEATURES], z[ROWS * VOCAB], row_logprobs[ROWS * (1 + 2 * LIKELY)];
    static float logprobs[SLOTS * (MOST + 1) * (1 + 2 * LIKELY)], confidence[SLOTS * MOST], states[SLOTS * KEPT * STREAMS * H];
    static int64_t chosen[ROWS], tokens[SLOTS * (MOST + 1)], draft[SLOTS * MOST], parents[SLOTS * MOST], path[SLOTS * MOST], following[SLOTS * KEPT];
    static double prices[SLOTS * (MOST + 1)];
    for (int k = 0; k < KINDS; k++) {
        seed(1300 + (uint64_t)k);
        Model *m = model(&kinds[k], 0);
        Draft d = drafter_of(&kinds[k], m, k & 1);
        Model *block = model(&kinds[k], 0); /* a block drafter: layers with k and v apart */
        for (int i = 0; i < LAYERS; i++) {
            Layer *l = &block->layer[i];
            l->attn.writes = 1;
            l->attn.kv_layer = i;
            l->attn.group = 0;
            l->attn.window = 0;
            l->attn.bidirectional = 1;
            l->rope = 0;
            l->qkv = weight(kinds[k].type, HEADS * DIM, H);
            l->kv = weight(kinds[k].type, 2 * KV_HEADS * DIM, H);
            l->qkv_bias = NULL;
            l->moe = (Moe){0};
            block->keys[i] = zeros(block->kv_bytes);
            block->values[i] = zeros(block->kv_bytes);
        }
        block->stack.ple = 0;
        BlockNet net = {.fc = weight(kinds[k].type, H, STREAMS * H), .head = m->head, .hidden_norm = normals(H, 0.1f, 1.0f), .mask = 3, .streams = STREAMS, .first = 1, .block = 0, .scale = 1.0f};
        net.call.stack = &block->stack;
        bind(&net.call.batch, block);
        net.call.batch.tables[1] = block->tables[1];
        for (unsigned which = 0; which < sizeof cycle_kinds / sizeof *cycle_kinds; which++) {
            const CycleKind *kind = &cycle_kinds[which];
            for (int p = 0; p < POOLS; p++) {
                float *taps[LAYERS] = {NULL, tap, NULL}, *streams[STREAMS] = {tap};
                int failed = read_text(pools[p], m, hidden, taps);
                int64_t slot[SLOTS] = {1, 0}, last_token[SLOTS] = {5, 77}, position[SLOTS] = {11, 26}, max_draft[SLOTS] = {STEPS, 3}, max_nodes[SLOTS];
                int64_t proposer[SLOTS], host_draft[SLOTS * STEPS], has_prices[SLOTS] = {0, 0}, adapter[SLOTS] = {-1, -1}, num_logprobs[SLOTS];
                int64_t num_tokens[SLOTS], num_drafted[SLOTS], num_confidences[SLOTS], seeds[SLOTS] = {21, 22}, top_k[SLOTS] = {30, 5}, span[2 * SLOTS] = {0};
                double stop[SLOTS] = {0.0, 0.0}, drop[SLOTS] = {0.0, 0.0}, draft_steps[SLOTS], top_p[SLOTS] = {0.9, 0.8};
                float temperature[SLOTS] = {kind->sampled ? 0.7f : 1.0f, 1.0f}, min_logp[SLOTS] = {-INFINITY, -INFINITY};
                uint8_t sampled[SLOTS] = {(uint8_t)kind->sampled, 0};
                int32_t block_taps[STREAMS] = {0};
                for (int i = 0; i < SLOTS; i++) {
                    max_nodes[i] = kind->nodes;
                    proposer[i] = kind->proposer;
                    num_logprobs[i] = kind->likely;
                }
                const int last_row[SLOTS] = {25, 36};
                for (int s = 0; s < SLOTS; s++) {
                    memcpy(features + s * FEATURES, hidden + last_row[s] * H, H * 4);
                    memcpy(features + s * FEATURES + H, tap + last_row[s] * H, H * 4);
                }
                Unread unread = {states, following, span, KEPT};
                if (kind->proposer == 2) { /* it reads the text's states */
                    Rows rows;
                    for (int i = 0; i < LAYERS; i++) {
                        memset(block->keys[i], 0, (size_t)block->kv_bytes);
                        memset(block->values[i], 0, (size_t)block->kv_bytes);
                    }
                    Batch b = batch_of(block, &rows, text_first, text_rows);
                    const float *const sources[STREAMS] = {tap};
                    failed |= or_block_context(pools[p], &net, &b, sources, rows.ids);
                    for (int i = 0; i < LAYERS; i++) hash(block->keys[i], block->kv_bytes);
                    for (int i = 0; i < LAYERS; i++) hash(block->values[i], block->kv_bytes);
                    report(failed, "block-context/%s/threads%d", kinds[k].name, pool_sizes[p]);
                    span[0] = 26;
                    span[2] = 11;
                }
                Cycle c = {.head = m->head, .draft = kind->proposer == 1 ? &d : NULL, .taps = streams, .features = features, .z = z, .temperature = temperature, .sampled = sampled, .seed = seeds, .chosen = chosen};
                c.call = (Call){.stack = &m->stack, .hidden = hidden, .taps = taps};
                bind(&c.call.batch, m);
                c.in = (DecodeInputs){slot, last_token, position, max_draft, max_nodes, proposer, host_draft, stop, drop, has_prices, prices, adapter, num_logprobs, STEPS};
                c.out = (DecodeOutputs){tokens, num_tokens, num_drafted, draft, parents, path, draft_steps, confidence, num_confidences, logprobs};
                if (kind->filtered) { c.top_k = top_k; c.top_p = top_p; c.min_logp = min_logp; }
                c.trust = trust;
                c.row_logprobs = row_logprobs;
                c.seqs = SLOTS; c.most = MOST; c.streams = STREAMS; c.shift = 1; c.cap = k & 1 ? 30.0f : 0.0f; c.likely = kind->likely;
                if (kind->proposer == 2) { c.block = &net; c.unread = &unread; c.block_taps = block_taps; }
                for (int cycle = 0; cycle < CYCLES; cycle++) {
                    for (int i = 0; i < SLOTS * STEPS; i++) host_draft[i] = (cycle * 61 + i * 13) % VOCAB;
                    failed |= or_decode_step(pools[p], &c);
                    hash(num_tokens, sizeof num_tokens);
                    hash(num_drafted, sizeof num_drafted);
                    for (int s = 0; s < SLOTS; s++) {
                        hash(tokens + s * (MOST + 1), 8 * num_tokens[s]);
                        hash(draft + s * MOST, 8 * num_drafted[s]);
                        for (int64_t j = 0; kind->likely >= 0 && j < num_tokens[s]; j++) hash_floats(logprobs + (s * (MOST + 1) + j) * (1 + 2 * LIKELY), 1 + 2 * LIKELY);
                        last_token[s] = tokens[s * (MOST + 1) + num_tokens[s] - 1];
                        position[s] += num_tokens[s];
                    }
                    hash_floats(features, SLOTS * FEATURES);
                    report(failed, "cycle/%s/%s/%d/threads%d", kinds[k].name, kind->name, cycle, pool_sizes[p]);
                }
                if (kind->proposer == 2) {
                    const int64_t both[SLOTS] = {0, 1};
                    failed |= or_read_slots(pools[p], &net, &unread, both, SLOTS);
                    for (int i = 0; i < LAYERS; i++) hash(block->keys[i], block->kv_bytes);
                    report(failed, "read-slots/%s/threads%d", kinds[k].name, pool_sizes[p]);
                }
            }
        }
    }
}

/* Pools come and go, and their members sleep and wake */
static void check_pools(void) {
    enum { K = 256, N = 64 };
    static float out[8 * N];
    seed(1400);
    float *x = normals(8 * K, 1.0f, 0.0f);
    Weight w = packed_weight(F_Q4_0, N, K);
    for (int size = 1; size <= 8; size++) {
        ThreadPool *pool = or_pool_new(size);
        int failed = pool == NULL || or_pool_size(pool) != size;
        for (int i = 0; !failed && i < 200; i++) failed |= or_linear(pool, &w, x, 8, NULL, out);
        if (pool) or_pool_free(pool);
        hash_floats(out, 8 * N);
        report(failed, "pool/%d", size);
    }
    free(x);
}

static void random_grids(void) {
    static uint8_t points[6][2048 * 8];
    const uint8_t *grids[6];
    seed(1);
    for (int g = 0; g < 6; g++) {
        for (int i = 0; i < 2048 * 8; i++) points[g][i] = (uint8_t)(random32() % (g < 4 ? 3 : 8));
        grids[g] = points[g];
    }
    or_grids(grids);
}

int main(int count, char **arguments) {
    if (count != 2) {
        fprintf(stderr, "usage: kernel_driver LIBRARY\n");
        return 2;
    }
    void *library = open_library(arguments[1]);
    if (library == NULL) {
        fprintf(stderr, "%s does not load\n", arguments[1]);
        return 2;
    }
    const char *lacking = find_functions(library, find_symbol);
    if (lacking != NULL) {
        fprintf(stderr, "%s has no %s\n", arguments[1], lacking);
        return 2;
    }
    for (int i = 0; i < STRUCTS; i++)
        if (or_sizes(i) != struct_sizes[i]) {
            fprintf(stderr, "struct %d has %d bytes there and %d here\n", i, or_sizes(i), struct_sizes[i]);
            return 2;
        }
    hash_state = 14695981039346656037ull;
    for (int p = 0; p < POOLS; p++) pools[p] = or_pool_new(pool_sizes[p]);
    random_grids();
    check_products();
    check_adapters();
    check_rows();
    check_choosing();
    check_experts();
    check_attention();
    check_models();
    check_drafts();
    check_cycles();
    check_pools();
    for (int p = 0; p < POOLS; p++) or_pool_free(pools[p]);
    fprintf(stderr, "%d cases, %d failures\n", cases, failures);
    return failures ? 1 : 0;
}
