#include "guard.h"

#include <string.h>

#include <jerror.h>

#define MAX_SCANS 200 /* real progressive files have about ten; a bomb has thousands */

static void on_error(j_common_ptr info) { longjmp(((Guard *)info->err)->escape, 1); }

static void on_message(j_common_ptr info, int level) {
    if (level >= 0)
        return;
    ((Guard *)info->err)->damaged = 1;
    if (info->err->msg_code == JWRN_JPEG_EOF)
        ((Guard *)info->err)->truncated = 1;
}

static void on_progress(j_common_ptr info) {
    if (((j_decompress_ptr)info)->input_scan_number > MAX_SCANS)
        longjmp(((Guard *)info->err)->escape, 1);
}

void arm(j_decompress_ptr info, Guard *guard) {
    memset(guard, 0, sizeof *guard);
    memset(info, 0, sizeof *info);
    info->err = jpeg_std_error(&guard->base);
    guard->base.error_exit = on_error;
    guard->base.emit_message = on_message;
    guard->progress.progress_monitor = on_progress;
}

Status why_escaped(const Guard *guard) {
    if (guard->base.msg_code == JERR_OUT_OF_MEMORY)
        return OUT_OF_MEMORY;
    return guard->truncated ? TRUNCATED : CORRUPT;
}

int starts_like_jpeg(const uint8_t *data, size_t length) {
    return length >= 3 && data[0] == 0xFF && data[1] == 0xD8 && data[2] == 0xFF;
}

Status check_header(j_decompress_ptr info, size_t max_pixels) {
    if ((size_t)info->image_width * info->image_height > max_pixels)
        return TOO_LARGE;
    if (info->num_components != 1 && info->num_components != 3)
        return FOREIGN;
    return OK;
}
