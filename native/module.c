/* Python's view: two functions that take a whole batch, release the GIL and share the work among threads.

   read_sizes(paths, sizes, statuses, max_pixels, num_threads)
   decode_crops(paths, boxes, flips, out, statuses, px, max_pixels, num_threads)

   paths: a list of bytes. sizes (int64, n × 2), boxes (int64, n × 4), flips (uint8, n), statuses (int32, n),
   out (uint8, n × px × px × 3): contiguous buffers. A status is one of jpeg.h's. Bound in data/decode.py only,
   which has checked the shapes; the lengths are checked here once more, since a mistake would write anywhere. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jpeglib.h>

#include "jpeg.h"
#include "resample.h"

#define HEAD_BYTES 65536
#define MAX_FILE_BYTES ((off_t)1 << 30)
#define MAX_THREADS 256

typedef struct {
    const char **paths;
    Py_ssize_t count;
    size_t max_pixels;
    int64_t *sizes; /* set: read sizes; not set: decode crops */
    const int64_t *boxes;
    const uint8_t *flips;
    uint8_t *out;
    int32_t *statuses;
    int px;
    atomic_long next;
} Batch;

/* The file's first `limit` bytes (0: all) into the workspace. */
static Status read_file(const char *path, off_t limit, Workspace *workspace, size_t *length, int *whole) {
    struct stat about;
    size_t wanted, got = 0;
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0)
        return UNREADABLE_FILE;
    if (fstat(descriptor, &about) || !S_ISREG(about.st_mode) || about.st_size > MAX_FILE_BYTES) {
        close(descriptor);
        return UNREADABLE_FILE;
    }
    *whole = limit == 0 || about.st_size <= limit;
    wanted = (size_t)(*whole ? about.st_size : limit);
    if (reserve((void **)&workspace->file, &workspace->file_room, wanted + 1)) {
        close(descriptor);
        return OUT_OF_MEMORY;
    }
    while (got < wanted) {
        ssize_t part = pread(descriptor, workspace->file + got, wanted - got, (off_t)got);
        if (part < 0) {
            close(descriptor);
            return UNREADABLE_FILE;
        }
        if (part == 0)
            break; /* it shrank while we read: what is there decides */
        got += (size_t)part;
    }
    close(descriptor);
    *length = got;
    return got ? OK : EMPTY_FILE;
}

static Status one_size(const Batch *batch, Py_ssize_t i, Workspace *workspace) {
    size_t length;
    int whole;
    Status status = read_file(batch->paths[i], HEAD_BYTES, workspace, &length, &whole);
    if (status == OK)
        status = jpeg_size(workspace->file, length, batch->max_pixels, batch->sizes + 2 * i);
    if ((status == TRUNCATED || status == CORRUPT) && !whole) { /* a header longer than usual */
        status = read_file(batch->paths[i], 0, workspace, &length, &whole);
        if (status == OK)
            status = jpeg_size(workspace->file, length, batch->max_pixels, batch->sizes + 2 * i);
    }
    return status;
}

static Status one_crop(const Batch *batch, Py_ssize_t i, Workspace *workspace) {
    size_t length, image_bytes = (size_t)batch->px * (size_t)batch->px * 3;
    int whole;
    Status status = read_file(batch->paths[i], 0, workspace, &length, &whole);
    if (status == OK)
        status = jpeg_crop(workspace, workspace->file, length, batch->max_pixels, batch->boxes + 4 * i, batch->px,
                           batch->flips[i], batch->out + (size_t)i * image_bytes);
    return status;
}

