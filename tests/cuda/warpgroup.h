// Hopper's instruction of four warps for a machine without a GPU: the functions of ops/cuda/warpgroup.cuh. Each warp multiplies its own 16 rows,
// so a warp is enough. A product is made when it is waited for, from what then is in shared memory; until then its sums are NaN.
#define OUTRIDER_WARPGROUP  // warpgroup.cuh has nothing to say after this

namespace machine {
constexpr int MOST_PRODUCTS = 64, MOST_SUMS = 128;

struct Product { float* d; int sums, group; u32 a[4]; u64 b; bool add; };

struct Sums { float *d, value[MOST_SUMS]; int waiting; };  // of products under way

struct Products {
    Product queue[MOST_PRODUCTS];
    Sums sums[8];
    int count, group;
    bool fenced;
};

inline Products& products() {
    Fiber& f = *the.now;
    if (!f.products) f.products = (Products*)room_for(sizeof(Products));
    return *f.products;
}

inline Sums& sums_of(Products& p, float* d) {
    for (Sums& s : p.sums)
        if (s.waiting && s.d == d) return s;
    for (Sums& s : p.sums)
        if (!s.waiting) {
            s.d = d;
            return s;
        }
    fail("more than 8 sums of products under way");
}

template <class F> inline void each_piece(u64 matrix, int tokens, F f) {  // f(where 8 columns of a token lie, first column, token); no swizzle
    const u32 at = (matrix & 0x3FFF) << 4, next_columns = (matrix >> 16 & 0x3FFF) << 4, next_tokens = (matrix >> 32 & 0x3FFF) << 4;
    if (matrix >> 62) fail("a matrix with a swizzle, which is not emulated");
    for (int t = 0; t < tokens; t++)
        for (int k = 0; k < 2; k++) f(at + k * next_columns + t / 8 * next_tokens + t % 8 * 16, k * 8, t);
}

inline void hold(u64 matrix, int tokens) {  // until the product is made nobody may write there
    each_piece(matrix, tokens, [](u32 at, int, int) {
        touch_shared(at, 16, "multiplies", READS);
        for (u32 word = (at - ROOM_AT) / 4, end = word + 4; word < end; word++) {
            const Written& w = the.here->shadow.written[word];
            if (w.by && the.fibers[w.by - 1].shown == w.shown) fail("multiplies byte %u of shared memory, which was not shown to the matrix units", word * 4);
            the.here->held[word]++;
        }
    });
}

inline void make_product(Warp& w, int index) {
    const int sums = w.lanes[0]->products->queue[index].sums, tokens = sums * 2;
    const u64 matrix = w.lanes[0]->products->queue[index].b;
    float b[MOST_SUMS * 2][16];
    each_piece(matrix, tokens, [&](u32 at, int column, int token) {
        u16 v[8];
        memcpy(v, touch_shared(at, 16, "multiplies", READS), 16);
        for (int i = 0; i < 8; i++) b[token][column + i] = float_of_bfloat(v[i]);
        for (int i = 0; i < 4; i++) the.here->held[(at - ROOM_AT) / 4 + i]--;
    });
    float a[16][16];
    for (int lane = 0; lane < 32; lane++) {
        const Product& p = w.lanes[lane]->products->queue[index];
        if (p.b != matrix || p.sums != sums) fail("lanes multiply different matrices");
        for (int i = 0; i < 4; i++)
            for (int h = 0; h < 2; h++) a[lane / 4 + (i & 1) * 8][lane % 4 * 2 + (i >> 1) * 8 + h] = float_of_bfloat(p.a[i] >> 16 * h & 0xFFFF);
    }
    for (int lane = 0; lane < 32; lane++) {
        Products& all = *w.lanes[lane]->products;
        const Product& p = all.queue[index];
        Sums& s = sums_of(all, p.d);
        for (int i = 0; i < sums; i++) {
            const int row = lane / 4 + (i >> 1 & 1) * 8, token = i / 4 * 8 + lane % 4 * 2 + (i & 1);
            double sum = p.add ? s.value[i] : 0;
            for (int k = 0; k < 16; k++) sum += (double)a[row][k] * b[token][k];
            s.value[i] = (float)sum;
        }
        if (--s.waiting == 0) memcpy(p.d, s.value, sums * 4);
    }
}
}  // namespace machine

template <bool Add, int N> inline void multiply_all(float (&d)[N], const u32* a, u64 b) {
    static_assert(N <= machine::MOST_SUMS, "");
    machine::Products& p = machine::products();
    if (!p.fenced) machine::fail("wgmma without a fence ahead of it");
    if (p.count == machine::MOST_PRODUCTS) machine::fail("more than %d products under way", machine::MOST_PRODUCTS);
    machine::Sums& s = machine::sums_of(p, d);
    if (!s.waiting++) memcpy(s.value, d, sizeof d);
    memset(d, 0xFF, sizeof d);
    p.queue[p.count++] = {d, N, p.group, {a[0], a[1], a[2], a[3]}, b, Add};
    machine::meet_warp("wgmma", nullptr, true, [=](machine::Warp&) { machine::hold(b, N * 2); });
}

inline void begin_multiplying() { machine::products().fenced = true; }

inline void end_batch() { machine::products().group++; }

template <int LEFT, int N> inline void wait_batches(float (&)[N]) {
    machine::products().fenced = false;
    machine::meet_warp("wgmma.wait_group", nullptr, true, [](machine::Warp& w) {
        const machine::Products& first = *w.lanes[0]->products;
        const int count = first.count, group = first.group;
        int done = 0;
        while (done < count && first.queue[done].group < group - LEFT) machine::make_product(w, done++);
        for (int lane = 0; lane < 32; lane++) {
            machine::Products& p = *w.lanes[lane]->products;
            if (p.count != count || p.group != group) machine::fail("lanes have different products under way");
            memmove(p.queue, p.queue + done, (p.count -= done) * sizeof(machine::Product));
        }
    });
}

#ifdef NT
inline u64 matrix_at(u32 at) { return (u64)((at & 0x3FFFF) >> 4) | (u64)(NT * 8) << 16 | (u64)8 << 32; }
#endif

inline void show_to_matrix_units() { machine::the.now->shown++; }
