"""Builds the archives that data sets come in, small: tars, MATLAB 5 files, pickles as Python 2 wrote them."""

import gzip
import io
import struct
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from images import encoded, pixels

FIELDS = (
    "ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children", "wordnet_height", "num_train_images",
)  # fmt: skip


def member(name: str, content: bytes = b"", type: bytes = tarfile.REGTYPE, link: str = "") -> tuple[Any, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(content), type, link
    return info, content


def tar_of(members: Iterable[tuple[Any, bytes]], format: int = tarfile.USTAR_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


def gzipped(content: bytes) -> bytes:
    return gzip.compress(content, 1, mtime=0)


def jpeg(seed: int) -> bytes:
    return encoded(pixels(40, 30, seed))


def wnid(label: int) -> str:
    return f"n{1440764 + 13 * label:08d}"


def train_images(num_classes: int, num_images: int) -> dict[str, dict[str, bytes]]:
    """class → file → bytes, as they should be after the import."""
    return {
        wnid(label): {f"{wnid(label)}_{number}.JPEG": jpeg(1000 * label + number) for number in range(num_images)}
        for label in range(num_classes)
    }


def train_tar(classes: dict[str, dict[str, bytes]]) -> bytes:
    inner = {name: tar_of(member(file, content) for file, content in files.items()) for name, files in classes.items()}
    return tar_of(member(f"{name}.tar", content) for name, content in inner.items())


def val_tar(num_images: int) -> bytes:
    return tar_of(member(f"ILSVRC2012_val_{n:08d}.JPEG", jpeg(-n % 2**31)) for n in range(1, num_images + 1))


def devkit(ids: list[int], meta: bytes) -> bytes:
    text = "".join(f"{id}\n" for id in ids).encode()
    folder = "ILSVRC2012_devkit_t12"
    return gzipped(
        tar_of(
            [
                member(folder, type=tarfile.DIRTYPE),
                member(f"{folder}/readme.txt", b"read me"),
                member(f"{folder}/data/ILSVRC2012_validation_ground_truth.txt", text),
                member(f"{folder}/data/meta.mat", meta),
            ]
        )
    )


def meta_mat(pairs: list[tuple[int, str]], compressed: bool, order: str = "<") -> bytes:
    """A MATLAB 5 file with the struct array `synsets` (n × 1) of ILSVRC2012's meta.mat, and a variable before it."""

    def element(kind: int, content: bytes) -> bytes:
        if 0 < len(content) <= 4 and kind != 14:  # a short element
            return struct.pack(f"{order}I", len(content) << 16 | kind) + content.ljust(4, b"\0")
        return struct.pack(f"{order}II", kind, len(content)) + content + bytes(-len(content) % 8)

    def matrix(kind: int, shape: tuple[int, int], body: bytes, name: str = "") -> bytes:
        flags = element(6, struct.pack(f"{order}II", kind, 0))
        size = element(5, struct.pack(f"{order}ii", *shape))
        return element(14, flags + size + element(1, name.encode()) + body)

    def number(value: int, name: str = "") -> bytes:  # a double, stored as small as it goes
        kind, code = (2, "B") if value < 256 else (4, "H")
        return matrix(6, (1, 1), element(kind, struct.pack(order + code, value)), name)

    def text(value: str) -> bytes:
        return matrix(4, (1, len(value)), element(4, value.encode("utf-16-le" if order == "<" else "utf-16-be")))

    def synset(id: int, wnid: str) -> bytes:
        is_inner = id > 1000
        children = matrix(6, (1, 2), element(2, b"\1\2")) if is_inner else matrix(6, (0, 0), element(9, b""))
        words = [number(id), text(wnid), text("tench, Tinca"), text("a fish " * (id % 3))]
        return b"".join([*words, number(2 * is_inner), children, number(3), number(1300)])

    width = 20
    names = b"".join(name.encode().ljust(width, b"\0") for name in FIELDS)
    head = element(5, struct.pack(f"{order}i", width)) + element(1, names)
    synsets = matrix(2, (len(pairs), 1), head + b"".join(synset(*pair) for pair in pairs), "synsets")
    variables = [number(7, "version"), synsets]
    if compressed:
        packed = map(zlib.compress, variables)
        variables = [struct.pack(f"{order}II", 15, len(content)) + content for content in packed]
    header = b"MATLAB 5.0 MAT-file, Platform: GLNXA64".ljust(124) + struct.pack(f"{order}H", 0x100)
    return header + (b"IM" if order == "<" else b"MI") + b"".join(variables)


def python2_pickle(value: Any) -> bytes:
    """Protocol 2 as Python 2 wrote it: str as bytes without an encoding, arrays through numpy.core.multiarray."""

    def save(value: Any) -> bytes:
        if isinstance(value, dict):
            return b"}(" + b"".join(save(key) + save(item) for key, item in value.items()) + b"u"
        if isinstance(value, list):
            return b"](" + b"".join(map(save, value)) + b"e"
        if isinstance(value, bytes):
            return b"U" + bytes([len(value)]) + value if len(value) < 256 else _long_string(value)
        if isinstance(value, np.ndarray):
            dtype = (
                b"cnumpy\ndtype\nq\x0aU\x02u1K\x00K\x01\x87Rq\x0b(K\x03U\x01|NNN"
                + 2 * b"J\xff\xff\xff\xff"
                + b"K\x00tb"
            )
            shape = b"".join(b"J" + struct.pack("<i", side) for side in value.shape) + b"\x86"
            made = b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87Rq\x03"
            return made + b"(K\x01" + shape + dtype + b"\x89" + _long_string(value.tobytes()) + b"tb"
        return b"J" + struct.pack("<i", value)

    return b"\x80\x02" + save(value) + b"."


def _long_string(value: bytes) -> bytes:
    return b"T" + struct.pack("<i", len(value)) + value


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
