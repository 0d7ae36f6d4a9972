"""Objects of one rank to all, and of all ranks to all: the bytes of `codec` by the collectives of a table's transport.

The first message is of a fixed size, into which most objects fit. What is longer follows, of a size that is bounded and
that all have been told. A rank whose object cannot be told says that in its place: all ranks raise, and none waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from hetu_fx.base.documents import MOST_BYTES
from hetu_fx.comm_ops.wire.flat import Flat
from hetu_fx.comm_ops.wire.groups import GroupTable, active, guarded
from hetu_fx.comm_ops.wire.objects.codec import decode, write
from hetu_fx.comm_ops.wire.transport import Group
from hetu_fx.errors import CommError, OtherRankError, StateError

T = TypeVar("T")
FIRST_BYTES = 4096
_SIZE_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Refused:
    """What a rank says whose object cannot be told: why."""

    why: str


def broadcast_object(value: T, source: int = 0) -> T:
    """Return on every process what one process has; collective. Nothing is pickled, and nothing of it is run.

    Args:
        value: numbers (those of numpy come as Python's), text, bytes, None, lists, tuples, dicts, sets, paths, enums,
            `torch.dtype`, `torch.device`, dense tensors (they come to the host), and plans and clusters of hetu_fx;
            looked at on one process only.
        source: that process, by its number.

    Raises:
        StateError: it has something else inside; the message says what and where. On all processes.
    """
    table = active()
    if source not in range(table.size):
        raise StateError(f"process {source} is to tell the others something; give one of 0 to {table.size - 1}")
    return broadcast(value, table, source)


def broadcast(value: T, table: GroupTable, source: int = 0) -> T:
    """Return the object of one rank of a table on all of them: there itself, on the others a copy; collective.

    Raises:
        StateError: it cannot be told; an OtherRankError on the others.
        CommError: what came cannot be read.
    """
    if table.size == 1:
        return value
    is_source = table.rank == source
    data, problem = _framed(value) if is_source else (b"", None)
    with guarded(f"word from rank {source}", range(table.size), table):
        first = _broadcast(data[:FIRST_BYTES], FIRST_BYTES, source, table, table.base)
        (came,) = _completed([first], data, [source], table, table.base)
    if problem is not None:
        raise problem
    return value if is_source else _read([came], [source])[0]


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
    data, problem = _framed(value)
    with guarded(what, ranks, table):
        firsts = _all_gather(data[:FIRST_BYTES], len(ranks), table, group)
        came = _completed(firsts, data, ranks, table, group)
    if problem is not None:
        raise problem
    return _read(came, ranks)


def _framed(value: Any) -> tuple[bytes, Exception | None]:
    """Return a value as bytes after their number, or what is to be said in its place and to be raised here."""
    try:
        data, problem = write(value), None
    except Exception as error:  # whatever it is, the others must not wait for this rank
        data, problem = write(_Refused(f"{type(error).__name__}: {error}")), error
    return len(data).to_bytes(_SIZE_BYTES) + data, problem


def _read(came: Sequence[bytes], ranks: Sequence[int]) -> list[Any]:
    values = [decode(data, f"what rank {rank} has told") for rank, data in zip(ranks, came, strict=True)]
    refused = {rank: value.why for rank, value in zip(ranks, values, strict=True) if isinstance(value, _Refused)}
    if refused:
        told = "; ".join(f"rank {rank}: {why}" for rank, why in refused.items())
        raise OtherRankError(f"another rank failed: {told}")
    return values


def _completed(
    firsts: Sequence[bytes], data: bytes, ranks: Sequence[int], table: GroupTable, group: Group
) -> list[bytes]:
    """Return all bytes of the ranks whose first ones have come; `data` are this rank's.

    Raises:
        CommError: a rank has announced too many; on all ranks, before memory is taken.
    """
    sizes = [int.from_bytes(first[:_SIZE_BYTES]) for first in firsts]
    if max(sizes) > MOST_BYTES:
        told = ", ".join(f"rank {rank}: {size}" for rank, size in zip(ranks, sizes, strict=True))
        raise CommError(f"ranks tell each other {MOST_BYTES} bytes at most, and have announced: {told}")
    came = []
    for rank, first, size in zip(ranks, firsts, sizes, strict=True):
        rest = _SIZE_BYTES + size - FIRST_BYTES
        own = data[FIRST_BYTES:] if rank == table.rank else b""
        whole = first + _broadcast(own, rest, rank, table, group) if rest > 0 else first
        came.append(whole[_SIZE_BYTES : _SIZE_BYTES + size])
    return came


def _buffer(data: bytes, size: int, table: GroupTable, group: Group) -> torch.Tensor:
    filled = bytearray(data.ljust(size, b"\0"))
    return torch.frombuffer(filled, dtype=torch.uint8).to(table.transport.device(group))


def _broadcast(data: bytes, size: int, source: int, table: GroupTable, group: Group) -> bytes:
    buffer = _buffer(data, size, table, group)
    work = table.transport.broadcast(Flat(buffer), table.to_global(source), group)
    if work is not None:
        work.wait()
    return buffer.cpu().numpy().tobytes()


def _all_gather(data: bytes, count: int, table: GroupTable, group: Group) -> list[bytes]:
    own = _buffer(data, FIRST_BYTES, table, group)
    everyone = own.new_empty(count, FIRST_BYTES)
    table.transport.all_gather([Flat(row) for row in everyone.unbind()], Flat(own), group)
    return [row.tobytes() for row in everyone.cpu().numpy()]
