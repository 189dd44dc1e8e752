import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import skip_or_fail
from images import encoded, malformed, pixels, with_size
from numpy.typing import NDArray
from PIL import Image

from fortyfold.data import augment, pillow_decode
from fortyfold.data.dali_decode import DaliDecoder
from fortyfold.data.places import Places
from fortyfold.spec.errors import UserError

BOX = np.array([5, 7, 47, 40])


@pytest.fixture
def decoder() -> DaliDecoder:
    try:
        return DaliDecoder(num_threads=2)
    except UserError as error:
        skip_or_fail("dali", str(error))
        raise


def crops(
    decoder: DaliDecoder, blobs: list[bytes], boxes: NDArray[np.int64], flips: NDArray[np.bool_], out: NDArray[np.uint8]
) -> dict[int, str]:
    """All blobs in one file, one after another."""
    lengths = np.array([len(blob) for blob in blobs], np.int64)
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(blobs))
        file.flush()
        which = np.zeros(len(blobs), np.int32)
        places = Places([file.name.encode()], which, np.cumsum(lengths) - lengths, lengths)
        reasons, seconds = decoder.decode_crops(places, boxes, flips.astype(np.uint8), out, 2, "bilinear")
    assert min(seconds.read, seconds.decode) > 0
    return reasons


def by_pillow(blob: bytes, box: NDArray[np.int64], px: int, flip: bool) -> NDArray[np.int64]:
    return pillow_decode.decode_crop(blob, box, px, px, int(flip)).astype(np.int64)


def test_without_dali_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['nvidia.dali'] = None\n"
        "from fortyfold.data.dali_decode import DaliDecoder\n"
        "try: DaliDecoder(1)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == 'UserError data.backend = "dali" needs NVIDIA DALI; pip install fortyfold[dali]\n'


def test_real_images_are_pillows_but_for_rounding(decoder: DaliDecoder, real_jpegs: Path) -> None:
    blobs = [path.read_bytes() for path in sorted(real_jpegs.iterdir())]
    sizes = np.array([pillow_decode.read_header(blob)[:2] for blob in blobs])
    ids = np.arange(len(blobs))
    boxes, flips = augment.random_crops(ids, sizes, 0, 0, 0.08), augment.flips(ids, 0, 0)
    out = np.zeros((len(blobs), 224, 224, 3), np.uint8)
    assert crops(decoder, blobs, boxes, flips, out) == {}
    expected = [by_pillow(blob, boxes[row], 224, flips[row]) for row, blob in enumerate(blobs)]
    means = np.array([np.abs(out[row] - pixels).mean() for row, pixels in enumerate(expected)])
    print(f"mean difference {means.mean():.3f} grey levels, worst image {means.max():.3f}")
    assert means.mean() < 0.25 and means.max() < 0.5


@pytest.mark.parametrize(
    "blob",
    [
        encoded(pixels(64, 48)),
        encoded(pixels(64, 48), progressive=True),
        encoded(pixels(64, 48), subsampling=0),
        encoded(pixels(64, 48).convert("L")),
        encoded(pixels(64, 48).convert("CMYK")),
        encoded(pixels(64, 48), "PNG"),
        encoded(pixels(64, 48)) + b"trailing",
    ],
    ids=["plain", "progressive", "4:4:4", "grey", "cmyk", "png", "trailing bytes"],
)
@pytest.mark.parametrize("px", [16, 32, 80])
def test_every_kind_is_pillows(decoder: DaliDecoder, blob: bytes, px: int) -> None:
    out = np.zeros((2, px, px, 3), np.uint8)
    assert crops(decoder, [blob, blob], np.stack([BOX, BOX]), np.array([False, True]), out) == {}
    for row, flip in enumerate((False, True)):
        difference = np.abs(out[row] - by_pillow(blob, BOX, px, flip))
        assert difference.mean() < 0.6 and difference.max() <= 6


def test_orientation_is_not_applied(decoder: DaliDecoder) -> None:
    exif = Image.Exif()
    exif[0x112] = 6
    out = np.zeros((2, 32, 32, 3), np.uint8)
    blobs = [encoded(pixels(64, 48)), encoded(pixels(64, 48), exif=exif)]
    assert crops(decoder, blobs, np.stack([BOX, BOX]), np.zeros(2, bool), out) == {}
    assert np.array_equal(out[0], out[1])


def test_bad_images_are_named_and_change_nothing_around_them(decoder: DaliDecoder) -> None:
    blobs = [encoded(pixels(64, 48, seed)) for seed in range(13)]
    boxes, flips = np.tile(BOX, (13, 1)), np.arange(13) % 2 == 0
    clean = np.zeros((13, 32, 32, 3), np.uint8)
    assert crops(decoder, blobs, boxes, flips, clean) == {}
    spoilt = list(blobs)
    spoilt[2], spoilt[3], spoilt[12] = b"\xff\xd8\xff\xd9", blobs[3][:-300], b""
    spoilt[7] = with_size(blobs[7], 65000, 65000)
    for row in (4, 9):
        spoilt[row] = blobs[row].replace(b"\xff\xdb", b"\xff\xfe")  # no quantisation table: only decoding finds out
    out = np.zeros_like(clean)
    reasons = crops(decoder, spoilt, boxes, flips, out)
    assert sorted(reasons) == [2, 3, 4, 7, 9, 12]
    assert "truncated" in reasons[3] and reasons[12] == "the file is empty"
    good = [row for row in range(13) if row not in reasons]
    assert np.array_equal(out[good], clean[good])


def test_a_batch_of_any_size(decoder: DaliDecoder) -> None:
    blob = encoded(pixels(64, 48))
    expected: NDArray[np.uint8] | None = None
    for num_images in (5, 8, 1, 9, 3, 0):
        out = np.zeros((num_images, 32, 32, 3), np.uint8)
        boxes, flips = np.tile(BOX, (num_images, 1)), np.zeros(num_images, bool)
        assert crops(decoder, [blob] * num_images, boxes, flips, out) == {}
        expected = out[0] if expected is None else expected
        assert all(np.array_equal(image, expected) for image in out)


@pytest.mark.usefixtures("decoder")
def test_a_run_with_dali_goes_on_with_dali_only(tiny_data: Path, tmp_path: Path, fortyfold: Callable[..., Any]) -> None:
    command = ("train", "tiny", "--data", tiny_data, "--epochs", "1")
    dali = ("--set", "data.backend=dali")
    code, out, err = fortyfold(*command, "--out", tmp_path / "run", *dali, "--set", "evaluate.rectangular=true")
    assert code == 0, err
    assert "decoder: dali" in out and "rectangular top-1" in out
    code, _, err = fortyfold(*command, "--out", tmp_path / "run", "--set", "evaluate.rectangular=true")
    assert code == 2 and "was started with" in err and "dali" in err


def test_malformed_files_get_pixels_or_a_reason(decoder: DaliDecoder) -> None:
    blobs = malformed(120)
    out = np.zeros((len(blobs), 16, 16, 3), np.uint8)
    reasons = crops(decoder, blobs, np.tile(BOX, (120, 1)), np.zeros(120, bool), out)
    assert 80 < len(reasons) < 120
