"""A server cuts connections, ignores ranges, changes its file: the right bytes come, or one line says why not."""

import hashlib
import json
import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from archives import gzipped, jpeg, member, tar_of
from kills import contents, finish_despite_kills

from fortyfold.cli import bars
from fortyfold.data.prepare import download as module
from fortyfold.data.prepare.download import download
from fortyfold.spec.errors import UserError

Fortyfold = Callable[..., tuple[int, str, str]]
CONTENT = random.Random(0).randbytes(300_000)
OTHER = random.Random(1).randbytes(300_000)


@dataclass
class Server:
    """What the server does, and what it was asked; `cuts` are where the next answers end early."""

    url: str = ""
    content: bytes = CONTENT
    cuts: list[int] = field(default_factory=list)
    changes_to: bytes | None = None  # after the first answer
    ranges: bool = True
    heeds_if_range: bool = True
    versions: bool = True
    sends_length: bool = True
    statuses: list[int] = field(default_factory=list)
    location: str = ""
    seconds_per_chunk: float = 0.0
    asked: list[dict[str, str]] = field(default_factory=list)

    def etag(self) -> str:
        return f'"{hashlib.md5(self.content, usedforsecurity=False).hexdigest()}"'


class Handler(BaseHTTPRequestHandler):
    behaviour: Server

    def do_GET(self) -> None:
        does = self.behaviour
        does.asked.append(dict(self.headers))
        if does.statuses:
            self.send_response(does.statuses.pop(0))
            self.send_header("Location", does.location)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content, start = does.content, self._start(does)
        if start >= len(content) > 0:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if does.versions:
            self.send_header("ETag", does.etag())
        if does.sends_length:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self._send(content[start : does.cuts.pop(0) if does.cuts else None])
        if does.changes_to is not None:
            does.content, does.changes_to = does.changes_to, None

    def _start(self, does: Server) -> int:
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        is_same = self.headers.get("If-Range") in (None, does.etag())
        return int(asked[1]) if asked and does.ranges and (is_same or not does.heeds_if_range) else 0

    def _send(self, data: bytes) -> None:
        chunk = 20_000
        for begin in range(0, len(data), chunk):
            try:
                self.wfile.write(data[begin : begin + chunk])
            except OSError:  # killed meanwhile
                return
            threading.Event().wait(self.behaviour.seconds_per_chunk)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _calm_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for everybody's writes proves nothing here."""
    monkeypatch.setattr(os, "sync", lambda: None)


@pytest.fixture
def server() -> Iterator[Server]:
    behaviour = Server()
    handler = type("Bound", (Handler,), {"behaviour": behaviour})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        behaviour.url = f"http://127.0.0.1:{http.server_address[1]}/files/archive.tar.gz?token=secret"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield behaviour
        http.shutdown()
        thread.join()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def fetch(server: Server, path: Path, content: bytes = CONTENT) -> list[tuple[int, int]]:
    """Download and check; gives the progress."""
    seen: list[tuple[int, int]] = []
    report: Callable[[int, int], None] = lambda done, total: seen.append((done, total))  # noqa: E731
    download(server.url, path, sha256(content), lambda size: 0, report, backoff_seconds=0.001)
    assert path.read_bytes() == content
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    return seen


def test_a_file_comes_whole_with_progress_in_bytes(server: Server, tmp_path: Path) -> None:
    seen = fetch(server, tmp_path / "down/file")
    assert seen[-1] == (300_000, 300_000) and seen == sorted(seen)
    fetch(server, tmp_path / "down/file")
    assert len(server.asked) == 1  # it is there, and right


def test_elsewhere_than_in_a_terminal_progress_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bars, "LINE_SECONDS", 0.0)
    with bars.bar("downloading", in_bytes=True) as report:
        report(1_500, 170_498_071)
    assert capsys.readouterr().out == "downloading: 1.5 KB of 170 MB\n"


def test_cut_connections_are_resumed_where_they_ended(server: Server, tmp_path: Path) -> None:
    server.cuts = [100_000, 100_001, 250_000]
    fetch(server, tmp_path / "file")
    assert [asked.get("Range") for asked in server.asked] == [
        None, "bytes=100000-", "bytes=100001-", "bytes=250000-",
    ]  # fmt: skip
    assert all(asked["If-Range"] == server.etag() for asked in server.asked[1:])


def test_a_server_that_ignores_ranges_starts_over(server: Server, tmp_path: Path) -> None:
    server.cuts, server.ranges = [100_000, 200_000], False
    fetch(server, tmp_path / "file")
    assert len(server.asked) == 3


@pytest.mark.parametrize("heeds_if_range", [True, False])
@pytest.mark.parametrize("versions", [True, False])
@pytest.mark.parametrize("new", [OTHER, OTHER[:90_000]])
def test_a_file_that_changed_is_fetched_anew(
    server: Server, tmp_path: Path, heeds_if_range: bool, versions: bool, new: bytes
) -> None:
    server.cuts, server.changes_to = [100_000], new
    server.heeds_if_range, server.versions = heeds_if_range, versions
    seen = fetch(server, tmp_path / "file", new)
    if versions:  # the mixture was never fetched to its end
        assert [done for done, total in seen if done == total] == [len(new)]


