"""What launcher and worker tell each other: messages, lines of JSON over a pair of sockets, and signs of life.

A process counts as ended, and its connections are closed, only once the kernel has taken its memory apart, a second for
a few gigabytes. But a robust mutex that a thread of it holds (pthread_mutexattr_setrobust(3)) is marked first of all.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]


class MessageChannel:
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


_SIZE = 64  # of what the C library keeps of a mutex and of its attributes, and more
_PROCESS_SHARED = _ROBUST = 1
_OWNER_DIED = 0x40000000  # linux/futex.h


class LifeSign:
    """Made before a fork. The child holds it, the parent looks at it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)  # shared with children
        self._mutex = (ctypes.c_char * _SIZE).from_buffer(self._memory)
        attributes = (ctypes.c_char * _SIZE)()
        _call("mutexattr_init", attributes)
        _call("mutexattr_setpshared", attributes, _PROCESS_SHARED)
        _call("mutexattr_setrobust", attributes, _ROBUST)
        _call("mutex_init", self._mutex, attributes)

    def hold(self) -> None:
        """Hold it for as long as this thread is there; to be called once."""
        _call("mutex_lock", self._mutex)

    @property
    def is_gone(self) -> bool:
        """Tell whether the thread that held it is gone; False while nobody has held it."""
        # The first word is the futex in glibc. Where it is another one, the process is missed at its end only.
        return bool(int.from_bytes(self._memory[:4], sys.byteorder) & _OWNER_DIED)


def _call(name: str, *arguments: object) -> None:
    status = getattr(ctypes.CDLL(None), f"pthread_{name}")(*arguments)
    if status:
        raise OSError(status, f"pthread_{name} failed")
