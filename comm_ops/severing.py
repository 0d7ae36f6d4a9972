"""Ends all communication of this process at once, so that whoever waits in it gets an error.

Gloo cannot be aborted: a message with a peer that lives but does not come, or is stopped, waits for its time-out, and
destroying its group waits for it (pytorch issue 130345, seen in torch 2.13). But a connection that is shut down fails
all that waits for it, here and at the other end. So the sockets that groups open are remembered.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_FOLDER = "/proc/self/fd"

_lock = threading.Lock()
_known: set[str] = set()
_before: list[set[str]] = []  # what was open when each recording under way began


@contextmanager
def opening_connections() -> Iterator[None]:
    """Remember the sockets that are opened in the block; `sever` ends them even while it still runs."""
    before = set(_sockets())
    with _lock:
        _before.append(before)
    try:
        yield
    finally:
        with _lock:
            _before.remove(before)
            _known.update(set(_sockets()) - before)


def sever() -> int:
    """Shut down the connections of all groups of this process, from any thread; returns how many.

    Nothing can be communicated any more until the process has left its groups and joined others.
    """
    with _lock:
        found = {name: fd for name, fd in _sockets().items() if name in _known or any(name not in b for b in _before)}
        _known.clear()
    return sum(_shut_down(fd) for fd in found.values())


def _sockets() -> dict[str, int]:
    """Return the file descriptors of open sockets by the kernel's name of each; none where it does not list them."""
    found: dict[str, int] = {}
    for entry in os.listdir(_FOLDER) if os.path.isdir(_FOLDER) else ():
        with suppress(OSError):  # closed meanwhile
            name = os.readlink(f"{_FOLDER}/{entry}")
            if name.startswith("socket:"):
                found[name] = int(entry)
    return found


def _shut_down(fd: int) -> bool:
    with suppress(OSError):  # closed meanwhile, or not connected
        with socket.socket(fileno=os.dup(fd)) as connection:
            if connection.family == socket.AF_UNIX or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False