def test_last_modified_serves_where_the_etag_is_weak() -> None:
    class Response:
        headers = {"ETag": 'W/"1"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}  # noqa: RUF012

    assert module._version(Response()) == "Mon, 01 Jan 2024 00:00:00 GMT"


def test_bytes_of_an_earlier_process_are_used_or_mended(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT[:120_000])
    (tmp_path / "file.part.json").write_text(json.dumps({"version": server.etag()}))
    fetch(server, tmp_path / "file")
    assert [asked["Range"] for asked in server.asked] == ["bytes=120000-"]
    for leftover in (bytes(50_000), CONTENT, CONTENT + b"more", b""):  # after a power cut; whole; too long; empty
        (tmp_path / "file").unlink()
        (tmp_path / "file.part").write_bytes(leftover)
        fetch(server, tmp_path / "file")
    (tmp_path / "file").write_bytes(b"damaged")
    fetch(server, tmp_path / "file")


def test_no_length_and_passing_errors_are_borne(server: Server, tmp_path: Path) -> None:
    server.sends_length, server.statuses = False, [503, 429, 500]
    fetch(server, tmp_path / "file")


def test_redirects_are_followed_but_only_over_http(server: Server, tmp_path: Path) -> None:
    server.statuses, server.location = [302], server.url
    fetch(server, tmp_path / "file")
    for place in ("file:///etc/passwd", "ftp://localhost/x"):
        server.statuses, server.location = [302] * module.ATTEMPTS, place
        with pytest.raises(UserError, match=r"cannot download|the server says"):
            fetch(server, tmp_path / "other/file")


def test_what_cannot_be_had_is_one_line_without_secrets(server: Server, tmp_path: Path) -> None:
    server.statuses = [404]
    with pytest.raises(UserError, match=r"^http://127.0.0.1:\d+/files/archive.tar.gz: the server says 404 Not Found"):
        fetch(server, tmp_path / "file")
    server.cuts = [70_000, *[0] * module.ATTEMPTS]
    with pytest.raises(UserError, match=r"cannot download .* the same command goes on"):
        server.ranges = True
        fetch(server, tmp_path / "file")
    server.cuts = []
    fetch(server, tmp_path / "file")
    assert server.asked[-1]["Range"] == "bytes=70000-"
    for url in ("file:///etc/passwd", "ftp://x/y", "x.tar", "http:///x", "http://h/a b\n"):
        with pytest.raises(UserError, match="give an address that begins with http"):
            download(url, tmp_path / "file", "0" * 64, lambda size: 0, lambda done, total: None)


def test_a_silent_server_is_given_up(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT_SECONDS", 0.05)
    server.seconds_per_chunk, server.content = 0.3, CONTENT[:40_000]
    fetch(server, tmp_path / "file", CONTENT[:40_000])
    assert len(server.asked) == 2


def imagenetv2() -> bytes:
    return gzipped(tar_of(member(f"v2/{number}/{number:040x}.jpeg", jpeg(number)) for number in range(40)))


def test_a_download_is_imported_and_its_archive_removed(server: Server, tmp_path: Path, fortyfold: Fortyfold) -> None:
    server.content = imagenetv2()
    command = ["data", "import", "imagenetv2", tmp_path, "--download", server.url, "--sha256"]
    code, _, err = fortyfold(*command, sha256(CONTENT))
    assert code == 2 and err.count("\n") == 1 and "has the SHA-256" in err and "secret" not in err
    assert {path.name for path in tmp_path.rglob("*")} == {".making"}
    code, out, _ = fortyfold(*command, sha256(server.content))
    assert code == 0 and "val   40 images, 40 classes" in out
    assert {path.name for path in tmp_path.iterdir()} == {".making", "val", "made.json"}
    assert "secret" not in (tmp_path / "made.json").read_text()
    assert "is there already" in fortyfold(*command, sha256(server.content))[1]
    assert len(server.asked) == 2


def test_a_download_that_is_given_up_goes_on_later(
    server: Server, tmp_path: Path, fortyfold: Fortyfold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ATTEMPTS", 1)
    server.content, server.cuts = imagenetv2(), [3000, 0]
    command = ["data", "import", "imagenetv2", tmp_path, "--download", server.url, "--sha256", sha256(server.content)]
    code, _, err = fortyfold(*command)
    assert code == 2 and "the same command goes on" in err
    assert fortyfold(*command)[0] == 0
    assert server.asked[-1]["Range"] == "bytes=3000-"


def test_a_killed_download_goes_on(server: Server, tmp_path: Path) -> None:
    server.content, server.seconds_per_chunk = imagenetv2(), 0.1
    options = ["--download", server.url, "--sha256", sha256(server.content)]
    finish_despite_kills(3, "data", "import", "imagenetv2", tmp_path / "killed", *options, most_seconds=0.8)
    server.seconds_per_chunk = 0.0
    finish_despite_kills(0, "data", "import", "imagenetv2", tmp_path / "whole", *options)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_the_disk_is_looked_at_before_the_first_byte(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"needs about 1000\.0 TB"):
        download(server.url, tmp_path / "file", "0" * 64, lambda size: 10**15, lambda done, total: None)
    assert list(tmp_path.iterdir()) == []
