"""Process groups by logical rank, created when first used and kept.

Communication ops name ranks by value; when they run they look up the runtime's table by `active()`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Any, NoReturn, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hetu_fx.base.device_types import HOST, device_type_record
from hetu_fx.base.per_rank import own
from hetu_fx.base.torch_private import store_of_world
from hetu_fx.comm_ops.plans.cost import Topology
from hetu_fx.comm_ops.plans.ways import PLACES, STAGED, Ends, Way, quickest
from hetu_fx.comm_ops.wire.common_path import CommonPath, common_path_of, join_path, watch_path
from hetu_fx.comm_ops.wire.flat import Flat
from hetu_fx.comm_ops.wire.process_group import (
    GroupCreation,
    group_timeout,
    world_group,
)
from hetu_fx.comm_ops.wire.serial_threads import SerialExecutor
from hetu_fx.comm_ops.wire.shutdown import can_sever, release_at_exit
from hetu_fx.comm_ops.wire.standings import Wait
from hetu_fx.comm_ops.wire.transport import Group, ProcessTransport, Transport, Work
from hetu_fx.errors import CommError


class Mailbox(Protocol):
    """Carries messages between ranks that can read each other's memory; see `peers.mail`."""

    def takes(self, peer: int, x: Flat, tag: int) -> bool:
        """Tell whether a message to or from another rank goes so."""

    def send(self, peer: int, x: Flat, tag: int) -> Work:
        """Start to send."""

    def receive(self, peer: int, room: Flat, tag: int) -> Work:
        """Start to receive."""


class Round(Protocol):
    """Numbers that this rank has said, and those that it hears; see `peers.mail`."""

    heard: list[Sequence[float]]

    def is_completed(self) -> bool:
        """Tell whether `wait` would not block."""

    def wait(self) -> None:
        """Wait for all ranks' numbers, which are `heard` then."""

    def take_back(self) -> None:
        """Be as if nothing had been said, the last time; no other rank may come before this one says something else."""


class Rounds(Protocol):
    """Brings a few numbers of each rank to all, between ranks of one machine; see `peers.mail`."""

    def say(self, numbers: Sequence[float], what: str) -> Round:
        """Begin a round."""


class PausedByWaits(Protocol):
    """What counts a rank's own work, and must know when it waits for others instead; pauses can be nested."""

    def pause(self) -> None:
        """Stop counting until the `resume` that belongs to this call."""

    def resume(self) -> None:
        """Go on."""


@dataclass(slots=True)
class _Present:
    """What a rank uses now: the table that was activated, that of the world, and what its communication is to pause.

    And it knows the types of devices that ranks compute on and the nodes that they stand on, by their numbers in the
    world, and between which ends messages go through the host that could leave from where they are.

    `tables_over` counts the tables that each base group has seen: with the base's name it makes group names that are
    new and that all ranks agree on. Counted per group object, so that a rank that joins a new world counts as the
    others. `beside` is a thread's own: its `table` is active there, whatever is in others.
    """

    active: GroupTable | None = None
    default: GroupTable | None = None
    working: PausedByWaits | None = None
    types: dict[int, str] = field(default_factory=dict)
    num_told: int = 0  # how often types were told
    nodes: dict[int, str] = field(default_factory=dict)
    detours: frozenset[Ends] = frozenset()
    tables_over: WeakKeyDictionary[ProcessGroup, int] = field(default_factory=WeakKeyDictionary)
    beside: threading.local = field(default_factory=threading.local)


# Of the process, not of the thread: torch runs the backward of a GPU's ops in a thread of its own.
_present = partial(own, _Present)


def set_working(work: PausedByWaits | None) -> None:
    """Say what communication is to pause (None: nothing)."""
    _present().working = work


