/* One JPEG in memory: its size, a crop of it resized, or the same image tiled. Whatever the bytes are, the answer is
   a result or a status; nothing is written to stderr, nothing exits. */
#ifndef FORTYFOLD_JPEG_H
#define FORTYFOLD_JPEG_H

#include <stddef.h>
#include <stdint.h>

typedef enum {
    OK = 0,
    UNREADABLE_FILE = 1, /* the file could not be opened or read */
    EMPTY_FILE = 2,
    FOREIGN = 3, /* not a JPEG, or of a kind left to another decoder (four components) */
    TOO_LARGE = 4, /* more pixels than the limit */
    TRUNCATED = 5,
    CORRUPT = 6,
    OUT_OF_MEMORY = 7,
    BAD_BOX = 8 /* the crop does not lie in the image: the file changed since its size was read */
} Status;

/* How a crop becomes an output image: `box` (left, top, right, bottom in whole pixels of the image as stored) is
   resized and then turned: transposed if turn & TRANSPOSE, then mirrored. The output is width × height × 3 bytes. */
enum { MIRROR_COLUMNS = 1, MIRROR_ROWS = 2, TRANSPOSE = 4 };
typedef struct {
    const int64_t *box;
    int width, height;
    int turn;
    int bicubic; /* else bilinear; both antialiased */
} Crop;

/* Memory that is kept from image to image, and where the time went; one for each thread. Zero it first,
   free_workspace() at the end. */
typedef struct {
    uint8_t *file, *pixels, *unturned;
    int16_t *row;
    size_t file_room, pixels_room, unturned_room, row_room;
    struct EntropyReader *reader;
    int64_t read_ns, decode_ns, resize_ns;
} Workspace;

void free_workspace(Workspace *workspace);
/* At least `bytes` at *block, contents not kept; 0, or -1 when out of memory. */
int reserve(void **block, size_t *room, size_t bytes);
int64_t now_ns(void);

/* size: width, height and EXIF orientation (1…8) of the image as stored. */
Status jpeg_size(const uint8_t *data, size_t length, size_t max_pixels, int64_t size[3]);

/* Nothing is written to `out` unless the answer is OK. */
Status jpeg_crop(Workspace *workspace, const uint8_t *data, size_t length, size_t max_pixels, const Crop *crop,
                 uint8_t *out);

/* 1: decode Huffman data with entropy.h where that can be (the default); 0: leave it to libjpeg. The pixels are the same. */
void set_own_entropy(int allowed);

/* The same coefficients once more, sequential, with a restart marker every few MCUs (see entropy.h), all other segments
   of the header kept. The result is malloc()ed. Damaged images are not OK, even where they could be decoded. */
Status jpeg_tile(const uint8_t *data, size_t length, size_t max_pixels, uint8_t **out, size_t *out_length);

#endif
