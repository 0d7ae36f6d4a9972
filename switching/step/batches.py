"""Read a call's arguments: which program runs them, its tensors by name, and what other ranks must know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hetu_fx.comm_ops.wire.consensus import Count, LocalFacts
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import BatchError
from hetu_fx.graph.bind import Batch, GivenBatch
from hetu_fx.graph.containers import passed_values
from hetu_fx.graph.row_dims import RowDims, other_dims
from hetu_fx.plans.plan import Plan
from hetu_fx.program.captured import Match
from hetu_fx.program.captures import Programs
from hetu_fx.program.program import Bindings, Program
from hetu_fx.switching.step.rows import Readers, RowPlan, cut_rows, rows_for_pipeline


@dataclass(frozen=True)
class MicroBatchRows:
    """One micro-batch: its tensors by input name, its rows, the number of the first, and what its sizes are."""

    tensors: Mapping[str, Tensor]
    rows: int
    first_row: int
    bindings: Bindings


@dataclass(frozen=True)
class ReadBatch:
    """One rank's batch of a step.

    Attributes:
        program: the program that runs it.
        tensors: its tensors by input name.
        facts: what the other ranks must know.
        bindings: what the graph's symbols stand for; the batch symbol stands for this rank's rows.
        splits: its micro-batches are not those of the plan, which may have but one.
        brought: what the symbols stood for before the batch was filled up to the sizes of all ranks; None: it was not.
        sizes_of: by rank, the sizes before that; (): nobody's batch was filled up.
        changes_values: filled up, it makes other outputs, though the same loss.
        passed: plain values that the model returns as they are, see `passed_values`.
    """

    program: Program
    tensors: Mapping[str, Tensor]
    facts: LocalFacts
    bindings: Bindings
    splits: bool = False
    brought: Bindings | None = None
    sizes_of: tuple[tuple[int, ...], ...] = ()
    changes_values: bool = False
    passed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def needing(self) -> Mapping[str, Tensor]:
        """Return the inputs that need a gradient."""
        return needing_gradients(self.tensors, self.program.row_dims)

    def cuts(
        self, rows: RowPlan, plan: Plan, table: GroupTable, *, shared: bool, readers: Readers
    ) -> list[MicroBatchRows]:
        """Fetch this rank's pipeline's rows and cut them into micro-batches; collective, unless `shared`.

        A rank has the inputs that it reads; all, where gradients go back to them, or they are cut to other sizes.
        """
        needs_all = bool(self.needing or self.sizes_of)
        dims = self.program.row_dims
        per_row = {n: t for n, t in self.tensors.items() if n in dims}
        others = {n: t for n, t in self.tensors.items() if n not in dims}
        mine = rows_for_pipeline(
            per_row, dims, rows, plan, table, shared=shared, readers=None if needs_all else readers
        )
        place = plan.place(table.rank)
        if place is None:
            return []
        start = rows.pipelines[place[0]].start
        return [
            self._cut(cut_rows(mine, dims, range(i.start - start, i.stop - start)) | others, i)
            for i in rows.micro_batches[place[0]]
        ]

    def has_rows(self, pipeline: int, rows: RowPlan) -> bool:
        """Tell whether a pipeline has rows of the batch."""
        return bool(rows.pipelines[pipeline])

    def _cut(self, tensors: Mapping[str, Tensor], interval: range) -> MicroBatchRows:
        symbol = self.program.graph.batch_symbol
        bindings = dict(self.bindings) if symbol is None else {**self.bindings, symbol: len(interval)}
        return MicroBatchRows(tensors, len(interval), interval.start, bindings)


def read_batch(batch: Batch, programs: Programs, training: bool, *, shared: bool, rows: int | None = None) -> ReadBatch:
    """Read the batch of a call of the model; `shared`: every rank passes the same; `rows`: of all ranks, where known.

    Raises:
        BatchError: it does not fit the captured program, or has objects that no graph takes.
        CaptureError: the program cannot be captured.
    """
    given = GivenBatch.of(batch)
    given.check_no_objects()
    match = programs.match(given, training, rows)
    tensors, needing = match.tensors, needing_gradients(match.tensors, match.program.row_dims)
    facts: LocalFacts | None = match.notes.get("facts")
    if facts is None or needing or facts.sizes_may_differ is shared:
        facts = _facts(match, programs, needing, shared=shared)
        if not needing and not facts.values:
            match.notes["facts"] = facts
    elif match.program.prologue.reads_values:
        facts = replace(facts, counts=_counts(match.program, tensors, match.rows))
    passed = passed_values(given.passable) if given.others else {}
    return ReadBatch(match.program, tensors, facts, match.bindings, passed=passed)


def _facts(match: Match, programs: Programs, needing: Mapping[str, Tensor], *, shared: bool) -> LocalFacts:
    program, tensors = match.program, match.tensors
    sizes = sizes_besides_rows(tensors, program.row_dims)
    values = {f"input {name!r}": float(tensor.detach()) for name, tensor in tensors.items() if tensor.dim() == 0}
    return LocalFacts(
        rows=match.rows,
        signature=f"{match.signature}{_told(needing)}",
        graph=program.identity,
        sizes=tuple(sizes.values()),
        size_names=tuple(sizes),
        sizes_may_differ=not shared,
        longest=program.longest(tensors),
        counts=_counts(program, tensors, match.rows),
        values=tuple(values.values()),
        value_names=tuple(values),
        told={"asks_rows": program.asks_rows},
        state=lambda: {**match.plain_facts, **programs.facts(program)},
    )


def same_inputs(tensors: Mapping[str, Tensor], row_dims: RowDims, *, shared: bool) -> dict[str, Tensor]:
    """Return the tensors that all ranks must pass alike: all, where the batch is `shared`, else those without rows.

    Those without dims are left out: they are compared in every step.
    """
    return {f"input {name!r}": x for name, x in tensors.items() if x.dim() and (shared or name not in row_dims)}


def needing_gradients(tensors: Mapping[str, Tensor], row_dims: RowDims) -> dict[str, Tensor]:
    """Return the inputs that need a gradient. Raises BatchError for one without rows, whose gradient is a sum."""
    found = {name: t for name, t in tensors.items() if t.requires_grad} if torch.is_grad_enabled() else {}
    if others := sorted(found.keys() - row_dims.keys()):
        raise BatchError(
            f"input {others} needs a gradient, which only inputs with rows get\n"
            f"hint: make it a parameter of the model, detach it, or take the gradient inside model.hetu.whole()"
        )
    return found


def sizes_besides_rows(tensors: Mapping[str, Tensor], row_dims: RowDims) -> dict[str, int]:
    """Return every size but the rows, by a name for messages."""
    dims = dims_besides_rows(tensors, row_dims)
    return {f"dim {dim} of input {name!r}": int(tensors[name].shape[dim]) for name, dim in dims}


def dims_besides_rows(tensors: Mapping[str, Tensor], row_dims: RowDims) -> list[tuple[str, int]]:
    """Return every dim but the rows, as (input, dim), in the order of `sizes_besides_rows`."""
    return [(name, dim) for name, x in tensors.items() for dim in other_dims(x, row_dims.get(name))]


def longest_side(tensors: Mapping[str, Tensor], row_dims: RowDims) -> int:
    """Return the largest size next to the rows of an input, which is the sequence length where there are sequences."""
    beside = [(name, next(iter(other_dims(tensors[name], dim)), None)) for name, dim in row_dims.items()]
    return max((int(tensors[name].shape[dim]) for name, dim in beside if dim is not None), default=0)


def _told(needing: Mapping[str, Tensor]) -> str:
    return f", gradients of {sorted(needing)}" if needing else ""


def _counts(program: Program, tensors: Mapping[str, Tensor], rows: int) -> tuple[Count, ...]:
    if not program.counts or rows == 0:
        return (0.0,) * len(program.counts)
    return program.prologue.counted(tensors)
