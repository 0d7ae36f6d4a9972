"""Memory of other processes of this machine: read where it is, or where they have packed for others; nothing is sent.

Where ranks can read each other's memory (`wire.peers`) nothing is packed, and there is no room for messages.

What is not read in the sender's own parts is packed in memory that processes share (`NodeMemory`). Messages over a
loopback connection are copied twice by the system, and wait for its threads; here the receiver takes its slices where
the sender has packed them. Where there is none (another machine, a container of its own, no room), messages are sent.

Whether all ranks may do the one or the other is found by trying, once per group table.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hetu_fx.comm_ops.wire.bsr_messages import Messages, Room
from hetu_fx.comm_ops.wire.consensus import all_gather_object, any_rank
from hetu_fx.comm_ops.wire.flat import is_dense
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.peers.memory import Peers, find_peers
from hetu_fx.comm_ops.wire.peers.rooms import behind
from hetu_fx.comm_ops.wire.peers.system import Extents, copy_extents, map_remote_memory, shared_memory
from hetu_fx.errors import StateError
from hetu_fx.switching.migrate.byte_runs import SliceRead

_PAGE = 4096


def take(
    processes: Mapping[int, int], reads: Iterable[SliceRead], senders: Extents, own: Sequence[Tensor | None]
) -> None:
    """Copy slices of the ranks' parts into this rank's.

    Args:
        processes: by rank.
        reads: what is read.
        senders: the addresses of parts, by rank and tensor.
        own: this rank's new parts, dense, by tensor.

    Raises:
        StateError: a process has gone, or its memory cannot be read any more.
    """
    places = np.array([0 if part is None else part.data_ptr() for part in own], dtype=np.int64)
    for read in reads:
        process, (taken, placed) = processes[read.sender], read.at(senders[read.sender], places)
        try:
            copy_extents(process, taken, placed)
        except OSError as error:
            raise StateError(
                f"{int(taken[:, 1].sum())} bytes of rank {read.sender} could not be read from process {process}: "
                f"{error.strerror}; if it runs, its memory was forbidden meanwhile to be read"
            ) from error


def all_reach(table: GroupTable, parts: Sequence[Tensor]) -> Peers | None:
    """Return the ranks' processes if all can read them and all their `parts` are dense in host memory; collective."""
    found = find_peers(table, range(table.size)) if table.size > 1 else None
    if found is None:
        return None
    is_able = all(part.device.type == "cpu" and is_dense(part) for part in parts)
    return None if any_rank(table, [not is_able])[0] else found


def gather_addresses(parts: Sequence[Tensor | None], table: GroupTable) -> Extents:
    """Return where all ranks' parts stand in their memory, by rank and tensor; collective."""
    own = tuple(0 if part is None else part.data_ptr() for part in parts)
    return np.array(all_gather_object(table, own), dtype=np.int64)


@dataclass(frozen=True)
class NodeMemory:
    """What this rank has packed for others, and what others have packed that it can read.

    Attributes:
        own: this rank's memory in equal rooms; empty if it has none to share.
        others: memory of other ranks, in rooms as well, by rank.
        readers: the ranks that read this rank's memory.
    """

    own: tuple[Tensor, ...] = ()
    others: Mapping[int, tuple[Tensor, ...]] = field(default_factory=dict)
    readers: frozenset[int] = frozenset()

    def unsent(self, messages: Messages) -> Messages:
        """Leave out what is read where it has been packed."""
        arriving = {rank: message for rank, message in messages.arriving.items() if rank not in self.others}
        leaving = {rank: message for rank, message in messages.leaving.items() if rank not in self.readers}
        here = {rank: message for rank, message in messages.arriving.items() if rank in self.others}
        return Messages(arriving, leaving, messages.device, here)


class ReadingRoom(Room):
    """Gives for some senders the places where their messages stand already, and room for the others'."""

    def __init__(self, room: Room, places: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._room, self._places = room, places

    def take(self, sizes: Mapping[int, int], device: torch.device) -> dict[int, Tensor]:
        """Give so many bytes for each peer; see `Room.take`."""
        lacking = {peer: size for peer, size in sizes.items() if peer not in self._places}
        taken = {**self._places, **self._room.take(lacking, device)}
        return {peer: taken[peer] for peer in sizes}


def all_share(table: GroupTable, is_able: bool) -> bool:
    """Tell whether all ranks can read each other's memory; found by trying, once. Collective.

    `is_able`: this rank's messages are in host memory; see `share`.
    """
    if "all share" not in table.found_out:
        found = share(table, 1 if is_able else None, 1)
        table.found_out["all share"] = not any_rank(table, [len(found.others) < table.size - 1])[0]
    return bool(table.found_out["all share"])


def share(table: GroupTable, room_bytes: int | None, num_rooms: int) -> NodeMemory:
    """Give this rank rooms that others can read, of at least `room_bytes` each, and open theirs; collective.

    None is for a rank whose messages are not in host memory: it has nothing to read or to be read.
    """
    num_bytes = -(-(room_bytes or 0) // _PAGE) * _PAGE * num_rooms
    own = shared_memory(num_bytes, reserves=True) if num_bytes else None
    try:
        told = all_gather_object(table, (os.getpid(), None if own is None else own.place))
        reads = {} if room_bytes is None else {rank: one for rank, one in enumerate(told) if rank != table.rank}
        places = {rank: (process, place) for rank, (process, place) in reads.items() if place is not None}
        opened = {rank: map_remote_memory(*place, for_tensors=True) for rank, place in places.items()}
        sizes = {rank: place.num_bytes for rank, (_, place) in places.items()}
        seen = {rank: behind(memory, 0)[: sizes[rank]] for rank, memory in opened.items() if memory is not None}
        readers = [rank for rank, read in enumerate(all_gather_object(table, tuple(seen))) if table.rank in read]
    finally:
        if own is not None:
            own.close()  # it stays as long as somebody has it mapped
    rooms = {rank: memory.chunk(num_rooms) for rank, memory in seen.items()}
    mine = () if own is None else behind(own.memory, 0)[:num_bytes].chunk(num_rooms)
    return NodeMemory(mine, rooms, frozenset(readers))
