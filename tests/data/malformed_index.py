"""Indexes of shards that are damaged or made to mislead, with a right checksum where that lets them get further."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from images import encoded, pixels

from fortyfold.data import decode
from fortyfold.data.prepare.shard import Sharding, make_shards, source_sizes
from fortyfold.data.shards import INDEX_NAME, ROW_DTYPE, Rows
from fortyfold.data.splits import open_folder

Generator = np.random.Generator
ODD: list[Any] = [
    None, True, False, -1, 0, 1, 1.5, 1e300, float("nan"), float("inf"), 10**15, 2**31, 2**62, 2**63, 2**64, 10**400,
    "", "x", ".tar", "a.tar", "../a.tar", "a\0.tar", "\ud800.tar", "x" * 10_000, [], [[]], [None], ["a", "a"], {},
    {"name": 1}, [{"name": "a.tar", "num_bytes": 1, "sha256": "x"}] * 3, json.loads("[" * 200 + "]" * 200),
]  # fmt: skip
_LIMITS = (0, 1, 2, 9, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1)


def small_shards(folder: Path) -> Path:
    """A split of 12 images in 2 shards, some of them tiled, one a PNG, one unreadable."""
    for number in range(12):
        path = folder / "source" / f"class{number % 3}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = "PNG" if number == 3 else "JPEG"
        path.write_bytes(b"no image" if number == 7 else encoded(pixels(40 + number, 30, number), kind))
    index = open_folder(folder / "source", fresh=True)
    tile = "always" if decode.is_native() else "never"
    make_shards(Sharding(index, 2, tile), folder / "train", (0, 1), 1, source_sizes(index, 1), lambda *_: None)
    return folder / "train"


def _split(index: bytes) -> tuple[dict[str, Any], Rows, bytes]:
    line, _, body = index.partition(b"\n")
    head = json.loads(line)
    end = head["num_samples"] * ROW_DTYPE.itemsize
    return head, np.frombuffer(body[:end], ROW_DTYPE).copy(), body[end:]


def _joined(head: dict[str, Any], rows: Rows, names: bytes) -> bytes:
    """With the checksum that belongs to it, unless that was tampered with."""
    body = rows.tobytes() + names
    if isinstance(head.get("sha256"), str):
        head["sha256"] = hashlib.sha256(body).hexdigest()
    return json.dumps(head).encode() + b"\n" + body


def _odd_value(index: bytes, rng: Generator) -> bytes:
    head, rows, names = _split(index)
    places: list[tuple[Any, Any]] = [(head, key) for key in head]
    places += [(head["shards"], number) for number in range(2)] + [(head["classes"], number) for number in range(3)]
    places += [(file, key) for file in head["shards"] for key in file]
    for place in rng.integers(0, len(places), int(rng.choice([1, 1, 1, 3]))):
        holder, key = places[int(place)]
        holder[key] = ODD[int(rng.integers(0, len(ODD)))]
    return _joined(head, rows, names)


def _missing_key(index: bytes, rng: Generator) -> bytes:
    head, rows, names = _split(index)
    holder = head if rng.random() < 0.6 else head["shards"][int(rng.integers(0, 2))]
    del holder[list(holder)[int(rng.integers(0, len(holder)))]]
    return _joined(head, rows, names)


def _repeated_key(index: bytes, rng: Generator) -> bytes:
    """JSON lets a key stand twice; the last holds."""
    key = str(rng.choice(["num_samples", "version", "classes", "shards", "sha256", "more"]))
    value = json.dumps(ODD[int(rng.integers(0, len(ODD)))]).encode()
    line, _, body = index.partition(b"\n")
    return line[:-1] + b', "' + key.encode() + b'": ' + value + b"}\n" + body


def _odd_rows(index: bytes, rng: Generator) -> bytes:
    head, rows, names = _split(index)
    assert ROW_DTYPE.names is not None
    for _ in range(int(rng.integers(1, 4))):
        field = str(rng.choice(ROW_DTYPE.names))
        most = np.iinfo(ROW_DTYPE[field]).max
        rows[field][int(rng.integers(0, len(rows)))] = min(int(rng.choice(np.array(_LIMITS, np.uint64))), int(most))
    return _joined(head, rows, names)


def _wrong_places(index: bytes, rng: Generator) -> bytes:
    """Rows that lead to some other bytes of the files."""
    head, rows, names = _split(index)
    sizes = np.array([file["num_bytes"] for file in head["shards"]])
    rows["shard"] = rng.integers(0, 2, len(rows))
    rows["offset"] = rng.integers(0, sizes[rows["shard"]])
    rows["length"] = rng.integers(0, sizes[rows["shard"]] - rows["offset"].astype(np.int64) + 1)
    rows["orientation"] = rng.integers(0, 9, len(rows))
    return _joined(head, rows, names)


def _wrong_sizes(index: bytes, rng: Generator) -> bytes:
    """The images are other than the rows say; and the files shorter."""
    head, rows, names = _split(index)
    rows["width"], rows["height"] = rng.choice([0, 1, 31, 65_535, 2**31 - 1], (2, len(rows)))
    for file in head["shards"]:
        file["num_bytes"] = int(rng.choice([file["num_bytes"], 2**61]))
    if head["shards"][0]["num_bytes"] == head["shards"][1]["num_bytes"] == 2**61:
        rows["offset"] = rng.choice(np.array([0, 2**40, 2**60], np.uint64), len(rows))
    return _joined(head, rows, names)


def _odd_names(index: bytes, rng: Generator) -> bytes:
    head, rows, names = _split(index)
    odd = [b"../../x", b"/etc/passwd", b"a/../../b", b"\0", b"\xff\xfe", b"", b"a" * 65_535]
    new = odd[int(rng.integers(0, len(odd)))]
    start = int(rows["name_bytes"][0])
    rows["name_bytes"][0] = len(new)
    return _joined(head, rows, new + names[start if rng.random() < 0.9 else 0 :])


def _deep(index: bytes, rng: Generator) -> bytes:
    depth = int(rng.choice([500, 100_000]))
    opened = [b"[", b'{"a":', b'{"format": "fortyfold shards", "version": '][int(rng.integers(0, 3))]
    return opened * depth + b"\n" + index


def _raw(index: bytes, rng: Generator) -> bytes:
    """Flipped bits, cut, longer; a number of thousands of digits; another encoding; nothing."""
    place = int(rng.integers(0, len(index)))
    flipped = index[:place] + bytes([index[place] ^ 1 << int(rng.integers(0, 8))]) + index[place + 1 :]
    line, _, body = index.partition(b"\n")
    kinds = [flipped, flipped, flipped, index[:place], index + b"x" * place, line, b"", b"\n", body, b"null\n" + body,
             line.replace(b'"version": 1', b'"version": ' + b"1" * 9000) + b"\n" + body,
             line.decode().encode("utf-16") + b"\n" + body, b"\xef\xbb\xbf" + index]  # fmt: skip
    return kinds[int(rng.integers(0, len(kinds)))]


_MUTATIONS: dict[str, Callable[[bytes, Generator], bytes]] = {
    "odd values": _odd_value,
    "keys left out": _missing_key,
    "keys repeated": _repeated_key,
    "odd rows": _odd_rows,
    "wrong places": _wrong_places,
    "wrong sizes": _wrong_sizes,
    "odd names": _odd_names,
    "deep JSON": _deep,
    "raw": _raw,
}


def malformed_indexes(shards: Path, count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """(kind, content of shards.index), each kind in turn, made from the one in `shards`."""
    rng = np.random.default_rng(seed)
    index = (shards / INDEX_NAME).read_bytes()
    kinds = list(_MUTATIONS.items())
    for number in range(count):
        kind, mutate = kinds[number % len(kinds)]
        yield kind, mutate(index, rng)
