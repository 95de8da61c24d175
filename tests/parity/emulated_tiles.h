/* Intel's tile instructions in C, put before the kernels by the flags that conftest.py gives the level `amx`: for machines with AVX-512
 * but without tiles. As in the manual: eight registers of sixteen rows of 64 bytes, whose shapes the configuration gives. What the
 * processor refuses, an instruction without a configuration or shapes that do not fit each other, ends the program here. */
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EMULATED_TILES 1

typedef struct {
    int configured;
    int rows[8], row_bytes[8];
    int8_t data[8][16][64];
} EmulatedTiles;
static _Thread_local EmulatedTiles emulated;

static void emulated_need(int fits) {
    if (!fits) abort();
}
static void emulated_tile(int t) { emulated_need(emulated.configured && emulated.rows[t] > 0 && emulated.row_bytes[t] > 0); }

static inline void emulated_configure(const void *config) {
    const uint8_t *bytes = config;
    memset(&emulated, 0, sizeof emulated);
    emulated_need(bytes[0] == 1 && bytes[1] == 0); /* palette 1, no load that was interrupted */
    for (int i = 2; i < 16; i++) emulated_need(bytes[i] == 0);
    for (int t = 0; t < 16; t++) {
        const int row_bytes = bytes[16 + 2 * t] | bytes[17 + 2 * t] << 8, rows = bytes[48 + t];
        emulated_need(rows <= 16 && row_bytes <= 64 && (t < 8 || (!rows && !row_bytes)));
        if (t >= 8) continue;
        emulated.rows[t] = rows;
        emulated.row_bytes[t] = row_bytes;
    }
    emulated.configured = 1;
}
static inline void emulated_release(void) { memset(&emulated, 0, sizeof emulated); }
static inline void emulated_zero(int t) {
    emulated_tile(t);
    memset(emulated.data[t], 0, sizeof emulated.data[t]);
}
static inline void emulated_load(int t, const void *from, int64_t stride) {
    emulated_tile(t);
    memset(emulated.data[t], 0, sizeof emulated.data[t]);
    for (int r = 0; r < emulated.rows[t]; r++)
        memcpy(emulated.data[t][r], (const char *)from + r * stride, (size_t)emulated.row_bytes[t]);
}
static inline void emulated_store(int t, void *to, int64_t stride) {
    emulated_tile(t);
    for (int r = 0; r < emulated.rows[t]; r++)
        memcpy((char *)to + r * stride, emulated.data[t][r], (size_t)emulated.row_bytes[t]);
}
static inline void emulated_dot(int c, int a, int b) {
    emulated_tile(a);
    emulated_tile(b);
    emulated_tile(c);
    emulated_need(emulated.rows[c] == emulated.rows[a] && emulated.row_bytes[a] == 4 * emulated.rows[b]);
    emulated_need(emulated.row_bytes[c] == emulated.row_bytes[b]);
    for (int m = 0; m < emulated.rows[c]; m++)
        for (int n = 0; n < emulated.row_bytes[c] / 4; n++) {
            int32_t sum;
            memcpy(&sum, emulated.data[c][m] + 4 * n, 4);
            for (int k = 0; k < emulated.rows[b]; k++)
                for (int i = 0; i < 4; i++) sum += emulated.data[a][m][4 * k + i] * emulated.data[b][k][4 * n + i];
            memcpy(emulated.data[c][m] + 4 * n, &sum, 4);
        }
}

#define TILE_CONFIGURE(config) emulated_configure(config)
#define TILE_RELEASE() emulated_release()
#define TILE_ZERO(t) emulated_zero(t)
#define TILE_LOAD(t, from, stride) emulated_load(t, from, stride)
#define TILE_STORE(t, to, stride) emulated_store(t, to, stride)
#define TILE_DOT(c, a, b) emulated_dot(c, a, b)
