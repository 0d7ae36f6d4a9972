"""Memory of other processes of this machine, read where it is: one copy, nothing packed, no room for messages.

Linux copies from one process to another (`process_vm_readv`, known as cross-memory attach from MPI libraries and UCX)
where the reader might also trace the other: same user, same namespace of processes, no filter of system calls and no
security module (such as Yama at a `ptrace_scope` above 0) that forbids it. Whether it may is found by trying.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

from hetu_fx.comm_ops.wire.consensus import any_of, of_all
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import StateError
from hetu_fx.switching.migrate.byte_runs import Extents, Read, ends_of, next_extents

MOST_EXTENTS = 1024
"""What one system call takes (IOV_MAX of Linux)."""

_TOKEN_BYTES = 32

ReadOnce = Callable[[int, Extents, Extents], int]


@dataclass(frozen=True)
class PeerMemory:
    """The processes of the ranks, all of which this rank can read.

    Attributes:
        processes: their ids, by rank.
    """

    processes: tuple[int, ...]

    def take(self, reads: Iterable[Read], senders: Extents, own: Sequence[Tensor | None]) -> None:
        """Copy slices of the ranks' parts into this rank's.

        Args:
            reads: what is read.
            senders: the addresses of parts, by rank and tensor.
            own: this rank's new parts, dense, by tensor.

        Raises:
            StateError: a process has gone, or its memory cannot be read any more.
        """
        places = np.array([0 if part is None else part.data_ptr() for part in own], dtype=np.int64)
        for read in reads:
            self._take(read.sender, *read.at(senders[read.sender], places))

    def _take(self, sender: int, taken: Extents, placed: Extents) -> None:
        process = self.processes[sender]
        try:
            copy(process, taken, placed)
        except OSError as error:
            raise StateError(
                f"{int(taken[:, 1].sum())} bytes of rank {sender} could not be read from process {process}: "
                f"{error.strerror}; if it runs, its memory was forbidden meanwhile to be read"
            ) from error


def copy(process: int, taken: Extents, placed: Extents, read_once: ReadOnce | None = None) -> None:
    """Copy extents of a process's memory into as many bytes of this one's; goes on where the system stopped early.

    Raises OSError where the memory cannot be read.
    """
    read_once = read_once or _read_once
    sides = [(side, ends_of(side)) for side in (taken, placed)]
    done, total = 0, int(taken[:, 1].sum())
    while done < total:
        done += read_once(process, *(next_extents(side, ends, done, MOST_EXTENTS) for side, ends in sides))


def _read_once(process: int, taken: Extents, placed: Extents) -> int:
    """Copy some bytes, at least one; tells how many."""
    sides = [(ctypes.c_void_p(side.ctypes.data), ctypes.c_ulong(len(side))) for side in (placed, taken)]
    count = int(_system_call()(process, *sides[0], *sides[1], ctypes.c_ulong(0)))
    if count <= 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number) if count else "nothing was read")
    return count


@cache
def _system_call() -> Any:
    """Find the system's call. Raises AttributeError where it has none."""
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.restype = ctypes.c_ssize_t
    return call


_found: WeakKeyDictionary[GroupTable, PeerMemory | None] = WeakKeyDictionary()


def all_reach(table: GroupTable, parts: Sequence[Tensor]) -> PeerMemory | None:
    """Return the ranks' memory if all can read it and all their `parts` are dense in host memory; collective.

    Whether ranks can read each other's memory is found by trying, once.
    """
    if table not in _found:
        _found[table] = _tried(table)
    found = _found[table]
    if found is None:
        return None
    is_able = all(part.device.type == "cpu" and part.is_contiguous() for part in parts)
    return None if any_of(table, [not is_able])[0] else found


def _tried(table: GroupTable) -> PeerMemory | None:
    """Read a word that nobody can guess from every rank; collective."""
    word = np.frombuffer(os.urandom(_TOKEN_BYTES), dtype=np.uint8)
    told = of_all(table, (os.getpid(), word.ctypes.data, word.tobytes()))
    failed = any(_word_at(process, address) != expected for process, address, expected in told)
    return None if any_of(table, [failed])[0] else PeerMemory(tuple(process for process, _, _ in told))


def _word_at(process: int, address: int) -> bytes | None:
    """Read a word; None where that process's memory cannot be read, or this system has no way to."""
    found = np.zeros(_TOKEN_BYTES, dtype=np.uint8)
    taken, placed = (np.array([[start, _TOKEN_BYTES]], dtype=np.int64) for start in (address, found.ctypes.data))
    try:
        copy(process, taken, placed)
    except (OSError, AttributeError):
        return None
    return found.tobytes()


def addresses_of(parts: Sequence[Tensor | None], table: GroupTable) -> Extents:
    """Return where all ranks' parts stand in their memory, by rank and tensor; collective."""
    own = tuple(0 if part is None else part.data_ptr() for part in parts)
    return np.array(of_all(table, own), dtype=np.int64)
