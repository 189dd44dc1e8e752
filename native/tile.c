/* Between two restart markers, entropy-coded data depends on nothing before it: segments can be put together anew
   under a header with another size. Markers are found by scanning for 0xFF, which coded data never has without a
   0 behind it; that is a matter of microseconds, where an index of all of them would be gigabytes. */
#include "tile.h"

#include <string.h>

/* libjpeg's fast path reads up to 8 bytes ahead, and where it meets a marker it gives up and decodes the MCU again
   the slow way. With so many zeros before each marker it never does; they are skipped with the marker. */
#define READ_AHEAD 8

enum { SOF0 = 0xC0, SOF1 = 0xC1, DHT = 0xC4, RST0 = 0xD0, EOI = 0xD9, SOS = 0xDA, DQT = 0xDB, DRI = 0xDD };
enum { APP0 = 0xE0, APP14 = 0xEE, APP15 = 0xEF, COM = 0xFE };

typedef struct {
    int64_t width, height;
    int components;
    int mcu_width, mcu_height;
    int64_t interval;       /* MCUs between two restart markers */
    size_t frame_at, scan_at; /* offsets of SOF's content and of the entropy-coded data */
} Layout;

static unsigned two_bytes(const uint8_t *data) { return (unsigned)data[0] << 8 | data[1]; }

static int read_frame(const uint8_t *content, size_t length, Layout *layout) {
    int max_h = 1, max_v = 1;
    if (length < 6 || layout->components || content[0] != 8)
        return 0;
    layout->height = two_bytes(content + 1);
    layout->width = two_bytes(content + 3);
    layout->components = content[5];
    if ((layout->components != 1 && layout->components != 3) || length != 6 + 3 * (size_t)layout->components)
        return 0;
    for (int i = 0; i < layout->components; i++) {
        int h = content[7 + 3 * i] >> 4, v = content[7 + 3 * i] & 15;
        if (h < 1 || h > 4 || v < 1 || v > 4)
            return 0;
        max_h = h > max_h ? h : max_h;
        max_v = v > max_v ? v : max_v;
    }
    layout->mcu_width = layout->components == 1 ? 8 : 8 * max_h; /* a scan of one component goes block by block */
    layout->mcu_height = layout->components == 1 ? 8 : 8 * max_v;
    return layout->width > 0 && layout->height > 0;
}

/* One scan with all components, and all of their coefficients. */
static int is_sequential_scan(const uint8_t *content, size_t length, const Layout *layout) {
    size_t components = (size_t)layout->components;
    return components && length == 4 + 2 * components && content[0] == components && content[1 + 2 * components] == 0 &&
           content[2 + 2 * components] == 63 && content[3 + 2 * components] == 0;
}

/* Any other marker (another kind of frame, fill bytes, what no decoder knows) is left to libjpeg to judge: a header that
   is read in two ways could hold two images. */
static int is_plain(unsigned marker) {
    return marker == SOF0 || marker == SOF1 || marker == DHT || marker == SOS || marker == DQT || marker == DRI ||
           (marker >= APP0 && marker <= APP15) || marker == COM;
}

/* Header segments that a decoder needs: tables, and what tells the colour space. */
static int is_needed(unsigned marker) {
    return marker < APP0 ? 1 : marker == APP0 || marker == APP14;
}

/* Walks the header, copying what is needed to `out` (room for all of `length`); 1 when the image is tiled. */
static int read_layout(const uint8_t *data, size_t length, Layout *layout, uint8_t *out, size_t *copied) {
    size_t at = 2;
    memset(layout, 0, sizeof *layout);
    memcpy(out, data, 2);
    *copied = 2;
    while (at + 4 <= length && data[at] == 0xFF) {
        unsigned marker = data[at + 1];
        size_t size = two_bytes(data + at + 2);
        const uint8_t *content = data + at + 4;
        if (!is_plain(marker) || size < 2 || size > length - at - 2)
            return 0;
        if (marker == SOF0 || marker == SOF1) {
            if (!read_frame(content, size - 2, layout))
                return 0;
            layout->frame_at = *copied + 4;
        } else if (marker == DRI && size == 4) {
            layout->interval = two_bytes(content);
        }
        if (is_needed(marker)) {
            memcpy(out + *copied, data + at, size + 2);
            *copied += size + 2;
        }
        at += size + 2;
        if (marker == SOS) {
            layout->scan_at = at;
            return layout->interval > 0 && is_sequential_scan(content, size - 2, layout);
        }
    }
    return 0;
}

/* The end of the segment that starts at `at`: the offset of the marker behind it. */
static size_t segment_end(const uint8_t *data, size_t length, size_t at) {
    while (at < length) {
        const uint8_t *found = memchr(data + at, 0xFF, length - at);
        if (!found || (size_t)(found - data) + 1 >= length)
            return length;
        at = (size_t)(found - data);
        if (found[1] != 0)
            return at;
        at += 2;
    }
    return length;
}

static void write_size(uint8_t *frame, int64_t width, int64_t height) {
    frame[1] = (uint8_t)(height >> 8);
    frame[2] = (uint8_t)height;
    frame[3] = (uint8_t)(width >> 8);
    frame[4] = (uint8_t)width;
}

static int64_t up_to(int64_t value, int64_t high) { return value < high ? value : high; }
static int64_t rounded_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

int cut_tiles(const uint8_t *data, size_t length, const Part *part, uint8_t *out, size_t *out_length, int64_t *left,
              int64_t *top) {
    Layout layout;
    size_t at, written;
    int64_t tile_width, tiles_a_row, num_rows, first_column, end_column, first_row, end_row, taken = 0;
    if (length < 4 || !read_layout(data, length, &layout, out, &written))
        return 0;
    tile_width = layout.interval * layout.mcu_width;
    if (rounded_up(layout.width, layout.mcu_width) % layout.interval || part->left < 0 || part->top < 0 ||
        part->left >= layout.width || part->top >= layout.height)
        return 0;
    tiles_a_row = rounded_up(layout.width, tile_width);
    num_rows = rounded_up(layout.height, layout.mcu_height);
    first_column = part->left / tile_width;
    first_row = part->top / layout.mcu_height;
    end_column = rounded_up(up_to(part->right, layout.width), tile_width);
    end_row = rounded_up(up_to(part->bottom, layout.height), layout.mcu_height);
    if (first_column >= end_column || first_row >= end_row)
        return 0;
    *left = first_column * tile_width;
    *top = first_row * layout.mcu_height;
    write_size(out + layout.frame_at, up_to(end_column * tile_width, layout.width) - *left,
               up_to(end_row * layout.mcu_height, layout.height) - *top);
    at = layout.scan_at;
    for (int64_t row = 0; row < end_row; row++)
        for (int64_t column = 0; column < tiles_a_row; column++) {
            size_t end = segment_end(data, length, at);
            int last = row == num_rows - 1 && column == tiles_a_row - 1;
            unsigned expected = last ? EOI : RST0 + (unsigned)((row * tiles_a_row + column) % 8);
            if (end + 2 > length || data[end + 1] != expected)
                return 0;
            if (row >= first_row && column >= first_column && column < end_column) {
                memcpy(out + written, data + at, end - at);
                memset(out + written + (end - at), 0, READ_AHEAD);
                written += end - at + READ_AHEAD;
                out[written++] = 0xFF;
                out[written++] = (uint8_t)(RST0 + taken++ % 8);
            }
            at = end + 2;
        }
    out[written - 1] = EOI;
    *out_length = written;
    return 1;
}
