"""Tells that a process is gone before the kernel has taken its memory apart, which takes a second for a few gigabytes.

Only after that a process counts as ended, and its connections are closed. But a robust mutex that a thread of it holds
(pthread_mutexattr_setrobust(3)) is marked first of all.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

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
