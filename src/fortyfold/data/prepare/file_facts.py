"""What an image's first and last bytes say, without decoding it.

Two short reads a file: the first 16 KB hold nearly every header, the last bytes the end-of-image marker. Only a
file whose header is longer, or which does not end as it should, is read whole.
"""

import hashlib
import os
import stat
from dataclasses import dataclass

from fortyfold.data.pillow_decode import BadImage, opened
from fortyfold.data.places import WHOLE, Place

_HEAD_BYTES, _TAIL_BYTES = 1 << 14, 1 << 10
_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
_START_OF_SCAN, _WITHOUT_LENGTH = 0xDA, {0x01, *range(0xD0, 0xD8)}


@dataclass(frozen=True)
class FileFacts:
    """`reason` says why the header cannot be read; then the rest, but for the bytes' own, means nothing."""

    num_bytes: int = 0
    ends_hash: int = 0  # of its first and last bytes; files that are alike have the same
    reason: str = ""
    width: int = 0
    height: int = 0
    format: str = ""
    mode: str = ""  # Pillow's, but YCCK where CMYK is stored so
    truncated: bool = False


def look_at(place: Place) -> FileFacts:
    """The facts about one image. Whatever is there, this does not raise."""
    try:
        num_bytes, head, tail = _read_ends(place)
        ends = hashlib.blake2b(head + tail, digest_size=8).digest()
        about = FileFacts(num_bytes, int.from_bytes(ends, "little"))
        return _look_inside(place, about, head, tail)
    except OSError as error:
        return FileFacts(reason=error.strerror or type(error).__name__)


def _read_ends(place: Place) -> tuple[int, bytes, bytes]:
    about = os.stat(place.file)  # noqa: PTH116
    if not stat.S_ISREG(about.st_mode):  # opening a pipe would wait for ever
        raise OSError(0, "not a file")
    num_bytes = about.st_size if place.length == WHOLE else place.length
    with open(place.file, "rb", buffering=0) as file:  # noqa: PTH123
        file.seek(place.offset)
        head = file.read(min(_HEAD_BYTES, num_bytes))
        behind = max(len(head), num_bytes - _TAIL_BYTES)
        file.seek(place.offset + behind)
        return num_bytes, head, file.read(num_bytes - behind)


def _look_inside(place: Place, about: FileFacts, head: bytes, tail: bytes) -> FileFacts:
    whole = head if about.num_bytes <= len(head) else None
    try:
        try:
            image = opened(head)
        except BadImage:
            if whole is not None:
                raise
            whole = place.read()
            image = opened(whole)
    except BadImage as error:
        return FileFacts(about.num_bytes, about.ends_hash, str(error))
    with image:
        format = "JPEG" if image.format == "MPO" else image.format or ""
        ycck = image.mode == "CMYK" and image.info.get("adobe_transform") == 2
        mode = "YCCK" if ycck else image.mode
        size = image.size
    truncated = False
    if format in _ENDS and not (head + tail).endswith(_ENDS[format]):
        whole = place.read() if whole is None else whole
        truncated = _ENDS[format] not in whole[_scan_start(whole) if format == "JPEG" else 0 :]
    return FileFacts(about.num_bytes, about.ends_hash, "", *size, format, mode, truncated)


def _scan_start(jpeg: bytes) -> int:
    """Where the entropy-coded data begins, behind segments that may hold a whole thumbnail with its own end."""
    place = 2
    while place + 4 <= len(jpeg) and jpeg[place] == 0xFF and jpeg[place + 1] != _START_OF_SCAN:
        marker = jpeg[place + 1]
        if marker == 0xFF:  # filling
            place += 1
        elif marker in _WITHOUT_LENGTH:
            place += 2
        else:
            place += 2 + int.from_bytes(jpeg[place + 2 : place + 4], "big")
    return place