class GroupTable:
    """Maps sorted tuples of logical ranks to process groups.

    Logical rank i is the i-th rank of `process_group` (the whole world if None). Without torch.distributed it
    is a world of one. All its ranks give a table the same `name`, or, if None, make their tables over it in
    the same order. Every wait of a group that the table makes is bounded by `timeout` (that of
    `process_group` if None). `listener` is told (what, start, end) of every communication. `topology` has the
    links between its ranks, if they are known: set it alike on all ranks.

    `creations` lists the groups created so far, also those of tables beside this one. `waited_seconds` adds up what it
    has waited for others. `mail` carries what stages hand over, where it can, and `rounds` a few numbers of
    each rank. `serial` runs what is done in threads beside, in order. `others_wait` tells whether all others wait for
    this rank in calls that are none of ours, or have ended.
    """

    listener: Callable[[str, float, float], None] | None = None
    topology: Topology | None = None
    mail: Mailbox | None = None
    rounds: Rounds | None = None
    others_wait: Callable[[], bool] | None = None
    waited_seconds = 0.0
    pauses_work = True  # its messages are waited for by the thread that computes
    transport: Transport = ProcessTransport()
    _path: CommonPath | None = None

    def __init__(
        self,
        process_group: ProcessGroup | None = None,
        *,
        timeout: timedelta | None = None,
        name: str | None = None,
    ) -> None:
        base = process_group or world_group()
        self._be(0, 1, "alone", timeout or group_timeout(base))
        if base is not None:
            self._bind(base, name)

    @classmethod
    def dry(cls, rank: int, size: int) -> GroupTable:
        """Pretend to be `rank` of `size`, for tracing and export: shapes are right, messages are refused."""
        table = cls.__new__(cls)
        table._be(rank, size, "dry", timedelta(0))
        return table

    @classmethod
    def over(cls, transport: Transport, base: Group, rank: int, size: int, name: str = "over") -> GroupTable:
        """Be `rank` of `size` that are no processes of torch.distributed; `base` is what `transport` calls all."""
        table = cls.__new__(cls)
        table._be(rank, size, name, group_timeout(None))
        table.transport, table._base = transport, base
        return table

    def _be(self, rank: int, size: int, name: str, timeout: timedelta) -> None:
        """Be a rank without groups, and with nothing to communicate by."""
        self.rank, self.size, self.timeout, self._name = rank, size, timeout, name
        self._globals = tuple(range(size))
        self._base: Group = None
        self._groups: dict[tuple[int, ...], Group] = {}
        self.creations: list[GroupCreation] = []
        self._beside: dict[str, GroupTable] = {}
        self._natives: dict[torch.device, bool] = {}
        self._known_kin: tuple[int, tuple[int, ...]] | None = None
        self.serial = SerialExecutor()
        self.found_out: dict[Any, Any] = {}  # once, of what its ranks can do; see `peers.memory.find_peers`
        self._known_cuts: tuple[int, dict[int, bool]] = (-1, {})

    def _bind(self, base: ProcessGroup, name: str | None) -> None:
        self._base, self._path = base, common_path_of(base)
        self._globals = tuple(dist.get_process_group_ranks(base))
        self.rank, self.size = dist.get_rank(base), dist.get_world_size(base)
        if name is None:
            seen = _present().tables_over
            name = str(seen.get(base, 0))
            seen[base] = seen.get(base, 0) + 1
        self._name = f"hetu_fx/{base.group_name}/{name}"
        release_at_exit(self)

    def beside(self, name: str, *, is_whole: bool = False) -> GroupTable:
        """Return the table of the same ranks, with groups of its own, for messages in a thread of that name.

        Messages of one group must come in one order on all ranks, which those of several threads do not. Made at the
        first call. Only a group of all ranks is shared, unless `is_whole`: then the first call is collective.
        """
        if name not in self._beside:
            own = f"{self._name}/{name}"
            base = self._whole(own) if is_whole else self.base
            self._beside[name] = self._named(own, base)
            self._beside[name].creations = self.creations
            self._beside[name].pauses_work = False
        return self._beside[name]

    def _named(self, name: str, base: Group) -> GroupTable:
        """Return a table of the same ranks."""
        if self.is_of_processes:
            return GroupTable(base, timeout=self.timeout, name=name)
        return GroupTable.over(self.transport, base, self.rank, self.size, name)

    def release(self) -> None:
        """Let the groups go; the table can communicate no longer."""
        self._groups, self._base, self._path, self.mail, self.rounds = {}, None, None, None, None

    @property
    def is_of_processes(self) -> bool:
        """Tell whether its ranks are processes, not threads of one that take turns."""
        return isinstance(self.transport, ProcessTransport)

    @property
    def number(self) -> str:
        """Return what all its ranks call it among the tables over its process group."""
        return self._name.rpartition("/")[2]

    @property
    def path(self) -> CommonPath | None:
        """Return what watches that its ranks take one path; None if nobody does, or where a thread waits aside."""
        return self._path if self.pauses_work else None

    def _whole(self, name: str) -> Group:
        """Return another group of all ranks; collective."""
        return self._connected(self._globals, f"{name}/whole", tuple(range(self.size)))

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Pause what counts this rank's own work, and tell the listener if there is one."""
        return _Waiting(what, self)

    @property
    def base(self) -> Group:
        """The group of all logical ranks; raises CommError where there is none."""
        if self._base is None:
            raise CommError(
                f"rank {self.rank} of {self.size} cannot communicate: torch.distributed is not initialised; "
                "start the job with torchrun, or call init_process_group first"
            )
        return self._base

    def to_global(self, rank: int) -> int:
        """Return torch.distributed's rank of a logical rank; raises CommError where there is no such rank."""
        if rank >= self.size:
            raise CommError(
                f"rank {rank} is not one of {self.size}\n"
                "hint: start the job with torchrun, with as many processes as there are ranks to communicate with"
            )
        return self._globals[rank]

    def position(self, ranks: Sequence[int]) -> int:
        """Return this rank's position among `ranks`; raise CommError where it is not one of them."""
        if self.rank not in ranks:
            raise CommError(f"rank {self.rank} runs a communication of ranks {list(ranks)}, which leave it out")
        return list(ranks).index(self.rank)

    def group(self, ranks: Sequence[int]) -> Group:
        """Return the group of logical `ranks` (any order; inside, they are sorted by global rank).

        Its first use is collective over `ranks`. Raises CommError for ranks that are not there.
        """
        key = tuple(sorted(ranks))
        if key not in self._groups:
            self._groups[key] = self._create(key)
        return self._groups[key]

    def order(self, ranks: Sequence[int]) -> list[int]:
        """Return the positions in `ranks` in the order in which their process group counts them."""
        return sorted(range(len(ranks)), key=lambda position: self._globals[ranks[position]])

    def know_types(self, types: Sequence[str]) -> None:
        """Take in the type of the device that each rank computes on, by rank, for all tables; the same on all ranks.

        Until then ranks are taken to be alike. What was known of their ways is forgotten.
        """
        present = _present()
        present.types.update({self.to_global(rank): name for rank, name in enumerate(types)})
        present.num_told += 1
        present.detours = frozenset()

    def set_links(self, ways: Iterable[Way], nodes: Sequence[str]) -> None:
        """Take in how fast messages go each way, and each rank's node, for all tables; the same on all ranks.

        Where messages can leave from where they are, and go through the host quicker, that is their way from now on.
        """
        present = _present()
        present.nodes.update({self.to_global(rank): node for rank, node in enumerate(nodes)})
        present.detours = frozenset(ends for ends, way in quickest(ways).items() if way.way == STAGED)

    def connect(self, device: torch.device) -> None:
        """Let the ranks of this one's type connect the group in which messages leave from `device`; collective.

        Two stages that had something for each other first would wait for all others (`Transport.connects_late`).
        """
        kin = self._kin()
        if len(kin) > 1 and self._is_direct(device) and self.transport.connects_late(device):
            with guarded("connection of devices of a type", kin, self):
                self.transport.all_reduce(Flat(torch.zeros(1, device=device)), self.group(kin))

    @property
    def direct(self) -> Group:
        """The group in which messages between ranks of this one's type leave from their devices; see `connect`."""
        return self.group(self._kin())

    @property
    def is_mixed(self) -> bool:
        """Whether its ranks compute on devices of several types, as far as is known."""
        return len(self._kin()) < self.size

    def is_staged(self, device: torch.device, ranks: Sequence[int] | None = None) -> bool:
        """Tell whether tensors of `device` travel through host memory between some ranks (None: all).

        They do where these compute on devices of several types, or of one that no backend of the group sends from, or
        where they are quicker so (`set_links`). So do those of threads aside in jobs of several types, as nothing there
        is connected.
        """
        if device.type == HOST.type or self.size == 1:
            return False
        if not self._is_direct(device) or (self.is_mixed and not self.pauses_work):
            return True
        if any(found != device.type for found in self._types_of(ranks)):
            return True
        return ((device.type, device.type), self._where(ranks)) in _present().detours

    def meets_on_host(self, device: torch.device, ranks: Sequence[int]) -> bool:
        """Tell whether some ranks, this one with `device`, stage what they send each other; alike on all of them."""
        return self.is_staged(device, ranks) or len(set(self._types_of(ranks))) > 1

    def cuts(self, peer: int) -> bool:
        """Tell whether both ends cut what goes to and from another rank, as one of them may have to stage it."""
        num_told = _present().num_told
        if self._known_cuts[0] != num_told:  # asked at each message
            self._known_cuts = num_told, {}
        known = self._known_cuts[1]
        if peer not in known:
            ends = self._types_of((self.rank, peer))
            known[peer] = len(ends) > 1 and (
                ends[0] != ends[1] or not device_type_record(torch.device(ends[0])).is_direct
            )
        return known[peer]

    def is_native(self, device: torch.device) -> bool:
        """Tell whether a backend of the groups sends tensors of a device from where they are."""
        if device not in self._natives:
            self._natives[device] = self.transport.is_native(self.base, device)
        return self._natives[device]

    def _is_direct(self, device: torch.device) -> bool:
        return self.is_native(device) and device_type_record(device).is_direct

    def _kin(self) -> tuple[int, ...]:
        """Return the ranks that compute on devices of this one's type, as far as is known."""
        present = _present()
        if self._known_kin is None or self._known_kin[0] != present.num_told:  # asked at each message
            own = present.types.get(self.to_global(self.rank))
            alike = (rank for rank in range(self.size) if own in (None, present.types.get(self.to_global(rank), own)))
            self._known_kin = present.num_told, tuple(alike)
        return self._known_kin[1]

    def _types_of(self, ranks: Sequence[int] | None) -> tuple[str, ...]:
        """Return the types of some ranks' devices (None: of all), as far as they are known."""
        known = _present().types
        if not known:
            return ()
        return tuple(known[at] for at in map(self.to_global, ranks or range(self.size)) if at in known)

    def _where(self, ranks: Sequence[int] | None) -> str:
        """Tell whether some ranks (None: all) stand on one node, as far as is known."""
        known = _present().nodes
        nodes = {known.get(at) for at in map(self.to_global, ranks or range(self.size))}
        return PLACES[len(nodes) > 1]

    def _create(self, ranks: tuple[int, ...]) -> Group:
        base = self.base
        if ranks[-1] >= self.size or self.rank not in ranks:
            raise CommError(f"rank {self.rank} of {self.size} cannot join a group of ranks {list(ranks)}")
        if len(ranks) == self.size:
            return base
        members = sorted(self._globals[rank] for rank in ranks)
        return self._connected(members, f"{self._name}/{'-'.join(map(str, ranks))}", ranks)

    def _connected(self, members: Sequence[int], name: str, ranks: tuple[int, ...]) -> Group:
        start = perf_counter()
        with guarded("group creation", ranks, self):
            if self._path is not None:
                self._path.meet(name, ranks)
            group = self.transport.connect(members, name, self.timeout)
        self.creations.append(GroupCreation(ranks, perf_counter() - start))
        return group


