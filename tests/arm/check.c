/* The kernels on a processor that this machine does not have: compiled by a cross compiler, run under qemu (make test-arm).
 *
 * Every format against its definition (a file's row decoded and multiplied in double precision), every row bitwise the same in any
 * company and with any number of threads; norms, experts and attention likewise.
 */
#include <stdio.h>

#include "../../src/outrider/ops/cpu/chunks.c"
#include "../../src/outrider/ops/cpu/kernels.c"
#include "../../src/outrider/ops/cpu/tiles.c"

static uint64_t state = 88172645463325252ull;
static uint32_t random32(void) { state ^= state << 13; state ^= state >> 7; state ^= state << 17; return (uint32_t)(state >> 16); }
static float normal(void) { float s = 0; for (int i = 0; i < 6; i++) s += (float)(random32() & 0xffff) / 65536.0f - 0.5f; return s; }
static int failures = 0;
static void expect(int good, const char *what, int kind, int rows) {
    if (!good) { failures++; printf("FAILED: %s (format %d, %d rows)\n", what, kind, rows); }
}

/* Random rows as a file would hold them, with sane scales */
static int blocks_of_row(int type, int k) { return k / 32 / k_blocks(file_types[type].kind); }
static void random_rows(int type, int n, int k, uint8_t *to) {
    const size_t bytes = file_types[type].bytes, blocks = (size_t)n * blocks_of_row(type, k);
    const int at = type == F_Q6_K ? 208 : type == F_Q3_K ? 108 : type == F_Q2_K ? 80 : type == F_TQ1_0 ? 52 : type == F_TQ2_0 ? 64 : 0;
    for (size_t b = 0; b < blocks; b++) {
        uint8_t *p = to + b * bytes;
        for (size_t i = 0; i < bytes; i++) p[i] = (uint8_t)random32();
        const uint16_t d = float_half(0.001f + 0.01f * (float)(random32() & 255) / 256.0f), m = float_half(-0.05f);
        if (type == F_IQ1_M) for (int i = 0; i < 4; i++) p[49 + 2 * i] = (uint8_t)((p[49 + 2 * i] & 15) | ((d >> 4 * i) & 15) << 4);
        else if (type == F_MXFP4) p[0] = (uint8_t)(118 + (random32() & 3));
        else memcpy(p + at, &d, 2);
        if (k_min(file_types[type].kind) && at != 52 && at != 64) memcpy(p + at + 2, type == F_Q4_1 || type == F_Q5_1 ? &m : &d, 2);
    }
}
static void random_grids(void) { /* points of the right number and range */
    static uint8_t points[GRIDS][2048 * 8];
    const uint8_t *grids[GRIDS];
    for (int g = 0; g < GRIDS; g++) {
        for (int i = 0; i < 2048 * 8; i++) points[g][i] = (uint8_t)(random32() % (g < G_IQ3_XXS ? 3 : 8));
        grids[g] = points[g];
    }
    or_grids(grids);
}
static Weight packed(ThreadPool *pool, int type, int n, int k, const uint8_t *rows) {
    const int kind = or_file_kind(type);
    Weight w = {kind, n, k, or_file_table(type), calloc(1, (size_t)or_packed_bytes(kind, n, k, 0)), calloc(1, (size_t)or_packed_bytes(kind, n, k, 1))};
    or_pack(pool, &w, type, 0, rows, (int64_t)blocks_of_row(type, k) * file_types[type].bytes, n);
    return w;
}

enum { N = 48, K = 512, R = 11 };

static void check_format(ThreadPool *one, ThreadPool *three, int type) {
    static float x[R * K], all[R * N], alone[N], row[K], same[K];
    static int8_t q[K];
    static int16_t wide[K];
    static Blk blk[K / 32];
    const QActs acts = {.k = K, .q = q, .blk = blk, .wide = wide};
    uint8_t *file = malloc((size_t)N * blocks_of_row(type, K) * file_types[type].bytes);
    random_rows(type, N, K, file);
    Weight w = packed(three, type, N, K, file), in_file = {W_FILE, N, K, type, file, NULL};
    for (int i = 0; i < R * K; i++) x[i] = normal();
    or_linear(one, &w, x, R, NULL, all);
    for (int n = 0; n < N; n++) {
        weight_row(&w, n, row);
        weight_row(&in_file, n, same);
        expect(!memcmp(row, same, sizeof row), "a packed row is the file's", type, 1);
        for (int r = 0; r < R; r++) {
            double want = 0, reach = 0;
            quantize_row(x + r * K, K, &acts, 0);
            for (int i = 0; i < K; i++) {
                const double term = (double)row[i] * q[i] * blk[i / 32].d;
                want += term;
                reach += fabs(term);
            }
            expect(fabs(all[r * N + n] - want) <= 2e-6 * reach + 1e-6, "a product is right", type, R);
        }
    }
    for (int rows = 1; rows <= R; rows++) {
        static float some[R * N];
        or_linear(three, &w, x, rows, NULL, some);
        expect(!memcmp(some, all, (size_t)rows * N * 4), "rows in other company have the same bits", type, rows);
    }
    for (int r = 0; r < R; r++) {
        or_linear(one, &w, x + r * K, 1, NULL, alone);
        expect(!memcmp(alone, all + r * N, sizeof alone), "a row alone has the same bits", type, 1);
    }
    free(file);
}

