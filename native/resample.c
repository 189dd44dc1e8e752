/* Vertical first, row by row into 16-bit values with 6 bits behind the point, then horizontal. Only integers
   are added, so the order does not matter and the AVX2 path gives the same bytes as the portable one. */
#include "resample.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_AVX2_PATH 1
#include <immintrin.h>
#endif

#define MIDDLE_BITS 6 /* 255 << 6 fits in an int16 */
#define VERTICAL_SHIFT (WEIGHT_BITS - MIDDLE_BITS)
#define HORIZONTAL_SHIFT (WEIGHT_BITS + MIDDLE_BITS)

static int simd_allowed = 1;

void set_simd(int allowed) { simd_allowed = allowed; }

static double triangle(double x) {
    x = fabs(x);
    return x < 1.0 ? 1.0 - x : 0.0;
}

/* Catmull-Rom: a = -0.5, as Pillow has it. */
static double cubic(double x) {
    x = fabs(x);
    if (x < 1.0)
        return (1.5 * x - 2.5) * x * x + 1.0;
    return x < 2.0 ? ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0 : 0.0;
}

void free_axis(Axis *axis) {
    free(axis->first);
    free(axis->taps);
    free(axis->weights);
    memset(axis, 0, sizeof *axis);
}

/* Rounded to integers whose sum is exact: what rounding lost goes to the largest. */
static void quantise(const double *exact, double sum, int taps, int16_t *weights) {
    int total = 0, largest = 0;
    for (int t = 0; t < taps; t++) {
        weights[t] = (int16_t)lrint(exact[t] / sum * (1 << WEIGHT_BITS));
        total += weights[t];
        if (weights[t] > weights[largest])
            largest = t;
    }
    weights[largest] = (int16_t)(weights[largest] + (1 << WEIGHT_BITS) - total);
}

int make_axis(Axis *axis, int size, Interval input, int bicubic) {
    double scale = (input.end - input.start) / size;
    double stretch = scale > 1.0 ? scale : 1.0;
    double support = bicubic ? 2.0 * stretch : stretch;
    int widest = 2 * ((int)ceil(support) + 1);
    double *exact = malloc((size_t)widest * sizeof *exact);
    memset(axis, 0, sizeof *axis);
    axis->stride = widest;
    axis->size = size;
    axis->first = malloc((size_t)size * sizeof *axis->first);
    axis->taps = malloc((size_t)size * sizeof *axis->taps);
    axis->weights = calloc((size_t)size * (size_t)widest, sizeof *axis->weights);
    if (!exact || !axis->first || !axis->taps || !axis->weights) {
        free(exact);
        return -1;
    }
    for (int i = 0; i < size; i++) {
        double centre = input.start + (i + 0.5) * scale, sum = 0.0;
        int from = (int)(centre - support + 0.5), to = (int)(centre + support + 0.5);
        if (from < input.low)
            from = input.low;
        if (to > input.high)
            to = input.high;
        if (from >= to) /* a sliver between two input pixels: take the nearer one */
            from = to - 1 >= input.low ? to - 1 : input.low, to = from + 1;
        if (to - from > widest)
            to = from + widest;
        for (int t = 0; t < to - from; t++) {
            double distance = (from + t + 0.5 - centre) / stretch;
            exact[t] = bicubic ? cubic(distance) : triangle(distance);
            sum += exact[t];
        }
        if (sum <= 0.0)
            exact[0] = sum = 1.0;
        axis->first[i] = from;
        axis->taps[i] = to - from;
        quantise(exact, sum, to - from, axis->weights + (size_t)i * (size_t)widest);
    }
    free(exact);
    return 0;
}

static void blend_rows_portable(const uint8_t *pixels, int row_bytes, int taps, const int16_t *weights, int from,
                                int16_t *out) {
    for (int x = from; x < row_bytes; x++) {
        int32_t sum = 1 << (VERTICAL_SHIFT - 1);
        for (int t = 0; t < taps; t++)
            sum += weights[t] * pixels[(size_t)t * (size_t)row_bytes + (size_t)x];
        out[x] = (int16_t)(sum >> VERTICAL_SHIFT);
    }
}

static uint8_t to_byte(int32_t sum) {
    sum >>= HORIZONTAL_SHIFT;
    return (uint8_t)(sum < 0 ? 0 : sum > 255 ? 255 : sum);
}

static void blend_columns_portable(const int16_t *row, const Axis *axis, int flip, uint8_t *out) {
    for (int i = 0; i < axis->size; i++) {
        const int16_t *source = row + 4 * (size_t)axis->first[i];
        const int16_t *weights = axis->weights + (size_t)i * (size_t)axis->stride;
        uint8_t *target = out + 3 * (size_t)(flip ? axis->size - 1 - i : i);
        int32_t sums[3] = {1 << (HORIZONTAL_SHIFT - 1), 1 << (HORIZONTAL_SHIFT - 1), 1 << (HORIZONTAL_SHIFT - 1)};
        for (int t = 0; t < axis->taps[i]; t++)
            for (int c = 0; c < 3; c++)
                sums[c] += weights[t] * source[4 * t + c];
        for (int c = 0; c < 3; c++)
            target[c] = to_byte(sums[c]);
    }
}

