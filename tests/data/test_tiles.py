"""Losslessly tiled JPEGs: the same image for any decoder, the same crops for ours, only sooner."""

import io
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import skip_or_fail
from images import encoded, pixels
from PIL import Image

from fortyfold.data import augment, decode
from fortyfold.data.places import Places, whole_files

SIZES = [(97, 61), (64, 64), (33, 130), (200, 151), (1, 1), (17, 9), (240, 8), (8, 240)]


@pytest.fixture(autouse=True)
def _native() -> None:
    if not decode.is_native():
        skip_or_fail("native", "the native decoder was not built")


def noisy(width: int, height: int) -> Image.Image:
    noise = np.random.default_rng(width).integers(-25, 25, (height, width, 3))
    return Image.fromarray((np.asarray(pixels(width, height)) + noise).clip(0, 255).astype(np.uint8))


def every_kind() -> list[bytes]:
    """All samplings × odd sizes × baseline, progressive, optimised, with restart markers of their own; grey, too."""
    options: list[dict[str, Any]] = [{}, {"progressive": True}, {"optimize": True}, {"restart_marker_blocks": 3}]
    blobs = []
    for (width, height), how in product(SIZES, options):
        picture = noisy(width, height)
        blobs += [encoded(picture, quality=90, subsampling=sampling, **how) for sampling in (0, 1, 2)]
        blobs.append(encoded(picture.convert("L"), quality=90, **how))
    return blobs


def tiled(blob: bytes) -> bytes:
    result = decode.tile(blob)
    assert result is not None
    return result


def opened(blob: bytes) -> Image.Image:
    return Image.open(io.BytesIO(blob))


def test_any_other_decoder_sees_the_same_pixels() -> None:
    for blob in every_kind():
        before, after = opened(blob), opened(tiled(blob))
        assert before.size == after.size and before.mode == after.mode
        assert np.array_equal(np.asarray(before), np.asarray(after))
        assert after.info.get("progressive") is None


def both(folder: Path, blobs: list[bytes]) -> tuple[Places, Places]:
    """The images as they are, and tiled, each in a file of its own."""
    paths: list[list[bytes]] = []
    for name, contents in (("plain", blobs), ("tiled", [tiled(blob) for blob in blobs])):
        (folder / name).mkdir()
        paths.append([])
        for number, content in enumerate(contents):
            path = folder / name / f"{number}.jpg"
            path.write_bytes(content)
            paths[-1].append(bytes(path))
    return whole_files(paths[0]), whole_files(paths[1])


def test_crops_of_tiled_images_are_those_of_untiled_ones_bit_for_bit(tmp_path: Path) -> None:
    blobs = every_kind()
    plain, tiles = both(tmp_path, blobs)
    headers, reasons = decode.read_headers(plain, 2)
    assert reasons == {} and np.array_equal(headers, decode.read_headers(tiles, 2)[0])
    ids = np.arange(len(blobs))
    for epoch, (px, interpolation) in enumerate(product((16, 40, 112), ("bilinear", "bicubic"))):
        boxes = augment.random_crops(ids, headers[:, :2], 0, epoch, 0.05)
        turns = augment.flips(ids, 0, epoch).astype(np.uint8)
        ours, theirs = (np.zeros((len(blobs), px, px, 3), np.uint8) for _ in range(2))
        assert decode.decode_crops(plain, boxes, turns, ours, 2, interpolation)[0] == {}
        assert decode.decode_crops(tiles, boxes, turns, theirs, 2, interpolation)[0] == {}
        assert np.array_equal(ours, theirs)


def test_our_huffman_decoding_is_libjpegs(tmp_path: Path) -> None:
    native = decode._native
    assert native is not None
    blobs = every_kind()
    for places in both(tmp_path, blobs):
        headers, _ = decode.read_headers(places, 2)
        boxes = augment.random_crops(np.arange(len(blobs)), headers[:, :2], 1, 0, 0.1)
        results = []
        for own in (True, False):
            native.allow_own_entropy(own)
            out = np.zeros((len(blobs), 40, 40, 3), np.uint8)
            assert decode.decode_crops(places, boxes, np.zeros(len(blobs), np.uint8), out, 2)[0] == {}
            results.append(out)
        assert np.array_equal(results[0], results[1])


def test_real_photographs(real_jpegs: Path, tmp_path: Path) -> None:
    """Bit for bit, and about as large as before."""
    blobs = [path.read_bytes() for path in sorted(real_jpegs.iterdir())[::4]]
    plain, tiles = both(tmp_path, blobs)
    headers, _ = decode.read_headers(plain, 2)
    ids = np.arange(len(blobs))
    for epoch in range(4):
        boxes = augment.random_crops(ids, headers[:, :2], 0, epoch, 0.08)
        ours, theirs = (np.zeros((len(blobs), 96, 96, 3), np.uint8) for _ in range(2))
        decode.decode_crops(plain, boxes, np.zeros(len(ids), np.uint8), ours, 2)
        decode.decode_crops(tiles, boxes, np.zeros(len(ids), np.uint8), theirs, 2)
        assert np.array_equal(ours, theirs)
    grown = sum(Path(path.decode()).stat().st_size for path in tiles.files) / sum(map(len, blobs))
    print(f"tiled images take {grown:.3f} of the bytes")
    assert grown < 1.05


def test_only_the_tiles_under_the_crop_are_decoded(tmp_path: Path) -> None:
    """Damage elsewhere in the image is not even noticed, which an untiled image's decoder would stumble over."""
    blob = tiled(encoded(noisy(640, 480), quality=90, subsampling=2))
    scan = blob.index(b"\xff\xda")
    markers = [place for place in range(scan, len(blob) - 1) if blob[place] == 0xFF and 0xD0 <= blob[place + 1] <= 0xD7]
    assert len(markers) > 100
    damaged = bytearray(blob)
    first, second = markers[0], markers[1]
    damaged[first + 2 : second] = bytes(second - first - 2)
    paths = [tmp_path / "whole.jpg", tmp_path / "damaged.jpg"]
    paths[0].write_bytes(blob)
    paths[1].write_bytes(bytes(damaged))
    out = np.zeros((2, 64, 64, 3), np.uint8)
    box = np.array([[400, 300, 500, 400]] * 2)
    reasons, _ = decode.decode_crops(whole_files([bytes(p) for p in paths]), box, np.zeros(2, np.uint8), out, 1)
    assert reasons == {}
    assert np.array_equal(out[0], out[1])


def test_other_segments_are_kept_and_damaged_or_foreign_images_are_not_tiled() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    blob = encoded(noisy(64, 48), exif=exif, comment=b"by hand", icc_profile=b"profile" * 20000)
    after = opened(tiled(blob))
    assert after.getexif()[0x0112] == 6
    assert after.info["comment"] == b"by hand" and after.info["icc_profile"] == b"profile" * 20000
    assert decode.tile(blob[: len(blob) // 2]) is None
    assert decode.tile(encoded(noisy(64, 48), "PNG")) is None
    assert decode.tile(encoded(noisy(64, 48).convert("CMYK"))) is None
    assert decode.tile(b"") is None


def test_tiling_twice_changes_nothing() -> None:
    blob = tiled(encoded(noisy(200, 151)))
    assert tiled(blob) == blob
