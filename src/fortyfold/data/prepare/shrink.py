"""One image's bytes in, smaller copies out: a pure function of the bytes, the file's name, the side and the quality.

The whole image is decoded once and each copy is resized from it with Lanczos: of Pillow's filters it leaves
training crops of the copy nearest to those of the original, and one making pays for many readings. JPEGs are
not scaled while decoding (`draft`): that is quicker, but as far off as no filter at all, and the copy of one
side would depend on which others were made with it. Figures: docs/findings.md.

A copy has the format that its name says, in grey or RGB as a training reads it (no alpha, no colour profile);
of the metadata only an EXIF orientation that turns the image stays.
"""

import io
from pathlib import PurePath

from PIL import ExifTags, Image

from fortyfold.data.pillow_decode import BadImage, describe, opened

FORMAT_OF_SUFFIX = {
    ".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".ppm": "PPM", ".pgm": "PPM", ".bmp": "BMP",
    ".tif": "TIFF", ".tiff": "TIFF", ".webp": "WEBP",
}  # fmt: skip
GREY_MODES = ("1", "L", "LA", "La")
_TURNS = range(2, 9)  # orientations other than upright; further numbers mean nothing


def shrink(blob: bytes, name: str, sides: tuple[int, ...], quality: int) -> list[bytes | None]:
    """For each of `sides` a copy with that shorter side; None where the image's own is no longer."""
    with opened(blob) as image:
        shorter = min(image.size)
        if shorter <= min(sides):
            return [None] * len(sides)
        try:
            image.load()
            options = _options(image, name, quality)
            pixels = image.convert("L" if image.mode in GREY_MODES else "RGB")
            pixels.info.clear()  # Pillow would write comments and profiles again
            return [None if shorter <= side else _copy(pixels, side, options) for side in sides]
        except MemoryError:
            raise
        except Exception as error:  # Pillow's readers raise nearly anything on damaged bytes
            raise BadImage(describe(error)) from None


def shrunk_size(width: int, height: int, side: int) -> tuple[int, int]:
    """The size whose shorter side is `side`, the longer one rounded (halves up)."""
    shorter, longer = sorted((width, height))
    other = (2 * longer * side + shorter) // (2 * shorter)
    return (side, other) if width <= height else (other, side)


def _copy(pixels: Image.Image, side: int, options: dict[str, object]) -> bytes:
    small = pixels.resize(shrunk_size(*pixels.size, side), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    small.save(file, **options)  # type: ignore[arg-type]
    return file.getvalue()


def _options(image: Image.Image, name: str, quality: int) -> dict[str, object]:
    options: dict[str, object] = {"format": FORMAT_OF_SUFFIX[PurePath(name).suffix.lower()]}
    if options["format"] == "JPEG":
        options |= {"quality": quality, "subsampling": "4:2:0"}
    elif options["format"] == "WEBP":
        options |= {"quality": quality}
    turn = _orientation(image)
    if turn in _TURNS:
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = turn
        options["exif"] = exif.tobytes()
    return options


def _orientation(image: Image.Image) -> object:
    """The EXIF orientation of a loaded image (Pillow applies a TIFF's, and no other, while loading)."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # damaged metadata is no reason to lose the image
        return None
