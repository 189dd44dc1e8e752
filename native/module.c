/* Python's view: functions that take a whole batch, release the GIL and share the work among threads.

   read_sizes(files, which, offsets, lengths, sizes, statuses, max_pixels, num_threads)
   decode_crops(files, which, offsets, lengths, boxes, turns, out, statuses, nanoseconds,
                width, height, bicubic, max_pixels, num_threads)
   fetch(files, which, offsets, lengths, num_threads)
   tile(jpeg, max_pixels)

   Image i is the `lengths[i]` bytes (-1: all) at `offsets[i]` of file which[i] of `files`, a list of paths as bytes.
   which: int32; offsets, lengths: int64; sizes: int64, n × 3 (width, height, EXIF orientation); boxes: int64, n × 4;
   turns: uint8; statuses: int32 (jpeg.h says what they mean); out: uint8, n × height × width × 3; nanoseconds: int64,
   3 (reading, decoding, resizing: summed over the threads). All contiguous. Bound in data/decode.py only, which has
   checked the shapes; the lengths are checked here once more, since a mistake would write anywhere. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jpeglib.h>

#include "jpeg.h"
#include "resample.h"

#define HEAD_BYTES 16384
#define MAX_FILE_BYTES ((int64_t)1 << 30)
#define MAX_THREADS 256

typedef struct Batch Batch;
typedef Status Job(const Batch *batch, Py_ssize_t i, Workspace *workspace);

struct Batch {
    Job *job;
    const char **files;
    Py_ssize_t num_files, count;
    const int32_t *which;
    const int64_t *offsets, *lengths;
    size_t max_pixels;
    int64_t *sizes;
    const int64_t *boxes;
    const uint8_t *turns;
    uint8_t *out;
    int32_t *statuses;
    int width, height, bicubic;
    atomic_long next;
    atomic_llong read_ns, decode_ns, resize_ns;
};

static Status read_open_file(int descriptor, int64_t offset, int64_t wanted, Workspace *workspace, size_t *length) {
    int64_t got = 0;
    if (reserve((void **)&workspace->file, &workspace->file_room, (size_t)wanted + 1))
        return OUT_OF_MEMORY;
    while (got < wanted) {
        ssize_t part = pread(descriptor, workspace->file + got, (size_t)(wanted - got), (off_t)(offset + got));
        if (part < 0 && errno == EINTR) /* a signal that some other thread will attend to */
            continue;
        if (part < 0)
            return UNREADABLE_FILE;
        if (part == 0)
            break; /* it shrank while we read: what is there decides */
        got += part;
    }
    *length = (size_t)got;
    return got ? OK : EMPTY_FILE;
}

