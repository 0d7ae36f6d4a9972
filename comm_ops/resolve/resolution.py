"""What a resolved change is: steps, and from them the calls of each rank. Frozen and pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetu_fx.annotations.annotation import Annotation, Shape, cotangent
from hetu_fx.annotations.states import Split
from hetu_fx.comm_ops.ops.batched_send_receive import plan_transition
from hetu_fx.comm_ops.ops.table import COMM_OPS
from hetu_fx.comm_ops.plans.cost import RING_TURNS, Topology, rounds_cost
from hetu_fx.comm_ops.plans.routes import slice_groups
from hetu_fx.comm_ops.plans.transition import Transition, format_shape
from hetu_fx.errors import ResolveError


@dataclass(frozen=True, slots=True)
class OpCall:
    """One op call: runs as `getattr(torch.ops.hetu, op)(x, *args)`."""

    op: str
    args: tuple[object, ...]


def resize_call(call: OpCall, sizes: Sequence[object]) -> OpCall:
    """Return a call that cuts or joins a dim with other sizes: of one whose size only the run tells.

    Such a change is resolved for a stand-in of as many entries as the split has units.
    """
    assert call.op in ("all_gather", "reduce_scatter", "local_slice"), "one axis is cut or joined"
    ranks, dim, _, *rest = call.args
    return OpCall(call.op, (ranks, dim, list(sizes), *rest))


@dataclass(frozen=True, slots=True)
class AxisStep:
    """A collective along one axis of a single group.

    `source` and `target` annotate the group's piece, of `shape`. The axis has `ways` positions, `interval`
    apart in the group; `split` is its state where the op cuts or joins (fine units only), else None.
    `cotangent` says what the gradient of the result is along the axis: "duplicate" or "partial".
    """

    op: str
    source: Annotation
    target: Annotation
    shape: Shape
    interval: int
    ways: int
    split: Split | None
    cotangent: str

    def call(self, rank: int) -> OpCall:
        """Return the call of `rank`, which must be in the group."""
        peers = list(self.peers(rank))
        if self.split is None:
            return OpCall(self.op, (peers,) if self.op == "identity" else (peers, self.cotangent))
        joined = self.target if self.op == "all_gather" else self.source
        size = joined.local_shape(rank, self.shape)[self.split.dim]
        if size is None:
            raise ResolveError(f"dim {self.split.dim} of {format_shape(self.shape)} is symbolic and split")
        layout = (self.split.dim, list(self.split.parts(size)), self.split.outer, self.split.inner)
        tail = (self.cotangent,) if self.op == "all_gather" else ()
        return OpCall(self.op, (peers, *layout, *tail))

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that `rank` communicates with, in axis order."""
        ranks, position = self.source.groups[0].ranks, self.source.position(rank)
        coordinate = position // self.interval % self.ways
        first = position - coordinate * self.interval
        return tuple(ranks[first + index * self.interval] for index in range(self.ways))

    def collectives(self) -> list[tuple[tuple[int, ...], int]]:
        """List (ranks, entries of the largest tensor on a rank) of each collective."""
        found = []
        for position, rank in enumerate(self.source.ranks):
            if position // self.interval % self.ways == 0:
                sizes = (a.local_shape(rank, self.shape) for a in (self.source, self.target))
                found.append((self.peers(rank), max(_numel(size) for size in sizes)))
        return found

    @property
    def traffic(self) -> int:
        """Entries that travel while the data goes around the rings of all collectives once."""
        return sum((len(ranks) - 1) * numel for ranks, numel in self.collectives())


@dataclass(frozen=True, slots=True)
class TopStep:
    """A split collective across the groups of a union, slice by slice."""

    op: str
    source: Annotation
    target: Annotation
    shape: Shape
    cotangent: str

    def call(self, rank: int) -> OpCall:
        """Return the call of `rank`."""
        transition = str(Transition(self.source, self.target, self.shape))
        return OpCall(self.op, (transition,) if self.op == "split_reduce_scatter" else (transition, self.cotangent))

    def collectives(self) -> list[tuple[tuple[int, ...], int]]:
        """List (ranks, entries in all) of each group's collective."""
        groups = slice_groups(Transition(self.source, self.target, self.shape))
        return [(group.ranks, group.numel) for group in groups]

    @property
    def traffic(self) -> int:
        """Entries that travel while the data goes around the rings of all collectives once.

        Worked out without listing these: every entry of the tensor is in as many of them, each with a rank of every
        group, as there are copies in the group that has most.
        """
        copies = max(sharding.num_copies for sharding in self.source.shardings)
        return (len(self.source.groups) - 1) * copies * _numel(self.shape)


