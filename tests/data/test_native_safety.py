"""What fuzzing (native/fuzz) and reading the native decoder with distrust brought to light."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import skip_or_fail
from images import encoded, pixels
from malformed_images import exif, markers, segments, whole_jpegs, with_scans

from fortyfold.data import decode
from fortyfold.data.decode import decode_crops, read_headers
from fortyfold.data.places import Places, whole_files

LIMITS = (-(2**63), -(2**62), -1, 0, 1, 64, 65500, 65536, 2**31, 2**62, 2**63 - 1)


@pytest.fixture(autouse=True)
def _native() -> None:
    if decode._native is None:
        skip_or_fail("native", "the native decoder was not built")


def crop(path: Path, blob: bytes, box: tuple[int, int, int, int], px: int) -> tuple[dict[int, str], bytes]:
    path.write_bytes(blob)
    out = np.zeros((1, px, px, 3), np.uint8)
    places = whole_files([str(path).encode()])
    reasons, _ = decode_crops(places, np.array([box]), np.zeros(1, np.uint8), out, 1)
    return reasons, out.tobytes()


def test_boxes_at_the_limits_of_the_numbers(tmp_path: Path) -> None:
    tiled = decode.tile(encoded(pixels(64, 64)))
    assert tiled is not None
    for low in LIMITS:
        for high in LIMITS:
            reasons, _ = crop(tmp_path / "a.jpg", tiled, (low, low, high, high), 8)
            good = 0 <= low < high <= 64
            assert reasons == ({} if good else {0: "the image changed its size while in use"})


@pytest.mark.parametrize(("offset", "length"), [(2**63 - 1, 2**63 - 1), (2**62, -1), (10**6, 5), (0, 0)])
def test_places_beyond_the_file(tmp_path: Path, offset: int, length: int) -> None:
    (tmp_path / "a.jpg").write_bytes(encoded(pixels(16, 16)))
    path = [str(tmp_path / "a.jpg").encode()]
    places = Places(path, np.zeros(1, np.int32), np.array([offset]), np.array([length]))
    assert read_headers(places, 1)[1] == {0: "the file is empty"}
    assert places.read(0) == b""


def test_a_progressive_image_that_lacks_scans_is_not_tiled(tmp_path: Path) -> None:
    """Decoders smooth what such an image lacks, and would not smooth the tiled one."""
    whole = encoded(pixels(200, 150), quality=95, progressive=True)
    scans = [place for place in markers(whole) if whole[place + 1] == 0xDA]
    assert len(scans) > 5
    assert decode.tile(whole) is not None
    for scan in scans[1:]:
        lacking = whole[:scan] + b"\xff\xd9"
        assert crop(tmp_path / "a.jpg", lacking, (0, 0, 200, 150), 32)[0] == {}
        assert decode.tile(lacking) is None


def test_more_scans_than_any_real_image_has_are_not_decoded(tmp_path: Path) -> None:
    progressive = encoded(pixels(64, 48), progressive=True)
    assert crop(tmp_path / "a.jpg", with_scans(progressive, 150), (0, 0, 64, 48), 8)[0] == {}
    assert crop(tmp_path / "a.jpg", with_scans(progressive, 250), (0, 0, 64, 48), 8)[0] == {0: "the JPEG is corrupt"}
    assert decode.tile(with_scans(progressive, 250)) is None


def test_coded_data_with_fill_bytes_is_not_tiled() -> None:
    """libjpeg-turbo reads it in two ways; which of them depends on the bytes behind."""
    whole = encoded(pixels(64, 64), quality=100)
    stuffed = whole.find(b"\xff\x00", segments(whole)[-1])
    assert stuffed > 0 and decode.tile(whole) is not None
    assert decode.tile(whole[:stuffed] + b"\xff\xff" + whole[stuffed:]) is None


def test_a_header_that_can_be_read_in_two_ways_shows_what_libjpeg_reads(tmp_path: Path) -> None:
    """A fill byte before the first segment; taken for a segment itself it would lead to the image behind."""
    first, second = (decode.tile(encoded(pixels(64, 64, seed))) for seed in (1, 2))
    assert first is not None and second is not None
    mixed = first[:2] + b"\xff" + first[2:]
    length = int.from_bytes(mixed[4:6], "big")  # of that segment
    mixed = mixed.ljust(4 + length, b"\0") + second[2:]
    box = (0, 0, 64, 64)
    assert crop(tmp_path / "a.jpg", mixed, box, 16) == crop(tmp_path / "b.jpg", first, box, 16)


@pytest.mark.parametrize("big_endian", [False, True])
def test_exif_is_read_in_both_byte_orders_and_not_beyond_its_end(tmp_path: Path, big_endian: bool) -> None:
    content = exif(6, big_endian)
    for end in range(len(content) + 1):
        (tmp_path / f"{end}.jpg").write_bytes(encoded(pixels(16, 16), exif=content[:end]))
    places = whole_files([str(tmp_path / f"{end}.jpg").encode() for end in range(len(content) + 1)])
    headers, reasons = read_headers(places, 2)
    assert reasons == {}
    assert headers[:, 2].tolist() == [1] * (len(content) - 4) + [6] * 5  # the last four bytes are nobody's


def test_a_pipe_without_a_writer_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jpg")
    program = (
        "from fortyfold.data import decode, places\n"
        f"print(decode.read_headers(places.whole_files([{str(tmp_path / 'a.jpg').encode()!r}]), 1)[1])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "{0: 'not a file'}\n"


def test_want_of_memory_is_not_called_a_corrupt_image(tmp_path: Path) -> None:
    """Under a limit that leaves no room for a large progressive image's coefficients."""
    (tmp_path / "a.jpg").write_bytes(encoded(pixels(6000, 4000), progressive=True))
    program = (
        "import resource, numpy as np\n"
        "from fortyfold.data import decode, places\n"
        f"where = places.whole_files([{str(tmp_path / 'a.jpg').encode()!r}])\n"
        "out = np.zeros((1, 8, 8, 3), np.uint8)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (40 << 20),) * 2)\n"
        "try:\n"
        "    print(decode.decode_crops(where, np.array([[0, 0, 6000, 4000]]), np.zeros(1, np.uint8), out, 1)[0])\n"
        "except MemoryError:\n"
        "    print('no memory')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "no memory\n"


def test_tiling_changes_no_pixel(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for blob in whole_jpegs():
        tiled = decode.tile(blob)
        assert tiled is not None
        (tmp_path / "a.jpg").write_bytes(blob)
        width, height, _ = read_headers(whole_files([str(tmp_path / "a.jpg").encode()]), 1)[0][0].tolist()
        for _ in range(4):
            left, top = int(rng.integers(0, width)), int(rng.integers(0, height))
            box = left, top, int(rng.integers(left, width)) + 1, int(rng.integers(top, height)) + 1
            px = int(rng.integers(1, 40))
            assert crop(tmp_path / "b.jpg", tiled, box, px) == crop(tmp_path / "a.jpg", blob, box, px)
