// Attention of few queries under a window, over paged K/V in bfloat16: the splits, the arithmetic and the order of sums of
// ops/triton/attention.py, so its bits.
//
// A block takes one split of the keys of one K/V head, for up to 16 queries (rows times the heads that share it). What earlier passes wrote
// of its keys and values is on its way into shared memory before the kernel ahead is done, all at once; queries, and K/V of this pass, come
// when it is. A warp scores eight keys and sums an eighth of the columns of the values. Splits leave their sums in `part` for a second
// kernel, which adds them up.
//
// TURN: queries come as the product gave them, and K/V of this pass too: a block norms and rotates its queries itself, and the one whose
// split holds rows of this pass does their keys and values, for itself and, where the row's first query is its own, for the cache.
//
// The matrix instruction multiplies 16 columns at once, in any order: a lane takes four neighbouring columns of queries and keys, and of the
// values.
//
// Given when compiled: D (256), KEYS (of a split, which is a block), HEADS, KV_HEADS, PAGE_KEYS, WINDOW; TURN, and with it Q_NORM, K_NORM,
// K_EQ_V, NORM_V, KEEPS (`AttnSpec`).
#include "heads.cuh"

struct Shape {
    int slots, tiles, table_stride, q_stride;
    float scale, eps;
    i64 page_stride;
};

constexpr int WARPS = 8, QUERIES = 16, GROUP = HEADS / KV_HEADS, LINE = 2 * D, EACH = KEYS / WARPS, COLUMNS = D / WARPS;
static_assert(COLUMNS == 32, "a lane has four neighbouring columns of the values");
#define NONE __int_as_float(0xFF800000)  // less than every score

// Where things lie in shared memory, turned by their row so that no two lanes of a read meet in a bank: bytes of a key, a value or a query, and
// two keys' weights of a query.
__device__ __forceinline__ u32 place(u32 base, int row, int byte) { return base + row * LINE + (byte ^ ((row ^ row >> 2) & 3) << 5); }
__device__ __forceinline__ u32 weight_at(u32 base, int query, int key) { return base + query * 128 + (2 * key ^ (query & 3) << 5 ^ (query & 4) << 2); }