static void check_experts(ThreadPool *one, ThreadPool *three) {
    enum { E = 5, H = 256, I = 64, TOP = 2 };
    static float x[R * H], all[R * H], some[R * H], router[E * H], scale[E];
    uint8_t *up = malloc((size_t)E * 2 * I * H), *down = malloc((size_t)E * H * I);
    random_rows(F_Q4_K, E * 2 * I, H, up);
    random_rows(F_Q4_0, E * H, I, down);
    for (int i = 0; i < R * H; i++) x[i] = normal();
    for (int i = 0; i < E * H; i++) router[i] = normal() * 0.1f;
    for (int i = 0; i < E; i++) scale[i] = 1.0f;
    Moe m = {{W_DENSE, E, H, DT_F32, router, NULL}, packed(one, F_Q4_K, E * 2 * I, H, up), packed(one, F_Q4_0, E * H, I, down),
             NULL, NULL, scale, NULL, NULL, E, TOP};
    or_moe(one, &m, x, x, R, ACT_GELU, all);
    for (int rows = 1; rows <= R; rows++) {
        or_moe(three, &m, x, x, rows, ACT_GELU, some);
        expect(!memcmp(some, all, (size_t)rows * H * 4), "experts: rows in other company have the same bits", 0, rows);
    }
    free(up); free(down);
}

/* One layer, one sequence of 150 positions in pages of 16: all at once, and in pieces */
static void check_attention(ThreadPool *one, ThreadPool *three, int dtype) {
    enum { HEADS = 4, KV = 2, D = 64, POS = 150, PAGE = 16, PAGES = 10, ROWS = (HEADS + 2 * KV) * D };
    Spec s = {HEADS, KV, D, 0, 1, 0, 0, 0, 0, 0.125f, 1e-6f};
    static float qkv[POS * ROWS], copy[POS * ROWS], all[POS * HEADS * D], some[POS * HEADS * D], cos[POS * D / 2], sin[POS * D / 2], freq[D / 2];
    static int64_t positions[POS], row_seq[POS];
    static int32_t table[PAGES];
    const size_t bytes = (size_t)PAGES * PAGE * KV * D * 4;
    for (int i = 0; i < POS * ROWS; i++) qkv[i] = normal();
    for (int i = 0; i < PAGES; i++) table[i] = (i * 7 + 3) % PAGES;
    for (int i = 0; i < POS; i++) positions[i] = i, row_seq[i] = 0;
    for (int i = 0; i < D / 2; i++) freq[i] = powf(10000.0f, -2.0f * (float)i / D);
    or_angles(positions, POS, freq, D / 2, cos, sin);
    for (int pass = 0; pass < 2; pass++) {
        void *keys = calloc(1, bytes), *values = calloc(1, bytes);
        const void *at_keys[1] = {keys}, *at_values[1] = {values};
        const int sizes[] = {1, 2, 5, 9, 33, 100, 0};
        for (int at = 0, i = 0; at < POS; i++) {
            const int rows = pass ? sizes[i] : POS;
            int32_t starts[2] = {0, rows};
            Batch b = {.rows = rows, .seqs = 1, .page_size = PAGE, .kv_dtype = dtype, .positions = positions + at, .row_seq = row_seq, .row_start = starts};
            b.tables[0] = table;
            b.width[0] = PAGES;
            b.keys = (void *)at_keys;
            b.values = (void *)at_values;
            memcpy(copy, qkv + at * ROWS, (size_t)rows * ROWS * 4);
            or_rope_write(three, &s, &b, copy, cos + at * D / 2, sin + at * D / 2, NULL, NULL);
            or_attend(pass ? three : one, &s, &b, copy, ROWS, (pass ? some : all) + at * HEADS * D);
            at += rows;
        }
        free(keys); free(values);
    }
    expect(!memcmp(some, all, sizeof all), "attention in pieces has the same bits", dtype, POS);
    for (int i = 0; i < POS * HEADS * D; i++) expect(isfinite(all[i]) && fabsf(all[i]) < 10.0f, "attention is finite", dtype, i);
}

int main(void) {
    ThreadPool *one = or_pool_new(1), *three = or_pool_new(3);
    random_grids();
    for (int type = F_Q4_1; type <= F_MXFP4; type++) check_format(one, three, type);
    check_experts(one, three);
    check_attention(one, three, DT_F16);
    check_attention(one, three, DT_F32);
    static float x[64], y[64];
    for (int i = 0; i < 64; i++) x[i] = -80.0f + 2.5f * (float)i;
    for (int i = 0; i < 64; i += 16) vf_store(y + i, vf_exp(vf_load(x + i)));
    for (int i = 0; i < 64; i++) expect(fabs(y[i] / exp(x[i]) - 1.0) < 3e-7, "exponentials", 0, i);
    if (!failures) printf("all formats, experts and attention are right\n");
    return failures ? 1 : 0;
}
