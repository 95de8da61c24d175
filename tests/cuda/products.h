// Matrix instructions. Each adds 16 exact products and the sum so far and rounds once (a GPU cuts digits off), so the order of columns in it does
// not matter, as on Hopper. Of the instruction of four warps each warp multiplies its own 16 rows, so a warp is enough; it is made when it is
// waited for, from what then is in shared memory, and until then its sums are NaN.
#ifndef OUTRIDER_PRODUCTS
#define OUTRIDER_PRODUCTS
#include "memory.h"

namespace machine {

inline float float_of_bfloat(u32 h) {
    h <<= 16;
    float f;
    memcpy(&f, &h, 4);
    return f;
}

inline void put_rows(float (&a)[16][16], int lane, const u32* words) {  // a lane's part of [16, 16]
    for (int i = 0; i < 4; i++)
        for (int h = 0; h < 2; h++) a[lane / 4 + (i & 1) * 8][lane % 4 * 2 + (i >> 1) * 8 + h] = float_of_bfloat(words[i] >> 16 * h & 0xFFFF);
}

inline float added(float sum, const float* a, const float* b) {
    double d = sum;
    for (int k = 0; k < 16; k++) d += (double)a[k] * b[k];
    return (float)d;
}

struct Operands { float* d; const u32 *a, *b; };

void multiply(float* d, const u32* a, const u32* b) {
    Operands mine = {d, a, b};
    meet_warp("mma", &mine, true, [](Warp& w) {
        float a[16][16], b[8][16];
        for (int lane = 0; lane < 32; lane++) {
            const Operands& o = *(Operands*)w.lanes[lane]->operands;
            put_rows(a, lane, o.a);
            for (int i = 0; i < 2; i++)
                for (int h = 0; h < 2; h++) b[lane / 4][lane % 4 * 2 + i * 8 + h] = float_of_bfloat(o.b[i] >> 16 * h & 0xFFFF);
        }
        for (int lane = 0; lane < 32; lane++) {
            const Operands& o = *(Operands*)w.lanes[lane]->operands;
            for (int i = 0; i < 4; i++) o.d[i] = added(o.d[i], a[lane / 4 + (i >> 1) * 8], b[lane % 4 * 2 + (i & 1)]);
        }
    });
}

struct Matrices { u32 at, *b; };

void take_matrices(u32* b, u32 at) {  // four of 8 x 8: lane 8 i + r says where row r of matrix i lies
    Matrices mine = {at, b};
    meet_warp("ldmatrix", &mine, true, [](Warp& w) {
        for (int row = 0; row < 32; row++) {
            u32 words[4];
            read_shared(((Matrices*)w.lanes[row]->operands)->at, words, 16);
            for (int c = 0; c < 4; c++) ((Matrices*)w.lanes[row % 8 * 4 + c]->operands)->b[row / 8] = words[c];
        }
    });
}

constexpr int MOST_PRODUCTS = 64, MOST_SUMS = 128;

struct Product { float* d; int sums, group; u32 a[4]; u64 left, b; bool add, across; };  // left: 0, or where a lies in shared memory; across: b is [16, tokens]

struct Sums { float *d, value[MOST_SUMS]; int waiting; };  // of products under way

struct Products {
    Product queue[MOST_PRODUCTS];
    Sums sums[8];
    int count, group, open;
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

// f(where 8 columns of a row lie, first column, row), of rows first..end. Swizzle: none, or that of 128 bytes.
template <class F> inline void each_piece(u64 matrix, int first, int end, F f) {
    const u32 at = (matrix & 0x3FFF) << 4, next_columns = (matrix >> 16 & 0x3FFF) << 4, next_rows = (matrix >> 32 & 0x3FFF) << 4;
    const bool swizzled = matrix >> 62 == 1;
    if (matrix >> 62 > 1) fail("a matrix with a swizzle that is not emulated");
    for (int t = first; t < end; t++)
        for (int k = 0; k < 2; k++) {
            const u32 linear = at + t / 8 * next_rows + (swizzled ? k * 16 + t % 8 * 128 : k * next_columns + t % 8 * 16);
            f(swizzled ? linear ^ (linear >> 7 & 7) << 4 : linear, k * 8, t);
        }
}

// f(where 8 columns of a row lie, row, first column) of 16 rows and so many columns: 64 of them are 128 bytes, swizzled.
template <class F> inline void each_piece_across(u64 matrix, int columns, F f) {
    const u32 at = (matrix & 0x3FFF) << 4, next_columns = (matrix >> 16 & 0x3FFF) << 4, next_rows = (matrix >> 32 & 0x3FFF) << 4;
    if (matrix >> 62 != 1) fail("a matrix with a swizzle that is not emulated");
    for (int column = 0; column < columns; column += 8)
        for (int row = 0; row < 16; row++) {
            const u32 linear = at + column / 64 * next_columns + column % 64 * 2 + row / 8 * next_rows + row % 8 * 128;
            f(linear ^ (linear >> 7 & 7) << 4, row, column);
        }
}

inline void hold(u64 matrix, int first, int end, bool across) {  // until the product is made nobody may write there
    auto one = [](u32 at, int, int) {
        touch_shared(at, 16, "multiplies", READS);
        for (u32 word = (at - ROOM_AT) / 4, end = word + 4; word < end; word++) {
            const Word& w = the.here->shadow.words[word];
            if (w.by && the.fibers[w.by - 1].shown == w.shown)
                fail("multiplies byte %u of shared memory, which was not shown to the matrix units", word * 4);
            the.here->held[word]++;
        }
    };
    if (across) each_piece_across(matrix, end, one);
    else each_piece(matrix, first, end, one);
}

inline int rows_of(const Warp& w) { return w.lanes[0]->thread / 32 % 4 * 16; }  // the first one of the warp in its warpgroup

inline void make_product(Warp& w, int index) {
    const int sums = w.lanes[0]->products->queue[index].sums, tokens = sums * 2;
    const u64 matrix = w.lanes[0]->products->queue[index].b;
    const u64 left = w.lanes[0]->products->queue[index].left;
    const bool across = w.lanes[0]->products->queue[index].across;
    float a[16][16], b[MOST_SUMS * 2][16];
    auto piece = [](u16 (&v)[8], u32 at) {
        memcpy(v, touch_shared(at, 16, "multiplies", READS), 16);
        for (int i = 0; i < 4; i++) the.here->held[(at - ROOM_AT) / 4 + i]--;
    };
    auto take = [&](float(*rows)[16], u64 from, int first, int end) {
        each_piece(from, first, end, [&](u32 at, int column, int row) {
            u16 v[8];
            piece(v, at);
            for (int i = 0; i < 8; i++) rows[row - first][column + i] = float_of_bfloat(v[i]);
        });
    };
    if (across)
        each_piece_across(matrix, tokens, [&](u32 at, int row, int column) {
            u16 v[8];
            piece(v, at);
            for (int i = 0; i < 8; i++) b[column + i][row] = float_of_bfloat(v[i]);
        });
    else take(b, matrix, 0, tokens);
    if (left) take(a, left, rows_of(w), rows_of(w) + 16);
    for (int lane = 0; lane < 32; lane++) {
        const Product& p = w.lanes[lane]->products->queue[index];
        if (p.b != matrix || p.left != left || p.sums != sums || p.across != across) fail("lanes multiply different matrices");
        if (!left) put_rows(a, lane, p.a);
    }
    for (int lane = 0; lane < 32; lane++) {
        Products& all = *w.lanes[lane]->products;
        const Product& p = all.queue[index];
        Sums& s = sums_of(all, p.d);
        for (int i = 0; i < sums; i++) {
            const int row = lane / 4 + (i >> 1 & 1) * 8, token = i / 4 * 8 + lane % 4 * 2 + (i & 1);
            s.value[i] = added(p.add ? s.value[i] : 0.f, a[row], b[token]);
        }
        if (--s.waiting == 0) memcpy(p.d, s.value, sums * 4);
    }
}

void begin_products() { products().fenced = true; }

void add_product(float* d, int sums, const u32* a, u64 left, u64 matrix, bool add, bool across) {
    const u32 none[4] = {};
    if (!a) a = none;
    Products& p = products();
    if (!p.fenced) fail("wgmma without a fence ahead of it");
    if (p.count == MOST_PRODUCTS || sums > MOST_SUMS) fail("more than %d products under way, or more than %d sums", MOST_PRODUCTS, MOST_SUMS);
    Sums& s = sums_of(p, d);
    if (!s.waiting++) memcpy(s.value, d, sums * 4);
    memset(d, 0xFF, sums * 4);
    p.queue[p.count++] = {d, sums, p.group, {a[0], a[1], a[2], a[3]}, left, matrix, add, across};
    meet_warp("wgmma", nullptr, true, [](Warp& w) {
        const Product& last = products().queue[products().count - 1];
        hold(last.b, 0, last.sums * 2, last.across);
        if (last.left) hold(last.left, rows_of(w), rows_of(w) + 16, false);
    });
}

void end_products() { products().group++; }

void wait_products(int open) {
    products().fenced = false, products().open = open;
    meet_warp("wgmma.wait_group", nullptr, true, [](Warp& w) {
        const Products& first = *w.lanes[0]->products;
        const int count = first.count, group = first.group - first.open;
        int done = 0;
        while (done < count && first.queue[done].group < group) make_product(w, done++);
        for (int lane = 0; lane < 32; lane++) {
            Products& p = *w.lanes[lane]->products;
            if (p.count != count || p.group - p.open != group) fail("lanes have different products under way");
            memmove(p.queue, p.queue + done, (p.count -= done) * sizeof(Product));
        }
        order_all(w.lanes, w.size);  // what the warp has multiplied, each of its lanes has read
    });
}

void show_to_products() { the.now->shown++; }

}  // namespace machine
#endif
