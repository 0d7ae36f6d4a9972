"""Carries out a change of home: every tensor of the training state to its new owners, in place and bit by bit.

Parameters, gradients and optimizer state stay the same objects, so the user's optimizers, schedulers and loops need
not know. Nothing goes through a file. A rank that fails in a bucket fails on all ranks before anything of the bucket is
changed; what earlier buckets brought over stays, and the next change of home starts from there.

Measured (4 processes on 2 cores, 100 million parameters with AdamW, parts read where they are): 0.9 GB in 0.3 to 0.5
seconds, a ninth to a fourteenth of what a checkpoint takes in the page cache; a change that is made for the first time
takes 0.1 to 1.7 seconds more, mostly for its plan.

Memory of other processes of this machine: read where it is, or where they have packed for others; nothing is sent.
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

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.comm_ops.wire.bsr_messages import Messages, Room, Rooms, post
from hetu_fx.comm_ops.wire.bsr_run import example_slices, new_results, prepare, unpack
from hetu_fx.comm_ops.wire.collectives import Exchange
from hetu_fx.comm_ops.wire.consensus import all_gather_object, any_rank, raise_on_all_ranks
from hetu_fx.comm_ops.wire.flat import is_dense
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.comm_ops.wire.peers.memory import Peers, find_peers
from hetu_fx.comm_ops.wire.peers.rooms import behind
from hetu_fx.comm_ops.wire.peers.system import Extents, copy_extents, map_remote_memory, shared_memory
from hetu_fx.errors import CommError, StateError
from hetu_fx.switching.home.layout import home_layout
from hetu_fx.switching.home.ops import HomeTensor
from hetu_fx.switching.home.parameters import cut_optimizer_state
from hetu_fx.switching.migrate.buckets import ARRIVING, LEAVING, Carrier, StateTensor, SwitchBucket
from hetu_fx.switching.migrate.byte_runs import SliceRead, slice_reads
from hetu_fx.switching.migrate.in_flight import InFlightState, StandIns
from hetu_fx.switching.migrate.move_plan import EXTRA_SHARE, LEAST_EXTRA_BYTES, SwitchPlan, plan_switch
from hetu_fx.switching.migrate.state_tensors import Homes, TrainingState, with_layout

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


def _gather_addresses(parts: Sequence[Tensor | None], table: GroupTable) -> Extents:
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


@torch.no_grad()
def migrate(
    homes: Homes,
    targets: Mapping[str, Annotation],
    optimizers: Sequence[torch.optim.Optimizer],
    table: GroupTable,
    *,
    extra_share: float = EXTRA_SHARE,
    least_extra_bytes: int = LEAST_EXTRA_BYTES,
    later: InFlightState | None = None,
    overlap: bool | None = None,
) -> SwitchPlan:
    """Bring home parameters, their gradients and all that `optimizers` keep of them to other ranks; collective.

    Args:
        homes: the home parameters by name.
        targets: where they are to go, by name; the others stay. The same on all ranks.
        optimizers: all that hold state for them. Plain tensors of a parameter's shape are cut to its home.
        table: the ranks.
        extra_share, least_extra_bytes: see `plan_switch`.
        later: brings what `optimizers` keep while the caller goes on, if all ranks pass one and have their state in
            host memory: messages of devices that send themselves cannot pass those of a step. None: all comes now.
        overlap: whether to leave something to `later`. None: only where messages are sent, as a copy in memory takes
            the processor from the step that it is made beside (see `Handle.switch_home` for numbers).

    Returns the plan that was carried out, or is being.

    Raises:
        StateError: on every rank, if the ranks' states do not fit together or one rank failed.
        CommError: a peer is dead.
    """
    with using(table):
        state = raise_on_all_ranks(table, lambda: _checked(homes, targets, optimizers, table))
        tensors = state.describe_on_all_ranks(targets, table)
        nodes = tuple(0 if table.topology is None else table.topology.node_of(rank) for rank in range(table.size))
        is_able = all(home.device.type == "cpu" or table.is_staged(home.device) for home in homes.values())
        memory = all_reach(table, [tensor.local for tensor in state.tensors.values()])
        transport = Carrier.DIRECT if memory else Carrier.SHARED if all_share(table, is_able) else Carrier.SENT
        wants = later is not None and (transport is Carrier.SENT if overlap is None else overlap)
        is_host = all(home.device.type == "cpu" for home in homes.values())
        splits = not any_rank(table, [not (wants and is_host)])[0]
        plan = raise_on_all_ranks(
            table,
            lambda: plan_switch(
                tensors,
                nodes,
                extra_share=extra_share,
                least_extra_bytes=least_extra_bytes,
                transport=transport,
                splits=splits,
            ),
        )
        _Migration(plan.now, state, table, is_able, memory).run()
    # A number beside a parameter without dims may be a count, which is whole everywhere.
    for optimizer in optimizers:
        cut_optimizer_state(optimizer, [home for home in homes.values() if home.dim()])
    if later is not None and plan.later.buckets:
        _leave(plan.later, state, later, is_able, memory)
    return plan


def _leave(plan: SwitchPlan, state: TrainingState, later: InFlightState, is_able: bool, memory: Peers | None) -> None:
    """Have a part of the state brought in the background; collective."""
    tensors = {(t.parameter, t.kind): state.tensors[t.parameter, t.kind] for t in plan.tensors}

    def bring(stand_ins: StandIns, table: GroupTable) -> None:
        _Migration(plan, state.with_tensors(stand_ins), table, is_able, memory).run()

    later.start(plan, tensors, bring)


def _checked(
    homes: Homes, targets: Mapping[str, Annotation], optimizers: Sequence[torch.optim.Optimizer], table: GroupTable
) -> TrainingState:
    strangers = sorted(set(targets) - set(homes))
    if strangers:
        raise StateError(f"homes are given for {strangers}, which are none of the parameters {sorted(homes)}")
    for name, target in targets.items():
        home_layout(target, tuple(homes[name].shape), table.rank, table.size)  # raises what is wrong with it
    return TrainingState(homes, optimizers)


class _Migration:
    """Carries out a plan, bucket by bucket.

    While a bucket's messages travel, the one before is put together and the one after is packed; where they are read
    where they are packed, one bucket is packed while the one before is put together. What is not packed is read in
    others' old parts. All that may fail is done before all ranks agree that it has not, and parts are taken over, and
    old ones given up, after that.

    Args:
        plan, state, table: what is carried out, of which tensors, among whom.
        is_able: this rank's messages are in host memory.
        memory: that of the other ranks, where it is read.
    """

    def __init__(
        self, plan: SwitchPlan, state: TrainingState, table: GroupTable, is_able: bool, memory: Peers | None
    ) -> None:
        self.plan, self.buckets, self.state, self.table, self.is_able = plan, plan.buckets, state, table, is_able
        self.memory = memory
        self.addresses: dict[tuple[str, str], Extents] = {}  # of a tensor's old parts, by rank
        self.shared, self.leaving = NodeMemory(), [Room() for _ in range(plan.transport.rooms[LEAVING])]
        self.arriving = [Room() for _ in range(plan.transport.rooms.get(ARRIVING, 1))]
        self.ahead = len(self.leaving) - 1  # so many buckets are packed before they are put together
        self.packed: dict[int, Messages] = {}
        self.begun: list[Tensor | None] | None = None  # of tensors of which more is to come

    def run(self) -> None:
        """Bring over all buckets; collective."""
        if not self.buckets:
            return
        self._share()
        self._tell_addresses()
        raise_on_all_ranks(self.table, self._pack_first)
        sending = self._post(0)
        for number in range(len(self.buckets)):
            arrived = sending.wait()
            later = self._post(number + 1)
            self._bring(number, arrived, later)
            sending = later if self.ahead > 1 else self._post(number + 1)

    def _bring(self, number: int, arrived: Mapping[int, Tensor], later: Exchange[dict[int, Tensor]]) -> None:
        """Put one bucket together on all ranks, or on none, and take it over."""

        def made() -> list[Tensor | None]:
            parts = self._unpack(number, arrived)
            self._pack(number + self.ahead)
            return parts

        try:
            new = raise_on_all_ranks(self.table, made)
        except CommError:
            raise
        except Exception:
            later.wait()  # or its messages would be taken for others
            raise
        bucket = self.buckets[number]
        self.begun = None if bucket.completes else new
        if bucket.completes:
            _take_over(bucket, self._held(bucket.tensors), new, self.table)

    def _share(self) -> None:
        """Pack where the other ranks of this machine can read it; collective."""
        if not any(bucket.packed.messages for bucket in self.buckets):
            return
        most = max(sum(bucket.leaving(self.table.rank).values()) for bucket in self.buckets)
        self.shared = share(self.table, most if self.is_able else None, len(self.leaving))
        if self.shared.own:
            self.leaving = [Room(memory) for memory in self.shared.own]

    def _tell_addresses(self) -> None:
        """Tell all ranks where this rank's old parts are, and learn where theirs are; collective."""
        if self.memory is not None:
            held = self._held(self.plan.tensors)
            told = _gather_addresses([home.local for home in held], self.table)
            keys = [(tensor.parameter, tensor.kind) for tensor in self.plan.tensors]
            self.addresses = dict(zip(keys, told.T, strict=True))

    def _pack_first(self) -> None:
        for number in range(self.ahead):
            self._pack(number)

    def _pack(self, number: int) -> None:
        if number < len(self.buckets):
            moves, (parts, like) = self.buckets[number].packed, self._parts(number)
            messages = prepare(moves, self.table, like, parts, self._rooms(number))
            self.packed[number] = self.shared.unsent(messages)

    def _rooms(self, number: int) -> Rooms:
        """Return where a bucket's messages are packed, and where they are received or read."""
        arriving, turn = self.arriving[number % len(self.arriving)], number % len(self.leaving)
        places = {rank: self._place(number, rank, rooms[turn]) for rank, rooms in self.shared.others.items()}
        return Rooms(ReadingRoom(arriving, places), self.leaving[turn])

    def _place(self, number: int, sender: int, room: Tensor) -> Tensor:
        """Return where in another rank's memory this rank's message of a bucket stands."""
        sizes = self.buckets[number].leaving(sender)
        before = sum(size for receiver, size in sizes.items() if receiver < self.table.rank)
        return room.narrow(0, before, sizes.get(self.table.rank, 0))

    def _post(self, number: int) -> Exchange[dict[int, Tensor]]:
        nothing = Messages({}, {}, torch.device("cpu"))
        return post(self.packed.pop(number, nothing), self.table)

    def _unpack(self, number: int, arrived: Mapping[int, Tensor]) -> list[Tensor | None]:
        bucket, rank, (parts, like) = self.buckets[number], self.table.rank, self._parts(number)
        new = new_results(bucket.moves, rank, parts, like) if self.begun is None else self.begun
        if self.memory is not None:
            senders = np.array([self.addresses[tensor.parameter, tensor.kind] for tensor in bucket.tensors]).T
            take(self.memory.processes, slice_reads(bucket.direct, rank), senders, new)
        return unpack(bucket.packed, rank, parts, like, arrived, new)

    def _held(self, tensors: Sequence[StateTensor]) -> list[HomeTensor]:
        return [self.state.tensors[tensor.parameter, tensor.kind] for tensor in tensors]

    def _parts(self, number: int) -> tuple[list[Tensor | None], list[Tensor]]:
        """Return this rank's old parts of a bucket's tensors, and tensors of their dtypes and devices."""
        bucket = self.buckets[number]
        like = [home.local for home in self._held(bucket.tensors)]
        holds = (tensor.source.holds(self.table.rank) for tensor in bucket.tensors)
        parts = [local if held else None for local, held in zip(like, holds, strict=True)]
        return parts, example_slices(bucket.moves, parts, like, self.table.rank)


def _take_over(
    bucket: SwitchBucket, held: Sequence[HomeTensor], made: Sequence[Tensor | None], table: GroupTable
) -> None:
    for tensor, home, piece in zip(bucket.tensors, held, made, strict=True):
        with_layout(home, piece if tensor.target.holds(table.rank) else None, tensor.target, table)
