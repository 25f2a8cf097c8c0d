/* What the kernels share: eight numbers at a time. */
#ifndef TINKEX_LANES_H
#define TINKEX_LANES_H

#include <string.h>

enum { LANES = 8 };

typedef float lanes __attribute__((vector_size(32), aligned(4)));
typedef int int_lanes __attribute__((vector_size(32), aligned(4)));

static inline lanes load(const float *from) { return *(const lanes *)from; }

static inline void store(float *to, lanes value) { *(lanes *)to = value; }

/* Have a value in a register, not read from memory again at each use. */
#if defined(__AVX__)
#define IN_REGISTER(value) __asm__("" : "+x"(value))
#else
#define IN_REGISTER(value) (void)(value)
#endif

static inline float lane_sum(lanes x)
{
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

/* e^x for x <= 0, to about one part in ten million; below -87 it is as good as zero. */
static inline lanes lane_exp(lanes x)
{
    const lanes lowest = (lanes){0} - 87.0f, round = (lanes){0} + 12582912.0f;
    int_lanes is_low = x < lowest;
    x = (lanes)((is_low & (int_lanes)lowest) | (~is_low & (int_lanes)x));
    /* e^x = 2^n e^r; adding 1.5 * 2^23 rounds to a whole n, whose bits then lie at the end. */
    lanes shifted = x * 1.44269504f + round;
    lanes n = shifted - round;
    lanes r = x - n * 0.693359375f + n * 2.12194440e-4f;
    lanes y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    int_lanes power = ((int_lanes)shifted - (int_lanes)round + 127) << 23;
    return y * (lanes)power;
}

#endif
