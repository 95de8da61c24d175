// Attention of prompts with heads of 512 on Hopper: the sums of ops/triton/attention.py, so its bits.
//
// A cluster of two blocks takes two tiles of 64 queries (rows times the heads that share a K/V head) of one sequence and goes through the keys by
// 256: first all their scores, 128 keys for each of two warpgroups, then the values by columns, 256 for each. A split's weights are rescaled to what
// is the maximum after it, exactly, by a power of two; so its product with 128 columns of the values is one chain of matrix instructions that is
// added to the sums before the next 128 columns start, and only one accumulator of all columns is alive. One warp fetches keys and values by
// TMA, each of the two blocks one half of them for both, through a ring of STAGES: `full` barriers count bytes, `empty` ones the warps of both
// blocks that have read.
//
// Given when compiled: PAGE, positions of a page of the K/V cache.
#include "tma.cuh"
#include "warpgroup.cuh"

constexpr int BQ = 64, BN = 64, D = 512, KEYS = 256, BLOCKS = KEYS / BN, WARPS = 8, THREADS = 128 + 32 * WARPS;
constexpr int STAGES = 4, STAGE = 32768, PANEL = 8192;  // bytes; a panel is 64 rows of 64 columns
constexpr int BOX = PAGE < 32 ? PAGE : 32, BOXES = KEYS / BOX;  // positions that are fetched together
constexpr u32 ONES = 0x3F803F80;

struct Problem {
    int heads, kv_heads, pairs;  // pairs: of tiles of a sequence
    int table_stride, span_end;  // span_end: the rows of an image see all keys ahead of it; 0: a row sees those up to its own
    int near, far;               // splits have 1 block up to `near`, 2 up to `far`, then 4
    float scale;
};

using Ring = StageRing<STAGES, STAGE>;

struct Fetcher {  // a warp; a lane fetches the positions of one box
    Ring ring;
    const int *table, kv_head, kv_heads, key_to, rank, lane;

    __device__ __forceinline__ int row_of(int k) const {  // of the lane's box among those of all pages; past the end any will do
        const int key = k + lane * BOX;
        return lane < BOXES && key < key_to ? (__ldg(table + key / PAGE) * kv_heads + kv_head) * PAGE + key % PAGE : 0;
    }
    __device__ __forceinline__ void open() const {
        barrier_wait(ring.empty(), ring.phase ^ 1);
        if (lane == 0) barrier_expect(ring.full(), STAGE);
        __syncwarp();
    }
    __device__ __forceinline__ void run(const TensorMap& keys, const TensorMap& values) {
        constexpr int PER = BOXES / BLOCKS;  // boxes of a block
        int row = row_of(0);
        for (int k = 0; k < key_to; k += KEYS) {
            const int next = row_of(k + KEYS);
#pragma unroll 1
            for (int c = 0; c < D; c += 64, ring.next()) {  // all keys of 64 columns, this block's half of the keys
                open();
                if (lane / (BOXES / 2) == rank) fetch_tile<false, true>(ring.stage() + lane * BOX * 128, keys, ring.full(), row, c);
            }
#pragma unroll 1
            for (int i = 0; i < 2 * BLOCKS; i++, ring.next()) {  // a block's values, 128 columns for each warpgroup, those of one of them
                open();
                const int column = rank * (D / 2) + i / BLOCKS * 128;
                const u32 to = ring.stage() + rank * (2 * PANEL) + lane % PER * BOX * 128;
                if (lane / PER == i % BLOCKS)
                    for (int h = 0; h < 2; h++) fetch_tile<false, true>(to + h * PANEL, values, ring.full(), row, column + h * 64);
            }
            row = next;
        }
    }
};

__device__ __forceinline__ float infinity_below() { return __uint_as_float(0xFF800000); }
__device__ __forceinline__ float known(float top) { return top == infinity_below() ? 0.f : top; }  // can be subtracted
__device__ __forceinline__ float power(float n) { return __uint_as_float(__float_as_uint(__fadd_rn(max(n, -127.f), 12583039.f)) << 23); }  // see attention.py