static void *work(void *argument) {
    Batch *batch = argument;
    Workspace workspace;
    memset(&workspace, 0, sizeof workspace);
    for (;;) {
        long i = atomic_fetch_add(&batch->next, 1);
        if (i >= batch->count)
            break;
        batch->statuses[i] = batch->sizes ? one_size(batch, i, &workspace) : one_crop(batch, i, &workspace);
    }
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
static const char **collect_paths(PyObject *list, Py_ssize_t count) {
    const char **paths = PyMem_Malloc((size_t)(count ? count : 1) * sizeof *paths);
    if (!paths) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyList_GetItem(list, i);
        paths[i] = item ? PyBytes_AsString(item) : NULL;
        if (!paths[i]) {
            PyMem_Free(paths);
            return NULL;
        }
    }
    return paths;
}

static PyObject *run(Batch *batch, PyObject *list, int num_threads) {
    batch->paths = collect_paths(list, batch->count);
    if (!batch->paths)
        return NULL;
    atomic_init(&batch->next, 0);
    Py_BEGIN_ALLOW_THREADS
    share_work(batch, num_threads);
    Py_END_ALLOW_THREADS
    PyMem_Free((void *)batch->paths);
    Py_RETURN_NONE;
}

static PyObject *read_sizes(PyObject *self, PyObject *arguments) {
    PyObject *list, *result = NULL;
    Py_buffer sizes, statuses;
    Py_ssize_t max_pixels;
    int num_threads;
    Batch batch;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "Ow*w*ni", &list, &sizes, &statuses, &max_pixels, &num_threads))
        return NULL;
    memset(&batch, 0, sizeof batch);
    batch.count = PyList_Check(list) ? PyList_Size(list) : -1;
    batch.sizes = sizes.buf;
    batch.statuses = statuses.buf;
    batch.max_pixels = (size_t)max_pixels;
    if (batch.count < 0 || sizes.len != batch.count * 16 || statuses.len != batch.count * 4)
        PyErr_SetString(PyExc_ValueError, "the buffers do not fit the list of paths");
    else
        result = run(&batch, list, num_threads);
    PyBuffer_Release(&sizes);
    PyBuffer_Release(&statuses);
    return result;
}

static PyObject *decode_crops(PyObject *self, PyObject *arguments) {
    PyObject *list, *result = NULL;
    Py_buffer boxes, flips, out, statuses;
    Py_ssize_t max_pixels;
    int px, num_threads;
    Batch batch;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "Oy*y*w*w*ini", &list, &boxes, &flips, &out, &statuses, &px, &max_pixels,
                          &num_threads))
        return NULL;
    memset(&batch, 0, sizeof batch);
    batch.count = PyList_Check(list) ? PyList_Size(list) : -1;
    batch.boxes = boxes.buf;
    batch.flips = flips.buf;
    batch.out = out.buf;
    batch.statuses = statuses.buf;
    batch.px = px;
    batch.max_pixels = (size_t)max_pixels;
    if (batch.count < 0 || px < 1 || px > 32768 || boxes.len != batch.count * 32 || flips.len != batch.count ||
        statuses.len != batch.count * 4 || out.len != batch.count * (Py_ssize_t)px * px * 3)
        PyErr_SetString(PyExc_ValueError, "the buffers do not fit the list of paths");
    else
        result = run(&batch, list, num_threads);
    PyBuffer_Release(&boxes);
    PyBuffer_Release(&flips);
    PyBuffer_Release(&out);
    PyBuffer_Release(&statuses);
    return result;
}

static PyObject *allow_simd(PyObject *self, PyObject *allowed) {
    (void)self;
    set_simd(PyObject_IsTrue(allowed) == 1);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"read_sizes", read_sizes, METH_VARARGS, "read_sizes(paths, sizes, statuses, max_pixels, num_threads)"},
    {"decode_crops", decode_crops, METH_VARARGS,
     "decode_crops(paths, boxes, flips, out, statuses, px, max_pixels, num_threads)"},
    {"allow_simd", allow_simd, METH_O, "allow_simd(allowed): the pixels are the same either way"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module)
        PyModule_AddIntConstant(module, "LIBJPEG_TURBO_VERSION", LIBJPEG_TURBO_VERSION_NUMBER);
    return module;
}
