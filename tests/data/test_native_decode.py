"""The native decoder against Pillow, on every kind of JPEG, and on what is none."""

import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import malformed as malformed_drill
import numpy as np
import pytest
from conftest import skip_or_fail
from images import encoded, pixels
from malformed_images import malformed_images
from numpy.typing import NDArray
from PIL import Image

from fortyfold.data import augment, decode, pillow_decode
from fortyfold.data.decode import decode_crops, read_headers
from fortyfold.data.pillow_decode import BadImage
from fortyfold.data.places import Places, whole_files

Array = NDArray[Any]
SUBSAMPLINGS = {"4:4:4": 0, "4:2:2": 1, "4:2:0": 2}


@pytest.fixture(autouse=True)
def _native() -> None:
    if decode._native is None:
        skip_or_fail("native", "the native decoder was not built")


def write(folder: Path, blobs: list[bytes]) -> Places:
    paths = [folder / f"{number}.jpg" for number in range(len(blobs))]
    for path, blob in zip(paths, blobs, strict=True):
        path.write_bytes(blob)
    return whole_files([str(path).encode() for path in paths])


def read_sizes(places: Places, num_threads: int = 2) -> tuple[Array, dict[int, str]]:
    headers, reasons = read_headers(places, num_threads)
    return headers[:, :2], reasons


def crops(places: Places, boxes: Array, px: int, flips: Array | None = None, num_threads: int = 2) -> Array:
    out = np.zeros((len(places), px, px, 3), np.uint8)
    reasons, seconds = decode_crops(places, boxes, no_turns(places) if flips is None else flips, out, num_threads)
    assert reasons == {}
    assert min(seconds) > 0
    return out


def no_turns(places: Places) -> Array:
    return np.zeros(len(places), np.uint8)


def expected(path: bytes, box: Array, px: int, flip: bool = False) -> Array:
    return pillow_decode.decode_crop(Path(path.decode()).read_bytes(), box, px, px, int(flip))


def all_expected(places: Places, boxes: Array, px: int, flips: Array | None = None) -> Array:
    mirrored = no_turns(places) if flips is None else flips
    return np.stack([expected(*row) for row in zip(places.files, boxes, [px] * len(places), mirrored, strict=True)])


def differences(ours: Array, theirs: Array) -> Array:
    result: Array = np.abs(ours.astype(int) - theirs).mean(axis=(1, 2, 3))
    return result


