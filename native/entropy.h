/* Huffman decoding for libjpeg, which keeps everything else: headers, inverse DCT, upsampling, colours.

   libjpeg decodes every MCU above and beside a crop in full. This decoder skips those without storing anything, and
   where restart markers divide the rows evenly (a tiled image) it does not even look at them: what lies between two
   markers depends on nothing before it. It also reads symbol and value with one table look-up. Whatever is not
   perfectly regular makes it give up: `failed` is set, and the caller decodes the image again with libjpeg alone. */
#ifndef FORTYFOLD_ENTROPY_H
#define FORTYFOLD_ENTROPY_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <jpeglib.h>

#define LOOK_BITS 10

typedef struct {
    UINT8 bits[17], values[256]; /* the table that this was made of */
    int32_t look[1 << LOOK_BITS];
    int32_t end_code[18]; /* by length: one more than its last code, shifted to 16 bits; [17] is a sentinel */
    int32_t offset[17];   /* by length: what leads from a code to its place in `values` */
    int made;
} HuffmanTable;

typedef struct EntropyReader {
    HuffmanTable dc[NUM_HUFF_TBLS], ac[NUM_HUFF_TBLS]; /* kept from image to image: many have the same */
    const uint8_t *start, *at, *end; /* entropy-coded data */
    uint64_t bits;                   /* the next ones, from the top */
    int num_bits, num_missing;       /* of `num_bits`, so many at the end are zeros in place of what is not there */
    int last_dc[MAX_COMPS_IN_SCAN];
    unsigned row, column;               /* of the next MCU */
    unsigned first_column, end_column;  /* MCUs whose coefficients are wanted */
    unsigned interval, until_restart;   /* MCUs between two markers (0: none), and to the next */
    uint32_t *tiles;                    /* where each tile starts, row by row; used if num_tile_rows */
    size_t tiles_room;
    unsigned tiles_a_row, num_tile_rows;
    int failed;
} EntropyReader;

/* Takes over Huffman decoding of an image for which jpeg_start_decompress() was called, for the MCU columns
   [first_column, end_column) and, if it is tiled, rows before end_row. Not if the image is of a kind that is left to
   libjpeg (progressive, several scans): then nothing is changed. `info->client_data` must be `reader`. */
void take_over(j_decompress_ptr info, EntropyReader *reader, const uint8_t *data, size_t length, unsigned first_column,
               unsigned end_column, unsigned end_row);
void free_reader(EntropyReader *reader);

#endif
