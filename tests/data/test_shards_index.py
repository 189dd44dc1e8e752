"""Any bytes as shards.index give an index or one line; any index gives pixels or reasons."""

import json
from collections import Counter
from pathlib import Path

import psutil
import pytest
from malformed_index import malformed_indexes, small_shards

from fortyfold.data.reader import Reader
from fortyfold.data.requests import eval_requests, rectangular_requests
from fortyfold.data.shards import INDEX_NAME, open_shards
from fortyfold.spec.errors import UserError


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_shards(tmp_path_factory.mktemp("shards"))


def test_mutated_indexes_are_opened_or_refused_in_one_line(shards: Path) -> None:
    """Those that are opened are used: what they lead to is decoded, or named as bad."""
    path = shards / INDEX_NAME
    whole = path.read_bytes()
    assert len(open_shards(shards)) == 12
    outcomes: Counter[str] = Counter()
    before = psutil.Process().memory_info().rss
    try:
        for _, content in malformed_indexes(shards, 450):
            path.write_bytes(content)
            try:
                index = open_shards(shards)
            except UserError as error:
                assert len(str(error).splitlines()) == 1 and len(str(error)) < 1000
                outcomes["refused"] += 1
                continue
            reader = Reader(2, upright=True)
            batches = [*reader.stream(eval_requests(index, 16, 0.9, 6)),
                       *reader.stream(rectangular_requests(index, reader.sizes(index), 16, 0.9, 6))]  # fmt: skip
            assert sum(len(batch) for batch in batches) == 2 * len(index)
            outcomes["opened"] += 1
            outcomes["bad images"] += sum(len(batch.bad) for batch in batches)
    finally:
        path.write_bytes(whole)
    assert outcomes["refused"] > 200 and outcomes["opened"] > 50 and outcomes["bad images"] > 500
    assert psutil.Process().memory_info().rss - before < 50e6


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("num_samples", 10**15, "it is cut off"),
        ("num_samples", [0] * 1000, "it is cut off"),  # times the bytes of a row it would still be a list
        ("num_samples", True, "it is cut off"),
        ("version", "1\n" * 1000, "it has version '1"),
        ("classes", "abc", "its classes have no names"),
        ("classes", ["a", "a", "b"], "two of its classes have one name"),
        ("classes", ["a", "b", "\ud800"], "its content makes no sense"),
    ],
)
def test_what_is_said_of_an_odd_head(shards: Path, tmp_path: Path, key: str, value: object, reason: str) -> None:
    line, _, body = (shards / INDEX_NAME).read_bytes().partition(b"\n")
    (tmp_path / INDEX_NAME).write_bytes(json.dumps(json.loads(line) | {key: value}).encode() + b"\n" + body)
    with pytest.raises(UserError, match="damaged") as caught:
        open_shards(tmp_path)
    assert reason in str(caught.value)


@pytest.mark.parametrize("num_bytes", [-1, 1.5, True, "12", [1], 2**63, None])
def test_sizes_of_files_are_counts(shards: Path, tmp_path: Path, num_bytes: object) -> None:
    line, _, body = (shards / INDEX_NAME).read_bytes().partition(b"\n")
    head = json.loads(line)
    head["shards"][0]["num_bytes"] = num_bytes
    (tmp_path / INDEX_NAME).write_bytes(json.dumps(head).encode() + b"\n" + body)
    with pytest.raises(UserError, match="makes no sense"):
        open_shards(tmp_path)


def test_an_index_followed_by_much_else_is_not_read_to_its_end(shards: Path, tmp_path: Path) -> None:
    path = tmp_path / INDEX_NAME
    path.write_bytes((shards / INDEX_NAME).read_bytes())
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    with pytest.raises(UserError, match="checksum"):
        open_shards(tmp_path)
