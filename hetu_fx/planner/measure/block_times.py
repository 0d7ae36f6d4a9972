"""Measure blocks of a captured model on the devices at hand: each distinct one, at several lengths and degrees.

What runs is what one device of a tensor parallel group has of a block, made to run alone. The block is the middle one
of three stages, so that its device graph is made as for any plan. What it would get from the stage before, from the
model and from the batch is made up: sizes and dtypes are right, values mean nothing. Communication is replaced by what
has its shapes, forward and backward, and is not timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from hetu_fx.annotations.local import local_part
from hetu_fx.base.device_types import HOST, device_type_record
from hetu_fx.base.dtypes import carries_gradient
from hetu_fx.base.progress import Tell, nobody
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.ops.table import COMM_OPS
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.errors import ProfileError
from hetu_fx.graph import meta
from hetu_fx.graph.graph import LeafKind
from hetu_fx.planner.measure.fit import (
    SHARES_OF_LENGTH,
    BlockSample,
    block_time,
    distinct_blocks,
    fastest_of_kind,
    slowdown,
    timed_degrees,
    timed_lengths,
)
from hetu_fx.planner.values.profile_file import BlockTime, Profile
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.program.program import Bindings, Program, deduce_program, evaluate
from hetu_fx.transforms.layouts.deduced_graph import DeducedGraph
from hetu_fx.transforms.lowering.lower import lower
from hetu_fx.transforms.lowering.recomputing_module import RecomputingModule
from hetu_fx.transforms.passes import run_pass
from hetu_fx.transforms.specialize.device_graph import DeviceGraph, GraphSlot, SlotKind
from hetu_fx.transforms.specialize.place import Place
from hetu_fx.transforms.specialize.specialize import Specialize

_STAGES = 3  # what stands before the block, the block, what stands after it


@dataclass(frozen=True, eq=False)
class BlockShard:
    """One device's part of one block, as a function of made-up tensors."""

    program: Program
    deduced: DeducedGraph
    device: DeviceGraph
    table: GroupTable
    module: Callable[..., Sequence[Any]]

    def inputs(self, length: int, place: torch.device, *, rows: int = 1) -> list[Tensor]:
        """Return arguments for rows of so many tokens."""
        bindings = self._bindings(length, rows)
        trained = {value.value.name for value in self.device.handovers_in if value.value.differentiable}
        return [self._input(slot, bindings, trained, place) for slot in self.device.slots]

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the forward; return the results that a gradient comes back for."""
        with using(self.table):
            results = self.module(*inputs)
        return [result for result in results if isinstance(result, Tensor) and result.requires_grad]

    def backward(self, results: Sequence[Tensor]) -> None:
        """Run the backward; gradients accumulate in the inputs."""
        with using(self.table):
            torch.autograd.backward(results, [torch.ones_like(result) for result in results])

    def kept_bytes(self, inputs: Sequence[Tensor]) -> int:
        """Return the bytes that the forward keeps for the backward, parameters and buffers not counted."""
        held = {slot.kind for slot in self.device.slots} - {SlotKind.RECEIVED}
        pairs = zip(self.device.slots, inputs, strict=True)
        left_out = {tensor.untyped_storage().data_ptr() for slot, tensor in pairs if slot.kind in held}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            results = self.forward(inputs)  # holds the storages, so that no address comes twice
        del results
        return sum(size for address, size in kept.items() if address not in left_out)

    def _bindings(self, length: int, rows: int) -> Bindings:
        """Return what symbols stand for: the rows, and sequences in proportion to the longest of the example."""
        hints = _symbol_hints(self.program)
        longest = max(hints.values(), default=1)
        return {self.program.graph.batch_symbol: rows} | {
            symbol: max(1, round(size * length / longest)) for symbol, size in hints.items()
        }

    def _input(self, slot: GraphSlot, bindings: Bindings, trained: set[str], place: torch.device) -> Tensor:
        graph, layout, rank = self.program.graph, self.device.layout, self.device.rank
        if slot.kind is SlotKind.RECEIVED:
            node = next(node for node in graph.graph.nodes if node.name == slot.name)
        else:
            node = next(leaf.node for leaf in graph.leaves_of(LeafKind(slot.kind.value)) if leaf.name == slot.name)
        at = self.deduced.value_annotation(node, layout)
        if slot.kind is SlotKind.CONSTANT:
            return local_part(graph.constants[slot.name], at, rank).to(place)
        shape = at.local_shape(rank, evaluate(tuple(map(meta.expression, meta.shape(node))), bindings))
        wants = slot.kind is SlotKind.PARAMETER or slot.name in trained
        return _made_up([size or 0 for size in shape], meta.dtype(node), place, wants_gradient=wants)


def _made_up(shape: Sequence[int], dtype: torch.dtype, place: torch.device, *, wants_gradient: bool) -> Tensor:
    """Return small random numbers; ones where only whole numbers go, which are valid positions, tokens and masks."""
    if not carries_gradient(dtype):
        return torch.ones(shape, dtype=dtype, device=place)
    values = torch.randn(shape, device=place).mul_(0.02).to(dtype)
    return values.requires_grad_(wants_gradient)


def _symbol_hints(program: Program) -> Mapping[Any, int]:
    """Return what the symbols of the inputs' sizes are in the example, that of the rows left out; empty without."""
    sizes = (size for leaf in program.inputs for size in meta.shape(leaf.node) if meta.is_symbolic(size))
    found = {symbol: meta.hint(size) for size in sizes if (symbol := meta.expression(size)).is_Symbol}
    return {symbol: hint for symbol, hint in found.items() if symbol != program.graph.batch_symbol}


