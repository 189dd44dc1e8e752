/* libFuzzer's target: PARAMETERS bytes that say what to do, then the JPEG to do it with. Every buffer has exactly the
   size that the headers promise, so that AddressSanitizer sees a byte too many.

   Beside memory safety: a crop has the same pixels with AVX2 and without, with our own Huffman decoding and without,
   whatever its memory held before; and tiling an image changes neither its size nor any pixel of any crop. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../exif.h"
#include "../jpeg.h"
#include "../resample.h"

#define PARAMETERS 24
#define MAX_PIXELS ((size_t)1 << 18) /* larger images find nothing else, only later */

#define REQUIRE(condition)                                                                                             \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "line %d: not so: %s\n", __LINE__, #condition);                                            \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

enum { SIZE, EXIF, CROP, TILE, OPERATIONS };
enum { INSIDE, NEAR, ANYWHERE, BOX_KINDS };

typedef struct {
    const uint8_t *data;
    size_t length;
} Bytes;

/* A copy with exactly `room` bytes behind it. */
static uint8_t *copied(Bytes bytes, size_t room) {
    uint8_t *copy = malloc(bytes.length + room ? bytes.length + room : 1);
    REQUIRE(copy);
    memcpy(copy, bytes.data, bytes.length);
    return copy;
}

static Status size_of(Bytes jpeg, int64_t size[3]) {
    uint8_t *copy = copied(jpeg, 0);
    Status status = jpeg_size(copy, jpeg.length, MAX_PIXELS, size);
    free(copy);
    if (status == OK) {
        REQUIRE(size[0] > 0 && size[1] > 0 && (uint64_t)(size[0] * size[1]) <= MAX_PIXELS);
        REQUIRE(size[2] >= 1 && size[2] <= 8);
    }
    return status;
}

static int64_t limit(unsigned draw, int64_t side) {
    const int64_t limits[] = {0, -1, 1, side - 1, side, side + 1, 65500, 65536, INT_MAX, INT64_MAX, INT64_MIN};
    return limits[draw % (sizeof limits / sizeof *limits)];
}

/* Two edges of a box along a side of the image. */
static void choose_edges(const uint8_t *draws, int kind, int64_t side, int64_t *low, int64_t *high) {
    unsigned first = draws[0] | (unsigned)draws[1] << 8, second = draws[2] | (unsigned)draws[3] << 8;
    if (kind == INSIDE) {
        *low = first % side;
        *high = *low + 1 + second % (side - *low);
    } else if (kind == NEAR) {
        *low = (int64_t)(first % (unsigned)(side + 32)) - 16;
        *high = (int64_t)(second % (unsigned)(side + 32)) - 8;
    } else {
        *low = limit(first, side);
        *high = limit(second, side);
    }
}

static void choose_box(const uint8_t *parameters, const int64_t size[3], int64_t box[4]) {
    int kind = parameters[1] % BOX_KINDS;
    choose_edges(parameters + 4, kind, size[0], &box[0], &box[2]);
    choose_edges(parameters + 8, kind, size[1], &box[1], &box[3]);
}

/* The crop into `out`, from memory that held `fill` before. */
static Status crop_once(Bytes jpeg, const Crop *crop, int fast, int fill, uint8_t *out) {
    Workspace workspace;
    uint8_t *copy = copied(jpeg, 0);
    Status status;
    memset(&workspace, 0, sizeof workspace);
    workspace.pixels_room = 65536;
    workspace.pixels = malloc(workspace.pixels_room);
    REQUIRE(workspace.pixels);
    memset(workspace.pixels, fill, workspace.pixels_room);
    set_simd(fast);
    set_own_entropy(fast);
    status = jpeg_crop(&workspace, copy, jpeg.length, MAX_PIXELS, crop, out);
    free_workspace(&workspace);
    free(copy);
    return status;
}

/* The crop; malloc()ed. */
static Status crop_both_ways(Bytes jpeg, const Crop *crop, uint8_t **out) {
    size_t bytes = 3 * (size_t)crop->width * (size_t)crop->height;
    uint8_t *portable = malloc(bytes);
    Status fast, slow;
    *out = malloc(bytes);
    REQUIRE(*out && portable);
    fast = crop_once(jpeg, crop, 1, 0xAA, *out);
    slow = crop_once(jpeg, crop, 0, 0x55, portable);
    REQUIRE(fast == slow);
    REQUIRE(fast != OK || !memcmp(*out, portable, bytes));
    free(portable);
    return fast;
}

static void try_crop(Bytes jpeg, const Crop *crop) {
    uint8_t *out;
    crop_both_ways(jpeg, crop, &out);
    free(out);
}

static void try_tile(Bytes jpeg, const int64_t size[3], const Crop *crop) {
    int64_t tiled_size[3];
    uint8_t *copy = copied(jpeg, 0), *tiled = NULL, *before, *after;
    size_t tiled_length = 0;
    Status status = jpeg_tile(copy, jpeg.length, MAX_PIXELS, &tiled, &tiled_length), from_original, from_tiled;
    free(copy);
    if (status != OK)
        return;
    Bytes tiles = {tiled, tiled_length};
    REQUIRE(size_of(tiles, tiled_size) == OK && !memcmp(size, tiled_size, sizeof tiled_size));
    from_original = crop_both_ways(jpeg, crop, &before);
    from_tiled = crop_both_ways(tiles, crop, &after);
    REQUIRE(from_original == from_tiled);
    REQUIRE(from_original != OK || !memcmp(before, after, 3 * (size_t)crop->width * (size_t)crop->height));
    free(before);
    free(after);
    free(tiled);
}

static void try_exif(Bytes segment) {
    uint8_t *copy = copied(segment, 0);
    int orientation = exif_orientation(copy, segment.length);
    REQUIRE(orientation >= 1 && orientation <= 8);
    free(copy);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t length) {
    if (length < PARAMETERS)
        return 0;
    Bytes rest = {data + PARAMETERS, length - PARAMETERS};
    int64_t size[3] = {1, 1, 1}, box[4];
    int operation = data[0] % OPERATIONS;
    if (operation == EXIF) {
        try_exif(rest);
        return 0;
    }
    Status status = size_of(rest, size);
    if (status != OK)
        size[0] = size[1] = 64; /* any box will do */
    choose_box(data, size, box);
    Crop crop = {box, 1 + data[2] % 96, 1 + data[3] % 96, data[12] & 7, data[13] & 1};
    if (operation == CROP)
        try_crop(rest, &crop);
    else if (operation == TILE && status == OK)
        try_tile(rest, size, &crop);
    return 0;
}
