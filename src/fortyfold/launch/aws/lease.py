"""Whose run it is that is kept on S3: one gang's at a time.

Its first node holds it by an object beside the run that it writes anew every few seconds. Whoever finds one watches
it: one that changes is held, one that does not is left over from a node that is gone. Clocks are not compared, and S3
itself sees to it that of two that write at once only one does.
"""

import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fortyfold.launch.aws.session import AwsError, Client
from fortyfold.spec.beside import beside
from fortyfold.spec.errors import UserError

LIFE_SECONDS = 10.0  # between two signs of life
GONE_SECONDS = 30.0  # without one
POLL_SECONDS = 2.0
_NOT_THERE = ("404", "NoSuchKey")
_REFUSED = ("PreconditionFailed", "ConditionalRequestConflict")


class Lease:
    """`lost` once somebody else holds it."""

    def __init__(self, client: Client, bucket: str, folder: str) -> None:
        self._client, self._place = client, {"Bucket": bucket, "Key": f"{folder}.holder"}
        self._url = f"s3://{bucket}/{folder}"
        self._token, self._count, self._version = secrets.token_hex(8), 0, ""
        self.lost = False

    def take(self) -> None:
        """Once nobody holds it. A UserError if somebody does."""
        found, since = self._look(), time.monotonic()
        if found is not None:
            wait = f"waiting {GONE_SECONDS:.0f} s for a sign of life"
            print(f"note: {self._url} was being trained by {found['host']}; {wait}", file=sys.stderr, flush=True)
        while True:
            if found is None:
                if self._write(IfNoneMatch="*"):
                    return
            elif time.monotonic() - since > GONE_SECONDS and self._write(IfMatch=found["version"]):
                return
            time.sleep(POLL_SECONDS)
            now = self._look()
            if now is not None and now != found:
                raise UserError(f"{self._url} is being trained by {now['host']}; stop that one first")
            found = now

    def show_life(self, over: threading.Event) -> None:
        while not over.wait(LIFE_SECONDS):
            with suppress(UserError):  # the next time, perhaps
                if not self._write(IfMatch=self._version):
                    self.lost = True
                    return

    def release(self) -> None:
        if not self.lost:
            with suppress(UserError):
                self._client("delete_object", **self._place)

    def _look(self) -> dict[str, str] | None:
        """Its version, and who writes it: the host, and a token of its own."""
        try:
            answer = self._client("head_object", **self._place)
        except AwsError as error:
            if error.code in _NOT_THERE:
                return None
            raise
        return {"host": "somebody", "token": "", **answer["Metadata"], "version": answer["ETag"]}

    def _write(self, **condition: Any) -> bool:
        """Whether nobody else has written meanwhile."""
        self._count += 1
        about = {"host": socket.gethostname(), "token": self._token}
        text = f"{self._token} {self._count}"  # the version is a hash of it
        try:
            answer = self._client("put_object", **self._place, Body=text.encode(), Metadata=about, **condition)
        except AwsError as error:
            if error.code not in (*_REFUSED, *_NOT_THERE):
                raise
            found = self._look()
            if found is None or found["token"] != self._token:
                return False
            self._version = found["version"]  # it was written, and the answer lost on its way
            return True
        self._version = answer["ETag"]
        return True


@contextmanager
def leased(client: Client, bucket: str, folder: str) -> Iterator[Lease]:
    """Inside, the run is ours."""
    lease = Lease(client, bucket, folder)
    lease.take()
    try:
        with beside("lease", lease.show_life):
            yield lease
    finally:
        lease.release()
