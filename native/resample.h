/* Antialiased resize of an RGBX region to a square of RGB, equal in meaning to Pillow's BILINEAR. */
#ifndef FORTYFOLD_RESAMPLE_H
#define FORTYFOLD_RESAMPLE_H

#include <stdint.h>

/* One axis: output pixel i is the sum of weights[i * stride + t] * input[first[i] + t] for t < taps[i].
   The weights of a pixel add up to exactly 1 << WEIGHT_BITS. */
#define WEIGHT_BITS 14
typedef struct {
    int32_t *first;
    int32_t *taps;
    int16_t *weights;
    int stride; /* taps of the widest pixel, rounded up to even; unused weights are 0 */
} Axis;

/* Resample `size` outputs from [start, end) (in input pixels, with fractions); inputs outside [low, high)
   are not used. Returns 0, or -1 when out of memory; free_axis() in both cases. */
int make_axis(Axis *axis, int size, double start, double end, int low, int high);
void free_axis(Axis *axis);

/* `pixels` holds rows of `row_bytes` bytes, 4 bytes a pixel; the axes count from its first pixel. `scratch`
   has room for row_bytes int16 values and 32 more. Rows and columns behind the last tap are read up to one
   pixel, never written. The result is px × px × 3 bytes, mirrored if `flip`. */
void resample(const uint8_t *pixels, int row_bytes, const Axis *horizontal, const Axis *vertical, int px, int flip,
              int16_t *scratch, uint8_t *out);

/* 1: use AVX2 where the processor has it (the default); 0: portable code only. The pixels are the same. */
void set_simd(int allowed);

#endif
