"""Messages between the launcher and a worker: lines of JSON over a pair of sockets."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]


class Channel:
    """One end; several threads may send, one receives."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._received = b""
        self._lock = threading.Lock()

    def send(self, kind: str, **what: Any) -> bool:
        """Send a message; returns whether the other end is there."""
        line = json.dumps({"kind": kind, **what}).encode() + b"\n"
        try:
            with self._lock:
                self.socket.sendall(line)
        except OSError:
            return False
        return True

    def receive(self) -> tuple[Message, ...] | None:
        """Return the messages that are there (waiting for one, if the socket blocks); None if the other end is gone."""
        try:
            got = self.socket.recv(65536)
        except BlockingIOError:
            return ()
        except OSError:
            return None
        if not got:
            return None
        *lines, self._received = (self._received + got).split(b"\n")
        return tuple(json.loads(line) for line in lines)

    def messages(self) -> Iterator[Message]:
        """Yield messages until the other end is gone."""
        while (received := self.receive()) is not None:
            yield from received
