"""A connection between two nodes that carries JSON, a value a line. Never waits unless asked to."""

import json
import selectors
import socket
import time
from typing import Any

MOST_BYTES = 1 << 24  # of a line
SEND_SECONDS = 30.0
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # seconds, seconds, times


class Closed(Exception):
    """The other side has gone, or talks nonsense."""


class Link:
    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._received = connection, b""
        self._socket.settimeout(SEND_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a node that is gone is noticed
        for option, value in _KEEPALIVE.items():
            self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self.heard_at = time.monotonic()

    def send(self, value: Any) -> None:
        """Raises Closed."""
        try:
            self._socket.sendall(json.dumps(value).encode() + b"\n")
        except OSError as error:
            raise Closed(str(error)) from None

    def receive(self, wait_seconds: float = 0.0) -> Any:
        """The next value; None when none has come in time. Raises Closed."""
        deadline = time.monotonic() + wait_seconds
        while b"\n" not in self._received:
            if not self._is_readable(max(0.0, deadline - time.monotonic())):
                return None
            self._read()
        line, _, self._received = self._received.partition(b"\n")
        self.heard_at = time.monotonic()
        try:
            return json.loads(line)
        except ValueError:
            raise Closed("it does not speak JSON") from None

    def close(self) -> None:
        self._socket.close()

    def _is_readable(self, wait_seconds: float) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            return bool(selector.select(wait_seconds))

    def _read(self) -> None:
        try:
            block = self._socket.recv(1 << 16)
        except OSError as error:
            raise Closed(str(error)) from None
        if not block:
            raise Closed("the connection was closed")
        self._received += block
        if len(self._received) > MOST_BYTES:
            raise Closed("it sends a line without an end")
