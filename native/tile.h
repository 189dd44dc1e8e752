/* Tiled JPEGs: ordinary ones with a restart marker every few MCUs, so that a crop's part of the compressed data can
   be found and decoded alone. libjpeg would have to decode all that lies above and beside the crop. */
#ifndef FORTYFOLD_TILE_H
#define FORTYFOLD_TILE_H

#include <stddef.h>
#include <stdint.h>

#define TILED_ROOM 6 /* each marker, two bytes, may grow by eight */

/* What of the image is wanted, in whole pixels; `right` and `bottom` may lie beyond the image. */
typedef struct {
    int64_t left, top, right, bottom;
} Part;

/* If `data` is tiled: a small JPEG of the tiles that cover `part` into `out` (room for TILED_ROOM × `length` bytes), its length in
   *out_length, and where its first pixel lies in the image in *left and *top (whole MCUs). Returns 1, or 0 when the
   data is not tiled, or damaged, or the part does not lie in it: then decode `data` itself. */
int cut_tiles(const uint8_t *data, size_t length, const Part *part, uint8_t *out, size_t *out_length, int64_t *left,
              int64_t *top);

#endif
