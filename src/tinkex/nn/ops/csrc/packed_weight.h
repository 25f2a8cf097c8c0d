/* Packed weights: panels of PANEL columns, stored input by input, of 16-bit or 32-bit floats.
 *
 * The columns j and j + LANES of a bfloat16 panel are the halves of one 32-bit number, so that a
 * shift and a mask widen them. Other types store the columns in order.
 */
#ifndef TINKEX_PACKED_WEIGHT_H
#define TINKEX_PACKED_WEIGHT_H

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "kernels.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (int_lanes){__VA_ARGS__})
#endif

static inline long dtype_bytes(long dtype) { return dtype == FLOAT32 ? 4 : 2; }

/* The address of an input of a panel. */
static inline const char *panel_row(const packed_weight *weight, long panel, long input)
{
    long at = (panel * weight->inputs + input) * PANEL;
    return (const char *)weight->panels + at * dtype_bytes(weight->dtype);
}

ALWAYS_INLINE void widen_row(const char *row, const int dtype, lanes columns[2])
{
    if (dtype == BFLOAT16) {
        int_lanes both = *(const int_lanes *)row;
        columns[0] = (lanes)(both << 16);
        columns[1] = (lanes)(both & (int)0xffff0000);
    } else if (dtype == FLOAT32) {
        columns[0] = load((const float *)row);
        columns[1] = load((const float *)row + LANES);
    }
#if defined(__F16C__)
    else {
        columns[0] = (lanes)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)row));
        columns[1] = (lanes)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)row + 1));
    }
#endif
}

ALWAYS_INLINE void transpose_lanes(lanes row[LANES])
{
    lanes pair[LANES], quad[LANES];
    for (int i = 0; i < LANES; i += 2) {
        pair[i] = SHUFFLE(row[i], row[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        pair[i + 1] = SHUFFLE(row[i], row[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int j = 0; j < 2; j++) {
            lanes a = pair[i + j], b = pair[i + j + 2];
            quad[i + 2 * j] = SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
            quad[i + 2 * j + 1] = SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; i++) {
        row[i] = SHUFFLE(quad[i], quad[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        row[i + 4] = SHUFFLE(quad[i], quad[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

/* Write PANEL inputs of a panel transposed: (column, input), zero for inputs that do not exist. */
ALWAYS_INLINE void transpose_block(const packed_weight *weight, const int dtype, long panel,
                                   long first, float *to)
{
    for (int half = 0; half < PANEL; half += LANES) {
        lanes columns[2][LANES];
        for (int i = 0; i < LANES; i++) {
            lanes row[2] = {{0}, {0}};
            if (first + half + i < weight->inputs)
                widen_row(panel_row(weight, panel, first + half + i), dtype, row);
            columns[0][i] = row[0];
            columns[1][i] = row[1];
        }
        for (int side = 0; side < 2; side++) {
            transpose_lanes(columns[side]);
            for (int j = 0; j < LANES; j++)
                store(to + (side * LANES + j) * PANEL + half, columns[side][j]);
        }
    }
}

#endif