/* The image's first `limit` bytes (0: all) into the workspace; *whole tells whether that is all. */
static Status read_image(const Batch *batch, Py_ssize_t i, int64_t limit, Workspace *workspace, size_t *length,
                         int *whole) {
    struct stat about;
    Status status = UNREADABLE_FILE;
    int64_t started = now_ns(), offset = batch->offsets[i], size = batch->lengths[i];
    int descriptor;
    do /* a pipe without a writer shall not be waited for; files do not care */
        descriptor = open(batch->files[batch->which[i]], O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    while (descriptor < 0 && errno == EINTR);
    if (descriptor < 0)
        return UNREADABLE_FILE;
    if (!fstat(descriptor, &about) && S_ISREG(about.st_mode) && offset >= 0) {
        int64_t there = offset < about.st_size ? (int64_t)about.st_size - offset : 0;
        size = size < 0 || size > there ? there : size;
        *whole = limit == 0 || size <= limit;
        if (size <= MAX_FILE_BYTES)
            status = read_open_file(descriptor, offset, *whole ? size : limit, workspace, length);
    }
    close(descriptor);
    workspace->read_ns += now_ns() - started;
    return status;
}

static Status one_size(const Batch *batch, Py_ssize_t i, Workspace *workspace) {
    size_t length;
    int whole;
    Status status = read_image(batch, i, HEAD_BYTES, workspace, &length, &whole);
    if (status == OK)
        status = jpeg_size(workspace->file, length, batch->max_pixels, batch->sizes + 3 * i);
    if ((status == TRUNCATED || status == CORRUPT) && !whole) { /* a header longer than usual */
        status = read_image(batch, i, 0, workspace, &length, &whole);
        if (status == OK)
            status = jpeg_size(workspace->file, length, batch->max_pixels, batch->sizes + 3 * i);
    }
    return status;
}

static Status one_crop(const Batch *batch, Py_ssize_t i, Workspace *workspace) {
    size_t length, image_bytes = (size_t)batch->width * (size_t)batch->height * 3;
    int whole;
    Crop crop = {batch->boxes + 4 * i, batch->width, batch->height, batch->turns[i] & 7, batch->bicubic};
    Status status = read_image(batch, i, 0, workspace, &length, &whole);
    if (status == OK)
        status = jpeg_crop(workspace, workspace->file, length, batch->max_pixels, &crop,
                           batch->out + (size_t)i * image_bytes);
    return status;
}

static Status one_fetch(const Batch *batch, Py_ssize_t i, Workspace *workspace) {
    size_t length;
    int whole;
    return read_image(batch, i, 0, workspace, &length, &whole);
}

static void *work(void *argument) {
    Batch *batch = argument;
    Workspace workspace;
    memset(&workspace, 0, sizeof workspace);
    for (;;) {
        long i = atomic_fetch_add(&batch->next, 1);
        if (i >= batch->count)
            break;
        Status status = batch->job(batch, i, &workspace);
        if (batch->statuses)
            batch->statuses[i] = status;
    }
    atomic_fetch_add(&batch->read_ns, workspace.read_ns);
    atomic_fetch_add(&batch->decode_ns, workspace.decode_ns);
    atomic_fetch_add(&batch->resize_ns, workspace.resize_ns);
    free_workspace(&workspace);
    return NULL;
}

/* The caller works, too; where no thread can be had it works alone. */
static void share_work(Batch *batch, int num_threads) {
    pthread_t threads[MAX_THREADS];
    int started = 0;
    if (num_threads > MAX_THREADS)
        num_threads = MAX_THREADS;
    if (num_threads > batch->count)
        num_threads = (int)batch->count;
    while (started < num_threads - 1 && pthread_create(&threads[started], NULL, work, batch) == 0)
        started++;
    work(batch);
    while (started > 0)
        pthread_join(threads[--started], NULL);
}

/* Pointers into a list of bytes, which must live as long as they are used. */
static const char **collect_files(PyObject *list, Py_ssize_t count) {
    const char **files = PyMem_Malloc((size_t)(count ? count : 1) * sizeof *files);
    if (!files) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyList_GetItem(list, i);
        files[i] = item ? PyBytes_AsString(item) : NULL;
        if (!files[i]) {
            PyMem_Free(files);
            return NULL;
        }
    }
    return files;
}

/* The arguments that say where the images are. */
typedef struct {
    PyObject *list;
    Py_buffer which, offsets, lengths;
} Places;

static void release(Places *places) {
    PyBuffer_Release(&places->which);
    PyBuffer_Release(&places->offsets);
    PyBuffer_Release(&places->lengths);
}

static int fits(const Places *places, Batch *batch) {
    batch->num_files = PyList_Check(places->list) ? PyList_Size(places->list) : -1;
    batch->count = places->which.len / 4;
    batch->which = places->which.buf;
    batch->offsets = places->offsets.buf;
    batch->lengths = places->lengths.buf;
    if (batch->num_files < 0 || places->which.len != batch->count * 4 || places->offsets.len != batch->count * 8 ||
        places->lengths.len != batch->count * 8)
        return 0;
    for (Py_ssize_t i = 0; i < batch->count; i++)
        if (batch->which[i] < 0 || batch->which[i] >= batch->num_files)
            return 0;
    return 1;
}

static PyObject *run(Batch *batch, const Places *places, int others_fit, int num_threads) {
    if (!fits(places, batch) || !others_fit) {
        PyErr_SetString(PyExc_ValueError, "the buffers do not fit each other");
        return NULL;
    }
    batch->files = collect_files(places->list, batch->num_files);
    if (!batch->files)
        return NULL;
    atomic_init(&batch->next, 0);
    Py_BEGIN_ALLOW_THREADS
    share_work(batch, num_threads);
    Py_END_ALLOW_THREADS
    PyMem_Free((void *)batch->files);
    Py_RETURN_NONE;
}

static PyObject *read_sizes(PyObject *self, PyObject *arguments) {
    PyObject *result;
    Places places;
    Py_buffer sizes, statuses;
    Py_ssize_t max_pixels, count;
    int num_threads;
    Batch batch;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "Oy*y*y*w*w*ni", &places.list, &places.which, &places.offsets, &places.lengths,
                          &sizes, &statuses, &max_pixels, &num_threads))
        return NULL;
    memset(&batch, 0, sizeof batch);
    batch.job = one_size;
    batch.sizes = sizes.buf;
    batch.statuses = statuses.buf;
    batch.max_pixels = (size_t)max_pixels;
    count = places.which.len / 4;
    result = run(&batch, &places, sizes.len == count * 24 && statuses.len == count * 4, num_threads);
    PyBuffer_Release(&sizes);
    PyBuffer_Release(&statuses);
    release(&places);
    return result;
}