extern "C" __global__ void __launch_bounds__(WARPS * 32, 3)
few_queries(const u16* q, const float* cosines, const float* sines, const float* q_norm, const float* k_norm, u16* keys, u16* values,
            const int* tables, const i64* positions, const int* row_start, float* part, float* part_ml, const __grid_constant__ Shape p) {
    const u32 at_k = shared_room(), at_v = at_k + KEYS * LINE, at_q = at_v + KEYS * LINE, at_p = at_q + QUERIES * LINE, at_top = at_p + QUERIES * 128;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
    const int slot = blockIdx.x % p.slots, rest = blockIdx.x / p.slots, kv_head = rest % KV_HEADS, tile = rest / KV_HEADS % p.tiles;
    const int b = rest / KV_HEADS / p.tiles;
    let_next_kernel_in();

    // Positions and tables stand since before the pass.
    const int first = row_start[b], count = (row_start[b + 1] - first) * GROUP, begin = tile * QUERIES;
    int lowest = 0, highest = -1, base = 0;
    if (begin < count) {
        lowest = highest = (int)positions[first + min(begin + (lane & 15), count - 1) / GROUP];
        base = (int)positions[first];
        for (int with = 1; with < QUERIES; with *= 2) {
            lowest = min(lowest, __shfl_xor_sync(~0u, lowest, with));
            highest = max(highest, __shfl_xor_sync(~0u, highest, with));
        }
    }
    const int from = (max(base - WINDOW + 1, 0) / KEYS + slot) * KEYS, to = min(highest + 1, from + KEYS);
    const bool works = from < to && from + KEYS > lowest - WINDOW + 1;
    const int since = max(from, lowest - WINDOW + 1);  // keys before have no weight, and their pages may be others' by now
    const int stands = min(base, to);  // keys from here on are of this pass
    const int* table = tables + (i64)b * p.table_stride;
    auto line_of = [&](int key) { return (i64)table[key / PAGE_KEYS] * p.page_stride + (kv_head * PAGE_KEYS + key % PAGE_KEYS) * D; };
    auto query_of = [&](int m) { return (i64)(first + m / GROUP) * HEADS + kv_head * GROUP + m % GROUP; };  // among all rows' heads

    // This warp's keys or values from `since` up to `until`: EACH neighbours, in one page.
    const int mine = from + warp * EACH;
    const i64 line = works && mine < to ? line_of(mine) : 0;
    auto fetch = [&](u32 room, const u16* of, int since, int until) {
        for (int i = 0; i < EACH; i++)
            if (mine + i >= since && mine + i < until) copy16(place(room, warp * EACH + i, lane * 16), (const char*)(of + line + i * D) + lane * 16);
    };
    if (works) {
        fetch(at_k, keys, since, stands);
        commit_copies();
        fetch(at_v, values, since, stands);
        for (int i = 0; i < EACH; i++)  // weights of keys that are not there are 0, but what lies there may be no number
            if (mine + i < since || mine + i >= to) put16(place(at_v, warp * EACH + i, lane * 16), make_uint4(0, 0, 0, 0));
        commit_copies();
    }
    wait_for_kernel_ahead();
    if (!works) return;

    if constexpr (TURN) {
        // A head to each warp, two at a time: queries first, then keys and values of this pass.
        const int asked = min(count - begin, QUERIES), fresh = KEEPS ? to - max(stands, from) : 0, jobs = asked + 2 * fresh;
        for (int job0 = warp; job0 < jobs; job0 += 2 * WARPS) {
            Head heads[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int job = job0 + i * WARPS;
                if (job >= jobs) continue;
                const bool query = job < asked, key = !query && job < asked + fresh;
                const int row = query ? first + (begin + job) / GROUP : first + max(stands, from) + (job - asked) % fresh - base;
                const int head = query ? kv_head * GROUP + (begin + job) % GROUP : HEADS + (key || K_EQ_V ? 0 : KV_HEADS) + kv_head;
                const float* weight = query && Q_NORM ? q_norm : key && K_NORM ? k_norm : nullptr;
                const i64 angles = (i64)row * (D / 2);
                heads[i].load(q + (i64)row * p.q_stride + head * D, query || key ? cosines + angles : nullptr, sines + angles, weight, lane);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int job = job0 + i * WARPS;
                if (job >= jobs) continue;
                const bool query = job < asked, key = !query && job < asked + fresh, weighted = query ? Q_NORM : key && K_NORM;
                if (weighted || (!query && !key && NORM_V)) heads[i].norm(weighted, p.eps);
                if (query || key) heads[i].turn();
                const int at = query ? 0 : max(stands, from) + (job - asked) % fresh, row = query ? job : at - from;
                const u32 room = query ? at_q : key ? at_k : at_v;
                put8(place(room, row, 8 * lane), heads[i].a[0], heads[i].a[1]);
                put8(place(room, row, D + 8 * lane), heads[i].b[0], heads[i].b[1]);
                if (!query && (at - base) * GROUP / QUERIES == tile) {
                    uint2* cache = (uint2*)((key ? keys : values) + line_of(at)) + lane;
                    __stcg(cache, make_uint2(heads[i].a[0], heads[i].a[1]));
                    __stcg(cache + D / 8, make_uint2(heads[i].b[0], heads[i].b[1]));
                }
            }
        }
    } else {
        uint4 x[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int m = begin + warp + i * WARPS;
            if (m < count) x[i] = __ldcg((const uint4*)(q + query_of(m) * D) + lane);
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (begin + warp + i * WARPS < count) put16(place(at_q, warp + i * WARPS, lane * 16), x[i]);
    }
    if (stands < to && !(TURN && KEEPS)) {
        fetch(at_k, keys, max(stands, since), to);
        fetch(at_v, values, max(stands, since), to);
        wait_copies();
    }
    wait_copies_but<1>();
    __syncthreads();

    // Scores of eight keys: s[0], s[1] of query g and keys 2 c, 2 c + 1; s[2], s[3] of query g + 8.
    float s[4] = {0.f, 0.f, 0.f, 0.f};
    if (warp < KEYS / 8) {
#pragma unroll
        for (int x = 8 * c; x < LINE; x += 32) {
            const uint2 low = take8(place(at_q, g, x)), high = take8(place(at_q, g + 8, x)), key = take8(place(at_k, warp * 8 + g, x));
            multiply(s, low.x, high.x, low.y, high.y, key.x, key.y);
        }
        for (int i = 0; i < 2; i++) {
            const int at = (int)positions[first + min(begin + g + 8 * i, count - 1) / GROUP];
            for (int j = 0; j < 2; j++) {
                const int key = from + warp * 8 + 2 * c + j;
                s[2 * i + j] = key <= at && key > at - WINDOW ? __fmul_rn(s[2 * i + j], p.scale) : NONE;
            }
            float most = max(s[2 * i], s[2 * i + 1]);
            for (int with = 1; with < 4; with *= 2) most = max(most, __shfl_xor_sync(~0u, most, with));
            if (c == 0) put_float(at_top + (warp * QUERIES + g + 8 * i) * 4, most);
        }
    }
    __syncthreads();
    float top[2];
    for (int i = 0; i < 2; i++) {
        top[i] = NONE;
        for (int w = 0; w < KEYS / 8; w++) top[i] = max(top[i], take_float(at_top + (w * QUERIES + g + 8 * i) * 4));
        top[i] = ceilf(top[i]);
        const float ref = top[i] == NONE ? 0.f : top[i];
        const float low = power_of_2_flushed(__fsub_rn(s[2 * i], ref)), high = power_of_2_flushed(__fsub_rn(s[2 * i + 1], ref));
        if (warp < KEYS / 8) put4(weight_at(at_p, g + 8 * i, warp * 8 + 2 * c), bfloat_of(low) | (u32)bfloat_of(high) << 16);
    }
    wait_copies();
    __syncthreads();

    float acc[4][4] = {}, total[4] = {};
#pragma unroll
    for (int k = 0; k < KEYS; k += 16) {
        u32 a[4];  // of queries g and g + 8, keys 2 c and 2 c + 1, then those 8 further on
        uint2 v[4];
        for (int i = 0; i < 4; i++) a[i] = take4(weight_at(at_p, g + (i & 1) * 8, k + (i >> 1) * 8 + 2 * c));
        for (int i = 0; i < 4; i++) v[i] = take8(place(at_v, k + (i >> 1) * 8 + 2 * c + (i & 1), warp * 2 * COLUMNS + 8 * g));
        multiply(total, a[0], a[1], a[2], a[3], 0x3F803F80, 0x3F803F80);
        for (int t = 0; t < 4; t++) {  // a column: two neighbouring keys in a register
            u32 x[4];
            for (int i = 0; i < 4; i++) x[i] = t < 2 ? v[i].x : v[i].y;
            const u32 b0 = t % 2 ? x[0] >> 16 | (x[1] & 0xFFFF0000) : (x[0] & 0xFFFF) | x[1] << 16;
            const u32 b1 = t % 2 ? x[2] >> 16 | (x[3] & 0xFFFF0000) : (x[2] & 0xFFFF) | x[3] << 16;
            multiply(acc[t], a[0], a[1], a[2], a[3], b0, b1);
        }
    }
    for (int i = 0; i < 2; i++) {
        const int m = begin + g + 8 * i;
        if (m >= count) continue;
        const i64 sums = query_of(m) * p.slots + slot;
        float4* columns = (float4*)(part + sums * D + warp * COLUMNS + 8 * c);
        for (int j = 2 * i; j < 2 * i + 2; j++) __stcg(columns + j % 2, make_float4(acc[0][j], acc[1][j], acc[2][j], acc[3][j]));
        if (warp == 0 && c == 0) __stcg((float2*)part_ml + sums, make_float2(top[i], total[2 * i]));
    }
}
