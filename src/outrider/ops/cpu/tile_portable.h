/* Any processor: plain loops over the compiler's vectors. Included by product.h. */
#pragma once

/* The signed values of a (group, block): [step][row·4 + column] */
INLINE void block_values(int kind, const CodeTable *table, const uint8_t *data, int16_t v[8][64]) {
    if (kind == W_Q8) {
        for (int j = 0; j < 8; j++) for (int i = 0; i < 64; i++) v[j][i] = (int8_t)data[64 * j + i];
        return;
    }
    if (k_lines(kind) < 4)
        for (int j = 0; j < 8; j++) for (int i = 0; i < 64; i++) v[j][i] = (data[64 * (j / 4) + i] >> 2 * (j % 4)) & 3;
    else
        for (int j = 0; j < 4; j++)
            for (int i = 0; i < 64; i++) v[j][i] = data[64 * j + i] & 15, v[j + 4][i] = data[64 * j + i] >> 4;
    if (k_lines(kind) == 3)
        for (int j = 0; j < 8; j++) for (int i = 0; i < 64; i++) v[j][i] |= (int16_t)(((data[128 + i] >> j) & 1) << 2);
    if (k_lines(kind) == 5)
        for (int j = 0; j < 8; j++) for (int i = 0; i < 64; i++) v[j][i] |= (int16_t)(((data[256 + i] >> j) & 1) << 4);
    if (k_lines(kind) == 6)
        for (int j = 0; j < 8; j++)
            for (int i = 0; i < 64; i++) v[j][i] |= (int16_t)(((data[256 + 64 * (j / 4) + i] >> 2 * (j % 4)) & 3) << 4);
    if (k_table(kind))
        for (int j = 0; j < 8; j++) for (int i = 0; i < 64; i++) v[j][i] = table->value[v[j][i]];
    const int16_t zero = kind == W_Q4 ? 8 : kind == W_Q5 ? 16 : kind == W_Q6K ? 32 : 0;
    if (zero) for (int j = 0; j < 8; j++) for (int i = 0; i < 64; i++) v[j][i] -= zero;
}
INLINE vf vf_u8(const uint8_t *p) {
    int32_t t[LANES];
    for (int i = 0; i < LANES; i++) t[i] = p[i];
    return vi_to_float(vi_load(t));
}
INLINE vf vf_nibble(const uint8_t *p, int high) {
    int32_t t[LANES];
    for (int i = 0; i < LANES; i++) t[i] = p[i] >> 4 * high & 15;
    return vi_to_float(vi_load(t));
}
INLINE vf vf_i8(const uint8_t *p) {
    int32_t t[LANES];
    for (int i = 0; i < LANES; i++) t[i] = (int8_t)p[i];
    return vi_to_float(vi_load(t));
}

INLINE void group_tile(int kind, const Weight *w, int g, const QActs *a, int m0, int MT, float *tile) {
    const int kb = w->k / 32, lines = k_lines(kind), super = k_blocks(kind);
    const CodeTable *table = w_table(w);
    const uint8_t *data = w_data(w, g), *scale = w_scale(w, g);
    const int8_t *x0 = a->q + (size_t)m0 * a->k;
    const Blk *s0 = a->blk + (size_t)m0 * kb;
    vf acc[TILE_ROWS];
    for (int m = 0; m < MT; m++) acc[m] = vf_set(0.0f);
    for (int b = 0; b < kb; b += super, scale += k_scale_step(kind)) {
        const vf front = kind == W_F4 ? vf_bf16((const uint16_t *)scale) : vf_half((const uint16_t *)scale);
        const vf first = k_table(kind) && k_super(kind) ? vf_mul(front, vf_set(table->unit)) : front;
        const vf second = k_min(kind) ? vf_half((const uint16_t *)scale + 16) : first;
        for (int sub = 0; sub < super; sub++, data += 64 * lines) {
            int16_t v[8][64];
            vf d[2] = {first, first}, zero_point[2] = {second, second};
            block_values(kind, table, data, v);
            if (k_super(kind)) {
                const uint8_t *bytes = scale + 2 * k_halves(kind) + sub * k_bytes(kind);
                const vf minus = vf_sub(vf_set(0.0f), second);
                if (kind == W_Q2K) for (int h = 0; h < 2; h++) {
                    d[h] = vf_mul(first, vf_nibble(bytes + 16 * h, 0));
                    zero_point[h] = vf_mul(minus, vf_nibble(bytes + 16 * h, 1));
                    }
                else if (k_min(kind)) {
                    d[0] = vf_mul(first, vf_u8(bytes));
                    zero_point[0] = vf_mul(minus, vf_u8(bytes + 16));
                } else d[0] = vf_mul(first, vf_i8(bytes));
                if (k_columns(kind) == 16 && kind != W_Q2K) d[1] = vf_mul(first, vf_i8(bytes + 16));
            }
            const int count = k_columns(kind) / 4;
            for (int m = 0; m < MT; m++) {
                const int8_t *x = x0 + (size_t)m * a->k + 32 * (b + sub);
                const Blk *s = s0 + (size_t)m * kb + b + sub;
                for (int from = 0; from < 8; from += count) {
                    int32_t dot[16] = {0};
                    for (int j = from; j < from + count; j++) {
                        const int32_t x0 = x[4 * j], x1 = x[4 * j + 1], x2 = x[4 * j + 2], x3 = x[4 * j + 3];
                        for (int r = 0; r < 16; r++)
                            dot[r] +=
                                v[j][4 * r] * x0 + v[j][4 * r + 1] * x1 + v[j][4 * r + 2] * x2 + v[j][4 * r + 3] * x3;
                    }
                    acc[m] = vf_fma(vf_mul(vi_to_float(vi_load(dot)), vf_set(s->d)), d[from / 4 % 2], acc[m]);
                    if (k_min(kind))
                        acc[m] = vf_fma(zero_point[from / 4 % 2], vf_set(zero_weight(s, from, count)), acc[m]);
                }
            }
        }
    }
    for (int m = 0; m < MT; m++) vf_store(tile + LANES * m, acc[m]);
}
