import io

import numpy as np
import pytest
from images import encoded, malformed, pixels, with_size
from PIL import ExifTags, Image

from fortyfold.data.pillow_decode import BadImage
from fortyfold.data.prepare.shrink import shrink, shrunk_size


def shrunk(blob: bytes, name: str = "x.jpg", side: int = 20) -> Image.Image:
    (copy,) = shrink(blob, name, (side,), 90)
    assert copy is not None
    image = Image.open(io.BytesIO(copy))
    image.load()
    return image


@pytest.mark.parametrize(
    ("size", "side", "expected"),
    [
        ((500, 375), 160, (213, 160)),
        ((375, 500), 160, (160, 213)),
        ((333, 333), 160, (160, 160)),
        ((161, 3000), 160, (160, 2981)),
        ((64, 41), 32, (50, 32)),
        ((65, 40), 20, (33, 20)),  # 32.5
    ],
)
def test_the_shorter_side_is_the_wanted_one_and_the_longer_is_rounded(
    size: tuple[int, int], side: int, expected: tuple[int, int]
) -> None:
    assert shrunk_size(*size, side) == expected
    assert shrunk(encoded(pixels(*size)), side=side).size == expected


def test_each_side_comes_from_the_original_and_small_images_stay() -> None:
    blob = encoded(pixels(90, 60), quality=95)
    both = shrink(blob, "x.jpg", (20, 40), 90)
    assert both == [*shrink(blob, "x.jpg", (20,), 90), *shrink(blob, "x.jpg", (40,), 90)]
    assert None not in both
    assert shrink(blob, "x.jpg", (40, 60, 80), 90)[1:] == [None, None]
    assert shrink(blob, "x.jpg", (60,), 90) == [None]


def test_pixels_are_those_of_an_antialiased_resize() -> None:
    fine = np.indices((90, 120)).sum(0) % 2 * 255  # without antialiasing: black, white or moiré
    grey = np.asarray(shrunk(encoded(Image.fromarray(fine.astype(np.uint8)), "PNG"), "x.png", 30))
    assert abs(grey.astype(int) - 127).max() <= 2
    picture = pixels(120, 90)
    exact = np.asarray(picture.resize((40, 30), Image.Resampling.LANCZOS)).astype(int)
    assert np.array_equal(np.asarray(shrunk(encoded(picture, "PNG"), "x.png", 30)), exact)
    assert np.abs(np.asarray(shrunk(encoded(picture, "PNG"), "x.jpg", 30)) - exact).mean() < 6  # colour is halved


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("a.JPEG", "JPEG"), ("a.png", "PNG"), ("a.ppm", "PPM"), ("a.pgm", "PPM"), ("a.bmp", "BMP"),
        ("a.tif", "TIFF"), ("a.TIFF", "TIFF"), ("a.b.webp", "WEBP"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("source", ["PNG", "JPEG"])
def test_a_copy_has_the_format_that_its_name_says(name: str, format: str, source: str) -> None:
    image = shrunk(encoded(pixels(60, 40), source), name)
    assert (image.format, image.mode, image.size) == (format, "RGB", (30, 20))


@pytest.mark.parametrize(
    ("mode", "format", "expected"),
    [
        ("L", "JPEG", "L"), ("CMYK", "JPEG", "RGB"), ("1", "PNG", "L"), ("LA", "PNG", "L"), ("P", "PNG", "RGB"),
        ("RGBA", "PNG", "RGB"),
    ],
)  # fmt: skip
def test_grey_stays_grey_and_the_rest_is_rgb_as_the_loader_sees_it(mode: str, format: str, expected: str) -> None:
    blob = encoded(pixels(60, 40).convert(mode), format)
    image = shrunk(blob, "x.png")
    assert image.mode == expected
    with Image.open(io.BytesIO(blob)) as original:
        seen = original.convert("RGB").resize((30, 20), Image.Resampling.LANCZOS)
    assert np.array_equal(np.asarray(image.convert("RGB")), np.asarray(seen))


def test_jpegs_are_made_with_the_quality_and_halved_colour() -> None:
    blob = encoded(pixels(200, 150), "PNG")
    fine, coarse = (shrink(blob, "x.jpg", (100,), quality)[0] for quality in (95, 50))
    assert fine is not None and coarse is not None and len(fine) > len(coarse)
    with Image.open(io.BytesIO(fine)) as image:
        assert [(h, v) for _, h, v, _ in image.layer] == [(2, 2), (1, 1), (1, 1)]  # type: ignore[attr-defined]


def turned(orientation: int, format: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    exif[ExifTags.Base.Artist] = "me"
    options: dict[str, object] = {"comment": b"a comment"} if format == "JPEG" else {}
    return encoded(pixels(60, 40), format, exif=exif, icc_profile=b"not a profile", dpi=(300, 300), **options)


@pytest.mark.parametrize(("orientation", "kept"), [(6, {0x112: 6}), (1, {}), (0, {}), (99, {})])
@pytest.mark.parametrize("name", ["x.jpg", "x.png", "x.webp"])
def test_of_the_metadata_only_a_turn_stays(orientation: int, kept: dict[int, int], name: str) -> None:
    image = shrunk(turned(orientation), name)
    assert dict(image.getexif()) == kept
    assert image.size == (30, 20)
    assert not {"icc_profile", "comment"} & image.info.keys()
    assert image.info.get("dpi", (72, 72)) == (72, 72)  # what Pillow says of an EXIF without one


def test_a_tiff_is_turned_by_pillow_and_not_once_more() -> None:
    image = shrunk(turned(6, "TIFF"))
    assert image.size == (20, 30)
    assert not dict(image.getexif())


def test_damaged_metadata_is_no_reason_to_lose_an_image() -> None:
    blob = turned(6)
    start = blob.index(b"Exif\0\0") + 6
    assert shrunk(blob[:start] + b"\xff" * 12 + blob[start + 12 :]).size == (30, 20)


def test_bad_images_are_bad_images_and_nothing_else() -> None:
    good = encoded(pixels(60, 40))
    for blob in [*malformed(120), with_size(good, 60_000, 60_000), good[: len(good) // 2], encoded(pixels(9, 9))[:-99]]:
        try:
            shrink(blob, "x.jpg", (20,), 90)
        except BadImage as error:
            assert "\n" not in str(error)
    with pytest.raises(BadImage, match="more than the limit"):
        shrink(with_size(good, 9_000, 9_000), "x.jpg", (20,), 90)
    with pytest.raises(BadImage, match="Truncated"):
        shrink(good[: len(good) // 2], "x.jpg", (20,), 90)
