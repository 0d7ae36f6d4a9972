"""Whether a wrong decision gives another result at all: tried alone, on numbers of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks.planted.decisions import ChangeCalls, Transfers, Wrong, planted
from hetu_fx.annotations.annotation import Annotation, Shape
from hetu_fx.annotations.local import local_part
from hetu_fx.comm_ops.plans.algorithm import FLAT
from hetu_fx.comm_ops.plans.bsr_plan import BsrPlan
from hetu_fx.comm_ops.plans.routes import RouteKind, route_kind
from hetu_fx.comm_ops.plans.transition import Transition
from hetu_fx.comm_ops.resolve.resolution import OpCall, Resolution
from hetu_fx.comm_ops.wire.bsr_run import gather_slices, pack, reduce_slices, scatter_slices, unpack
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.threads import run_in_threads
from hetu_fx.errors import HetuFxError

T = TypeVar("T")
OPEN = 3  # entries of a dim whose size only a run tells
_SLICES = {RouteKind.SUM: reduce_slices, RouteKind.SCATTER: scatter_slices, RouteKind.GATHER: gather_slices}
Results = list[Tensor | None] | None


def changes_transfers(plan: BsrPlan, wrong: Transfers) -> bool:
    """Tell whether ranks get something else by other transfers."""
    return not _same(_by_transfers(plan), _by_transfers(wrong.put_in(BsrPlan(plan.moves, plan.transfers))))


def _by_transfers(plan: BsrPlan) -> Results:
    """Carry out a plan as all ranks; None where it cannot be."""
    ranks = sorted({rank for move in plan.moves for at in (move.source, move.target) for rank in at.ranks})
    parts = {rank: [part_of(move.source, rank, move.shape) for move in plan.moves] for rank in ranks}
    like = [torch.empty(_filled(move.shape), dtype=torch.float64) for move in plan.moves]
    found: list[Tensor | None] = []
    try:
        for rank in ranks:
            messages = {
                sender: pack(plan, sender, rank, parts[sender], like)
                for sender in ranks
                if rank in plan.outgoing.get(sender, {})
            }
            found += unpack(plan, rank, parts[rank], like, messages)
    except (RuntimeError, StopIteration, ValueError):
        return None
    return found


def changes_groups(transition: Transition, wrong: Wrong) -> bool:
    """Tell whether a split collective gives something else by other groups."""
    right = _by_groups(transition)
    with planted(wrong):
        return not _same(right, _by_groups(transition))


def _by_groups(transition: Transition) -> Results:
    kind = route_kind(transition.source.top, transition.target.top)
    run = _SLICES[kind or RouteKind.SUM]

    def work(table: GroupTable) -> Tensor | None:
        x = part_of(transition.source, table.rank, transition.shape)
        return None if x is None else run(x, transition, FLAT, table)

    return _tried(max(transition.ranks) + 1, work)


def changes_calls(resolution: Resolution, change: ChangeCalls) -> bool:
    """Tell whether a resolved change gives something else, forward or backward, by other calls."""
    return not _same(_by_calls(resolution, tuple), _by_calls(resolution, change))


def _by_calls(resolution: Resolution, change: Callable[[tuple[OpCall, ...]], Sequence[OpCall]]) -> Results:
    def work(table: GroupTable) -> list[Tensor | None]:
        mine = part_of(resolution.source, table.rank, resolution.shape)
        x = torch.empty(0, dtype=torch.float64) if mine is None else mine.requires_grad_()
        result = x
        for call in change(resolution.calls(table.rank)):
            result = getattr(torch.ops.hetu, call.op)(result, *call.args)
        if mine is not None and result is not x:
            result.backward(_numbers(result.shape, table.rank))
        return [result.detach(), x.grad]

    ranks = max(*resolution.source.ranks, *resolution.target.ranks) + 1
    found = _tried(ranks, work)
    return None if found is None else [tensor for pair in found for tensor in pair]


def _tried(ranks: int, work: Callable[[GroupTable], T]) -> list[T] | None:
    """Do something as all ranks; None where it cannot be done."""
    try:
        return run_in_threads(ranks, work)
    except (HetuFxError, RuntimeError, ValueError, IndexError):
        return None


def _same(one: Results, other: Results) -> bool:
    if one is None or other is None:
        return one is other
    return all(_are_same(*pair) for pair in zip(one, other, strict=True))


def _are_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def part_of(annotation: Annotation, rank: int, shape: Shape) -> Tensor | None:
    """Return a rank's part of a tensor of drawn numbers; each summand has its own. None where it holds nothing."""
    if not annotation.holds(rank):
        return None
    whole = _numbers(_filled(shape), annotation.region(rank, _filled(shape)).summand or 0)
    return local_part(whole, annotation, rank).clone()


def _numbers(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _filled(shape: Shape) -> tuple[int, ...]:
    return tuple(OPEN if size is None else size for size in shape)
