"""Stages exchange in an order that ends wherever a group's calls run one after another, as NCCL's do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations, product

import pytest
import torch
from torch import Tensor, fx

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.p2p import Message, PendingMessages
from hetu_fx.plans.plan import Schedule
from hetu_fx.plans.schedule import Order, forwards, stage_orders
from hetu_fx.switching.step import stage_p2p
from hetu_fx.switching.step.engine import Chunk, Engine, MicroBatchFeeds
from hetu_fx.switching.step.stage_p2p import Ends, StageP2P
from hetu_fx.switching.step.timer import ComputeTimer
from hetu_fx.transforms.layouts.annotated_graph import StageAxis, StageLayout
from hetu_fx.transforms.specialize.device_graph import (
    DeviceGraph,
    GraphResult,
    GraphSlot,
    Handover,
    ResultKind,
    SlotKind,
    Value,
)

Call = tuple[tuple[str, int], ...]
"""One group call of a rank: messages "to" and "from" other ranks."""

Pairs = Sequence[tuple[int, int]]
"""Which parts hand something to which; of p stages part k is a chunk of stage k % p."""


class Recorder:
    """Stands for the wire of one rank: notes the calls, and lets zeros arrive."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def post(self, receives: Sequence[Message], sends: Sequence[Message], table: GroupTable) -> PendingMessages:
        for _, room, _ in receives:
            room.zero_()
        messages = [*(("from", peer) for peer, _, _ in receives), *(("to", peer) for peer, _, _ in sends)]
        self.calls.append(tuple(messages))
        return PendingMessages(())


class OneRank(GroupTable):
    """The table of a rank that talks to nobody."""

    def __init__(self, rank: int) -> None:
        self.rank, self.topology, self._name = rank, None, "of one rank"

    def is_native(self, device: torch.device) -> bool:
        return True

    def is_staged(self, device: torch.device) -> bool:
        return False


def handover(source: int, target: int, num_stages: int) -> Handover:
    held = [Annotation.replicated([part % num_stages]) for part in (source, target)]
    return Handover(Value(f"x{source}", (2,), torch.float64, True, held[0]), (0, source), (0, target), held[1])


def chunk_of(part: int, num_stages: int, num_parts: int, pairs: Pairs) -> Chunk:
    """Make a part of a pipeline that adds up what it gets and multiplies it."""
    stage, is_last = part % num_stages, part == num_parts - 1
    inward = tuple(handover(*pair, num_stages) for pair in pairs if pair[1] == part)
    outward = tuple(handover(*pair, num_stages) for pair in pairs if pair[0] == part)
    slots = [GraphSlot(SlotKind.RECEIVED, h.value.name) for h in inward]
    made = GraphResult(ResultKind.LOSS, "loss") if is_last else GraphResult(ResultKind.SENT, f"x{part}")
    device = DeviceGraph(
        rank=stage,
        layout=StageLayout(0, part, (stage,), StageAxis(1, {}), StageAxis(1, {})),
        num_stages=num_parts,
        graph=fx.Graph(),
        slots=tuple(slots),
        results=(made,),
        handovers_in=inward,
        handovers_out=outward,
        differentiable=frozenset(),
    )
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)

    def module(*received: Tensor) -> tuple[Tensor]:
        total = weight * sum(received, torch.ones(2, dtype=torch.float64))
        return (total.sum() if is_last else total,)

    return Chunk(device, module)


def engine(stage: int, num_stages: int, chunks: int, pairs: Pairs) -> Engine:
    """Make the engine of a stage, a rank of its own."""
    parts = range(stage, num_stages * chunks, num_stages)
    made = [chunk_of(part, num_stages, num_stages * chunks, pairs) for part in parts]
    ends = [Ends(chunk.device.handovers_in, chunk.device.handovers_out) for chunk in made]
    return Engine(made, StageP2P(stage, ends, OneRank(stage), torch.device("cpu")))