static PyObject *decode_crops(PyObject *self, PyObject *arguments) {
    PyObject *result;
    Places places;
    Py_buffer boxes, turns, out, statuses, nanoseconds;
    Py_ssize_t max_pixels, count;
    int num_threads, fit;
    Batch batch;
    (void)self;
    memset(&batch, 0, sizeof batch);
    if (!PyArg_ParseTuple(arguments, "Oy*y*y*y*y*w*w*w*iiini", &places.list, &places.which, &places.offsets,
                          &places.lengths, &boxes, &turns, &out, &statuses, &nanoseconds, &batch.width, &batch.height,
                          &batch.bicubic, &max_pixels, &num_threads))
        return NULL;
    batch.job = one_crop;
    batch.boxes = boxes.buf;
    batch.turns = turns.buf;
    batch.out = out.buf;
    batch.statuses = statuses.buf;
    batch.max_pixels = (size_t)max_pixels;
    count = places.which.len / 4;
    fit = batch.width >= 1 && batch.width <= 32768 && batch.height >= 1 && batch.height <= 32768 &&
          boxes.len == count * 32 && turns.len == count && statuses.len == count * 4 && nanoseconds.len == 24 &&
          out.len == count * (Py_ssize_t)batch.width * batch.height * 3;
    result = run(&batch, &places, fit, num_threads);
    if (result) {
        int64_t *totals = nanoseconds.buf;
        totals[0] = batch.read_ns;
        totals[1] = batch.decode_ns;
        totals[2] = batch.resize_ns;
    }
    PyBuffer_Release(&boxes);
    PyBuffer_Release(&turns);
    PyBuffer_Release(&out);
    PyBuffer_Release(&statuses);
    PyBuffer_Release(&nanoseconds);
    release(&places);
    return result;
}

static PyObject *fetch(PyObject *self, PyObject *arguments) {
    PyObject *result;
    Places places;
    int num_threads;
    Batch batch;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "Oy*y*y*i", &places.list, &places.which, &places.offsets, &places.lengths,
                          &num_threads))
        return NULL;
    memset(&batch, 0, sizeof batch);
    batch.job = one_fetch;
    result = run(&batch, &places, 1, num_threads);
    release(&places);
    return result;
}

static PyObject *tile(PyObject *self, PyObject *arguments) {
    PyObject *result;
    Py_buffer jpeg;
    Py_ssize_t max_pixels;
    Status status;
    uint8_t *out = NULL;
    size_t length = 0;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "y*n", &jpeg, &max_pixels))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = jpeg_tile(jpeg.buf, (size_t)jpeg.len, (size_t)max_pixels, &out, &length);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&jpeg);
    if (status == OUT_OF_MEMORY)
        return PyErr_NoMemory();
    if (status != OK)
        Py_RETURN_NONE;
    result = PyBytes_FromStringAndSize((const char *)out, (Py_ssize_t)length);
    free(out);
    return result;
}

static PyObject *allow_simd(PyObject *self, PyObject *allowed) {
    (void)self;
    set_simd(PyObject_IsTrue(allowed) == 1);
    Py_RETURN_NONE;
}

static PyObject *allow_own_entropy(PyObject *self, PyObject *allowed) {
    (void)self;
    set_own_entropy(PyObject_IsTrue(allowed) == 1);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"read_sizes", read_sizes, METH_VARARGS, "width, height and orientation of each image, from its header"},
    {"decode_crops", decode_crops, METH_VARARGS, "a crop of each image, resized and turned"},
    {"fetch", fetch, METH_VARARGS, "read each image's bytes, so that the system has them at hand"},
    {"tile", tile, METH_VARARGS, "tile(jpeg, max_pixels): the same image tiled, or None if it is damaged or foreign"},
    {"allow_simd", allow_simd, METH_O, "allow_simd(allowed): the pixels are the same either way"},
    {"allow_own_entropy", allow_own_entropy, METH_O, "allow_own_entropy(allowed): the pixels are the same either way"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

/* The library that was found when the program started, which need not be the one this was compiled for. */
static const char *libjpeg_name(void) {
    static char name[PATH_MAX];
    Dl_info about;
    const char *base;
    void *function = (void *)(uintptr_t)jpeg_std_error;
    if (!dladdr(function, &about) || !about.dli_fname || !realpath(about.dli_fname, name))
        return "libjpeg";
    base = strrchr(name, '/');
    return base ? base + 1 : name;
}

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module)
        PyModule_AddStringConstant(module, "LIBJPEG", libjpeg_name());
    return module;
}
