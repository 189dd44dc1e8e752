/* An APP1 segment holds "Exif\0\0", then a TIFF header and its first directory of 12-byte entries. */
#include "exif.h"

#include <string.h>

#define TAG_ORIENTATION 0x0112
#define TYPE_SHORT 3

static uint32_t number(const uint8_t *data, int bytes, int big_endian) {
    uint32_t value = 0;
    for (int i = 0; i < bytes; i++)
        value = value << 8 | data[big_endian ? i : bytes - 1 - i];
    return value;
}

int exif_orientation(const uint8_t *data, size_t length) {
    const uint8_t *tiff;
    size_t room, at;
    uint32_t entries;
    int big;
    if (length < 6 + 8 || memcmp(data, "Exif\0\0", 6))
        return 1;
    tiff = data + 6;
    room = length - 6;
    if (memcmp(tiff, "MM\0*", 4) && memcmp(tiff, "II*\0", 4))
        return 1;
    big = tiff[0] == 'M';
    at = number(tiff + 4, 4, big);
    if (at < 8 || at > room - 2) /* room is at least 8 */
        return 1;
    entries = number(tiff + at, 2, big);
    at += 2;
    for (; entries > 0 && at + 12 <= room; entries--, at += 12)
        if (number(tiff + at, 2, big) == TAG_ORIENTATION && number(tiff + at + 2, 2, big) == TYPE_SHORT) {
            uint32_t value = number(tiff + at + 8, 2, big);
            return value >= 1 && value <= 8 ? (int)value : 1;
        }
    return 1;
}
