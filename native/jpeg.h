/* One JPEG in memory: its size, or a crop of it resized to a square. Whatever the bytes are, the answer is
   pixels or a status; nothing is written to stderr, nothing exits. */
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

/* Memory that is kept from image to image; one for each thread. Zero it first, free_workspace() at the end. */
typedef struct {
    uint8_t *file, *pixels;
    int16_t *row;
    size_t file_room, pixels_room, row_room;
} Workspace;

void free_workspace(Workspace *workspace);
/* At least `bytes` at *block, contents not kept; 0, or -1 when out of memory. */
int reserve(void **block, size_t *room, size_t bytes);

Status jpeg_size(const uint8_t *data, size_t length, size_t max_pixels, int64_t size[2]);
/* box: left, top, right, bottom in whole pixels; out: px × px × 3 bytes. */
Status jpeg_crop(Workspace *workspace, const uint8_t *data, size_t length, size_t max_pixels, const int64_t box[4],
                 int px, int flip, uint8_t *out);

#endif
