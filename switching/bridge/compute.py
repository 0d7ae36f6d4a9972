"""What runs under one compute layout, made when it is first needed and shared by all variants of that layout.

Plans that differ only in shares of rows, in how many micro-batches these are cut into, or in what sequences they take
have one compute layout: a plan for devices that became slow often needs no new graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from hetu_fx.base.torch_private import version
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.plans.plan import Pipeline, Plan
from hetu_fx.plans.schedule import cuts_backwards
from hetu_fx.switching.bridge.bridge import Bridge, BridgeEntry
from hetu_fx.switching.home.ops import own_pieces


def compute_layout(plan: Plan) -> Plan:
    """Return the plan without what its graphs do not depend on; plans with equal ones have the same graphs.

    Graphs differ between one micro-batch in all pipelines and several in any, but not by how many they are; and between
    schedules that cut backwards in two, or stages in chunks, and others.
    """
    several = any(pipeline.micro_batches > 1 for pipeline in plan.pipelines)
    pipelines = tuple(Pipeline(p.stages, micro_batches=2 if several else 1) for p in plan.pipelines)
    schedule = plan.schedule if cuts_backwards(plan.schedule) or plan.chunks > 1 else "1f1b"
    zero = 3 if plan.gathers_units else 1  # whose graphs gather parameters
    others: dict[str, Any] = {"name": None, "max_length": None, "predicted": None, "homes": ()}
    return replace(plan, pipelines=pipelines, schedule=schedule, zero=zero, **others)


class Compute:
    """The way of parameters from home and back under one compute layout, and their copies; see the module.

    Attributes:
        last_use: number of the last run that used it; the same on all ranks.
        readers: what holds copies for a backward that may come yet.
        sizes: the bytes that copies and graphs take on the rank where they take most, once ranks have agreed on them.
    """

    def __init__(self, table: GroupTable, homes: Mapping[str, nn.Parameter]) -> None:
        self.table, self.homes = table, homes
        self.last_use = 0
        self.readers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.sizes: tuple[int, int] | None = None
        self._sized_for: Bridge | None = None
        self._gathered: tuple[tuple[Bridge, tuple[int, ...]] | None, dict[str, Tensor]] = (None, {})
        self._held: list[Tensor] = []  # so that no other tensor gets the id of one of them
        self._lasts_for: Bridge | None = None  # whose copies are the pieces that are held
        self._bridges: dict[tuple[BridgeEntry, ...], Bridge] = {}
        self._in_use: weakref.WeakSet[Bridge] = weakref.WeakSet()  # a step may hold one that is kept no more

    @property
    def device(self) -> torch.device:
        """Return where this rank computes: where its parameters are."""
        return next(iter(self.homes.values())).device

    def gather(self, bridge: Bridge) -> dict[str, Tensor]:
        """Return this rank's compute parameters; collective unless home has not changed since the last call."""
        pieces = own_pieces(self.homes)
        is_known = self._lasts_for is bridge and len(pieces) == len(self._held)
        if is_known and all(map(is_, pieces.values(), self._held)):
            return dict(self._gathered[1])
        state = bridge, self._state(bridge, pieces)
        if self._gathered[0] != state:
            into = self._rewritable(bridge, pieces)
            self.drop_copies()  # before the new ones are made, so that there are never two of each
            self._held = list(pieces.values())
            with torch.inference_mode(False), torch.no_grad():  # a step that trains may read these copies, too
                self._gathered = (state, bridge.gather(pieces, into))
            self._lasts_for = bridge if bridge.shares(pieces) else None
            if self._sized_for is not bridge:
                self._sized_for, self.sizes = bridge, None
        return dict(self._gathered[1])

    def take_leaves(self, copies: Mapping[str, Tensor], trained: Collection[str]) -> dict[str, Tensor]:
        """Return copies as leaves of a step's graph of autograd."""
        return {name: copy.detach().requires_grad_(name in trained) for name, copy in copies.items()}

    def give_back(self, leaves: dict[str, Tensor], copies: Mapping[str, Tensor], trained: Collection[str]) -> None:
        """Let leaves go with their step, as code of the user's may have kept some, or hung hooks on them."""

    def _rewritable(self, bridge: Bridge, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the copies that new ones may be written to: of the same bridge, and of no step that awaits a backward.

        As on one device, a backward that comes after that finds that its parameters have been written to.
        """
        before, copies = self._gathered
        if before is None or before[0] is not bridge or self.readers:
            return {}
        own = {piece.untyped_storage().data_ptr() for piece in pieces.values()}
        return {name: copy for name, copy in copies.items() if copy.untyped_storage().data_ptr() not in own}

    @property
    def entries(self) -> tuple[BridgeEntry, ...]:
        """Return what the copies that are kept have come by: where each parameter's home is, and where it is read."""
        state = self._gathered[0]
        return () if state is None else state[0].plan.entries

    def find_bridge(self, entries: Sequence[BridgeEntry]) -> Bridge:
        """Return the bridge of some entries; made once per home layout, which the entries tell."""
        key = tuple(entries)
        if key not in self._bridges:
            self._bridges[key] = Bridge(key, self.table)
            self._in_use.add(self._bridges[key])
        self._bridges[key].is_outdated = False
        return self._bridges[key]

    def rehome(self) -> None:
        """Forget what belongs to the present homes of the parameters: they are about to change."""
        self.drop_copies()
        for bridge in self._in_use:
            bridge.is_outdated = True

    @property
    def has_copies(self) -> bool:
        """Tell whether copies of the parameters are kept; the same on all ranks."""
        return self._gathered[0] is not None

    @property
    def has_stale_copies(self) -> bool:
        """Tell whether copies are kept that the next gather would replace; the same on all ranks."""
        state = self._gathered[0]
        return state is not None and state[1] != self._state(state[0], own_pieces(self.homes))

    @property
    def has_graphs(self) -> bool:
        """Tell whether graphs are kept; the same on all ranks."""
        return False

    @property
    def copy_bytes(self) -> int:
        """Return what this rank's copies take besides the homes, with which they may share memory."""
        return bytes_besides(self._gathered[1].values(), own_pieces(self.homes).values())

    @property
    def graph_bytes(self) -> int:
        """Return what this rank's graphs take."""
        return 0

    def know_sizes(self, copy_bytes: int, graph_bytes: int) -> None:
        """Remember what ranks have agreed on; what copies take is not known where there are none."""
        self.sizes = copy_bytes, graph_bytes
        self._sized_for = self._sized_for if self.has_copies else None

    def drop_copies(self) -> None:
        """Forget the copies of the parameters; the next run gathers them again."""
        self._gathered, self._held, self._lasts_for = (None, {}), [], None

    def drop(self) -> None:
        """Forget everything; the next run makes it again. Steps whose backward is to come keep what they need."""
        self.drop_copies()
        self._bridges.clear()
        self._sized_for, self.sizes = None, None

    def _state(self, bridge: Bridge, pieces: Mapping[str, Tensor]) -> tuple[int, ...]:
        """Return numbers that change when a gather brings something else: with a write, unless it shares the pieces.

        On a rank alone those are new tensors each time, and are told by their memory: a script may put other in the
        place of it without a write, and what copies share is not given to others.
        """
        is_alone = self.table.size == 1
        places = tuple(map(Tensor.data_ptr, pieces.values())) if is_alone else ()
        if bridge.shares(pieces):
            return places if is_alone else tuple(map(id, pieces.values()))
        return (*places, *map(version, pieces.values()))


def bytes_besides(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> int:
    """Return the bytes of the memory that tensors hold and the others do not; each piece of memory counts once."""
    known = {tensor.untyped_storage().data_ptr() for tensor in others}
    sizes = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(size for place, size in sizes.items() if place not in known)
