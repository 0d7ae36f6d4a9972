"""Memory of a process that others on its machine map: they see what is written there, without a call of the system.

It has no name that outlives its processes, and stays as long as one of them has it.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from typing import NamedTuple

WORD_BYTES = 32


class Place(NamedTuple):
    """Where a process has memory open, how much, and a word at its end that nobody can guess."""

    file: int
    num_bytes: int
    word: bytes


class SharedMemory:
    """Memory of this process; nothing stands in it. Raises OSError where there is none to be had.

    Attributes:
        memory: it.
        place: for others to map it, until `close`.
    """

    def __init__(self, num_bytes: int) -> None:
        self.place = Place(os.memfd_create("hetu_fx_peers"), num_bytes, os.urandom(WORD_BYTES))
        try:
            os.ftruncate(self.place.file, num_bytes + WORD_BYTES)
            self.memory = mmap.mmap(self.place.file, num_bytes + WORD_BYTES)
        except (OSError, ValueError):
            self.close()
            raise
        self.memory[num_bytes:] = self.place.word

    def close(self) -> None:
        """Let nobody map it any more; who has done so keeps it."""
        with suppress(OSError):
            os.close(self.place.file)


def shared_memory(num_bytes: int) -> SharedMemory | None:
    """Return memory to be shared; None where there is none to be had, or this system has no such memory."""
    try:
        return SharedMemory(num_bytes)
    except (AttributeError, OSError):
        return None


def map_remote_memory(process: int, place: Place, *, for_tensors: bool = False) -> mmap.mmap | None:
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
