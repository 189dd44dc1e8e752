/* Decodes no more than the crop needs: of a tiled image only the tiles under it (entropy.h); rows above it are skipped,
   columns beside it are not transformed, and where the crop is at least twice the output, the inverse DCT itself halves
   (or quarters…) the image. */
#include "jpeg.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "entropy.h"
#include "exif.h"
#include "guard.h"
#include "resample.h"

#define PAD 8 /* pixels decoded beside the crop, so that chroma is interpolated there as in a full decode */

static int own_entropy_allowed = 1;

void set_own_entropy(int allowed) { own_entropy_allowed = allowed; }

int reserve(void **block, size_t *room, size_t bytes) {
    if (bytes <= *room)
        return 0;
    free(*block);
    *room = 0;
    *block = malloc(bytes);
    if (!*block)
        return -1;
    *room = bytes;
    return 0;
}

void free_workspace(Workspace *workspace) {
    free(workspace->file);
    free(workspace->pixels);
    free(workspace->unturned);
    free(workspace->row);
    if (workspace->reader)
        free_reader(workspace->reader);
    free(workspace->reader);
    memset(workspace, 0, sizeof *workspace);
}

int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

Status jpeg_size(const uint8_t *data, size_t length, size_t max_pixels, int64_t size[3]) {
    struct jpeg_decompress_struct info;
    Guard guard;
    Status status;
    if (!starts_like_jpeg(data, length))
        return FOREIGN;
    arm(&info, &guard);
    if (setjmp(guard.escape)) {
        jpeg_destroy_decompress(&info);
        return why_escaped(&guard);
    }
    jpeg_create_decompress(&info);
    jpeg_save_markers(&info, JPEG_APP0 + 1, 0xFFFF);
    jpeg_mem_src(&info, data, (unsigned long)length);
    jpeg_read_header(&info, TRUE);
    status = guard.truncated ? TRUNCATED : check_header(&info, max_pixels);
    size[0] = info.image_width;
    size[1] = info.image_height;
    size[2] = 1;
    for (jpeg_saved_marker_ptr marker = info.marker_list; marker && size[2] == 1; marker = marker->next)
        size[2] = exif_orientation(marker->data, marker->data_length);
    jpeg_destroy_decompress(&info);
    return status;
}

/* A whole file ends in an end-of-image marker, perhaps with something behind it. */
static int has_end(const uint8_t *data, size_t length) {
    for (size_t i = length - 1; i >= 2; i--)
        if (data[i] == 0xD9 && data[i - 1] == 0xFF)
            return 1;
    return 0;
}

static int lies_in(const int64_t box[4], int64_t width, int64_t height) {
    return box[0] >= 0 && box[1] >= 0 && box[0] < box[2] && box[1] < box[3] && box[2] <= width && box[3] <= height;
}

/* The largest power of two by which a crop can shrink and still be no smaller than the output. */
static int64_t largest_denominator(const Crop *crop) {
    int64_t width = crop->box[2] - crop->box[0], height = crop->box[3] - crop->box[1];
    int64_t denominator = 1;
    while (denominator < 8 && width >= 2 * denominator * crop->width && height >= 2 * denominator * crop->height)
        denominator *= 2;
    return denominator;
}

static int64_t at_least(int64_t value, int64_t low) { return value < low ? low : value; }
static int64_t at_most(int64_t value, int64_t high) { return value > high ? high : value; }

/* What is decoded of the (scaled) image: whole pixels, the crop and some around it. */
typedef struct {
    JDIMENSION left, top, width, height;
} Region;

static Region padded_region(const int64_t box[4], j_decompress_ptr info) {
    int64_t denominator = info->scale_denom;
    int64_t left = at_least(box[0] / denominator - PAD, 0), top = at_least(box[1] / denominator - PAD, 0);
    int64_t right = at_most((box[2] + denominator - 1) / denominator + PAD, info->output_width);
    int64_t bottom = at_most((box[3] + denominator - 1) / denominator + PAD, info->output_height);
    Region region = {(JDIMENSION)left, (JDIMENSION)top, (JDIMENSION)(right - left), (JDIMENSION)(bottom - top)};
    return region;
}

/* Gives Huffman decoding of what the region needs to our own decoder. */
static void take_over_region(j_decompress_ptr info, EntropyReader *reader, const uint8_t *data, size_t length,
                             const Region *region) {
    unsigned denominator = info->scale_denom;
    unsigned mcu_width = DCTSIZE * (info->num_components == 1 ? 1u : (unsigned)info->max_h_samp_factor);
    unsigned mcu_height = DCTSIZE * (info->num_components == 1 ? 1u : (unsigned)info->max_v_samp_factor);
    unsigned right = (region->left + info->output_width) * denominator;
    unsigned bottom = (region->top + region->height) * denominator;
    take_over(info, reader, data, length, region->left * denominator / mcu_width, (right + mcu_width - 1) / mcu_width,
              bottom / mcu_height + 1 + (unsigned)info->max_v_samp_factor); /* rows of context, too */
}

/* Rows of the region into workspace->pixels, 4 bytes a pixel; with our own entropy decoding if `data` is given. May leave
   by longjmp. */
static Status read_region(j_decompress_ptr info, Workspace *workspace, Region *region, const uint8_t *data,
                          size_t length) {
    size_t row_bytes;
    jpeg_crop_scanline(info, &region->left, &region->width); /* moves the left edge to a block's edge */
    if (data)
        take_over_region(info, workspace->reader, data, length, region);
    row_bytes = 4 * (size_t)info->output_width;
    if (reserve((void **)&workspace->pixels, &workspace->pixels_room, row_bytes * region->height))
        return OUT_OF_MEMORY;
    if (region->top > 0 && jpeg_skip_scanlines(info, region->top) != region->top)
        return CORRUPT;
    for (JDIMENSION y = 0; y < region->height;) {
        JSAMPROW row = workspace->pixels + y * row_bytes;
        JDIMENSION got = jpeg_read_scanlines(info, &row, 1);
        if (got == 0)
            return CORRUPT;
        y += got;
    }
    return OK;
}