struct Consumer {  // a thread: rows `row` and row + 8 of the tile, columns 2 c and 2 c + 1 of each eight
    Ring ring;
    u32 query, weights, peaks, masses;  // in shared memory: [D / 64], [BLOCKS] panels; [BLOCKS, BQ], [2, BQ] floats
    int group, lane, row, c;
    int split;                   // blocks of a split: 1, 2 or 4
    int limit[2], lowest, live;  // the last key that a row sees, and that every row sees; keys from `live` on may never have been written
    float scale;
    float total[128], top[2], mass[2];  // the sums of columns by 128, the maximum, the sum of weights (of warpgroup 1)

    __device__ __forceinline__ void release(u32 empty) const {
        if (lane < 2) barrier_arrive(empty, lane);
    }

    __device__ __forceinline__ void scores(float (&s)[64]) {
        u32 read = 0;
#pragma unroll
        for (int i = 0; i < D / 64; i++, ring.next()) {
            barrier_wait(ring.full(), ring.phase);
            const u64 a = swizzled_matrix(query + i * PANEL), b = swizzled_matrix(ring.stage() + group * (STAGE / 2));
            begin_multiplying();
#pragma unroll
            for (int j = 0; j < 4; j++) multiply_shared(s, a + 2 * j, b + 2 * j, i + j);
            end_batch();
            if (i > 0) wait_batches<1>(), release(read);
            read = ring.empty();
        }
        wait_batches<0>(s), release(read);
    }

    __device__ __forceinline__ bool opens(int block) const { return block % 4 == 0 || (block % 2 ? split == 1 : split <= 2); }  // a split, of those of 256 keys

    // Scores of the blocks 2 group and 2 group + 1 from key k on become weights. before: what the split that ends with a block makes of the sums.
    __device__ __forceinline__ void weigh(float (&s)[64], float (&before)[2][BLOCKS], int k) {
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const int block = 2 * group + t, key = k + block * BN + 2 * c;
#pragma unroll
            for (int i = 32 * t; i < 32 * t + 32; i++) s[i] = __fmul_rn(s[i], scale);
            if (k + block * BN + BN - 1 > lowest)
#pragma unroll
                for (int i = 0; i < 32; i++)
                    if (key + i / 4 * 8 + i % 2 > limit[i / 2 % 2]) s[32 * t + i] = infinity_below();
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float most = infinity_below();
#pragma unroll
                for (int i = 0; i < 16; i++) most = max(most, s[32 * t + i / 2 * 4 + 2 * h + i % 2]);
                most = max(most, __shfl_xor_sync(~0u, most, 1));
                most = max(most, __shfl_xor_sync(~0u, most, 2));
                if (c == 0) put_float(peaks + (block * BQ + row + 8 * h) * 4, ceilf(most));
            }
        }
        meet(1, 32 * WARPS);
        float ref[2][2], factor[2][2];  // of the own blocks: what is subtracted, and 2 to what the split's maximum is below that of all
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float run[BLOCKS], tops[BLOCKS];  // the split's maximum up to a block, and that of all keys up to its end
#pragma unroll
            for (int i = 0; i < BLOCKS; i++) {
                run[i] = take_float(peaks + (i * BQ + row + 8 * h) * 4);
                if (!opens(i)) run[i] = max(run[i], run[i - 1]);
                tops[i] = max(top[h], run[i]), before[h][i] = power(top[h] - known(tops[i]));
                if (opens(i + 1)) top[h] = tops[i];
            }
#pragma unroll
            for (int i = BLOCKS - 2; i >= 0; i--)
                if (!opens(i + 1)) tops[i] = tops[i + 1];
