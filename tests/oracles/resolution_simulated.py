"""Runs a resolution for all ranks in one process, to test it and to look at it.

Batched send-receive and the split collectives run their own packing; plain collectives are played by the
reference formulas below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hetu_fx.comm_ops.ops.batched_send_receive import plan_transition
from hetu_fx.comm_ops.ops.table import join_parts, take_part
from hetu_fx.comm_ops.plans.bsr_plan import BsrPlan
from hetu_fx.comm_ops.plans.routes import slice_groups
from hetu_fx.comm_ops.plans.transition import Transition
from hetu_fx.comm_ops.resolve.resolution import AxisStep, MoveStep, OpCall, Resolution, TopStep
from hetu_fx.comm_ops.wire.bsr_run import pack, result_like, take, unpack, write_slices

Locals = dict[int, Tensor]


def simulate(resolution: Resolution, locals_: Mapping[int, Tensor]) -> Locals:
    """Give every target rank's local tensor after the steps, from every source rank's before them."""
    values = dict(locals_)
    for step in resolution.steps:
        match step:
            case AxisStep():
                values.update(_along_axis(step, values))
            case TopStep():
                values.update(_across_groups(step, values))
            case MoveStep():
                moved = _moved(step, values)
                values = {rank: x for rank, x in values.items() if not step.source.holds(rank)} | moved
    return values


def simulate_moves(
    plan: BsrPlan, tensors: Mapping[int, Sequence[Tensor | None]], like: Sequence[Tensor]
) -> dict[int, list[Tensor | None]]:
    """Carry out a plan with the lists of tensors of all ranks."""
    results = {rank: list(held) for rank, held in tensors.items()}
    for part in plan.rounds:
        messages = {
            (sender, receiver): pack(part, sender, receiver, results[sender], like)
            for sender, receiver, _ in part.messages
        }
        results = {
            rank: unpack(part, rank, held, like, {s: m for (s, r), m in messages.items() if r == rank})
            for rank, held in results.items()
        }
    return results


def _along_axis(step: AxisStep, values: Locals) -> Locals:
    return {
        rank: _play(step.call(rank), step.peers(rank).index(rank), [values[peer] for peer in step.peers(rank)])
        for rank in step.source.ranks
    }


def _play(call: OpCall, position: int, inputs: Sequence[Tensor]) -> Tensor:
    match call.op, call.args:
        case "identity", _:
            return inputs[position]
        case "all_reduce", _:
            return torch.stack(list(inputs)).sum(0)
        case "all_gather", (_, int(dim), _, int(outer), _, _):
            return join_parts(inputs, dim, outer)
        case "local_slice", (_, int(dim), list(sizes), int(outer), int(inner)):
            return take_part(inputs[position], dim, sizes, position, outer, inner)
        case _, (_, int(dim), list(sizes), int(outer), int(inner)):
            return take_part(torch.stack(list(inputs)).sum(0), dim, sizes, position, outer, inner)
    raise AssertionError(f"not a collective along an axis: {call}")


def _across_groups(step: TopStep, values: Locals) -> Locals:
    change = Transition(step.source, step.target, step.shape)
    results = {rank: result_like(values[rank], change, rank) for rank in step.source.ranks}
    for group in slice_groups(change):
        for index, rank in enumerate(group.ranks):
            parts = group.parts if step.op == "split_all_gather" else [group.parts[index]]
            for owner, part in zip(group.ranks, parts, strict=False):
                givers = [owner] if step.op == "split_all_gather" else group.ranks
                flats = [take(values[giver], step.source, change, part, giver) for giver in givers]
                write_slices(results[rank], step.target, change, part, rank, torch.stack(flats).sum(0))
    return results


def _moved(step: MoveStep, values: Locals) -> Locals:
    like = next(iter(values.values()))
    plan = plan_transition(Transition(step.source, step.target, step.shape), like.element_size())
    ranks = {*step.source.ranks, *step.target.ranks}
    held = {rank: [values[rank] if step.source.holds(rank) else None] for rank in ranks}
    return {rank: result for rank, (result,) in simulate_moves(plan, held, [like]).items() if result is not None}
