"""Objects of one rank to all, and of all ranks to all: the bytes of `codec` by the collectives of a table's transport.

The first message is of a fixed size, into which most objects fit; what is longer follows in a second one, of a size
that all have been told. A rank whose object cannot be told says that in its place: all ranks raise, and none waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from hetu_fx.base.documents import MOST_BYTES
from hetu_fx.comm_ops.wire.flat import Flat
from hetu_fx.comm_ops.wire.groups import GroupTable, active, guarded
from hetu_fx.comm_ops.wire.objects.codec import read, write
from hetu_fx.comm_ops.wire.transport import Group
from hetu_fx.errors import CommError, OtherRankError

T = TypeVar("T")
Exchange = Callable[[bytes], Sequence[bytes]]
"""Brings bytes of this rank to others, and returns theirs: as many of each as this rank gave."""

FIRST_BYTES = 1024
_SIZE_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Refused:
    """What a rank says whose object cannot be told: why."""

    why: str


def broadcast_object(value: T, source: int = 0) -> T:
    """Return on every process what one process has; collective. Nothing is pickled, and nothing of it is run.

    Args:
        value: numbers, text, bytes, None, lists, tuples, dicts, sets, paths, enums, `torch.dtype`, `torch.device`,
            dense tensors (they come to the host), and plans and clusters of hetu_fx; looked at on one process only.
        source: that process, by its number.

    Raises:
        StateError: it has something else inside; the message says what and where. On all processes.
    """
    return broadcast(value, active(), source)


def broadcast(value: T, table: GroupTable, source: int = 0) -> T:
    """Return the object of one rank of a table on all of them: there itself, on the others a copy; collective.

    Raises:
        StateError: it cannot be told; an OtherRankError on the others.
        CommError: what came cannot be read.
    """
    if table.size == 1:
        return value
    data, problem = _written(value) if table.rank == source else (b"", None)
    with guarded(f"word from rank {source}", range(table.size), table):
        (came,) = _exchanged(data, lambda part: (_broadcast(part, source, table),), [source])
    if problem is not None:
        raise problem
    return value if table.rank == source else _read([came], [source])[0]


def gather(value: T, table: GroupTable, group: Group, ranks: Sequence[int], what: str) -> list[T]:
    """Return the objects of some ranks, several, in the order of their group; collective over them.

    Args:
        value: this rank's.
        table: of the ranks.
        group: of the ranks.
        ranks: in the order of the group.
        what: is waited for, in errors and records.

    Raises:
        StateError: this rank's object cannot be told; an OtherRankError on the others.
        CommError: what came cannot be read.
    """
    data, problem = _written(value)
    with guarded(what, ranks, table):
        came = _exchanged(data, lambda part: _all_gather(part, len(ranks), table, group), ranks)
    if problem is not None:
        raise problem
    return _read(came, ranks)


def _written(value: Any) -> tuple[bytes, Exception | None]:
    """Return a value as bytes, or what is to be said in its place and to be raised here."""
    try:
        return write(value), None
    except Exception as problem:  # whatever it is, the others must not wait for this rank
        return write(_Refused(f"{type(problem).__name__}: {problem}")), problem


def _read(came: Sequence[bytes], ranks: Sequence[int]) -> list[Any]:
    values = [read(data, f"what rank {rank} has told") for rank, data in zip(ranks, came, strict=True)]
    refused = {rank: value.why for rank, value in zip(ranks, values, strict=True) if isinstance(value, _Refused)}
    if refused:
        told = "; ".join(f"rank {rank}: {why}" for rank, why in refused.items())
        raise OtherRankError(f"another rank failed: {told}")
    return values


def _exchanged(data: bytes, exchange: Exchange, ranks: Sequence[int]) -> list[bytes]:
    """Bring bytes of any number to others, and return theirs. Raises CommError, on all ranks, for too many."""
    framed = len(data).to_bytes(_SIZE_BYTES) + data
    firsts = exchange(_filled(framed[:FIRST_BYTES], FIRST_BYTES))
    sizes = [_SIZE_BYTES + int.from_bytes(first[:_SIZE_BYTES]) for first in firsts]
    if max(sizes) > _SIZE_BYTES + MOST_BYTES:
        told = ", ".join(f"rank {rank}: {size - _SIZE_BYTES}" for rank, size in zip(ranks, sizes, strict=True))
        raise CommError(f"ranks tell each other {MOST_BYTES} bytes at most, and have announced: {told}")
    rest = max(sizes) - FIRST_BYTES
    if rest > 0:
        others = exchange(_filled(framed[FIRST_BYTES:], rest))
        firsts = [first + other for first, other in zip(firsts, others, strict=True)]
    return [first[_SIZE_BYTES:size] for first, size in zip(firsts, sizes, strict=True)]


def _filled(data: bytes, size: int) -> bytes:
    return data.ljust(size, b"\0")


def _broadcast(data: bytes, source: int, table: GroupTable) -> bytes:
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(table.transport.device(table.base))
    work = table.transport.broadcast(Flat(buffer), table.to_global(source), table.base)
    if work is not None:
        work.wait()
    return buffer.cpu().numpy().tobytes()


def _all_gather(data: bytes, size: int, table: GroupTable, group: Group) -> list[bytes]:
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(table.transport.device(group))
    everyone = own.new_empty(size, len(data))
    table.transport.all_gather([Flat(row) for row in everyone.unbind()], Flat(own), group)
    return [row.tobytes() for row in everyone.cpu().numpy()]
