"""Runs any resolution, forward and backward, on numpy arrays in one process: what resolutions are checked against.

Calls are read as their ops' summaries promise, by the global index sets of `annotations.definition`; plans
(slice groups, transfers) are read as lists of who gives which entries to whom. No code that packs, cuts or sums on
real processes is used. Entries that nobody writes stay NaN, so that a forgotten slice is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.comm_ops.ops.batched_send_receive import plan_transition
from hetu_fx.comm_ops.plans.bsr_plan import BsrPlan
from hetu_fx.comm_ops.plans.routes import SliceGroup, slice_groups
from hetu_fx.comm_ops.plans.slices import Dims
from hetu_fx.comm_ops.plans.transition import Transition, parse_transition
from hetu_fx.comm_ops.resolve.resolution import CommStep, OpCall, Resolution
from tests.oracles.annotation_definition import Indices, Part, parts
from tests.oracles.annotation_reference import Array
from tests.oracles.traffic import adjoint_calls

Locals = dict[int, Array]


def run(resolution: Resolution, locals_: Mapping[int, Array]) -> Locals:
    """Give every target rank's local array after the steps, from every source rank's before them."""
    values = dict(locals_)
    for step in resolution.steps:
        _play({rank: step.call(rank) for rank in _ranks(step)}, values)
    return {rank: values[rank] for rank in resolution.target.ranks}


def run_adjoint(resolution: Resolution, gradients: Mapping[int, Array]) -> Locals:
    """Give the gradient of every source rank's array, from that of every target rank's."""
    values = dict(gradients)
    for step in reversed(resolution.steps):
        adjoints = {rank: adjoint_calls(step.call(rank)) for rank in _ranks(step)}
        for together in zip(*adjoints.values(), strict=True):
            _play(dict(zip(adjoints, together, strict=True)), values)
    return {rank: values[rank] for rank in resolution.source.ranks}


def _ranks(step: CommStep) -> list[int]:
    return sorted({*step.source.ranks, *step.target.ranks})


def _play(calls: Mapping[int, OpCall], values: Locals) -> None:
    """Carry out the one op that `calls` are, and replace what its ranks hold by what they get."""
    ((op, _),) = {(call.op, len(call.args)) for call in calls.values()}
    found = _PLAYERS[op](calls, values)
    for rank in calls:
        values.pop(rank, None)
    values.update(found)


def _sum(calls: Mapping[int, OpCall], values: Locals) -> Locals:
    return {rank: _total(values, _args(call)[0]) for rank, call in calls.items()}


def _keep(calls: Mapping[int, OpCall], values: Locals) -> Locals:
    return {rank: values[rank] for rank in calls}


def _join(calls: Mapping[int, OpCall], values: Locals) -> Locals:
    found: Locals = {}
    for rank, call in calls.items():
        ranks, dim, sizes, outer, inner, *_ = _args(call)
        places = _places(sizes, outer, inner)
        shape = list(values[rank].shape)
        shape[dim] = sum(map(len, places))
        found[rank] = np.full(shape, np.nan)
        for peer, place in zip(ranks, places, strict=True):
            found[rank][_along(dim, place)] = values[peer]
    return found


def _slice(calls: Mapping[int, OpCall], values: Locals) -> Locals:
    return {rank: _own(rank, call, values[rank]) for rank, call in calls.items()}


def _sum_and_slice(calls: Mapping[int, OpCall], values: Locals) -> Locals:
    return {rank: _own(rank, call, _total(values, _args(call)[0])) for rank, call in calls.items()}


def _own(rank: int, call: OpCall, x: Array) -> Array:
    ranks, dim, sizes, outer, inner, *_ = _args(call)
    own: Array = x[_along(dim, _places(sizes, outer, inner)[list(ranks).index(rank)])]
    return own


def _places(sizes: Sequence[int], outer: int, inner: int) -> list[Indices]:
    """Number the entries of each part of a dim that is (outer, sum of sizes, inner)."""
    view = np.arange(outer * sum(sizes) * inner).reshape(outer, sum(sizes), inner)
    ends = np.cumsum(sizes)
    return [view[:, end - size : end].reshape(-1) for size, end in zip(sizes, ends, strict=True)]


def _along(dim: int, place: Indices) -> tuple[Any, ...]:
    return (*[slice(None)] * dim, place)


def _total(values: Locals, ranks: Sequence[int]) -> Array:
    total: Array = np.sum([values[rank] for rank in ranks], axis=0)
    return total


# Who gives to whom within a slice group: (givers, receivers, slices).
_Exchange = tuple[Sequence[int], Sequence[int], Sequence[Dims]]


def _across_groups(exchanges: Callable[[SliceGroup], Iterator[_Exchange]]) -> Callable[..., Locals]:
    def play(calls: Mapping[int, OpCall], values: Locals) -> Locals:
        change = _change(calls)
        before, after = _parts(change.source, change), _parts(change.target, change)
        found = {rank: _unwritten(after[rank]) for rank in calls}
        for group in slice_groups(change):
            for givers, receivers, slices in exchanges(group):
                for dims in slices:
                    total = np.sum([values[giver][_where(before[giver], dims)] for giver in givers], axis=0)
                    for receiver in receivers:
                        found[receiver][_where(after[receiver], dims)] = total
        return found

    return play


def _all_sum(group: SliceGroup) -> Iterator[_Exchange]:
    yield group.ranks, group.ranks, group.parts[0]


def _each_gives(group: SliceGroup) -> Iterator[_Exchange]:
    for rank, part in zip(group.ranks, group.parts, strict=True):
        yield (rank,), group.ranks, part


def _each_gets_its_sum(group: SliceGroup) -> Iterator[_Exchange]:
    for rank, part in zip(group.ranks, group.parts, strict=True):
        yield group.ranks, (rank,), part


def _move(calls: Mapping[int, OpCall], values: Locals) -> Locals:
    change = _change(calls)
    held = {rank: values[rank] for rank in change.source.ranks}
    for plan in plan_transition(change, 8).rounds:
        held = _transfer(plan, held)
    return held


def _transfer(plan: BsrPlan, values: Locals) -> Locals:
    """Play one round: every transfer reads what was there before the round."""
    (move,) = plan.moves
    change = Transition(move.source, move.target, move.shape)
    before, after = _parts(move.source, change), _parts(move.target, change)
    if move.source == move.target:
        found = {rank: value.copy() for rank, value in values.items()}
    else:
        found = {rank: _started(rank, before, part, values) for rank, part in after.items()}
    for transfer in plan.transfers:
        value = values[transfer.sender][_where(before[transfer.sender], transfer.dims)]
        place = _where(after[transfer.receiver], transfer.dims)
        result = found[transfer.receiver]
        result[place] = result[place] + value if transfer.adds else value
    return found


def _started(rank: int, before: Mapping[int, Part], part: Part, values: Locals) -> Array:
    """Start with what the rank has if it keeps it as it is, with zeros for a later summand, else with nothing."""
    if part.summand:
        return np.zeros(list(map(len, part.dims)))
    if part.summand is None and rank in before and _same(before[rank], part):
        return values[rank].copy()
    return _unwritten(part)


def _same(a: Part, b: Part) -> bool:
    return a.summand == b.summand and all(map(np.array_equal, a.dims, b.dims))


def _unwritten(part: Part) -> Array:
    return np.full(list(map(len, part.dims)), np.nan)


def _where(part: Part, dims: Dims) -> tuple[Any, ...]:
    """Find the entries of a slice (global intervals per dim) in a rank's local array; KeyError if it lacks any."""
    found = []
    for held, intervals in zip(part.dims, dims, strict=True):
        place = {int(index): number for number, index in enumerate(held)}
        found.append(np.array([place[i] for bounds in intervals for i in range(*bounds)], dtype=np.int64))
    return np.ix_(*found) if found else ()


def _args(call: OpCall) -> Any:
    return call.args


def _change(calls: Mapping[int, OpCall]) -> Transition:
    (text,) = {_args(call)[0] for call in calls.values()}
    return parse_transition(str(text))


def _parts(annotation: Annotation, change: Transition) -> dict[int, Part]:
    sizes = [size for size in change.shape if size is not None]
    return parts(annotation, sizes)


_PLAYERS: Mapping[str, Callable[[Mapping[int, OpCall], Locals], Locals]] = {
    "identity": _keep,
    "all_reduce": _sum,
    "all_gather": _join,
    "reduce_scatter": _sum_and_slice,
    "local_slice": _slice,
    "split_all_reduce": _across_groups(_all_sum),
    "split_all_gather": _across_groups(_each_gives),
    "split_reduce_scatter": _across_groups(_each_gets_its_sum),
    "batched_send_receive": _move,
}
