"""Another process's memory: mapped, or copied by the system.

What a process shares others map, and see what is written there without a call of the system. It has no name that
outlives its processes, and stays as long as one of them has it.

Other memory Linux copies in one go (`process_vm_readv`, known as cross-memory attach from MPI libraries and UCX), where
the reader might trace the other: same user, same namespace of processes, no filter of system calls and no security
module (such as Yama at a `ptrace_scope` above 0) that forbids it. What copies raises OSError where the memory cannot be
read, AttributeError where the system has no such call.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

WORD_BYTES = 32


class SharedPlace(NamedTuple):
    """Where a process has memory open, how much, and a word at its end that nobody can guess."""

    file: int
    num_bytes: int
    word: bytes


class SharedMemory:
    """Memory of this process; nothing stands in it. Raises OSError where there is none to be had.

    Its pages exist once they are written to, or from now on if it `reserves` them: then writing fails for nobody.

    Attributes:
        memory: it.
        place: for others to map it, until `close`.
    """

    def __init__(self, num_bytes: int, *, reserves: bool = False) -> None:
        self.place = SharedPlace(os.memfd_create("hetu_fx_peers"), num_bytes, os.urandom(WORD_BYTES))
        try:
            os.ftruncate(self.place.file, num_bytes + WORD_BYTES)
            if reserves:
                os.posix_fallocate(self.place.file, 0, num_bytes)
            self.memory = mmap.mmap(self.place.file, num_bytes + WORD_BYTES)
        except (OSError, ValueError):
            self.close()
            raise
        self.memory[num_bytes:] = self.place.word

    def close(self) -> None:
        """Let nobody map it any more; who has done so keeps it."""
        with suppress(OSError):
            os.close(self.place.file)


def shared_memory(num_bytes: int, *, reserves: bool = False) -> SharedMemory | None:
    """Return memory to be shared; None where there is none to be had, or this system has no such memory."""
    try:
        return SharedMemory(num_bytes, reserves=reserves)
    except (AttributeError, OSError):
        return None


def map_remote_memory(process: int, place: SharedPlace, *, for_tensors: bool = False) -> mmap.mmap | None:
    """Return another process's memory, to be read; None where it cannot be.

    `for_tensors`: so that torch takes it, which has no tensors that cannot be written to.
    """
    flags, protection = (os.O_RDWR, mmap.PROT_READ | mmap.PROT_WRITE) if for_tensors else (os.O_RDONLY, mmap.PROT_READ)
    try:
        file = os.open(f"/proc/{process}/fd/{place.file}", flags)
    except OSError:
        return None
    try:
        memory = mmap.mmap(file, place.num_bytes + WORD_BYTES, prot=protection)
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)
    return memory if memory[place.num_bytes :] == place.word else None


Extents: TypeAlias = npt.NDArray[np.int64]
"""Rows of (first byte, number of bytes)."""

MOST_EXTENTS = 1024
"""What one system call takes (IOV_MAX of Linux)."""


class _Extent(ctypes.Structure):
    """A system's `iovec`."""

    _fields_ = (("first", ctypes.c_void_p), ("size", ctypes.c_size_t))


@cache
def _system_call() -> Any:
    """Find the system's call."""
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.restype = ctypes.c_ssize_t
    return call


def copy(process: int, address: int, place: int, size: int) -> None:
    """Copy bytes of a process's memory to this one's; goes on where the system stopped early."""
    while size > 0:
        there, here = _Extent(address, size), _Extent(place, size)
        count = _read_once(process, ctypes.byref(here), 1, ctypes.byref(there), 1)
        address, place, size = address + count, place + count, size - count


def copy_extents(process: int, taken: Extents, placed: Extents) -> None:
    """Copy extents of a process's memory into as many bytes of this one's; goes on where the system stopped early."""
    sides = [(side, np.cumsum(side[:, 1])) for side in (placed, taken)]
    done, total = 0, int(taken[:, 1].sum())
    while done < total:
        here, there = (_following(side, ends, done) for side, ends in sides)
        done += _read_once(process, *_vector(here), *_vector(there))


def _following(extents: Extents, ends: Extents, done: int) -> Extents:
    """Return what follows the first `done` bytes of `extents`, as many as one call takes; `ends` are theirs."""
    first = int(np.searchsorted(ends, done, side="right"))
    following = extents[first : first + MOST_EXTENTS].copy()
    into = done - (int(ends[first]) - int(extents[first, 1]))
    following[0] += (into, -into)
    return following


def _vector(extents: Extents) -> tuple[Any, int]:
    return ctypes.c_void_p(extents.ctypes.data), len(extents)


def _read_once(process: int, here: Any, num_here: int, there: Any, num_there: int) -> int:
    """Copy some bytes, at least one; tells how many."""
    count = int(
        _system_call()(process, here, ctypes.c_ulong(num_here), there, ctypes.c_ulong(num_there), ctypes.c_ulong(0))
    )
    if count <= 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number) if count else "nothing was read")
    return count


def word_at(process: int, address: int) -> bytes | None:
    """Read a word; None where that process's memory cannot be read, or this system has no way to."""
    found = bytearray(WORD_BYTES)
    try:
        copy(process, address, ctypes.addressof(ctypes.c_char.from_buffer(found)), WORD_BYTES)
    except (OSError, AttributeError):
        return None
    return bytes(found)