@pytest.fixture(scope="module")
def every_kind(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """All samplings × odd sizes × baseline and progressive, and grey ones: smooth pictures with noise on them."""
    blobs = []
    rng = np.random.default_rng(0)
    for (width, height), sampling, progressive in product(
        [(97, 61), (64, 64), (33, 130), (200, 151)], SUBSAMPLINGS.values(), [False, True]
    ):
        image = np.asarray(pixels(width, height)).astype(int) + rng.integers(-20, 20, (height, width, 3))
        picture = Image.fromarray(image.clip(0, 255).astype(np.uint8))
        blobs.append(encoded(picture, quality=90, subsampling=sampling, progressive=progressive))
        blobs.append(encoded(picture.convert("L"), quality=90, progressive=progressive))
    return write(tmp_path_factory.mktemp("kinds"), blobs)


def test_every_kind_is_within_a_grey_level_of_pillow(every_kind: Places) -> None:
    sizes, reasons = read_sizes(every_kind, 2)
    assert reasons == {}
    for row, path in enumerate(every_kind.files):
        with Image.open(path.decode()) as image:
            assert tuple(sizes[row]) == image.size
    ids = np.arange(len(every_kind))
    for epoch in range(6):
        boxes = augment.random_crops(ids, sizes, 0, epoch, 0.08)
        flips = augment.flips(ids, 0, epoch)
        px = 112  # no crop is twice as large: nothing is scaled by the DCT
        ours = crops(every_kind, boxes, px, flips)
        theirs = all_expected(every_kind, boxes, px, flips)
        assert np.abs(ours.astype(int) - theirs).max() <= 1


def test_crops_at_every_offset_do_not_depend_on_what_is_around(every_kind: Places) -> None:
    """Partial decoding pads its region, so that chroma at the crop's edge is a full decode's."""
    for path in every_kind.files[:6]:
        boxes = np.array([[left, top, left + 21, top + 19] for left in range(0, 40, 3) for top in range(0, 40, 3)])
        ours = crops(whole_files([path] * len(boxes)), boxes, 20)
        theirs = np.stack([expected(path, box, 20) for box in boxes])
        assert np.abs(ours.astype(int) - theirs).max() <= 1


def test_scaling_by_the_dct_stays_near(every_kind: Places) -> None:
    sizes, _ = read_sizes(every_kind, 1)
    boxes = np.concatenate([np.zeros_like(sizes), sizes], axis=1)
    ours = crops(every_kind, boxes, 16)
    theirs = all_expected(every_kind, boxes, 16)
    assert differences(ours, theirs).max() < 3.5


def test_real_photographs(real_jpegs: Path) -> None:
    """512 crops: mean ≤ 0.2 and worst ≤ 0.5 grey levels without DCT scaling, worst ≤ 3.5 with it."""
    paths = [str(path).encode() for path in sorted(real_jpegs.glob("*.JPEG"))]
    places = whole_files((paths * 3)[:512])
    sizes, reasons = read_sizes(places, 2)
    assert reasons == {}
    boxes = augment.random_crops(np.arange(512), sizes, 0, 0, 0.08)
    difference = differences(crops(places, boxes, 224), all_expected(places, boxes, 224))
    scaled = (boxes[:, 2:] - boxes[:, :2]).min(axis=1) >= 448
    print(f"mean {difference[~scaled].mean():.3f}, worst {difference[~scaled].max():.3f}; {scaled.sum()} scaled, "
          f"worst {difference[scaled].max(initial=0):.3f}")  # fmt: skip
    assert difference[~scaled].mean() <= 0.2
    assert difference[~scaled].max() <= 0.5
    assert difference[scaled].max(initial=0) <= 3.5


def test_avx2_and_portable_code_give_the_same_bytes(every_kind: Places) -> None:
    sizes, _ = read_sizes(every_kind, 2)
    native = decode._native
    assert native is not None
    for px, min_scale in ((112, 0.08), (16, 0.5), (37, 0.2)):
        boxes = augment.random_crops(np.arange(len(every_kind)), sizes, 1, px, min_scale)
        fast = crops(every_kind, boxes, px)
        native.allow_simd(False)
        try:
            assert np.array_equal(crops(every_kind, boxes, px), fast)
        finally:
            native.allow_simd(True)
        assert np.array_equal(crops(every_kind, boxes, px, num_threads=7), fast)


def test_what_is_no_plain_jpeg_goes_to_pillow(tmp_path: Path) -> None:
    picture = pixels(64, 48)
    paths = write(
        tmp_path,
        [encoded(picture.convert("CMYK")), encoded(picture, "PNG"), encoded(picture, "WEBP"), encoded(picture)],
    )
    sizes, reasons = read_sizes(paths, 2)
    assert reasons == {} and sizes.tolist() == [[64, 48]] * 4
    boxes = np.array([[3, 5, 40, 41]] * 4)
    ours = crops(paths, boxes, 32)
    for row in range(3):
        assert np.array_equal(ours[row], expected(paths.files[row], boxes[row], 32))


def test_a_header_longer_than_the_first_read(tmp_path: Path) -> None:
    comments = b"".join(b"\xff\xfe\xff\xff" + bytes(65533) for _ in range(3))
    blob = encoded(pixels(64, 48))
    path = write(tmp_path, [blob[:2] + comments + blob[2:]])
    assert read_sizes(path, 1)[0].tolist() == [[64, 48]]


@pytest.mark.parametrize(
    ("blob", "reason"),
    [
        (b"", "the file is empty"),
        (b"hello", "not an image that Pillow knows"),
        (encoded(pixels(64, 48))[:-300], "the image is truncated"),
        (encoded(pixels(64, 48))[:30], "the image is truncated"),
        (b"\xff\xd8\xff\xd9", "the JPEG is corrupt"),
    ],
)
def test_what_cannot_be_decoded_says_why(tmp_path: Path, blob: bytes, reason: str) -> None:
    paths = write(tmp_path, [blob, encoded(pixels(64, 48))])
    out = np.zeros((2, 16, 16, 3), np.uint8)
    reasons = read_sizes(paths)[1] | decode_crops(paths, np.array([[0, 0, 64, 48]] * 2), no_turns(paths), out, 2)[0]
    assert reasons == {0: reason}
    assert out[1].any()


def test_damage_that_pillow_reads_over_is_no_reason(tmp_path: Path) -> None:
    """A piece of the image's data is missing, but the file has its end: grey from there on, as with Pillow."""
    whole = encoded(pixels(64, 48), quality=95)
    path = write(tmp_path, [whole[:-500] + whole[-2:]])
    box = np.array([[0, 0, 64, 48]])
    ours = crops(path, box, 48)
    assert np.abs(ours[0].astype(int) - expected(path.files[0], box[0], 48)).max() <= 1


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    paths = [str(tmp_path / name).encode() for name in ("absent", "folder")]
    assert read_sizes(whole_files(paths))[1] == {0: "No such file or directory", 1: "not a file"}


def test_a_box_outside_the_image_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, [encoded(pixels(64, 48))])
    out = np.zeros((1, 16, 16, 3), np.uint8)
    for box in ([0, 0, 65, 48], [-1, 0, 10, 10], [5, 5, 5, 9], [9, 9, 5, 5], [0, 0, 2**40, 2**40]):
        reasons, _ = decode_crops(path, np.array([box]), no_turns(path), out, 1)
        assert reasons == {0: "the image changed its size while in use"}


