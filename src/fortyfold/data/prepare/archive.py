"""Reads tar archives forwards, once, and trusts nothing in them.

The standard tarfile takes a torn or damaged header behind the first member for the end of the archive; here
an archive ends with its block of zeros (and gzip's checksum), or one line says that it is cut short.
Names are only ever looked at: where a file goes is made of what a pattern matched, never of a member's path.
"""

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fortyfold.spec.errors import UserError

BLOCK = 512
_MOST_HEADER_BYTES = 1 << 20  # long names and pax records
_DATALESS = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)
_KINDS = {tarfile.LNKTYPE: "a link", tarfile.SYMTYPE: "a link", tarfile.DIRTYPE: "a folder"}


def archive_bytes(path: Path) -> int:
    """The size of an archive file."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


class Source:
    """The bytes of an archive, or of a range of it, forwards only; gzip is undone."""

    def __init__(self, path: Path, start: int = 0, stop: int | None = None) -> None:
        self.path, self.position, self.stop = path, start, stop
        with self._naming_errors():
            self._raw = path.open("rb", buffering=1 << 18)
            self.is_compressed = self._raw.read(2) == b"\x1f\x8b"
            self._raw.seek(start)
        self._file = gzip.GzipFile(fileobj=self._raw) if self.is_compressed else self._raw

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        self._raw.close()

    def read(self, num_bytes: int) -> bytes:
        """Exactly so many bytes."""
        if self.stop is not None and self.position + num_bytes > self.stop:
            raise self.damaged("a file in it goes on behind its end")
        with self._naming_errors():
            content = self._file.read(num_bytes)
        if len(content) < num_bytes:
            raise self._cut_short()
        self.position += num_bytes
        return content

    def skip_to(self, position: int) -> None:
        with self._naming_errors():
            self._file.seek(position)
        self.position = position

    def finish(self) -> None:
        """Read what comes behind the end mark, for gzip's checksum."""
        with self._naming_errors():
            while self.is_compressed and self._file.read(1 << 20):
                pass

    def bytes_read(self) -> int:
        """How far into the file as it lies on the disk."""
        return self._raw.tell()

    def damaged(self, why: str) -> UserError:
        return UserError(f"{self.path} is damaged at byte {self.position} ({why}); get it again, then repeat this")

    def _cut_short(self) -> UserError:
        return UserError(f"{self.path} is cut short: it ends without an end mark; get it whole, then repeat this")

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except EOFError:
            raise self._cut_short() from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise self.damaged(str(error)) from None
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror or error}") from None


@dataclass(frozen=True)
class Member:
    name: str
    start: int
    size: int
    kind: str  # "a file", or what else it is

    @property
    def end(self) -> int:
        """Where the next header is."""
        return self.start + -(-self.size // BLOCK) * BLOCK


def files(source: Source, skipped: list[str]) -> Iterator[Member]:
    """The plain files, to be read from `source` before the next is asked for. Links, devices and names that
    lead elsewhere are not given but named in `skipped`; folders are passed over."""
    for member in members(source):
        if why := _objection(member):
            skipped.append(f"{member.name!r} ({why})")
        elif member.kind == "a file":
            yield member


def _objection(member: Member) -> str | None:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or not member.name.isprintable():
        return "not a plain name"
    return None if member.kind in ("a file", "a folder") else member.kind


def members(source: Source) -> Iterator[Member]:
    """Everything in the archive, up to its end mark."""
    extended: dict[str, str] = {}
    while source.position != source.stop:
        block = source.read(BLOCK)
        if block.count(0) == BLOCK:
            source.finish()
            return
        member, info = _parse(source, block, extended)
        if info.type in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
            extended |= _extension(source, info)
        elif info.type not in (tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE):
            extended = {}
            yield member
        source.skip_to(member.end)


def _parse(source: Source, block: bytes, extended: dict[str, str]) -> tuple[Member, tarfile.TarInfo]:
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        is_extension = info.type in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
        size = info.size if is_extension else int(extended.get("size", info.size))
    except (tarfile.HeaderError, ValueError) as error:
        raise source.damaged(str(error)) from None
    if size < 0:
        raise source.damaged("a negative size")
    kind = _KINDS.get(info.type, "a file" if info.type in (tarfile.REGTYPE, tarfile.AREGTYPE) else "no plain file")
    if any(key.startswith("GNU.sparse") for key in extended):
        kind = "no plain file"
    size = 0 if info.type in _DATALESS else size
    return Member(extended.get("path", info.name), source.position, size, kind), info


def _extension(source: Source, info: tarfile.TarInfo) -> dict[str, str]:
    """What a header about the next member says: its long name, or pax records of `length key=value`."""
    if info.size > _MOST_HEADER_BYTES:
        raise source.damaged("a header of absurd length")
    payload = source.read(info.size)
    if info.type == tarfile.GNUTYPE_LONGNAME:
        return {"path": payload.rstrip(b"\0").decode("utf-8", "surrogateescape")}
    records: dict[str, str] = {}
    while payload.strip(b"\0"):
        length, _, _ = payload.partition(b" ")
        if not length.isdigit() or not len(length) + 2 < int(length) <= len(payload):
            raise source.damaged("a pax header")
        record = payload[len(length) + 1 : int(length) - 1].decode("utf-8", "surrogateescape")
        key, _, value = record.partition("=")
        records[key] = value
        payload = payload[int(length) :]
    return records
