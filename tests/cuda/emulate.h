// The words of CUDA C++ and the functions of ops/cuda/device.cuh for a machine without a GPU: included ahead of a kernel's source, it makes
// that source a program for the CPU, with the launch below. How threads run is in machine.cpp.
//
// Numbers: every result that IEEE defines is the GPU's; powers of 2, quotients and roots are rounded to nearest; matrices: products.h.
#include "interface.h"
#define OUTRIDER_DEVICE  // device.cuh has nothing to say after this

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __shared__ static __attribute__((section("emulated_shared"), used))
#define __align__(n) alignas(n)

extern "C" {
float fmaf(float, float, float) noexcept;
float exp2f(float) noexcept;
float ldexpf(float, int) noexcept;
float sqrtf(float) noexcept;
double sqrt(double) noexcept;
float ceilf(float) noexcept;
float floorf(float) noexcept;
}

struct uint3 { u32 x, y, z; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define threadIdx (uint3{machine::thread_index(), 0, 0})
#define blockIdx (uint3{machine::block_index(), 0, 0})
#define blockDim (uint3{machine::threads_of_block(), 1, 1})
#define gridDim (uint3{machine::blocks_of_grid(), 1, 1})

inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline u32 max(u32 a, u32 b) { return a > b ? a : b; }
inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline float min(float a, float b) { return __builtin_fminf(a, b); }

template <class To, class From> inline To as(From v) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    __builtin_memcpy(&to, &v, sizeof to);
    return to;
}
inline float __uint_as_float(u32 v) { return as<float>(v); }
inline u32 __float_as_uint(float v) { return as<u32>(v); }
inline float __int_as_float(int v) { return as<float>(v); }
inline int __float_as_int(float v) { return as<int>(v); }
inline u32 __umulhi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
inline u32 __byte_perm(u32 a, u32 b, u32 which) {
    const u64 both = (u64)b << 32 | a;
    u32 v = 0;
    for (int i = 0; i < 4; i++) {
        const u32 s = which >> 4 * i & 15, byte = both >> 8 * (s & 7) & 0xFF;
        v |= (s & 8 ? (byte & 0x80 ? 0xFF : 0) : byte) << 8 * i;
    }
    return v;
}
inline int __popc(u32 v) {  // by hand: the compiler's own is a function of a library that is not linked
    v -= v >> 1 & 0x55555555, v = (v & 0x33333333) + (v >> 2 & 0x33333333);
    return (v + (v >> 4) & 0x0F0F0F0F) * 0x01010101u >> 24;
}
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __clz(int v) { return v ? __builtin_clz(v) : 32; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __frcp_rn(float a) { return 1.f / a; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

// Where threads meet.

inline void __syncthreads() { machine::meet_block(0, 0, "__syncthreads"); }

inline void whole_warp(u32 mask) {
    if (mask != ~0u) machine::fail("only whole warps meet here, and the mask is %08x", mask);
}

inline void __syncwarp(u32 mask = ~0u) {
    whole_warp(mask);
    machine::meet_warp("__syncwarp", nullptr, false, nullptr);
}

template <class T, class From> inline T exchange(const char* what, T v, From from) {  // from(lane): whose value it gets
    T both[2] = {v, v};  // given, taken
    int source[1] = {from(machine::thread_index() % 32)};
    void* operands[2] = {both, source};
    machine::meet_warp(what, operands, true, [](machine::Warp& w) {
        for (int i = 0; i < machine::lanes_of(w); i++) {
            void** mine = (void**)machine::operands_of(w, i);
            const int other = *(int*)mine[1];
            if (other >= 0 && other < machine::lanes_of(w)) ((T*)mine[0])[1] = ((T*)((void**)machine::operands_of(w, other))[0])[0];
        }
    });
    return both[1];
}
template <class T> inline T __shfl_sync(u32 mask, T v, int from, int width = 32) {
    whole_warp(mask);
    return exchange("__shfl_sync", v, [=](int lane) { return (lane & ~(width - 1)) + (from & (width - 1)); });
}
template <class T> inline T __shfl_xor_sync(u32 mask, T v, int with, int width = 32) {
    whole_warp(mask);
    return exchange("__shfl_xor_sync", v, [=](int lane) { return (lane ^ with) < (lane & ~(width - 1)) + width ? lane ^ with : lane; });
}
template <class T> inline T __shfl_down_sync(u32 mask, T v, u32 by, int width = 32) {
    whole_warp(mask);
    return exchange("__shfl_down_sync", v, [=](int lane) { return (lane & (width - 1)) + (int)by < width ? lane + (int)by : lane; });
}
template <class T> inline T __shfl_up_sync(u32 mask, T v, u32 by, int width = 32) {
    whole_warp(mask);
    return exchange("__shfl_up_sync", v, [=](int lane) { return (lane & (width - 1)) >= (int)by ? lane - (int)by : lane; });
}
inline u32 __ballot_sync(u32 mask, int v) {
    whole_warp(mask);
    u32 mine = v != 0;
    machine::meet_warp("__ballot_sync", &mine, true, [](machine::Warp& w) {
        u32 all = 0;
        for (int i = 0; i < machine::lanes_of(w); i++) all |= *(u32*)machine::operands_of(w, i) << i;
        for (int i = 0; i < machine::lanes_of(w); i++) *(u32*)machine::operands_of(w, i) = all;
    });
    return mine;
}
template <class T, class F> inline T reduced(const char* what, u32 mask, T v, F f) {
    whole_warp(mask);
    struct Operands { T v; F f; } mine = {v, f};
    machine::meet_warp(what, &mine, true, [](machine::Warp& w) {
        Operands* first = (Operands*)machine::operands_of(w, 0);
        for (int i = 1; i < machine::lanes_of(w); i++) first->v = first->f(first->v, ((Operands*)machine::operands_of(w, i))->v);
        for (int i = 1; i < machine::lanes_of(w); i++) ((Operands*)machine::operands_of(w, i))->v = first->v;
    });
    return mine.v;
}
template <class T> inline T __reduce_max_sync(u32 mask, T v) {
    return reduced("__reduce_max_sync", mask, v, [](T a, T b) { return a > b ? a : b; });
}
template <class T> inline T __reduce_min_sync(u32 mask, T v) {
    return reduced("__reduce_min_sync", mask, v, [](T a, T b) { return a < b ? a : b; });
}
template <class T> inline T __reduce_add_sync(u32 mask, T v) {
    return reduced("__reduce_add_sync", mask, v, [](T a, T b) { return (T)(a + b); });
}
template <class T> inline T __reduce_or_sync(u32 mask, T v) {
    return reduced("__reduce_or_sync", mask, v, [](T a, T b) { return (T)(a | b); });
}
inline int __any_sync(u32 mask, int v) { return __ballot_sync(mask, v) != 0; }
inline int __all_sync(u32 mask, int v) { return __ballot_sync(mask, !v) == 0; }

// Global memory.

template <class T> inline T __ldcg(const T* at) {
    T v;
    machine::read_global(at, &v, sizeof v);
    return v;
}
template <class T> inline T __ldg(const T* at) { return __ldcg(at); }
template <class T> inline T __ldcs(const T* at) { return __ldcg(at); }
template <class T> inline void __stcg(T* at, T v) { machine::write_global(at, &v, sizeof v); }
template <class T> inline void __stcs(T* at, T v) { __stcg(at, v); }
template <class T> inline T atomicAdd(T* at, T v) {
    T before, after;
    machine::begin_adding(at, &before, sizeof v);
    after = before + v;
    machine::end_adding(at, &after, sizeof v);
    return before;
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(u32) { machine::spin(); }

// device.cuh: arithmetic.

inline u16 bfloat_of(float v) {
    const u32 b = __float_as_uint(v);
    if ((b & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
    return (u16)((b + 0x7FFF + (b >> 16 & 1)) >> 16);
}

inline float float_of_bfloat(u32 h) { return __uint_as_float(h << 16); }

inline u16 rounded_once(float a, float b, float c) {  // a · b + c to bfloat16: the product is exact, and what gets lost leaves an odd last digit
    const double p = (double)a * b, s = p + c, t = s - p, lost = (p - (s - t)) + (c - t);
    u64 d = as<u64>(s);
    if (lost != 0 && __builtin_isfinite(s) && !(d & 1)) d += (lost > 0) == (s > 0) ? 1 : -1;
    const double exact = as<double>(d);
    float f = (float)exact;
    const bool less = __builtin_fabs((double)f) < __builtin_fabs(exact);
    if (__builtin_isfinite(f) && (double)f != exact && !(__float_as_uint(f) & 1)) f = __uint_as_float(__float_as_uint(f) + (less ? 1 : -1));
    return bfloat_of(f);
}

inline u32 fma2(u32 a, u32 b, u32 c) {
    const u32 low = rounded_once(float_of_bfloat(a & 0xFFFF), float_of_bfloat(b & 0xFFFF), float_of_bfloat(c & 0xFFFF));
    return low | (u32)rounded_once(float_of_bfloat(a >> 16), float_of_bfloat(b >> 16), float_of_bfloat(c >> 16)) << 16;
}

template <u32 MASK> inline u32 and_or(u32 a, u32 b) { return (a & MASK) | b; }

inline void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    machine::multiply(d, a, b);
}

inline u32 transposed(u32 v) {
    const int g = machine::thread_index() % 32 / 4, c = machine::thread_index() % 4;
    const u32 low = __shfl_sync(~0u, v, 8 * c + g / 2), high = __shfl_sync(~0u, v, 8 * c + 4 + g / 2);
    return (low >> 16 * (g & 1) & 0xFFFF) | high >> 16 * (g & 1) << 16;
}

inline float float_of_half(u16 h) {
    const int exponent = h >> 10 & 31, digits = h & 1023;
    float v = exponent ? ldexpf(1024 + digits, exponent - 25) : ldexpf(digits, -24);
    if (exponent == 31) v = digits ? __builtin_nanf("") : __builtin_inff();
    return h & 0x8000 ? -v : v;
}

inline u32 bfloats_of(float low, float high) { return (u32)bfloat_of(low) | (u32)bfloat_of(high) << 16; }

inline float power_of_2(float v) { return exp2f(v); }

inline float power_of_2_flushed(float v) { return v < -126 ? 0.f : exp2f(v); }

inline float root(float v) { return (float)(1 / sqrt((double)v)); }


inline float ratio(float a, float b) { return a / b; }

// device.cuh: shared memory.

inline u32 shared_room() { return machine::ROOM_AT; }

template <class T> inline T from_shared(u32 at) {
    T v;
    machine::read_shared(at, &v, sizeof v);
    return v;
}
template <class T> inline void to_shared(u32 at, T v) { machine::write_shared(at, &v, sizeof v); }

inline uint4 read16(u32 at) { return from_shared<uint4>(at); }
inline float read_float(u32 at) { return from_shared<float>(at); }
inline uint4 take16(u32 at) { return from_shared<uint4>(at); }
inline u32 take4(u32 at) { return from_shared<u32>(at); }
inline uint2 take8(u32 at) { return from_shared<uint2>(at); }
inline float take_float(u32 at) { return from_shared<float>(at); }
inline void put4(u32 at, u32 v) { to_shared(at, v); }
inline void put16(u32 at, uint4 v) { to_shared(at, v); }
inline void put8(u32 at, u32 a, u32 b) { to_shared(at, uint2{a, b}); }
inline void put_float(u32 at, float v) { to_shared(at, v); }
inline void take_matrices(u32 (&b)[4], u32 at) { machine::take_matrices(b, at); }
inline void pin(u32&, u32&) {}

inline void copy16(u32 to, const char* from) { machine::begin_copy(to, from, 16, 16); }
inline void copy16_once(u32 to, const char* from) { copy16(to, from); }
template <int BYTES> inline void copy_few(u32 to, const char* from) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "");
    machine::begin_copy(to, from, BYTES, BYTES);
}
inline void copy16_or_zeros(u32 to, const char* from, int bytes) { machine::begin_copy(to, from, 16, bytes); }
inline void prefetch_line(const void*) {}
inline void commit_copies() { machine::end_group(); }
template <int GROUPS> inline void wait_copies_but() { machine::end_copies(GROUPS); }
inline void wait_copies() { machine::end_group(), machine::end_copies(0); }

// device.cuh: between warps, between blocks and between kernels.

inline void meet(int barrier, int threads) { machine::meet_block(barrier, threads, "bar.sync"); }
inline int count_one(int* at) { return atomicAdd(at, 1); }
inline u32 add_and_see(u32* at, u32 more) { return atomicAdd(at, more); }
inline u32 look(const u32* at) {
    u32 v;
    machine::look_global(at, &v, sizeof v);
    return v;
}
inline void stop() { machine::fail("stops the launch"); }
inline void pdl_trigger() {}
inline void pdl_wait() { machine::pdl_wait(); }

// warpgroup.cuh.

#define OUTRIDER_WARPGROUP
template <bool Add, int N> inline void multiply_all(float (&d)[N], const u32* a, u64 b) { machine::add_product(d, N, a, 0, b, Add, false); }
inline void begin_multiplying() { machine::begin_products(); }
inline void end_batch() { machine::end_products(); }
template <int LEFT> inline void wait_batches() { machine::wait_products(LEFT); }
template <int LEFT, int N> inline void wait_batches(float (&)[N]) { machine::wait_products(LEFT); }
template <int COUNT> inline void pin(float*) {}
inline void show_to_matrix_units() { machine::show_to_products(); }
#ifdef NT
inline u64 matrix_at(u32 at) { return (u64)((at & 0x3FFFF) >> 4) | (u64)(NT * 8) << 16 | (u64)8 << 32; }
#endif

// tma.cuh.

#define OUTRIDER_TMA
struct TensorMap {
    machine::Matrix matrix;
    char rest[128 - sizeof(machine::Matrix)];
};
inline void barrier_init(u32 at, int arrivals) { machine::barrier_init(at, arrivals); }
inline void show_barriers() {}
inline void barrier_expect(u32 at, int bytes) { machine::barrier_arrive(at, -1, bytes); }
inline void barrier_arrive(u32 at, int block) { machine::barrier_arrive(at, block, 0); }
inline void barrier_wait(u32 at, u32 parity) { machine::barrier_wait(at, parity); }
inline void cluster_sync() { machine::meet_cluster(); }
template <bool Paired, bool All> inline void fetch_tile(u32 to, const TensorMap& map, u32 barrier, int row, int column) {
    if (map.matrix.paired != Paired) machine::fail("fetches by a map for other tiles");
    machine::fetch_tile(to, map.matrix, barrier, row, column, All);
}
inline void fetch_bytes(u32 to, const char* from, int bytes, u32 barrier) { machine::fetch_bytes(to, from, bytes, barrier); }
template <int COUNT> inline void take_registers() {}
template <int COUNT> inline void give_registers() {}
inline u64 swizzled_matrix(u32 at, u32 next = 16) { return (u64)((at & 0x3FFFF) >> 4) | (u64)(next >> 4) << 16 | (u64)64 << 32 | (u64)1 << 62; }
template <bool Across = false, int N> inline void multiply_shared(float (&d)[N], u64 a, u64 b, int add) {
    machine::add_product(d, N, nullptr, a, b, add, Across);
}

// The launch of KERNEL, which is given when compiled: values are addresses of its parameters, as the driver takes them.

template <int... I> struct Numbers {};
template <int N, int... I> struct Count : Count<N - 1, N - 1, I...> {};
template <int... I> struct Count<0, I...> { typedef Numbers<I...> type; };
template <class... P, int... I> inline void call_with(void (*kernel)(P...), void** values, Numbers<I...>) { kernel(*(P*)values[I]...); }
template <class... P> inline void call(void (*kernel)(P...), void** values) { call_with(kernel, values, typename Count<sizeof...(P)>::type()); }

extern char shared_begin[] __asm__("__start_emulated_shared") __attribute__((weak, visibility("hidden")));  // its shared variables
extern char shared_end[] __asm__("__stop_emulated_shared") __attribute__((weak, visibility("hidden")));

#define EMULATED(KERNEL)                                                                                    \
    extern "C" int emulated_launch(const machine::Launch& asked) {                                          \
        return machine::launch(asked, [](void** v) { call(KERNEL, v); }, shared_begin, shared_end);         \
    }