def calls_of(
    monkeypatch: pytest.MonkeyPatch,
    num_stages: int,
    micro_batches: int,
    pairs: Pairs,
    schedule: Schedule | None,
    chunks: int = 1,
) -> list[list[Call]]:
    """Run every stage alone and return its calls; without a schedule, forwards alone."""
    found = []
    orders: Sequence[Order] = [forwards(micro_batches, num_stages, chunks)] * num_stages
    if schedule:
        orders = stage_orders(schedule, num_stages, micro_batches, chunks)
    for stage in range(num_stages):
        recorder = Recorder()
        monkeypatch.setattr(stage_p2p, "post", recorder.post)
        feeds = [MicroBatchFeeds(2, {}, {})] * micro_batches
        made = engine(stage, num_stages, chunks, pairs)
        made.run(orders, feeds, {}, train=schedule is not None, timer=ComputeTimer())
        found.append(recorder.calls)
    return found


def left_waiting(calls: Sequence[Sequence[Call]]) -> set[int]:
    """Return the ranks that wait for ever where a call starts when all messages of the one before have got through.

    The messages of one call go side by side. So it is with NCCL, messages that are too large for its buffers.
    """
    begun, under_way = [0] * len(calls), [Counter[tuple[str, int]]() for _ in calls]
    moved = True
    while moved:
        moved = False
        for rank, of_rank in enumerate(calls):
            if not under_way[rank].total() and begun[rank] < len(of_rank):
                under_way[rank].update(of_rank[begun[rank]])
                begun[rank] += 1
                moved = True
        for rank, peer in permutations(range(len(calls)), 2):
            if under_way[rank]["to", peer] and under_way[peer]["from", rank]:
                under_way[rank]["to", peer] -= 1
                under_way[peer]["from", rank] -= 1
                moved = True
    return {rank for rank, messages in enumerate(under_way) if messages.total()}


def apart(calls: Sequence[Call]) -> Iterator[Call]:
    """Send first, in a call of its own."""
    for call in calls:
        for way in ("to", "from"):
            if part := tuple(message for message in call if message[0] == way):
                yield part


def chain(num_stages: int) -> Pairs:
    return [(stage, stage + 1) for stage in range(num_stages - 1)]


def from_the_first(num_stages: int) -> Pairs:
    return [*chain(num_stages), *((0, stage) for stage in range(2, num_stages))]


def from_the_middle(num_stages: int) -> Pairs:
    middle = num_stages // 2 - 1
    return sorted({*chain(num_stages), *((middle, stage) for stage in range(middle + 1, num_stages))})


@pytest.mark.parametrize("pairs", [chain, from_the_first, from_the_middle])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", None])
def test_no_schedule_leaves_a_stage_waiting(
    monkeypatch: pytest.MonkeyPatch, pairs: Callable[[int], Pairs], schedule: Schedule | None
) -> None:
    for num_stages, micro_batches in product((2, 3, 5), (1, 2, 3, 7)):
        calls = calls_of(monkeypatch, num_stages, micro_batches, pairs(num_stages), schedule)
        assert not left_waiting(calls), (num_stages, micro_batches)


@pytest.mark.parametrize("pairs", [chain, from_the_first, from_the_middle])
@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble", None])
@pytest.mark.parametrize("chunks", [2, 3])
def test_chunks_leave_no_stage_waiting(
    monkeypatch: pytest.MonkeyPatch, pairs: Callable[[int], Pairs], schedule: Schedule | None, chunks: int
) -> None:
    for num_stages, micro_batches in product((2, 3, 4), (1, 2, 3, 4, 8, 9)):
        calls = calls_of(monkeypatch, num_stages, micro_batches, pairs(num_stages * chunks), schedule, chunks)
        assert not left_waiting(calls), (num_stages, micro_batches)
        assert all(("to", rank) not in call for rank, of_rank in enumerate(calls) for call in of_rank)


def test_neighbours_that_both_send_first_would_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of(monkeypatch, 2, 4, chain(2), "1f1b")
    assert left_waiting([list(apart(of_rank)) for of_rank in calls]) == {0, 1}


def test_what_a_stage_has_made_leaves_before_it_computes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = calls_of(monkeypatch, 2, 3, chain(2), "1f1b")
    assert [set(call) for call in first] == [{("to", 1)}, *[{("to", 1), ("from", 1)}] * 2, {("from", 1)}]
    assert [set(call) for call in last] == [{("from", 0)}, *[{("to", 0), ("from", 0)}] * 2, {("to", 0)}]