class _Waiting(AbstractContextManager[None]):
    """See `GroupTable.waiting`; a class, as messages of stages are many and a generator takes longer."""

    __slots__ = ("_before", "_table", "_wait", "_what", "_working")

    def __init__(self, what: str, table: GroupTable) -> None:
        self._what, self._table = what, table

    def __enter__(self) -> None:
        table = self._table
        self._working = _present().working if table.pauses_work else None
        self._before = table.waited_seconds  # of waits inside this one, too
        self._wait = Wait(self._what, perf_counter(), table.path, table._name)
        if self._working is not None:
            self._working.pause()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        table, start = self._table, self._wait.start
        self._wait.end()
        if self._working is not None:
            self._working.resume()
        end = perf_counter()
        table.waited_seconds = self._before + end - start
        if table.listener is not None:
            table.listener(self._what, start, end)


class guarded(_Waiting):
    """Turn torch.distributed's errors (a dead peer, a time-out) into CommError; count as waiting of `table`.

    None: of the active one. The error is a DivergedError where a rank has left the path that all must take.
    """

    __slots__ = ("_ranks",)

    def __init__(self, what: str, ranks: Sequence[int], table: GroupTable | None = None) -> None:
        self._what, self._ranks, self._table = what, ranks, table or active()

    def __enter__(self) -> None:
        path = self._table.path
        if path is not None:
            path.check()
        super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, RuntimeError | ValueError):
            self._fail(error)

    def _fail(self, error: BaseException) -> NoReturn:
        if self._table.path is not None:
            self._table.path.explain(self._what)
        raise CommError(
            f"{self._what} of ranks {list(self._ranks)} failed on rank {self._table.rank}: {error}; "
            "a peer is dead, stuck, or runs another plan"
        ) from error


