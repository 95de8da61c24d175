/* From a file's rows to the layout of the kernels, bit for bit and in parallel; and rows of a packed weight in another
 * order. */
#pragma once
#include "formats.h"
#include "threads.h"

/* Codes of one lane into its words of a (group, block). */
INLINE void put_codes(int kind, const uint8_t *q, uint8_t *data) {
    const int lines = k_lines(kind), bit = lines == 3 ? 2 : 4; /* the bit, or the lower of two, that lies apart */
    if (lines == 8) { for (int j = 0; j < 8; j++) memcpy(data + 64 * j, q + 4 * j, 4); return; }
    if (lines >= 4) {
        uint8_t low[16];
        for (int i = 0; i < 16; i++) low[i] = (uint8_t)((q[i] & 15) | (q[16 + i] << 4));
        for (int j = 0; j < 4; j++) memcpy(data + 64 * j, low + 4 * j, 4);
    }
    if (lines & 1) {
        uint32_t bits = 0;
        for (int j = 0; j < 8; j++) bits |= ((word_at(q + 4 * j) >> bit) & 0x01010101u) << j;
        memcpy(data + 64 * (lines - 1), &bits, 4);
    }
    if (lines < 4 || lines == 6)
        for (int h = 0; h < 2; h++) {
            uint32_t bits = 0;
            for (int j = 0; j < 4; j++)
                bits |= ((word_at(q + 16 * h + 4 * j) >> (lines == 6 ? bit : 0)) & 0x03030303u) << 2 * j;
            memcpy(data + (lines == 6 ? 256 : 0) + 64 * h, &bits, 4);
        }
}

typedef struct {
    const Weight *w;
    int type;               /* of the file's rows */
    int first, rows;        /* rows first.. of w are filled */
    const uint8_t *from;    /* the file's rows, row_bytes each */
    size_t row_bytes;
} PackJob;

INLINE void pack_group(int kind, const PackJob *job, int g) {
    const Weight *w = job->w;
    const int lo = g * LANES > job->first ? 0 : job->first - g * LANES; /* the group's lanes that this call fills */
    const int end = job->first + job->rows - g * LANES, hi = end < LANES ? end : LANES;
    const int supers = w->k / 32 / k_blocks(kind);
    for (int s = 0; s < supers; s++)
        for (int lane = lo; lane < hi; lane++) {
            const uint8_t *p = job->from + (size_t)(g * LANES + lane - job->first) * job->row_bytes +
                               (size_t)s * file_types[job->type].bytes;
            uint8_t *data = (uint8_t *)w_data(w, g) + (size_t)s * k_blocks(kind) * 64 * k_lines(kind) + 4 * lane;
            uint8_t *scale = (uint8_t *)w_scale(w, g) + (size_t)s * k_scale_step(kind);
            memcpy(scale + 2 * lane, &(uint16_t){raw_half(job->type, p, 0)}, 2);
            if (k_halves(kind) == 32) memcpy(scale + 32 + 2 * lane, &(uint16_t){raw_half(job->type, p, 1)}, 2);
            for (int sub = 0; sub < k_blocks(kind); sub++, data += 64 * k_lines(kind)) {
                uint8_t q[32], a = 0, b = 0;
                raw_codes(job->type, p, sub, q);
                put_codes(kind, q, data);
                if (!k_bytes(kind)) continue;
                raw_byte_scales(job->type, p, sub, &a, &b);
                uint8_t *bytes = scale + 2 * k_halves(kind) + sub * k_bytes(kind) + lane;
                bytes[0] = a;
                if (k_bytes(kind) == 32) bytes[16] = b;
            }
        }
}
static void pack_region(ThreadPool *pool, int me, void *arg) {
    (void)me;
    const PackJob *job = arg;
    const int first = job->first / LANES, count = (job->first + job->rows + LANES - 1) / LANES - first;
    int lo, hi;
    while (pool_next(pool, count, 4, &lo, &hi)) /* claimed, not shared out: one member may wait for the disk */
        for (int g = first + lo; g < first + hi; g++) {
#define PACK_GROUP(K) pack_group(K, job, g)
            switch (job->w->kind) { EACH_KIND(PACK_GROUP) }
        }
}

/* Row `from_row` of `from` becomes row `to_row` of `to`: both packed and of one kind and width */
static void copy_lane(const Weight *from, int64_t from_row, const Weight *to, int64_t to_row) {
    const int kind = from->kind, a = (int)(from_row % LANES), b = (int)(to_row % LANES), kb = from->k / 32;
    const uint8_t *data = w_data(from, from_row / LANES), *scale = w_scale(from, from_row / LANES);
    uint8_t *data_to = (uint8_t *)w_data(to, to_row / LANES), *scale_to = (uint8_t *)w_scale(to, to_row / LANES);
    for (int line = 0; line < kb * k_lines(kind); line++)
        memcpy(data_to + 64 * line + 4 * b, data + 64 * line + 4 * a, 4);
    for (int s = 0; s < kb / k_blocks(kind); s++, scale += k_scale_step(kind), scale_to += k_scale_step(kind)) {
        for (int h = 0; h < k_halves(kind); h += 16) memcpy(scale_to + 2 * (h + b), scale + 2 * (h + a), 2);
        for (int i = 2 * k_halves(kind); i < (int)k_scale_step(kind); i += 16) scale_to[i + b] = scale[i + a];
    }
}