#ifdef HAVE_AVX2_PATH
/* 16 bytes of two rows at a time: bytes of both rows side by side, widened, times their pair of weights. */
__attribute__((target("avx2"))) static int blend_rows_avx2(const uint8_t *pixels, int row_bytes, int taps,
                                                           const int16_t *weights, int16_t *out) {
    const __m256i half = _mm256_set1_epi32(1 << (VERTICAL_SHIFT - 1));
    const size_t stride = (size_t)row_bytes;
    int x = 0;
    for (; x + 16 <= row_bytes; x += 16) {
        __m256i low = half, high = half;
        for (int t = 0; t < taps; t += 2) {
            const uint8_t *source = pixels + (size_t)t * stride + (size_t)x;
            int paired = t + 1 < taps;
            __m128i a = _mm_loadu_si128((const __m128i *)source);
            __m128i b = paired ? _mm_loadu_si128((const __m128i *)(source + stride)) : _mm_setzero_si128();
            uint32_t both = (uint16_t)weights[t] | (paired ? (uint32_t)(uint16_t)weights[t + 1] << 16 : 0);
            __m256i pair = _mm256_set1_epi32((int)both);
            low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b)), pair));
            high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm_unpackhi_epi8(a, b)), pair));
        }
        low = _mm256_srai_epi32(low, VERTICAL_SHIFT);
        high = _mm256_srai_epi32(high, VERTICAL_SHIFT);
        /* packs works in 128-bit halves; put the quarters back in order */
        __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xD8);
        _mm256_storeu_si256((__m256i *)(out + x), packed);
    }
    return x;
}

/* Two output rows at a time, one in each half of the register. Two input pixels (8 values) of each make one madd:
   channel by channel their two values, times the two weights. A pixel behind the last tap is read with weight 0; the
   scratch rows have room for it. Four bytes are stored for a pixel, the last of which is the next one's. */
__attribute__((target("avx2"))) static void blend_columns_avx2(const int16_t *upper, const int16_t *lower,
                                                               const Axis *axis, int flip, uint8_t *out_upper,
                                                               uint8_t *out_lower) {
    const __m256i by_channel =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
    const __m256i half = _mm256_set1_epi32(1 << (HORIZONTAL_SHIFT - 1));
    const int last = axis->size - 1;
    for (int i = 0; i <= last; i++) {
        int place = flip ? last - i : i, taps = axis->taps[place];
        size_t first = 4 * (size_t)axis->first[place];
        const int16_t *weights = axis->weights + (size_t)place * (size_t)axis->stride;
        __m256i sum = half;
        for (int t = 0; t < taps; t += 2) {
            int32_t pair;
            memcpy(&pair, weights + t, sizeof pair);
            __m256i pixels = _mm256_inserti128_si256(
                _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(upper + first + 4 * t))),
                _mm_loadu_si128((const __m128i *)(lower + first + 4 * t)), 1);
            sum = _mm256_add_epi32(
                sum, _mm256_madd_epi16(_mm256_shuffle_epi8(pixels, by_channel), _mm256_set1_epi32(pair)));
        }
        sum = _mm256_srai_epi32(sum, HORIZONTAL_SHIFT);
        sum = _mm256_packus_epi16(_mm256_packs_epi32(sum, sum), sum);
        int32_t bytes_upper = _mm_cvtsi128_si32(_mm256_castsi256_si128(sum));
        int32_t bytes_lower = _mm_cvtsi128_si32(_mm256_extracti128_si256(sum, 1));
        size_t stored = i < last ? 4 : 3;
        memcpy(out_upper + 3 * (size_t)i, &bytes_upper, stored);
        memcpy(out_lower + 3 * (size_t)i, &bytes_lower, stored);
    }
}

static int use_avx2(void) { return simd_allowed && __builtin_cpu_supports("avx2"); }
#else
static int use_avx2(void) { return 0; }
#endif

size_t scratch_values(int row_bytes, const Axis *horizontal) {
    return 2 * ((size_t)row_bytes + 4 * (size_t)horizontal->stride);
}

static void blend_rows(const uint8_t *pixels, int row_bytes, const Axis *vertical, int y, int simd, int16_t *out) {
    const uint8_t *rows = pixels + (size_t)vertical->first[y] * (size_t)row_bytes;
    const int16_t *weights = vertical->weights + (size_t)y * (size_t)vertical->stride;
    int done = 0;
#ifdef HAVE_AVX2_PATH
    if (simd)
        done = blend_rows_avx2(rows, row_bytes, vertical->taps[y], weights, out);
#endif
    (void)simd;
    blend_rows_portable(rows, row_bytes, vertical->taps[y], weights, done, out);
}

void resample(const uint8_t *pixels, int row_bytes, const Axis *horizontal, const Axis *vertical, int flip,
              int16_t *scratch, uint8_t *out) {
    const int simd = use_avx2();
    const size_t out_bytes = 3 * (size_t)horizontal->size, half = scratch_values(row_bytes, horizontal) / 2;
    memset(scratch, 0, 2 * half * sizeof *scratch);
    for (int y = 0; y < vertical->size; y += 2) {
        int next = y + 1 < vertical->size ? y + 1 : y; /* an odd last row is made twice */
        uint8_t *upper = out + (size_t)y * out_bytes, *lower = out + (size_t)next * out_bytes;
        blend_rows(pixels, row_bytes, vertical, y, simd, scratch);
        blend_rows(pixels, row_bytes, vertical, next, simd, scratch + half);
#ifdef HAVE_AVX2_PATH
        if (simd) {
            blend_columns_avx2(scratch, scratch + half, horizontal, flip, upper, lower);
            continue;
        }
#endif
        blend_columns_portable(scratch, horizontal, flip, upper);
        blend_columns_portable(scratch + half, horizontal, flip, lower);
    }
}