#pragma unroll
            for (int t = 0; t < 2; t++) {
                const float mine = group ? run[2 + t] : run[t], most = group ? tops[2 + t] : tops[t];
                ref[t][h] = known(mine), factor[t][h] = power(mine - known(most));
            }
        }
        u32 words[2][8][2];  // [block, columns by eight, row]
        float sum[4];        // of rows `row` and row + 8, twice each
        auto add_block = [&](int t) {
#pragma unroll
            for (int j = 0; j < 8; j += 2) multiply(sum, words[t][j][0], words[t][j][1], words[t][j + 1][0], words[t][j + 1][1], ONES, ONES);
        };
#pragma unroll
        for (int t = 0; t < 2; t++) {
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float *v = s + 32 * t + 4 * j + 2 * h, r = ref[t][h], f = factor[t][h];
                    words[t][j][h] = bfloats_of(__fmul_rn(power_of_2_flushed(__fadd_rn(v[0], -r)), f), __fmul_rn(power_of_2_flushed(__fadd_rn(v[1], -r)), f));
                    put4(weights + (2 * group + t) * PANEL + (row + 8 * h) * 128 + (j ^ row & 7) * 16 + 4 * c, words[t][j][h]);
                }
            if (group == 0) {
                if (opens(t)) sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
                add_block(t);
                if (c < 2) put_float(masses + (t * BQ + row + 8 * c) * 4, c ? sum[2] : sum[0]);
            }
        }
        show_to_matrix_units();
        meet(1, 32 * WARPS);
        if (group == 0) return;
