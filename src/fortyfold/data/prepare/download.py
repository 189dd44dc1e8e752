"""Downloads one file over http or https: resumed where it was cut, and never taken for what it is not.

The bytes so far are in `.part` beside the file, with what the server calls this version of it (ETag or
Last-Modified) in `.part.json`. A server that ignores ranges, or has another version by now, starts over. The file
gets its name only when its SHA-256 is the one given; one put together wrongly is fetched once more from the start.
"""

import hashlib
import http.client
import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

from fortyfold.data.prepare.work import Progress, require_space
from fortyfold.spec.errors import UserError
from fortyfold.spec.run_dir import write_json

TIMEOUT_SECONDS = 30.0
ATTEMPTS = 5  # in a row that bring nothing new
_CHUNK_BYTES = 1 << 18
_PASSING = {408, 425, 429, 500, 502, 503, 504}  # worth another attempt


class _Interrupted(Exception):
    """The network's fault; the next attempt goes on."""


@dataclass(frozen=True)
class _Transfer:
    url: str
    part: Path
    room: Callable[[int], int]
    progress: Progress

    @property
    def notes(self) -> Path:
        return self.part.with_name(f"{self.part.name}.json")

    def size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def start_over(self) -> None:
        self.part.unlink(missing_ok=True)
        self.notes.unlink(missing_ok=True)

    def version(self) -> str | None:
        """What the server called the file whose bytes are in the part."""
        try:
            version = json.loads(self.notes.read_text(encoding="utf-8"))["version"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return version if isinstance(version, str) and version.isascii() and version.isprintable() else None


def download(
    url: str, path: Path, sha256: str, room: Callable[[int], int], progress: Progress, backoff_seconds: float = 0.5
) -> None:
    """Bring `url` to `path`. `room` tells, from the file's size, how much more space will be needed than its own."""
    _check_url(url)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and file_sha256(path) == sha256:
        return
    path.unlink(missing_ok=True)
    transfer = _Transfer(url, path.with_name(f"{path.name}.part"), room, progress)
    was_pieced = _receive_all(transfer, backoff_seconds)
    if was_pieced and file_sha256(transfer.part) != sha256:
        transfer.start_over()
        _receive_all(transfer, backoff_seconds)
    if (found := file_sha256(transfer.part)) != sha256:
        transfer.start_over()
        raise UserError(
            f"{_shown(url)} has the SHA-256 {found}, not {sha256}; it was removed: check the address and --sha256"
        )
    transfer.part.replace(path)
    transfer.notes.unlink(missing_ok=True)


def file_sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii() or not url.isprintable():
        raise UserError(f"--download {_shown(url)}: give an address that begins with http:// or https://")


def _shown(url: str) -> str:
    """The address without what may be secret in it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _receive_all(transfer: _Transfer, backoff_seconds: float) -> bool:
    """Attempts until all is there; whether it was put together from several answers."""
    was_pieced, failures = False, 0
    while True:
        before = transfer.size()
        try:
            return _receive(transfer) or was_pieced
        except _Interrupted as error:
            failures = 0 if transfer.size() > before else failures + 1
            was_pieced |= transfer.size() > 0
            if failures >= ATTEMPTS:
                raise UserError(f"cannot download {_shown(transfer.url)}: {error}; the same command goes on") from None
        time.sleep(backoff_seconds * 2**failures)


def _receive(transfer: _Transfer) -> bool:
    """One request, to its end; whether it went on with bytes that were there."""
    have = transfer.size()
    with _network():
        response = _open(transfer, have)
    with response:
        if response.status == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return _take_unsatisfiable(transfer, response, have)
        goes_on: bool = response.status == http.HTTPStatus.PARTIAL_CONTENT
        if goes_on and not _continues(transfer, response, have):
            transfer.start_over()
            raise _Interrupted("the server has another file by now")
        start = have if goes_on else 0
        length = response.headers.get("Content-Length", "")
        total = start + int(length) if length.isdecimal() else None
        require_space(transfer.part.parent, (total or start) - start + transfer.room(total or 0))
        if not goes_on:
            transfer.start_over()
            write_json(transfer.notes, {"version": _version(response)})
        _save(transfer, response, start, total)
    return goes_on


def _open(transfer: _Transfer, have: int) -> Any:
    request = urllib.request.Request(transfer.url, headers={"User-Agent": "fortyfold"})  # noqa: S310 (checked)
    if have:
        request.add_header("Range", f"bytes={have}-")
        if version := transfer.version():
            request.add_header("If-Range", version)
    opener = urllib.request.OpenerDirector()  # the usual one would follow a redirect to ftp
    for handler in (
        urllib.request.ProxyHandler, urllib.request.HTTPHandler, urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler, urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor, urllib.request.UnknownHandler,
    ):  # fmt: skip
        opener.add_handler(handler())
    try:
        return opener.open(request, timeout=TIMEOUT_SECONDS)
    except HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and have:
            return error
        error.close()
        if error.code in _PASSING:
            raise _Interrupted(f"the server says {error.code} {error.reason}") from None
        raise UserError(f"{_shown(transfer.url)}: the server says {error.code} {error.reason}") from None


def _take_unsatisfiable(transfer: _Transfer, response: Any, have: int) -> bool:
    """Nothing comes behind our bytes: they are all of it, or of another file."""
    if response.headers.get("Content-Range", "").strip() != f"bytes */{have}":
        transfer.start_over()
        raise _Interrupted("the server has a shorter file by now")
    return True


def _continues(transfer: _Transfer, response: Any, have: int) -> bool:
    """Whether a partial answer begins where our bytes end, in the same version of the file."""
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    known, now = transfer.version(), _version(response)
    return match is not None and int(match[1]) == have and (known is None or now is None or known == now)


def _version(response: Any) -> str | None:
    """A strong ETag, or the time of the last change; what If-Range takes."""
    tag: str | None = response.headers.get("ETag")
    changed: str | None = response.headers.get("Last-Modified")
    return tag if tag and not tag.startswith("W/") else changed


def _save(transfer: _Transfer, response: Any, start: int, total: int | None) -> None:
    size = start
    with transfer.part.open("ab" if start else "wb") as file:
        while True:
            with _network():
                chunk = response.read1(_CHUNK_BYTES)
            if not chunk:
                break
            file.write(chunk)
            size += len(chunk)
            transfer.progress(size, total or size)
    if total is not None and size != total:
        raise _Interrupted(f"the connection ended {total - size} bytes early")


@contextmanager
def _network() -> Iterator[None]:
    """An error on the way is worth another attempt; one of the disk, elsewhere, is not."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise _Interrupted(str(getattr(error, "reason", None) or error) or type(error).__name__) from None
