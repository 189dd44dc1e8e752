/* Antialiased resize of an RGBX region to RGB, equal in meaning to Pillow's BILINEAR and BICUBIC. */
#ifndef FORTYFOLD_RESAMPLE_H
#define FORTYFOLD_RESAMPLE_H

#include <stddef.h>
#include <stdint.h>

/* One axis: output pixel i is the sum of weights[i * stride + t] * input[first[i] + t] for t < taps[i].
   The weights of a pixel add up to exactly 1 << WEIGHT_BITS. */
#define WEIGHT_BITS 14
typedef struct {
    int32_t *first;
    int32_t *taps;
    int16_t *weights;
    int size;
    int stride; /* taps of the widest pixel, rounded up to even; unused weights are 0 */
} Axis;

/* Where on the input an axis lies: [start, end) with fractions; inputs outside [low, high) are not used. */
typedef struct {
    double start, end;
    int low, high;
} Interval;

/* `size` outputs from `input`. Returns 0, or -1 when out of memory; free_axis() in both cases. */
int make_axis(Axis *axis, int size, Interval input, int bicubic);
void free_axis(Axis *axis);

/* `pixels` holds rows of `row_bytes` bytes, 4 bytes a pixel; the axes count from its first pixel. `scratch`
   has room for scratch_values() of them. The result has the axes' sizes, 3 bytes a pixel, mirrored if `flip`. */
size_t scratch_values(int row_bytes, const Axis *horizontal);
void resample(const uint8_t *pixels, int row_bytes, const Axis *horizontal, const Axis *vertical, int flip,
              int16_t *scratch, uint8_t *out);

/* 1: use AVX2 where the processor has it (the default); 0: portable code only. The pixels are the same. */
void set_simd(int allowed);

#endif
