"""Buffers that stand on after their exchange: this rank has what it asked for, others may still be reading.

Whoever comes late, as to a sum that was begun before other work, would else be waited for twice. What stands is in
memory that the others have mapped, and so is what tells them where: it outlives the process that made it.
"""

from __future__ import annotations

from threading import Lock
from typing import Protocol


class PendingBuffer(Protocol):
    """An exchange that this rank has read all of, and its buffer, to which nobody writes."""

    def is_read(self) -> bool:
        """Tell whether all others have read it too, or have gone."""

    def end(self) -> None:
        """Wait until they have. Raises RuntimeError where one does not come in time."""


class Standing:
    """At most one exchange of each set of peers: the one before has been read where all take theirs in one order.

    They stand here, whoever drops their peers: memory that is read must not become another's. Threads may add at once.
    """

    def __init__(self) -> None:
        self._by_peers: dict[int, PendingBuffer] = {}
        self._lock = Lock()

    def add(self, peers: int, exchange: PendingBuffer) -> None:
        """Let an exchange of peers, by their id, stand until their next one is here."""
        with self._lock:
            before = self._by_peers.pop(peers, None)
            self._by_peers = {other: stood for other, stood in self._by_peers.items() if not stood.is_read()}
            self._by_peers[peers] = exchange
        if before is not None:
            before.end()

    def end(self) -> None:
        """Wait for all of them."""
        while self._by_peers:
            _, exchange = self._by_peers.popitem()
            exchange.end()