def make_block_shard(program: Program, block: int, degree: int, place: torch.device = HOST) -> BlockShard:
    """Return what the first device of a group of `degree` runs of a block, on `place`.

    Raises:
        PlanError, DeductionError: the block cannot be a stage, or not be cut so.
    """
    count = program.graph.num_blocks
    groups = [tuple(range(start, start + degree)) for start in range(0, _STAGES * degree, degree)]
    pairs = zip(groups, (block, 1, count - block - 1), strict=True)
    plan = Plan((Pipeline(tuple(Stage(devices, blocks=blocks) for devices, blocks in pairs)),))
    deduced = deduce_program(program, plan, wants_values=False)
    device = run_pass(Specialize(groups[1][0]), deduced)
    assert device is not None, "the plan has the rank"
    device = run_pass(Place(place), device)
    _leave_communication_out(device.graph)
    table = GroupTable.dry(device.rank, _STAGES * degree)
    return BlockShard(program, deduced, device, table, lower(run_pass(RecomputingModule(), device), None))


def _leave_communication_out(graph: fx.Graph) -> None:
    names = {record.overload: name for name, record in COMM_OPS.items()}
    for node in graph.nodes:
        if node.op == "call_function" and node.target in names:
            node.args = (names[node.target], *node.args)
            node.target = _shape_only


def _shape_only(name: str, x: Tensor, *args: object) -> Tensor:
    """Stand in for a communication: zeros of the shape of its result, and of x in backward."""
    result: Tensor = _ShapeOnly.apply(x, name, args)  # type: ignore[no-untyped-call]
    return result


class _ShapeOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, args: tuple[object, ...]) -> Tensor:
        ctx.shape = x.shape
        result: Tensor = COMM_OPS[name].fake(x, *args).zero_()
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        return gradients[0].new_zeros(ctx.shape), None, None


SECONDS = 90.0
_REPEATS = 3  # runs of a shard at least, after one that warms up
_CELL_SECONDS = 0.5  # how long a shard is run for one length, if that is more often


@dataclass(frozen=True)
class Measuring:
    """How blocks are measured.

    Attributes:
        cluster: the devices at hand, as measured; device i is that of rank i.
        seconds: how long it may take, about; where that is too little for long sequences, shorter ones are timed.
    """

    cluster: Cluster
    seconds: float = SECONDS

    @property
    def first(self) -> int:
        """Return the first rank that measures."""
        return next(rank for rank in self.cluster.ranks if self.measures(rank))

    def measures(self, rank: int) -> bool:
        """Tell whether a rank measures: the fastest device of each kind does, the others wait."""
        device = self.cluster.device(rank)
        return fastest_of_kind(device.kind, self.cluster).rank == rank