/* `from` has the output's sides (swapped if it shall be transposed). */
static void turn_pixels(const uint8_t *from, const Crop *crop, uint8_t *out) {
    for (int y = 0; y < crop->height; y++)
        for (int x = 0; x < crop->width; x++) {
            int column = crop->turn & MIRROR_COLUMNS ? crop->width - 1 - x : x;
            int row = crop->turn & MIRROR_ROWS ? crop->height - 1 - y : y;
            size_t place = crop->turn & TRANSPOSE ? (size_t)column * (size_t)crop->height + (size_t)row
                                                  : (size_t)row * (size_t)crop->width + (size_t)column;
            memcpy(out + 3 * ((size_t)y * (size_t)crop->width + (size_t)x), from + 3 * place, 3);
        }
}

static Status resize_region(j_decompress_ptr info, Workspace *workspace, const Region *region, const Crop *crop,
                            uint8_t *out) {
    Axis horizontal, vertical;
    const int64_t *box = crop->box;
    double scale = 1.0 / info->scale_denom;
    int turned = crop->turn > MIRROR_COLUMNS; /* a mere mirror costs nothing on the way */
    int out_width = crop->turn & TRANSPOSE ? crop->height : crop->width;
    int out_height = crop->turn & TRANSPOSE ? crop->width : crop->height;
    int width = (int)info->output_width, height = (int)region->height;
    double left = box[0] * scale - region->left, right = box[2] * scale - region->left;
    double top = box[1] * scale - region->top, bottom = box[3] * scale - region->top;
    /* Nothing outside the crop is used: it is cut out first and resized then. */
    Interval columns = {left, right, (int)left, (int)at_most((int64_t)(right + 0.999), width)};
    Interval rows = {top, bottom, (int)top, (int)at_most((int64_t)(bottom + 0.999), height)};
    int failed = make_axis(&horizontal, out_width, columns, crop->bicubic) |
                 make_axis(&vertical, out_height, rows, crop->bicubic);
    if (!failed)
        failed = reserve((void **)&workspace->row, &workspace->row_room,
                         scratch_values(4 * width, &horizontal) * sizeof *workspace->row);
    if (turned && !failed)
        failed = reserve((void **)&workspace->unturned, &workspace->unturned_room,
                         3 * (size_t)out_width * (size_t)out_height);
    if (!failed)
        resample(workspace->pixels, 4 * width, &horizontal, &vertical, !turned && crop->turn, workspace->row,
                 turned ? workspace->unturned : out);
    if (turned && !failed)
        turn_pixels(workspace->unturned, crop, out);
    free_axis(&horizontal);
    free_axis(&vertical);
    return failed ? OUT_OF_MEMORY : OK;
}

static Status decode(Workspace *workspace, const uint8_t *data, size_t length, size_t max_pixels, const Crop *crop,
                     int own_entropy, uint8_t *out) {
    struct jpeg_decompress_struct info;
    Guard guard;
    Region region;
    Status status;
    const int64_t *box = crop->box;
    int64_t started = now_ns();
    arm(&info, &guard);
    if (setjmp(guard.escape)) {
        jpeg_destroy_decompress(&info);
        return why_escaped(&guard);
    }
    jpeg_create_decompress(&info);
    info.progress = &guard.progress;
    info.client_data = workspace->reader;
    jpeg_mem_src(&info, data, (unsigned long)length);
    jpeg_read_header(&info, TRUE);
    status = check_header(&info, max_pixels);
    if (status == OK && !lies_in(box, info.image_width, info.image_height))
        status = BAD_BOX;
    if (status == OK) {
        info.out_color_space = JCS_EXT_RGBX;
        info.scale_num = 1;
        /* Not where chroma has half the columns but all the rows (4:2:2): its columns would be halved once more. */
        info.scale_denom =
            info.max_h_samp_factor == info.max_v_samp_factor ? (unsigned)largest_denominator(crop) : 1;
        jpeg_start_decompress(&info);
        region = padded_region(box, &info);
        status = read_region(&info, workspace, &region, own_entropy ? data : NULL, length);
        if (status == OK && guard.truncated)
            status = TRUNCATED;
    }
    int64_t decoded = now_ns();
    workspace->decode_ns += decoded - started;
    if (own_entropy && workspace->reader->failed)
        status = CORRUPT;
    if (status == OK)
        status = resize_region(&info, workspace, &region, crop, out);
    workspace->resize_ns += now_ns() - decoded;
    jpeg_destroy_decompress(&info);
    return status;
}

Status jpeg_crop(Workspace *workspace, const uint8_t *data, size_t length, size_t max_pixels, const Crop *crop,
                 uint8_t *out) {
    Status status;
    if (!starts_like_jpeg(data, length))
        return FOREIGN;
    if (!has_end(data, length))
        return TRUNCATED;
    if (!workspace->reader)
        workspace->reader = calloc(1, sizeof *workspace->reader);
    if (!workspace->reader)
        return OUT_OF_MEMORY;
    workspace->reader->failed = 0;
    status = decode(workspace, data, length, max_pixels, crop, own_entropy_allowed, out);
    if (own_entropy_allowed && (status == CORRUPT || status == TRUNCATED)) /* libjpeg reads over some damage, and knows better what it is */
        status = decode(workspace, data, length, max_pixels, crop, 0, out);
    return status;
}
