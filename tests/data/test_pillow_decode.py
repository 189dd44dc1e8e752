import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from images import encoded, malformed, pixels, with_size
from PIL import Image

from fortyfold.data.pillow_decode import BadImage, decode_crop, read_header

WHOLE = np.array([0, 0, 64, 48])


def test_a_crop_is_pillows_crop_and_resize() -> None:
    blob = encoded(pixels(64, 48))
    image = Image.open(io.BytesIO(blob)).convert("RGB")
    expected = np.asarray(image.crop((5, 7, 47, 40)).resize((32, 32), Image.Resampling.BILINEAR))
    box = np.array([5, 7, 47, 40])
    assert np.array_equal(decode_crop(blob, box, 32, 32), expected)
    assert np.array_equal(decode_crop(blob, box, 32, 32, turn=1), expected[:, ::-1])


@pytest.mark.parametrize(
    "blob",
    [
        encoded(pixels(64, 48).convert("L")),
        encoded(pixels(64, 48).convert("CMYK")),
        encoded(pixels(64, 48), progressive=True),
        encoded(pixels(64, 48), "PNG"),
        encoded(pixels(64, 48).convert("P"), "PNG"),
        encoded(pixels(64, 48).convert("RGBA"), "PNG"),
        encoded(pixels(64, 48).convert("LA"), "PNG"),
        encoded(pixels(64, 48), "WEBP"),
        encoded(pixels(64, 48), exif=b"Exif\0\0II*\0broken and cut short"),
        encoded(pixels(64, 48), exif=b"\xff" * 40),
    ],
    ids=[
        "grey",
        "cmyk",
        "progressive",
        "png",
        "palette",
        "rgba",
        "grey-alpha",
        "webp",
        "broken exif",
        "no exif at all",
    ],
)
def test_whatever_is_an_image_becomes_rgb(blob: bytes) -> None:
    assert read_header(blob) == (64, 48, 1)
    assert decode_crop(blob, WHOLE, 16, 16).shape == (16, 16, 3)


@pytest.mark.parametrize(
    ("blob", "reason"),
    [
        (b"", "the file is empty"),
        (b"hello", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 48\n%%EndComments\n", "not an image"),
        (encoded(pixels(64, 48))[:1000], "truncated"),
        (with_size(encoded(pixels(64, 48)), 9000, 9000), "9000 × 9000 pixels are more than the limit"),
        (with_size(encoded(pixels(64, 48)), 65000, 65000), "DecompressionBomb"),
    ],
)
def test_what_is_not_says_why(blob: bytes, reason: str) -> None:
    with pytest.raises(BadImage, match=reason):
        read_header(blob)
        decode_crop(blob, WHOLE, 16, 16)


@given(st.integers(0, 10_000), st.binary(max_size=8))
def test_any_damage_gives_pixels_or_bad_image(place: int, junk: bytes) -> None:
    blob = encoded(pixels(64, 48))
    place %= len(blob)
    damaged = blob[:place] + junk + blob[place + len(junk) :]
    try:
        read_header(damaged)
        decode_crop(damaged, WHOLE, 16, 16)
    except BadImage:
        pass


@pytest.mark.parametrize("box", [(0, 0, 65, 48), (0, 0, 30_000, 30_000), (-1, 0, 9, 9), (5, 5, 5, 9), (9, 9, 5, 5)])
def test_a_box_outside_the_image_is_refused_and_not_filled_with_black(box: tuple[int, int, int, int]) -> None:
    with pytest.raises(BadImage, match="the image changed its size while in use"):
        decode_crop(encoded(pixels(64, 48), "PNG"), np.array(box), 16, 16)


def test_malformed_files_never_crash() -> None:
    outcomes = []
    for blob in malformed(200):
        try:
            read_header(blob)
            decode_crop(blob, WHOLE, 16, 16)
            outcomes.append("pixels")
        except BadImage:
            outcomes.append("bad")
    assert outcomes.count("bad") > 150
