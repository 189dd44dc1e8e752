/* Makes tiled JPEGs: coefficients in, coefficients out, so no pixel changes for any decoder. */
#include <stdlib.h>
#include <string.h>

#include "guard.h"

#include <jerror.h>

#define TILE_PIXELS 32 /* wide, or as near as divides the row; 4:2:0 then has a marker every 2 MCUs */

#ifndef SPARE_BYTES
#define SPARE_BYTES 65536 /* beyond the original's; tiled images seldom need more */
#endif

/* MCUs between two markers: they must divide the row, so that each row starts with one. */
static unsigned choose_interval(unsigned mcus_a_row, unsigned mcu_width) {
    unsigned wanted = TILE_PIXELS / mcu_width > 1 ? TILE_PIXELS / mcu_width : 1;
    for (unsigned step = 0; step <= wanted; step++) {
        if (mcus_a_row % (wanted + step) == 0)
            return wanted + step;
        if (wanted > step && mcus_a_row % (wanted - step) == 0)
            return wanted - step;
    }
    return 1;
}

/* The offset of the first scan's marker; `length` when the header is not a plain row of segments. */
static size_t find_scan(const uint8_t *data, size_t length) {
    size_t at = 2;
    while (at + 4 <= length && data[at] == 0xFF && data[at + 1] != 0xDA)
        at += data[at + 1] == 0xFF ? 1 : 2 + ((size_t)data[at + 2] << 8 | data[at + 3]);
    return at + 4 <= length && data[at] == 0xFF ? at : length;
}

/* Coded data writes the byte 0xFF as 0xFF 0. With more than one 0xFF before the 0, libjpeg-turbo's fast and slow paths
   disagree without a warning, so that pixels depend on where the file ends: no tiling keeps them. */
static int is_ambiguous(const uint8_t *data, size_t length) {
    const uint8_t *end = data + length, *at = data + find_scan(data, length);
    if (at == end)
        return 1;
    while ((at = memchr(at, 0xFF, (size_t)(end - at)))) {
        const uint8_t *next = at + 1;
        while (next < end && *next == 0xFF)
            next++;
        if (next < end && *next == 0 && next - at > 1)
            return 1;
        at = next;
    }
    return 0;
}

static void copy_segments(j_decompress_ptr from, j_compress_ptr to) {
    for (jpeg_saved_marker_ptr marker = from->marker_list; marker; marker = marker->next) {
        int jfif = marker->marker == JPEG_APP0 && marker->data_length >= 5 && !memcmp(marker->data, "JFIF", 5);
        int adobe = marker->marker == JPEG_APP0 + 14 && marker->data_length >= 5 && !memcmp(marker->data, "Adobe", 5);
        if (!(jfif && to->write_JFIF_header) && !(adobe && to->write_Adobe_marker)) /* libjpeg writes these itself */
            jpeg_write_marker(to, marker->marker, marker->data, marker->data_length);
    }
}

/* Where a progressive image has no or not all bits of a coefficient, decoders guess what it was (block smoothing); they
   would take a sequential image's at its word. */
static int lacks_scans(j_decompress_ptr info) {
    if (!info->progressive_mode)
        return 0;
    for (int component = 0; component < info->num_components; component++)
        for (int i = 0; i < DCTSIZE2; i++)
            if (info->coef_bits[component][i] != 0)
                return 1;
    return 0;
}

static Status write_tiled(j_decompress_ptr from, j_compress_ptr to) {
    jvirt_barray_ptr *coefficients = jpeg_read_coefficients(from);
    unsigned mcu_width, mcus_a_row;
    if (lacks_scans(from))
        return CORRUPT;
    jpeg_copy_critical_parameters(from, to);
    mcu_width = from->num_components == 1 ? DCTSIZE : DCTSIZE * (unsigned)from->max_h_samp_factor;
    mcus_a_row = (from->image_width + mcu_width - 1) / mcu_width;
    to->optimize_coding = TRUE; /* pays for the markers */
    to->restart_interval = choose_interval(mcus_a_row, mcu_width);
    jpeg_write_coefficients(to, coefficients);
    copy_segments(from, to);
    jpeg_finish_compress(to);
    jpeg_finish_decompress(from);
    return OK;
}

/* Where the compressed data goes. libjpeg's own destination loses its memory when an error leaves by longjmp. */
typedef struct {
    struct jpeg_destination_mgr base; /* first: libjpeg hands out a pointer to it */
    uint8_t *data;
    size_t room, length;
} Sink;

static void open_sink(j_compress_ptr to) {
    Sink *sink = (Sink *)to->dest;
    sink->base.next_output_byte = sink->data;
    sink->base.free_in_buffer = sink->room;
}

static boolean grow_sink(j_compress_ptr to) {
    Sink *sink = (Sink *)to->dest;
    uint8_t *larger = realloc(sink->data, 2 * sink->room);
    if (!larger)
        ERREXIT1(to, JERR_OUT_OF_MEMORY, 0);
    sink->base.next_output_byte = larger + sink->room;
    sink->base.free_in_buffer = sink->room;
    sink->data = larger;
    sink->room *= 2;
    return TRUE;
}

static void close_sink(j_compress_ptr to) {
    Sink *sink = (Sink *)to->dest;
    sink->length = sink->room - sink->base.free_in_buffer;
}

static Status retile(const uint8_t *data, size_t length, size_t max_pixels, Sink *sink) {
    struct jpeg_decompress_struct from;
    struct jpeg_compress_struct to;
    Guard guard;
    Status status;
    arm(&from, &guard);
    memset(&to, 0, sizeof to);
    to.err = from.err;
    if (setjmp(guard.escape)) {
        jpeg_destroy_compress(&to);
        jpeg_destroy_decompress(&from);
        return why_escaped(&guard);
    }
    jpeg_create_decompress(&from);
    jpeg_create_compress(&to);
    to.dest = &sink->base;
    from.progress = &guard.progress;
    for (int marker = 0; marker < 16; marker++)
        jpeg_save_markers(&from, JPEG_APP0 + marker, 0xFFFF);
    jpeg_save_markers(&from, JPEG_COM, 0xFFFF);
    jpeg_mem_src(&from, data, (unsigned long)length);
    jpeg_read_header(&from, TRUE);
    status = check_header(&from, max_pixels);
    if (status == OK)
        status = write_tiled(&from, &to);
    jpeg_destroy_compress(&to);
    jpeg_destroy_decompress(&from);
    if (status == OK && guard.damaged)
        status = guard.truncated ? TRUNCATED : CORRUPT;
    return status;
}

Status jpeg_tile(const uint8_t *data, size_t length, size_t max_pixels, uint8_t **out, size_t *out_length) {
    Sink sink = {.base = {.init_destination = open_sink, .empty_output_buffer = grow_sink, .term_destination = close_sink}};
    Status status;
    if (!starts_like_jpeg(data, length))
        return FOREIGN;
    if (is_ambiguous(data, length))
        return CORRUPT;
    sink.room = length + SPARE_BYTES;
    sink.data = malloc(sink.room);
    if (!sink.data)
        return OUT_OF_MEMORY;
    status = retile(data, length, max_pixels, &sink);
    if (status != OK) {
        free(sink.data);
        return status;
    }
    *out = sink.data;
    *out_length = sink.length;
    return OK;
}
