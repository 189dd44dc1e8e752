/* Decodes no more than the crop needs: rows above it are skipped, columns beside it are not transformed, and
   where the crop is at least twice the output, the inverse DCT itself halves (or quarters…) the image. */
#include "jpeg.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jerror.h>
#include <jpeglib.h>

#include "resample.h"

#define PAD 8 /* pixels decoded beside the crop, so that chroma is interpolated there as in a full decode */
#define MAX_SCANS 200 /* real progressive files have about ten; a bomb has thousands */

typedef struct {
    struct jpeg_error_mgr base; /* first: libjpeg hands out a pointer to it */
    struct jpeg_progress_mgr progress;
    jmp_buf escape;
    int truncated;
} Guard;

static void on_error(j_common_ptr info) { longjmp(((Guard *)info->err)->escape, 1); }

static void on_message(j_common_ptr info, int level) {
    if (level < 0 && info->err->msg_code == JWRN_JPEG_EOF) /* other warnings are no reason: Pillow reads on, too */
        ((Guard *)info->err)->truncated = 1;
}

static void on_progress(j_common_ptr info) {
    if (((j_decompress_ptr)info)->input_scan_number > MAX_SCANS)
        longjmp(((Guard *)info->err)->escape, 1);
}

static void arm(j_decompress_ptr info, Guard *guard) {
    memset(guard, 0, sizeof *guard);
    memset(info, 0, sizeof *info);
    info->err = jpeg_std_error(&guard->base);
    guard->base.error_exit = on_error;
    guard->base.emit_message = on_message;
    guard->progress.progress_monitor = on_progress;
}

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
    free(workspace->row);
    memset(workspace, 0, sizeof *workspace);
}

static int starts_like_jpeg(const uint8_t *data, size_t length) {
    return length >= 3 && data[0] == 0xFF && data[1] == 0xD8 && data[2] == 0xFF;
}

/* A whole file ends in an end-of-image marker, perhaps with something behind it. */
static int has_end(const uint8_t *data, size_t length) {
    for (size_t i = length - 1; i >= 2; i--)
        if (data[i] == 0xD9 && data[i - 1] == 0xFF)
            return 1;
    return 0;
}

static Status check_header(j_decompress_ptr info, size_t max_pixels) {
    if ((size_t)info->image_width * info->image_height > max_pixels)
        return TOO_LARGE;
    if (info->num_components != 1 && info->num_components != 3)
        return FOREIGN;
    return OK;
}

Status jpeg_size(const uint8_t *data, size_t length, size_t max_pixels, int64_t size[2]) {
    struct jpeg_decompress_struct info;
    Guard guard;
    Status status;
    if (!starts_like_jpeg(data, length))
        return FOREIGN;
    arm(&info, &guard);
    if (setjmp(guard.escape)) {
        jpeg_destroy_decompress(&info);
        return CORRUPT;
    }
    jpeg_create_decompress(&info);
    jpeg_mem_src(&info, data, (unsigned long)length);
    jpeg_read_header(&info, TRUE);
    status = guard.truncated ? TRUNCATED : check_header(&info, max_pixels);
    size[0] = info.image_width;
    size[1] = info.image_height;
    jpeg_destroy_decompress(&info);
    return status;
}

/* The largest power of two by which the crop can shrink and still be no smaller than the output. Not where
   chroma has half the columns but all the rows (4:2:2): its columns would be halved once more. */
static unsigned choose_denominator(j_decompress_ptr info, const int64_t box[4], int px) {
    int64_t width = box[2] - box[0], height = box[3] - box[1];
    unsigned denominator = 1;
    if (info->max_h_samp_factor != info->max_v_samp_factor)
        return 1;
    while (denominator < 8 && width >= 2 * (int64_t)denominator * px && height >= 2 * (int64_t)denominator * px)
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

/* Rows of the region into workspace->pixels, 4 bytes a pixel. May leave by longjmp. */
static Status read_region(j_decompress_ptr info, Workspace *workspace, Region *region) {
    size_t row_bytes;
    jpeg_crop_scanline(info, &region->left, &region->width); /* moves the left edge to a block's edge */
    row_bytes = 4 * (size_t)info->output_width;
    if (reserve((void **)&workspace->pixels, &workspace->pixels_room, row_bytes * region->height + 64) ||
        reserve((void **)&workspace->row, &workspace->row_room, (row_bytes + 32) * sizeof *workspace->row))
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

static Status resize_region(j_decompress_ptr info, Workspace *workspace, const Region *region, const int64_t box[4],
                            int px, int flip, uint8_t *out) {
    Axis horizontal, vertical;
    double scale = 1.0 / info->scale_denom;
    int width = (int)info->output_width, height = (int)region->height;
    double left = box[0] * scale - region->left, right = box[2] * scale - region->left;
    double top = box[1] * scale - region->top, bottom = box[3] * scale - region->top;
    /* Nothing outside the crop is used: it is cut out first and resized then. */
    int failed = make_axis(&horizontal, px, left, right, (int)left, (int)at_most((int64_t)(right + 0.999), width)) |
                 make_axis(&vertical, px, top, bottom, (int)top, (int)at_most((int64_t)(bottom + 0.999), height));
    if (!failed)
        resample(workspace->pixels, 4 * width, &horizontal, &vertical, px, flip, workspace->row, out);
    free_axis(&horizontal);
    free_axis(&vertical);
    return failed ? OUT_OF_MEMORY : OK;
}

Status jpeg_crop(Workspace *workspace, const uint8_t *data, size_t length, size_t max_pixels, const int64_t box[4],
                 int px, int flip, uint8_t *out) {
    struct jpeg_decompress_struct info;
    Guard guard;
    Region region;
    Status status;
    if (!starts_like_jpeg(data, length))
        return FOREIGN;
    if (!has_end(data, length))
        return TRUNCATED;
    arm(&info, &guard);
    if (setjmp(guard.escape)) {
        jpeg_destroy_decompress(&info);
        return guard.truncated ? TRUNCATED : CORRUPT;
    }
    jpeg_create_decompress(&info);
    info.progress = &guard.progress;
    jpeg_mem_src(&info, data, (unsigned long)length);
    jpeg_read_header(&info, TRUE);
    status = check_header(&info, max_pixels);
    if (status == OK && (box[0] < 0 || box[1] < 0 || box[0] >= box[2] || box[1] >= box[3] ||
                         box[2] > (int64_t)info.image_width || box[3] > (int64_t)info.image_height))
        status = BAD_BOX;
    if (status == OK) {
        info.out_color_space = JCS_EXT_RGBX;
        info.scale_num = 1;
        info.scale_denom = choose_denominator(&info, box, px);
        jpeg_start_decompress(&info);
        region = padded_region(box, &info);
        status = read_region(&info, workspace, &region);
    }
    if (status == OK)
        status = resize_region(&info, workspace, &region, box, px, flip, out);
    jpeg_destroy_decompress(&info);
    return status == OK && guard.truncated ? TRUNCATED : status;
}
