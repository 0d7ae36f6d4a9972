"""A batch of sequences of mixed lengths as a step runs it: micro-batches with rows of their own width.

Every rank has all sequences, and an assignment that says which micro-batch of which pipeline has which. Rows are
filled where they are read. Losses are sums over global counts, so that unequal rows and pipelines add up to the mean
over all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, starmap
from typing import Any

import sympy
from torch import Tensor

from hetu_fx.batches.packing import Filling, fill_rows
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import BatchError
from hetu_fx.graph.bind import Batch, GivenBatch, input_tensors
from hetu_fx.graph.containers import passed_values
from hetu_fx.planner.dispatch.assignment import Assignment, PackedMicroBatch
from hetu_fx.plans.plan import Plan
from hetu_fx.program.program import Bindings, Program
from hetu_fx.switching.step.batches import MicroBatchRows
from hetu_fx.switching.step.rows import Readers, RowPlan


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of a batch.

    Attributes:
        inputs: by input, its part of each sequence, of shape (tokens, ...).
        others: the arguments that belong to no sequence.
    """

    inputs: Mapping[str, tuple[Tensor, ...]]
    others: Mapping[str, Any]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the tokens of each sequence."""
        return tuple(map(len, next(iter(self.inputs.values()))))


def nested_sequences(batch: Batch) -> Sequences | None:
    """Return the sequences of a batch whose inputs are nested tensors (torch.jagged); None where none is nested.

    Raises:
        BatchError: inputs have sequences of other lengths than each other, or rows of the whole batch.
    """
    if not isinstance(batch, Mapping):
        if any(isinstance(value, Tensor) and value.is_nested for value in batch):
            raise BatchError(
                "sequences are passed by position\nhint: use keywords: model(input_ids=nested, labels=nested)"
            )
        return None
    nested = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.is_nested}
    if not nested:
        return None
    others = {name: value for name, value in batch.items() if name not in nested}
    _check_others(others)
    inputs = {name: tuple(value.unbind()) for name, value in nested.items()}
    _check_lengths({name: tuple(map(len, parts)) for name, parts in inputs.items()})
    return Sequences(inputs, others)


def _check_others(others: Mapping[str, Any]) -> None:
    rows = {name: tuple(value.shape) for name, value in others.items() if isinstance(value, Tensor) and value.dim()}
    if rows:
        raise BatchError(
            f"inputs of shapes {rows} come with sequences of mixed lengths\n"
            f"hint: pass them as nested tensors too, one entry per token (torch.nested.nested_tensor(parts, "
            f"layout=torch.jagged))"
        )


def _check_lengths(lengths: Mapping[str, tuple[int, ...]]) -> None:
    if len(set(lengths.values())) > 1:
        raise BatchError(
            f"inputs have sequences of different lengths {dict(lengths)}\nhint: give each token one of each"
        )
    first = next(iter(lengths.values()))
    if not first or 0 in first:
        raise BatchError(
            f"a batch has sequences of {list(first)} tokens\nhint: give one or more, of one token or more each"
        )


def row_plan(assignment: Assignment, world_size: int, sequences: int) -> RowPlan:
    """Return which rows each micro-batch has, counted in the order of the assignment; every rank brings all.

    A forward that compares rows compares all `sequences` of the step, on one device; the graph of several is a lone
    one's too.
    """
    sizes = [[len(micro.rows) for micro in micro_batches] for micro_batches in assignment.pipelines]
    stops = [0, *accumulate(size for pipeline in sizes for size in pipeline)]
    intervals = starmap(range, pairwise(stops))
    micro_batches = tuple(tuple(next(intervals) for _ in pipeline) for pipeline in sizes)
    starts = [0, *accumulate(map(sum, sizes))]
    pipelines = tuple(starmap(range, pairwise(starts)))
    others = max(2, sequences) - stops[-1]
    return RowPlan((range(0, stops[-1]),) * world_size, pipelines, micro_batches, others=others)


def first_rows(micro_batches: Sequence[PackedMicroBatch]) -> tuple[int, ...]:
    """Return the number that each micro-batch's first row has for random ops.

    They count rows of their own width, and draw by row or by token counted over rows; no two micro-batches have a
    row or a token of one number.
    """
    found: list[int] = []
    rows = tokens = 0
    for micro in micro_batches:
        first = max(rows, math.ceil(tokens / micro.width))
        found.append(first)
        rows = first + len(micro.rows)
        tokens = rows * micro.width
    return tuple(found)


_MOST_TOKENS_MORE = 16
"""That a row is made wider by, so that a graph holds for it: graphs hold for all but a few widths, such as 1."""


def widen_assignment(found: Assignment, program: Program, names: Iterable[str]) -> Assignment:
    """Return an assignment whose rows are as wide as the program holds for, where it does not for theirs."""
    lengths = [size for name in names for size in program.shapes[name][1:2] if isinstance(size, sympy.Symbol)]

    def wide(micro: PackedMicroBatch) -> PackedMicroBatch:
        widths = range(micro.width, micro.width + _MOST_TOKENS_MORE)
        width = next((width for width in widths if program.holds(dict.fromkeys(lengths, width))), micro.width)
        return micro if width == micro.width else replace(micro, width=width)

    return replace(found, pipelines=tuple(tuple(map(wide, pipeline)) for pipeline in found.pipelines))


@dataclass(frozen=True, eq=False)
class AssignedRows:
    """What a variant runs of a batch of sequences.

    Attributes:
        program: the program that runs its rows.
        sequences: of the whole batch.
        filling: what else stands in rows.
        assignment: which micro-batch has which sequences.
        first_rows: for random ops, of every micro-batch of the assignment.
    """

    program: Program
    sequences: Sequences
    filling: Filling
    assignment: Assignment
    first_rows: tuple[int, ...]
    splits: bool = True

    @property
    def bindings(self) -> Bindings:
        """Return no sizes: every micro-batch has its own."""
        return {}

    @property
    def needing(self) -> Mapping[str, Tensor]:
        """Return that no input needs a gradient."""
        return {}

    @property
    def passed(self) -> Mapping[str, Any]:
        """Return the plain values that the model returns as they are."""
        return passed_values(GivenBatch.of(self.sequences.others).passable)

    @property
    def tokens(self) -> int:
        """Return the tokens of the sequences."""
        lengths = self.sequences.lengths
        return sum(lengths[i] for i in self.assignment.positions)

    @cached_property
    def counts(self) -> tuple[float, ...]:
        """Return the counts of all its rows."""
        made = [self.program.prologue(self._tensors(micro)) for micro in self.assignment.micro_batches]
        return tuple(map(sum, zip(*made, strict=True)))

    def cuts(
        self, rows: RowPlan, plan: Plan, table: GroupTable, *, shared: bool, readers: Readers
    ) -> list[MicroBatchRows]:
        """Return the micro-batches of this rank's pipeline."""
        assert shared, "every rank has all sequences"
        place = plan.place(table.rank)
        if place is None:
            return []
        before = sum(map(len, self.assignment.pipelines[: place[0]]))
        own = self.assignment.pipelines[place[0]]
        return [self._cut(micro, self.first_rows[before + i]) for i, micro in enumerate(own)]

    def has_rows(self, pipeline: int, rows: RowPlan) -> bool:
        """Tell whether a pipeline has rows of the batch."""
        return any(micro.rows for micro in self.assignment.pipelines[pipeline])

    def _cut(self, micro: PackedMicroBatch, first_row: int) -> MicroBatchRows:
        tensors = self._tensors(micro)
        return MicroBatchRows(tensors, len(micro.rows), first_row, self.program.bind(tensors))

    def _tensors(self, micro: PackedMicroBatch) -> Mapping[str, Tensor]:
        rows = fill_rows(self.sequences.inputs, micro.rows, micro.width, self.filling)
        return input_tensors(self.program.graph, {**rows, **self.sequences.others})