def with_times(
    profile: Profile, program: Program, rank: int, measuring: Measuring, place: torch.device, tell: Tell = nobody
) -> Profile:
    """Return the profile with times and alpha of this rank's kind of device, measured on `place`.

    `tell` takes which block of how many is measured.

    Raises:
        ProfileError: the model has no sequences of any length, no repeated blocks, or they cannot be run apart.
    """
    check_measurable(profile.costs, program, place)
    _check_lengths(program)
    kind = measuring.cluster.device(rank).kind
    samples = list(_Measurement(profile, program, measuring, rank, place).samples(tell))
    times = [
        block_time(kind, found, profile.costs, profile.tokens_per_row, measuring.cluster)
        for degree in timed_degrees(profile.costs.units)
        if (found := [sample for sample in samples if sample.tensor_parallel == degree])
    ]
    alpha = (slowdown(times, profile.tokens_per_row),) if len(times) > 1 else ()
    return replace(profile, times=tuple(times), alpha=alpha)


def merge_profiles(profiles: Sequence[Profile]) -> Profile:
    """Return the first profile with the times and alphas of all: they are of different kinds of devices."""
    times: tuple[BlockTime, ...] = tuple(time for profile in profiles for time in profile.times)
    alpha = tuple(slowdown for profile in profiles for slowdown in profile.alpha)
    return replace(profiles[0], times=times, alpha=alpha)


def check_measurable(costs: ProgramCosts, program: Program, place: torch.device) -> None:
    """Raise `ProfileError` where blocks of a program cannot be run apart on a device."""
    reason = None
    if not costs.num_blocks:
        reason = "the model has no repeated blocks"
    elif not program.graph.takes_any_rows:
        reason = "its captured graph is for a fixed number of rows"
    elif place.type == "meta":
        reason = "it is on the meta device, and blocks need one to run on (such as model.to_empty(device='cpu'))"
    if reason is not None:
        raise ProfileError(f"blocks cannot be measured: {reason}\nhint: profile it without measuring")


def _check_lengths(program: Program) -> None:
    if not _symbol_hints(program):
        raise ProfileError(
            "blocks cannot be measured: the captured graph has no sequences that could have other lengths\n"
            "hint: profile it without measuring"
        )


class _Measurement:
    """Runs every shard at every length."""

    def __init__(
        self, profile: Profile, program: Program, measuring: Measuring, rank: int, place: torch.device
    ) -> None:
        self._profile, self._program, self._place = profile, program, place
        self._measuring, self._rank = measuring, rank
        self._blocks = distinct_blocks(profile.costs)
        self._degrees = timed_degrees(profile.costs.units)

    def samples(self, tell: Tell) -> Iterator[BlockSample]:
        """Yield what was measured."""
        lengths = timed_lengths(self._profile.tokens_per_row, self._estimate(), self._measuring.seconds)
        total, done = len(self._degrees) * len(self._blocks) * len(lengths), 0
        share = self._measuring.seconds / total
        for degree in self._degrees:
            for block, count in self._blocks:
                shard = make_block_shard(self._program, block, degree, self._place)
                for length in lengths:
                    tell(f"block {block} on {degree} x {length} tokens", done, total)
                    yield BlockSample(degree, length, *_timed(shard, length, self._place, share), count)
                    done += 1

    def _estimate(self) -> float:
        """Return the seconds, by FLOPs, of all runs that are needed up to the longest sequence."""
        costs, speed = self._profile.costs, self._measuring.cluster.device(self._rank).speed
        flops = sum(costs.blocks[block].flops for block, _ in self._blocks) * len(self._degrees)
        return 3 * flops / speed * (_REPEATS + 2) * sum(SHARES_OF_LENGTH)


def _timed(shard: BlockShard, length: int, place: torch.device, budget: float) -> tuple[float, float]:
    """Return the median seconds forward and backward, and the bytes kept in between."""
    inputs = shard.inputs(length, place)
    kept = shard.kept_bytes(inputs)
    time_shard(shard, inputs)
    seconds: list[float] = []
    while len(seconds) < _REPEATS or sum(seconds) < min(_CELL_SECONDS, budget / 2):
        seconds.append(time_shard(shard, inputs))
    return statistics.median(seconds), float(kept)


def time_shard(shard: BlockShard, inputs: Sequence[torch.Tensor], times: int = 1) -> float:
    """Run a shard forward and backward so many times in a row; return the seconds.

    A device that works beside its host is waited for once, at the end, as in a step: each wait would cost a launch.
    """
    _wait(inputs)
    start = time.perf_counter()
    for _ in range(times):
        for tensor in inputs:
            tensor.grad = None
        shard.backward(shard.forward(inputs))
    _wait(inputs)
    return time.perf_counter() - start


def _wait(inputs: Sequence[torch.Tensor]) -> None:
    for device in {tensor.device for tensor in inputs}:
        device_type_record(device).synchronize(device)