#pragma unroll
        for (int t = 0; t < BLOCKS; t++) {
            if (t < 2) {
#pragma unroll
                for (int i = 0; i < 4; i++) sum[i] = take_float(masses + (t * BQ + row + i / 2 * 8) * 4);
            } else {
                if (opens(t)) sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
                add_block(t - 2);
            }
            if (opens(t + 1))
#pragma unroll
                for (int h = 0; h < 2; h++) mass[h] = __fmaf_rn(mass[h], before[h][t], sum[2 * h]);
        }
    }

    __device__ __forceinline__ void blank(int key) const {  // this warpgroup's values from `live` on; weights of 0 times NaN would be NaN
        for (int i = threadIdx.x % 128; i < 2 * PANEL / 16; i += 128)
            if (key + i / 8 % BN >= live) put16(ring.stage() + group * (STAGE / 2) + i * 16, make_uint4(0, 0, 0, 0));
        show_to_matrix_units();
        if (group == 0) meet(2, 128);
        else meet(3, 128);
    }

    __device__ __forceinline__ void add_values(const float (&before)[2][BLOCKS], int k) {
#pragma unroll
        for (int piece = 0; piece < 2; piece++) {
            float acc[64];
#pragma unroll
            for (int block = 0; block < BLOCKS; block++, ring.next()) {  // while this warpgroup waits, the other one's products go on
                barrier_wait(ring.full(), ring.phase);
                if (k + block * BN + BN > live) blank(k + block * BN);
                const u64 a = swizzled_matrix(weights + block * PANEL), b = swizzled_matrix(ring.stage() + group * (STAGE / 2), PANEL);
                begin_multiplying();
#pragma unroll
                for (int j = 0; j < 4; j++) multiply_shared<true>(acc, a + 2 * j, b + 128 * j, j > 0 || !opens(block));
                end_batch();
                wait_batches<0>(acc), release(ring.empty());
                if (opens(block + 1)) {
#pragma unroll
                    for (int i = 0; i < 64; i++) total[64 * piece + i] = __fmaf_rn(total[64 * piece + i], before[i / 2 % 2][block], acc[i]);
                    pin<64>(total + 64 * piece);
                }
            }
        }
    }
};

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
attention_wgmma(const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values, const char* q, const int* table, const i64* positions,
                const int* row_start, u16* out, const __grid_constant__ Problem p) {
    const int warp = __shfl_sync(~0u, (int)threadIdx.x >> 5, 0), lane = threadIdx.x & 31, rank = blockIdx.x & 1, unit = blockIdx.x / 2;
    const int heads = p.heads / p.kv_heads, kv_head = unit / p.pairs % p.kv_heads, b = unit / p.pairs / p.kv_heads;
    const int first = __ldg(row_start + b), count = (__ldg(row_start + b + 1) - first) * heads;
    const int pair = (p.pairs - 1 - unit % p.pairs) * 2 * BQ, tile = pair + rank * BQ;  // the last ones first: they see most keys
    pdl_trigger();
    if (pair >= count) return pdl_wait();  // no kernel may seem done before the one ahead of it
    auto position = [&](int m) { return (int)__ldg(positions + first + min(m, count - 1) / heads); };
    const int key_to = p.span_end ? p.span_end : position(pair + 2 * BQ - 1) + 1;
    const u32 query = shared_room(), weights = query + D / 64 * PANEL;  // at a multiple of 1,024: nothing else is in shared memory
    Ring ring = {weights + BLOCKS * PANEL};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++, ring.next()) barrier_init(ring.full(), 1), barrier_init(ring.empty(), 2 * WARPS);
        show_barriers();
    }
    ring.slot = ring.phase = 0;
    cluster_sync();
    pdl_wait();
    if (warp < 4) {
        give_registers<24>();
        if (warp == 0) Fetcher{ring, table + (i64)b * p.table_stride, kv_head, p.kv_heads, key_to, rank, lane}.run(keys, values);
    } else {
        take_registers<240>();
        const int thread = threadIdx.x - 128;
        auto place = [&](int m) { return ((i64)(first + min(m, count - 1) / heads) * p.heads + kv_head * heads + m % heads) * D; };
        for (int i = thread; i < BQ * D / 8; i += 32 * WARPS) {
            const int m = i / 64, piece = i % 64;
            copy16(query + piece / 8 * PANEL + m * 128 + (piece % 8 ^ m & 7) * 16, q + (place(tile + m) + piece * 8) * 2);
        }
        Consumer me = {ring, query, weights, ring.full() + STAGES * 16};
        me.masses = me.peaks + BLOCKS * BQ * 4;
        me.group = (warp - 4) / 4, me.lane = lane, me.row = warp % 4 * 16 + lane / 4, me.c = lane % 4, me.scale = p.scale;
        for (int h = 0; h < 2; h++) {
            me.limit[h] = p.span_end ? p.span_end - 1 : position(tile + me.row + 8 * h);
            me.top[h] = infinity_below(), me.mass[h] = 0.f;
        }
        me.lowest = p.span_end ? p.span_end - 1 : position(tile), me.live = p.span_end ? p.span_end : position(tile + BQ - 1) + 1;
#pragma unroll
        for (int i = 0; i < 128; i++) me.total[i] = 0.f;
        wait_copies();
        show_to_matrix_units();
        meet(1, 32 * WARPS);
#pragma unroll 1
        for (int k = 0; k < key_to; k += KEYS) {
            float s[64], before[2][BLOCKS];
            me.split = k < p.near ? 1 : k < p.far ? 2 : 4;
            me.scores(s);
            me.weigh(s, before, k);
            me.add_values(before, k);
        }
        if (me.group == 1 && me.c < 2) put_float(me.peaks + (me.row + 8 * me.c) * 4, me.c ? me.mass[1] : me.mass[0]);
        meet(1, 32 * WARPS);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int m = tile + me.row + 8 * h;
            const float mass = take_float(me.peaks + (me.row + 8 * h) * 4);
            u32* to = (u32*)(out + place(m) + me.group * (D / 2) + 2 * me.c);
#pragma unroll
            for (int j = 0; j < 32; j++)
                if (m < count) to[4 * j] = bfloats_of(ratio(me.total[4 * j + 2 * h], mass), ratio(me.total[4 * j + 2 * h + 1], mass));
        }
    }
    __syncwarp();
    cluster_sync();  // no block exits while the other one's bytes and arrivals are in flight
}
