"""EXIF orientations, rectangles and bicubic interpolation: native and Pillow agree, and both with Pillow's own ways."""

import io
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from images import encoded, pixels
from PIL import Image, ImageOps

from fortyfold.data import decode, pillow_decode, turns
from fortyfold.data.places import whole_files

ORIENTATIONS = range(1, 9)


def oriented(orientation: int, width: int = 90, height: int = 60) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(pixels(width, height), quality=95, subsampling=0, exif=exif)


@pytest.fixture(params=["native", "pillow"])
def _decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "pillow":
        monkeypatch.setattr(decode, "_native", None)


@pytest.mark.usefixtures("_decoder")
@pytest.mark.parametrize("mirrored", [False, True])
def test_upright_crops_are_those_of_the_transposed_image(tmp_path: Path, mirrored: bool) -> None:
    paths = [tmp_path / f"{orientation}.jpg" for orientation in ORIENTATIONS]
    for path, orientation in zip(paths, ORIENTATIONS, strict=True):
        path.write_bytes(oriented(orientation))
    places = whole_files([bytes(path) for path in paths])
    headers, _ = decode.read_headers(places, 2)
    assert headers[:, 2].tolist() == list(ORIENTATIONS)
    upright = turns.upright_turns(headers[:, 2])
    sizes = turns.turned_sizes(headers[:, :2], upright)
    boxes = np.array([[5, 11, 47, 52]] * 8)
    stored = turns.stored_boxes(boxes, sizes, upright)
    out = np.zeros((8, 24, 32, 3), np.uint8)  # a rectangle
    reasons, _ = decode.decode_crops(places, stored, upright ^ np.uint8(mirrored), out, 2)
    assert reasons == {}
    for row, path in enumerate(paths):
        with Image.open(path) as image:
            straight = ImageOps.exif_transpose(image)
        assert tuple(sizes[row]) == straight.size
        expected = straight.crop(tuple(boxes[row].tolist())).resize((32, 24), Image.Resampling.BILINEAR)
        expected = ImageOps.mirror(expected) if mirrored else expected
        assert np.abs(out[row].astype(int) - np.asarray(expected)).max() <= 1


@pytest.mark.parametrize("order", ["little", "big"])
def test_orientation_in_both_byte_orders_and_nonsense(tmp_path: Path, order: Literal["little", "big"]) -> None:
    def header_of(orientation: bytes) -> int:
        tiff = (b"II*\0" if order == "little" else b"MM\0*") + (8).to_bytes(4, order) + (1).to_bytes(2, order)
        tiff += (0x0112).to_bytes(2, order) + (3).to_bytes(2, order) + (1).to_bytes(4, order) + orientation
        exif = b"Exif\0\0" + tiff
        blob = encoded(pixels(20, 10))
        segment = b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif
        path = tmp_path / "x.jpg"
        path.write_bytes(blob[:2] + segment + blob[2:])
        return int(decode.read_headers(whole_files([bytes(path)]), 1)[0][0, 2])

    for number in ORIENTATIONS:
        assert header_of(number.to_bytes(2, order) + bytes(6)) == number
    assert header_of((9).to_bytes(2, order) + bytes(6)) == 1
    assert header_of(b"") == 1  # cut off


def test_bicubic_is_pillows(real_jpegs: Path) -> None:
    if not decode.is_native():
        pytest.skip("Pillow against itself")
    paths = [bytes(path) for path in sorted(real_jpegs.iterdir())[:60]]
    places = whole_files(paths)
    headers, _ = decode.read_headers(places, 2)
    boxes = np.concatenate([headers[:, :2] // 5, headers[:, :2] // 2], axis=1)
    out = np.zeros((len(paths), 224, 224, 3), np.uint8)
    decode.decode_crops(places, boxes, np.zeros(len(paths), np.uint8), out, 2, "bicubic")
    expected = [pillow_decode.decode_crop(places.read(row), boxes[row], 224, 224, 0, "bicubic") for row in range(60)]
    difference = np.abs(out.astype(int) - np.stack(expected)).mean(axis=(1, 2, 3))
    print(f"mean {difference.mean():.3f}, worst {difference.max():.3f} grey levels")
    assert difference.mean() <= 0.2 and difference.max() <= 0.5
    plain = np.zeros_like(out)
    decode.decode_crops(places, boxes, np.zeros(len(paths), np.uint8), plain, 2)
    assert not np.array_equal(plain, out)


def test_avx2_and_portable_bicubic_give_the_same_bytes(tmp_path: Path) -> None:
    native = decode._native
    if native is None:
        pytest.skip("no native decoder")
    noise = np.random.default_rng(0).integers(0, 256, (90, 120, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "JPEG", quality=100, subsampling=0)
    path = tmp_path / "x.jpg"
    path.write_bytes(file.getvalue())
    places, box = whole_files([bytes(path)]), np.array([[3, 2, 111, 88]])
    results = []
    for simd in (True, False):
        native.allow_simd(simd)
        out = np.zeros((1, 37, 61, 3), np.uint8)
        decode.decode_crops(places, box, np.array([5], np.uint8), out, 1, "bicubic")
        results.append(out)
    native.allow_simd(True)
    assert np.array_equal(results[0], results[1])
