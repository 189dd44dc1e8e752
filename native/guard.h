/* libjpeg with its way out: errors come back by longjmp, nothing is printed, bombs of many scans are cut short. */
#ifndef FORTYFOLD_GUARD_H
#define FORTYFOLD_GUARD_H

#include <setjmp.h>
#include <stdio.h>

#include <jpeglib.h>

#include "jpeg.h"

typedef struct {
    struct jpeg_error_mgr base; /* first: libjpeg hands out a pointer to it */
    struct jpeg_progress_mgr progress;
    jmp_buf escape;
    int truncated;
    int damaged; /* any warning about the data */
} Guard;

/* Call setjmp(guard->escape) after this and before anything else is done with `info`. */
void arm(j_decompress_ptr info, Guard *guard);

/* What the error that escaped means. Want of memory says nothing about the image. */
Status why_escaped(const Guard *guard);

int starts_like_jpeg(const uint8_t *data, size_t length);
Status check_header(j_decompress_ptr info, size_t max_pixels);

#endif
