// y = x · wᵀ for 1 to 8 tokens and weights of four to eight bits: the layout, the arithmetic and the order of sums of ops/triton/quant.py, so its bits.
//
// A warp takes 16 rows of the weight over one span of its columns, a unit. While it multiplies a chunk the next one is in flight into the
// warp's own shared memory, 16 bytes per lane, and every lane reads back what it fetched itself (except scales): no warp waits for
// another, and 24 of them on an SM hide each other's waiting. Units are distributed evenly, one to each warp in Gemma's 31B. x lies in
// shared memory once per block, in the order in which lanes multiply it.
//
// The matrix instruction multiplies 16 columns at once, in any order, so a lane takes four neighbours (8 bytes of x) where the instruction's
// own order would give it two and two: loads are twice as wide. On Hopper the bits are the same.
//
// Given when compiled: TOKENS, WARPS, ACT (units.cuh); VALUES (of values.cuh), HALF, PER, ZERO_POINT, FACTOR (`Coded` of codes.cuh); GATED;
// RANK (lora.cuh).
#include "units.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
wna16_gemv(const char* x, u16* out, float* part, int* semaphores, const __grid_constant__ Weights weights, const __grid_constant__ Shape p,
           const __grid_constant__ Lora lora) {
    typedef Coded<VALUES, HALF, PER, ZERO_POINT, FACTOR> Code;
    typedef Ring<Code, OneProduct<GATED>> Chunks;
    const u32 base = shared_room();
    const int index = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const Lane lane = {index, index >> 2, index & 3};
    const Deal deal(p);
    const int units = deal.count();
    if (units == 0) return;
    OneProduct<GATED> source = {p, deal, weights, warp, units};
    Chunks ring(source, base + warp * Chunks::BYTES, lane);
    ring.start();  // no kernel writes weights: the first ones are loaded while the previous kernel still runs
    Range range = {0};
    if constexpr (RANK > 0) {
        range = range_at(lora, index);
        if (warp < units) prefetch_unit_b<GATED>(lora, range, p, deal, warp, lane);
    }
    wait_for_x(lora);
    pdl_trigger();  // all blocks have their place, so the next kernel takes none from them; what x is made of is complete
    const X<Code> columns(p, deal, base + WARPS * Chunks::BYTES);
    columns.lay(p, x);
    __syncthreads();
    multiply_units<Code, GATED>(ring, p, deal, columns, {out, part, semaphores, lora}, range);
}