@dataclass(frozen=True, slots=True)
class MoveStep:
    """Batched send-receive: every rank gets what it lacks, in one message per pair."""

    source: Annotation
    target: Annotation
    target_cotangent: Annotation
    shape: Shape
    op: str = "batched_send_receive"

    def call(self, rank: int) -> OpCall:
        """Return the call of `rank`."""
        back = Transition(self.target_cotangent, cotangent(self.source), self.shape)
        return OpCall(self.op, (str(Transition(self.source, self.target, self.shape)), str(back)))

    def rounds(self, itemsize: int) -> list[list[tuple[int, int, int]]]:
        """List the (sender, receiver, bytes) of the forward, round by round."""
        _numel(self.shape)
        plan = plan_transition(Transition(self.source, self.target, self.shape), itemsize)
        return [part.messages for part in plan.rounds]


CommStep = AxisStep | TopStep | MoveStep


@dataclass(frozen=True, slots=True)
class Resolution:
    """The steps that turn `source` into `target`, in order. Steps of different groups are independent."""

    source: Annotation
    target: Annotation
    shape: Shape
    steps: tuple[CommStep, ...]

    def calls(self, rank: int) -> tuple[OpCall, ...]:
        """Return the op calls of `rank`, in order. It starts with an empty tensor if it holds nothing yet."""
        return tuple(step.call(rank) for step in self.steps if _takes_part(step, rank))

    def bytes(self, itemsize: int) -> int:
        """Count the bytes that all ranks send; raise ResolveError on symbolic sizes."""
        return steps_bytes(self.steps, itemsize)

    def seconds(self, itemsize: int, topology: Topology) -> float:
        """Price the forward: a rank's steps one after the other, other ranks' beside them."""
        return steps_seconds(self.steps, itemsize, topology)

    def __str__(self) -> str:
        """Explain the steps, one per line."""
        lines = [f"  {step.op}: {step.source} -> {step.target}" for step in self.steps] or ["  nothing to do"]
        head = str(Transition(self.source, self.target, self.shape))
        return "\n".join([head, *lines])


def ring_turns(op: str) -> int:
    """Count how often a collective's data goes around the ring of its ranks."""
    return RING_TURNS[COMM_OPS[op].cost]


def steps_bytes(steps: Iterable[CommStep], itemsize: int) -> int:
    """Count the bytes that all ranks send; raise ResolveError on symbolic sizes."""
    total = 0
    for step in steps:
        if isinstance(step, MoveStep):
            total += sum(message[2] for messages in step.rounds(itemsize) for message in messages)
        elif ring_turns(step.op):
            total += ring_turns(step.op) * step.traffic * itemsize
    return total


def steps_seconds(steps: Iterable[CommStep], itemsize: int, topology: Topology) -> float:
    """Price steps: a rank's one after the other, other ranks' beside them."""
    busy: dict[int, float] = {}
    for step in steps:
        seconds = _step_seconds(step, itemsize, topology)
        ranks = {*step.source.ranks, *step.target.ranks}
        done = max(busy.get(rank, 0.0) for rank in ranks) + seconds
        busy |= dict.fromkeys(ranks, done)
    return max(busy.values(), default=0.0)


def _takes_part(step: CommStep, rank: int) -> bool:
    return step.source.holds(rank) or step.target.holds(rank)


def _step_seconds(step: CommStep, itemsize: int, topology: Topology) -> float:
    if isinstance(step, MoveStep):
        return rounds_cost(step.rounds(itemsize), topology)
    cost = COMM_OPS[step.op].cost
    return max((cost(numel * itemsize, ranks, topology) for ranks, numel in step.collectives()), default=0.0)


def _numel(shape: Shape) -> int:
    sizes = [size for size in shape if size is not None]
    if len(sizes) != len(shape):
        raise ResolveError(f"bytes of shape {format_shape(shape)} are not known\nhint: resolve with concrete sizes")
    return math.prod(sizes)
