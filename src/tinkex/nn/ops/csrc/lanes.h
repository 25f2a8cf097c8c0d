/* SIMD helpers shared by all kernels: vectors of LANES floats. */
#ifndef TINKEX_LANES_H
#define TINKEX_LANES_H

#include <string.h>

enum { LANES = 8 };

typedef float lanes __attribute__((vector_size(32), aligned(4)));
typedef int int_lanes __attribute__((vector_size(32), aligned(4)));

static inline lanes load(const float *from) { return *(const lanes *)from; }

static inline void store(float *to, lanes value) { *(lanes *)to = value; }

/* Keep a value in a register instead of reloading it at each use. */
#if defined(__AVX__)
#define IN_REGISTER(value) __asm__("" : "+x"(value))
#else
#define IN_REGISTER(value) (void)(value)
#endif

static inline float lane_sum(lanes x)
{
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

/* Lanes of a where the mask is set, else of b. */
static inline lanes lane_select(int_lanes mask, lanes a, lanes b)
{
    return (lanes)((mask & (int_lanes)a) | (~mask & (int_lanes)b));
}

/* e^x for x <= 0, relative error about 1e-7; inputs below -87 are clamped to -87. */
static inline lanes lane_exp(lanes x)
{
    const lanes lowest = (lanes){0} - 87.0f, round = (lanes){0} + 12582912.0f;
    x = lane_select(x < lowest, lowest, x);
    /* e^x = 2^n e^r; adding 1.5 * 2^23 rounds to an integer n and leaves it in the low bits. */
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

/* e^-|x|, which never overflows. */
static inline lanes lane_exp_neg_abs(lanes x)
{
    const int_lanes sign = (int_lanes){0} + (int)0x80000000;
    return lane_exp((lanes)((int_lanes)x | sign));
}

/* The largest of `num` floats. */
static inline float row_max(const float *x, long num)
{
    float max_value = x[0];
    lanes max_lanes = (lanes){0} + max_value;
    long i = 0;
    for (; i + LANES <= num; i += LANES) {
        lanes some = load(x + i);
        max_lanes = lane_select(some > max_lanes, some, max_lanes);
    }
    for (int lane = 0; lane < LANES; lane++)
        max_value = max_lanes[lane] > max_value ? max_lanes[lane] : max_value;
    for (; i < num; i++)
        max_value = x[i] > max_value ? x[i] : max_value;
    return max_value;
}

#endif
