"""Where a public archive comes from: a file, or a URL with the SHA-256 it must have."""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fortyfold.data.prepare.download import download, file_sha256
from fortyfold.data.prepare.image_folder import DOWNLOADS, Show, Tally, importing
from fortyfold.spec.errors import UserError


@dataclass(frozen=True)
class Origin:
    archive: Path | None
    url: str | None
    sha256: str | None

    def check(self) -> None:
        if bool(self.archive) == bool(self.url):
            raise UserError("give ARCHIVE, or --download URL --sha256 HEX")
        if self.url and not self.sha256:
            raise UserError("--download needs --sha256 HEX, so that what comes is known to be what was meant")
        if self.sha256 and not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise UserError(f"--sha256 {self.sha256[:80]}: give 64 hexadecimal digits")

    def arguments(self) -> dict[str, str | None]:
        """What names the content: the URL does not, and may hold a secret."""
        return {"archive": self.archive.name if self.archive else None, "sha256": self.sha256}

    def fetch(self, folder: Path, room: Callable[[int], int], show: Show) -> Path:
        """The archive as a file, downloaded below `folder` if need be and checked. `room` tells, from the
        archive's size, how much space unpacking it will need."""
        if self.url and self.sha256:
            path = folder / DOWNLOADS / "archive"
            with show("downloading") as progress:
                download(self.url, path, self.sha256, room, progress)
            return path
        assert self.archive is not None
        if self.sha256 and (found := file_sha256(self.archive)) != self.sha256:
            raise UserError(f"{self.archive} has the SHA-256 {found}, not the one given; get it again")
        return self.archive


def import_archive(folder: Path, by: str, origin: Origin, fill: Callable[[], Tally]) -> Tally | None:
    """`fill` the folder unless the command `by` did so before; None if it did. A downloaded archive goes at the end."""
    origin.check()
    with importing(folder, by, origin.arguments()) as needed:
        tally = fill() if needed else None
    shutil.rmtree(folder / DOWNLOADS, ignore_errors=True)
    return tally
