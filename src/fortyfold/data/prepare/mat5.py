"""Reads two fields of a struct array out of a MATLAB 5 file, and steps over everything else.

Enough for ILSVRC2012's meta.mat: compressed or not, small elements, numbers in any storage, text, cells.
Every length is checked against the bytes that are there; nesting and unpacked size are bounded.
"""

import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_INT8, _UINT32, _INT32, _MATRIX, _COMPRESSED = 1, 6, 5, 14, 15
_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_TEXTS = {1: "latin-1", 2: "latin-1", 4: "utf-16", 16: "utf-8", 17: "utf-16", 18: "utf-32"}
_CELL, _STRUCT, _CHAR = 1, 2, 4
_MOST_BYTES = 64 << 20  # the real file is a thousandth of it
_MOST_DEPTH = 4

Value = float | str


class Mat5Error(ValueError):
    """Not a MATLAB 5 file that can be read; says why."""


def struct_fields(data: bytes, variable: str, fields: tuple[str, ...]) -> list[list[Value]]:
    """The values of each of `fields` of the struct array `variable`, element after element."""
    if len(data) < 128 or data[126:128] not in (b"IM", b"MI"):
        raise Mat5Error("it has no MATLAB 5 header")
    order = "<" if data[126:128] == b"IM" else ">"
    for kind, content in _elements(data[128:], order):
        if kind == _COMPRESSED:
            kind, content = next(_elements(_unpack(content), order), (0, b""))
        if kind == _MATRIX:
            matrix = _Matrix(content, order)
            if matrix.name == variable and matrix.kind == _STRUCT:
                return matrix.fields(fields)
    raise Mat5Error(f"it has no struct {variable}")


class _Matrix:
    """An array: its class, its number of elements and its name; what comes behind is read when asked for."""

    def __init__(self, content: bytes, order: str, depth: int = 0) -> None:
        self._order, self._depth = order, depth
        if depth > _MOST_DEPTH:
            raise Mat5Error("it is nested too deeply")
        self._parts = _elements(content, order)
        flags = self._integers(_UINT32)
        dimensions = self._integers(_INT32)
        if len(flags) != 2 or len(dimensions) < 2 or dimensions.min() < 0:
            raise Mat5Error("an array has no size")
        self.kind = int(flags[0]) & 0xFF
        self.num_elements = int(np.prod(dimensions.astype(object)))
        self.name = self._part(_INT8).decode("latin-1")

    def fields(self, wanted: tuple[str, ...]) -> list[list[Value]]:
        widths = self._integers(_INT32)
        width = int(widths[0]) if len(widths) == 1 else 0
        text = self._part(_INT8)
        if not 0 < width <= len(text) or len(text) % width:
            raise Mat5Error("a struct has no field names")
        names = [text[start : start + width].split(b"\0")[0].decode("latin-1") for start in range(0, len(text), width)]
        if missing := set(wanted) - set(names):
            raise Mat5Error(f"its struct has no field {sorted(missing)[0]}")
        found: dict[str, list[Value]] = {name: [] for name in wanted}
        for _ in range(self.num_elements):
            for name in names:
                content = self._part(_MATRIX)
                if name in found and content:
                    found[name] += _Matrix(content, self._order, self._depth + 1).values()
        return [found[name] for name in wanted]

    def values(self) -> list[Value]:
        """Numbers, a text, or those of all cells."""
        if self.kind == _CELL:
            cells = (_Matrix(content, self._order, self._depth + 1) for _, content in self._parts if content)
            return [value for cell in cells for value in cell.values()]
        kind, content = next(self._parts, (0, b""))
        if self.kind == _CHAR:
            encoding = _TEXTS.get(kind, "latin-1")
            suffix = "" if encoding in ("latin-1", "utf-8") else "-le" if self._order == "<" else "-be"
            return [content.decode(encoding + suffix, "replace")]
        return [float(number) for number in _numbers(kind, content, self._order)]

    def _integers(self, kind: int) -> NDArray[np.generic]:
        return _numbers(kind, self._part(kind), self._order)

    def _part(self, kind: int) -> bytes:
        found, content = next(self._parts, (0, b""))
        if found != kind:
            raise Mat5Error(f"an element of type {found} stands where {kind} belongs")
        return content


def _numbers(kind: int, content: bytes, order: str) -> NDArray[np.generic]:
    dtype = np.dtype(order + _NUMBERS.get(kind, "u1"))
    if kind not in _NUMBERS or len(content) % dtype.itemsize:
        raise Mat5Error(f"an element of type {kind} holds no numbers")
    return np.frombuffer(content, dtype)


def _elements(data: bytes, order: str) -> Iterator[tuple[int, bytes]]:
    """(type, content) of each element; short ones have both lengths in their first four bytes."""
    start = 0
    while len(data) - start >= 8:
        tag, length = (int(word) for word in np.frombuffer(data, f"{order}u4", 2, start))
        is_short = tag >> 16 != 0
        kind, size, begin = (tag & 0xFFFF, tag >> 16, start + 4) if is_short else (tag, length, start + 8)
        if begin + size > len(data) or (is_short and size > 4):
            raise Mat5Error("it is cut short")
        yield kind, data[begin : begin + size]
        room = size if kind == _COMPRESSED else -(-size // 8) * 8
        start = begin + (4 if is_short else room)
    if data[start:].strip(b"\0"):
        raise Mat5Error("it is cut short")


def _unpack(content: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    try:
        unpacked = unpacker.decompress(content, _MOST_BYTES)
    except zlib.error as error:
        raise Mat5Error(f"it is damaged ({error})") from None
    if not unpacker.eof:
        raise Mat5Error("a compressed element is cut short, or absurdly large")
    return unpacked
