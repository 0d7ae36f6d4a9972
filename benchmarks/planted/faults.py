"""Wrong moves, drawn: a slice that is shifted, a summand that counts twice, a copy that is not sent.

A fault is one wrong decision. What gives the same on all ranks whatever the numbers is none, and is not drawn: each is
tried alone, on numbers of its own, before it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

from benchmarks.planted.decisions import ChangeCalls, Decisions, Transfers, Wrong
from benchmarks.planted.trial import changes_calls, changes_groups, changes_transfers
from hetu_fx.annotations.annotation import Annotation, Shape
from hetu_fx.annotations.region import Box
from hetu_fx.comm_ops.plans.bsr_plan import BsrPlan, SliceTransfer
from hetu_fx.comm_ops.plans.routes import SliceGroup, slice_groups
from hetu_fx.comm_ops.plans.slices import Dims
from hetu_fx.comm_ops.plans.transition import Transition
from hetu_fx.comm_ops.resolve.resolution import OpCall
from hetu_fx.switching.bridge.bridge_plan import BridgeBucket, BridgePlan, Message, ParameterBox

SHIFTED, TWICE, NOT_SENT = "a shifted slice", "a summand twice", "a copy not sent"


@dataclass(frozen=True)
class Fault:
    """A wrong decision: what is wrong, in what it was planted, and where."""

    kind: str
    family: str
    place: str
    wrong: Wrong


def draw(decisions: Decisions, random: Random) -> Fault:
    """Draw a fault that is one: first the kind of decision, then what is wrong in which of them."""
    families: list[Callable[[Decisions, Random], Fault | None]] = [
        *[_in_transfers] * bool(decisions.plans),
        *[_in_groups] * bool(decisions.groups),
        *[_in_calls] * bool(decisions.resolutions),
        *[_in_boxes] * bool(decisions.bridges),
    ]
    while True:
        fault = random.choice(families)(decisions, random)
        if fault is not None:
            return fault


def _in_transfers(decisions: Decisions, random: Random) -> Fault | None:
    plan = random.choice(list(decisions.plans))
    transfer = random.choice(plan.transfers)
    found = list(_wrong_transfers(plan, transfer))
    if not found:
        return None
    kind, transfers = random.choice(found)
    if not changes_transfers(plan, transfers):
        return None
    place = f"{transfer.dims} of {plan.moves[transfer.move].source} from {transfer.sender} to {transfer.receiver}"
    return Fault(kind, "transfer", place, Wrong(plans={plan: transfers}))


def _wrong_transfers(plan: BsrPlan, transfer: SliceTransfer) -> Iterator[tuple[str, Transfers]]:
    move, everything = plan.moves[transfer.move], plan.transfers
    yield NOT_SENT, Transfers.of(plan, (one for one in everything if one is not transfer))
    if transfer.adds:
        yield TWICE, Transfers.of(plan, (again for one in everything for again in [one] * (1 + (one is transfer))))
    if transfer.sender != transfer.receiver:  # whoever sends to itself reads and writes by the same
        for dims in _beside(transfer.dims, move.source, transfer.sender, move.shape):
            beside = replace(transfer, dims=dims)
            yield SHIFTED, Transfers.of(plan, (beside if one is transfer else one for one in everything), everything)


def _beside(dims: Dims, annotation: Annotation, rank: int, shape: Shape) -> Iterator[Dims]:
    """Yield slices one further in a dim, of what a rank holds."""
    held = annotation.region(rank, shape).dims
    for place, (intervals, own) in enumerate(zip(dims, held, strict=True)):
        for step in (1, -1):
            moved = tuple((start + step, stop + step) for start, stop in intervals)
            if all(any(low <= start and stop <= high for low, high in own) for start, stop in moved):
                yield (*dims[:place], moved, *dims[place + 1 :])


def _in_groups(decisions: Decisions, random: Random) -> Fault | None:
    transition = random.choice(list(decisions.groups))
    groups = slice_groups(transition)
    number = random.randrange(len(groups))
    found = list(_wrong_groups(transition, groups[number], random))
    if not found:
        return None
    kind, group = random.choice(found)
    wrong = Wrong(groups={transition: (*groups[:number], group, *groups[number + 1 :])})
    if not changes_groups(transition, wrong):
        return None
    return Fault(kind, "split collective", f"{transition}, ranks {group.ranks}", wrong)


def _wrong_groups(transition: Transition, group: SliceGroup, random: Random) -> Iterator[tuple[str, SliceGroup]]:
    """Yield a group without one of its slices, and with one beside it."""
    slices = sorted({dims for part in group.parts for dims in part})
    chosen = random.choice(slices)
    yield NOT_SENT, replace(group, parts=tuple(tuple(d for d in part if d != chosen) for part in group.parts))
    for dims in _beside(chosen, transition.source, group.ranks[0], transition.shape):
        parts = tuple(tuple(dims if d == chosen else d for d in part) for part in group.parts)
        yield SHIFTED, replace(group, parts=parts)


_CUTS = ("all_gather", "reduce_scatter", "local_slice")


def _in_calls(decisions: Decisions, random: Random) -> Fault | None:
    resolution = random.choice(list(decisions.resolutions))
    calls = resolution.calls(resolution.source.ranks[0])
    if not calls:
        return None
    number = random.randrange(len(calls))
    found = list(_wrong_calls(calls[number].op, number, is_ordered=resolution not in decisions.unordered))
    if not found:
        return None
    kind, change = random.choice(found)
    if not changes_calls(resolution, change):
        return None
    return Fault(kind, calls[number].op, str(resolution).partition("\n")[0], Wrong(resolutions={resolution: change}))


def _wrong_calls(op: str, number: int, *, is_ordered: bool) -> Iterator[tuple[str, ChangeCalls]]:
    if op in _CUTS and is_ordered:
        yield SHIFTED, partial(_changed, number, _turned)
    if op in ("all_reduce", "identity"):  # an identity's gradient is summed
        yield TWICE, partial(_changed, number, lambda call: [call, call])
        yield NOT_SENT, partial(_changed, number, lambda call: [])
    if op in ("all_gather", "all_reduce"):  # the gradient is summed, or is not
        yield TWICE, partial(_changed, number, _of_other_cotangent)


def _changed(
    number: int, change: Callable[[OpCall], Sequence[OpCall]], calls: tuple[OpCall, ...]
) -> tuple[OpCall, ...]:
    return (*calls[:number], *change(calls[number]), *calls[number + 1 :])


def _turned(call: OpCall) -> Sequence[OpCall]:
    """Have every part in the place of the next one."""
    ranks, *rest = call.args
    assert isinstance(ranks, list)
    return [OpCall(call.op, ([*ranks[1:], ranks[0]], *rest))]


def _of_other_cotangent(call: OpCall) -> Sequence[OpCall]:
    *rest, cotangent = call.args
    return [OpCall(call.op, (*rest, "duplicate" if cotangent == "partial" else "partial"))]


def _in_boxes(decisions: Decisions, random: Random) -> Fault | None:
    """Draw in the bridge. What travels there is lacking where it goes to, so that every change of it is one."""
    entries, plan = random.choice(list(decisions.bridges.items()))
    shapes = {entry.name: entry.shape for entry in entries}
    places = [
        (direction, bucket, message)
        for direction in ("gathers", "reduces")
        for bucket in getattr(plan, direction)
        for message in bucket.messages
    ]
    if not places:
        return None
    direction, bucket, message = random.choice(places)
    found = list(_wrong_messages(message, shapes, random))
    if not found:
        return None
    kind, other = random.choice(found)
    wrong = _with_message(plan, direction, bucket, message, other)
    return Fault(kind, f"bridge {direction}", f"{message.lane}", Wrong(bridges={entries: wrong}))


def _wrong_messages(message: Message, shapes: Any, random: Random) -> Iterator[tuple[str, Message]]:
    filled = [number for number, segment in enumerate(message.segments) if segment]
    number = random.choice(filled)
    segment = message.segments[number]
    place = random.randrange(len(segment))

    def having(boxes: Sequence[ParameterBox]) -> Message:
        changed = (*segment[:place], *boxes, *segment[place + 1 :])
        return replace(message, segments=(*message.segments[:number], changed, *message.segments[number + 1 :]))

    if len(segment) > 1 or len(filled) > 1:
        yield NOT_SENT, having(())
    for box in _boxes_beside(segment[place].box, shapes[segment[place].name]):
        yield SHIFTED, having((replace(segment[place], box=box),))
    copies = sorted(set(message.lane.ranks) - set(message.lane.givers)) if message.lane.givers else []
    if copies:
        givers = tuple(sorted((*message.lane.givers, random.choice(copies))))
        yield TWICE, replace(message, lane=replace(message.lane, givers=givers))


def _boxes_beside(box: Box, shape: Sequence[int]) -> Iterator[Box]:
    for dim, (start, stop) in enumerate(box.bounds):
        for step in (1, -1):
            if start + step >= 0 and stop + step <= shape[dim]:
                yield Box((*box.bounds[:dim], (start + step, stop + step), *box.bounds[dim + 1 :]))


def _with_message(
    plan: BridgePlan, direction: str, bucket: BridgeBucket, message: Message, other: Message
) -> BridgePlan:
    messages = tuple(other if one is message else one for one in bucket.messages)
    changed = replace(bucket, messages=messages)
    buckets = tuple(changed if one is bucket else one for one in getattr(plan, direction))
    return replace(plan, **{direction: buckets})