def test_buffers_that_do_not_fit_are_refused() -> None:
    native = decode._native
    assert native is not None
    one, which, statuses = np.zeros(1, np.int64), np.zeros(1, np.int32), np.zeros(1, np.int32)
    headers = np.zeros((1, 3), np.int64)
    right: list[Any] = [[b"a"], which, one, one, headers, statuses, 1000, 1]
    native.read_sizes(*right)
    for argument, wrong in ((0, None), (0, []), (1, which + 1), (1, which - 1), (2, one[:0]), (3, one[:0]),
                            (4, headers[:0]), (5, statuses[:0])):  # fmt: skip
        arguments = [*right[:argument], wrong, *right[argument + 1 :]]
        with pytest.raises(ValueError, match="do not fit"):
            native.read_sizes(*arguments)
    with pytest.raises(TypeError):
        native.read_sizes(["text"], *right[1:])


def test_a_thousand_malformed_files(tmp_path: Path) -> None:
    """Each one pixels or a reason; and Pillow agrees about those that are no JPEGs."""
    blobs = [blob for _, blob in malformed_images(1000)]
    paths = write(tmp_path, blobs)
    sizes, reasons = read_sizes(paths, 2)
    boxes = augment.random_crops(np.arange(len(paths)), sizes, 0, 0, 0.08)
    out = np.zeros((len(paths), 32, 32, 3), np.uint8)
    reasons |= decode_crops(paths, boxes, np.arange(len(paths), dtype=np.uint8) % 8, out, 2)[0]
    assert 300 < len(reasons) < 700
    assert not out[list(reasons)].any()
    for row in range(0, len(paths), 37):
        if row in reasons and blobs[row][:2] != b"\xff\xd8":
            with pytest.raises(BadImage):
                pillow_decode.decode_crop(blobs[row], boxes[row], 32, 32)


def test_malformed_files_leave_no_memory_behind() -> None:
    """The drill in a process of its own, since memory that other tests freed would hide what this one keeps."""
    drill = Path(malformed_drill.__file__)
    done = subprocess.run([sys.executable, drill, "--count", "1000"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "within 50 MB" in done.stdout
