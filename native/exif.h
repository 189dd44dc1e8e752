/* The orientation tag of a JPEG, 1…8; 1 where there is none or it makes no sense. */
#ifndef FORTYFOLD_EXIF_H
#define FORTYFOLD_EXIF_H

#include <stddef.h>
#include <stdint.h>

/* `data` is the content of an APP1 segment, without its marker and length. */
int exif_orientation(const uint8_t *data, size_t length);

#endif