def activate(table: GroupTable | None) -> GroupTable | None:
    """Make `table` the one that ops use (None: the default world); give the one before."""
    present = _present()
    before, present.active = present.active, table
    return before


def active() -> GroupTable:
    """Return the table that ops use: the activated one, else one over the whole world as it is now."""
    present = _present()
    own: GroupTable | None = getattr(present.beside, "table", None)
    if own is not None:
        return own
    if present.active is not None:
        return present.active
    base = _watched(world_group())
    if present.default is None or present.default._base is not base:
        # Named, as ranks may come here at different times, or some not at all.
        present.default = GroupTable(base, name="default")
    return present.default


def _watched(group: ProcessGroup | None) -> ProcessGroup | None:
    """Return the group of the same ranks whose messages can be ended, if there is one."""
    path = common_path_of(group)
    return group if path is None or path.group is None else path.group


def watched_group(process_group: ProcessGroup | None, seconds: float) -> ProcessGroup | None:
    """Watch from now on that the ranks of a group (None: of the world) take one path; return a group of them.

    Each waits so many seconds for another that is elsewhere. Messages of the group that is returned can be ended:
    where the user's own cannot, it is another one, made by the first call, which is collective.
    """
    base = process_group or world_group()
    path = None if base is None else watch_path(base, store_of_world, seconds)
    if base is None or path is None or path.group is not None:
        return _watched(base)
    return join_path(path, base if can_sever(base) else _whole_of(base))


@contextmanager
def using(table: GroupTable) -> Iterator[GroupTable]:
    """Activate `table` inside a with block; one made by `beside` in this thread alone."""
    if not table.pauses_work:
        with _using_here(table):
            yield table
        return
    before = activate(table)
    try:
        yield table
    finally:
        activate(before)


@contextmanager
def _using_here(table: GroupTable) -> Iterator[None]:
    beside = _present().beside
    before, beside.table = getattr(beside, "table", None), table
    try:
        yield
    finally:
        beside.table = before


def _whole_of(base: ProcessGroup) -> ProcessGroup:
    table = GroupTable(base, name="watched")
    whole: ProcessGroup = table._whole(table._name)
    return whole
