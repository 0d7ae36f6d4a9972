"""The batch of a trial: few rows, short sequences; shares that are unequal stay so."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import sympy
import torch
from torch import Tensor

from hetu_fx.base.dtypes import is_real
from hetu_fx.check.model import Narrowing, in_dtype
from hetu_fx.graph.bind import Batch, flatten_batch
from hetu_fx.graph.containers import unflatten
from hetu_fx.plans.plan import Pipeline, Plan, micro_batch_rows, pipeline_rows
from hetu_fx.program.program import Program

MOST_ROWS = 64
"""Rows above which a trial does not look for shares that stay unequal."""

LEAST_ROWS = 4
LEAST_LENGTH = 8
MOST_LENGTH = 64
_MICRO_BATCHES = 2  # more than a pipeline has stages
_ROWS = 2  # of a micro-batch
_ALIKE = 2  # pipelines that are tried of those that differ in their devices alone


def with_few_micro_batches(plan: Plan) -> Plan:
    """Return a plan whose pipelines have no more micro-batches than fill them, and one that finds them full."""
    return replace(
        plan,
        pipelines=tuple(
            replace(p, micro_batches=min(p.micro_batches, len(p.stages) * plan.chunks + _MICRO_BATCHES))
            for p in plan.pipelines
        ),
    )


def fewest_rows(plan: Plan, world: int) -> int:
    """Return the least number of rows of which all micro-batches have two, and that shows all shares as they are.

    (Of one row nobody can tell a mean from a sum, nor what it varies by.) Pipelines of unlike shares have unlike rows,
    and micro-batches of a pipeline unlike sizes, where few rows do it; with very many micro-batches some have one row.
    """
    least = max(LEAST_ROWS, world, sum(pipeline.micro_batches for pipeline in plan.pipelines))
    numbers = range(least, max(MOST_ROWS, 2 * least) + 1)
    return min(numbers, key=lambda rows: (_idle(plan, rows, 1), _idle(plan, rows, _ROWS), _hidden(plan, rows), rows))


def uneven_row_count(plan: Plan, world: int, given: int) -> int:
    """Return as many rows as are given, up to 64: what they have in common shows in few of them or in none.

    One more where pipelines of equal shares would have equal ones: later batches may not.
    """
    rows = max(fewest_rows(plan, world), min(given, MOST_ROWS))
    return rows + (len(plan.pipelines) > 1 and len(set(pipeline_rows(rows, plan))) == 1)


def _idle(plan: Plan, rows: int, each: int) -> int:
    """Return how many pipelines have not so many rows in each micro-batch."""
    counts = zip(pipeline_rows(rows, plan), plan.pipelines, strict=True)
    return sum(count < each * pipeline.micro_batches for count, pipeline in counts)


def _hidden(plan: Plan, rows: int) -> int:
    """Return how many of the plan's inequalities so many rows do not show."""
    counts = pipeline_rows(rows, plan)
    pairs = sorted(zip([pipeline.share for pipeline in plan.pipelines], counts, strict=True))
    alike = sum(share < more and few == many for (share, few), (more, many) in pairwise(pairs))
    cut = [(n, p.micro_batches) for n, p in zip(counts, plan.pipelines, strict=True) if p.micro_batches > 1]
    return alike + (bool(cut) and all(len(set(micro_batch_rows(*one))) == 1 for one in cut))


def rows_of_ranks(rows: int, world: int) -> tuple[int, ...]:
    """Return how many rows each rank brings: the first ones more."""
    return micro_batch_rows(rows, world)


def sequence_length_for(plan: Plan) -> int:
    """Return a length of sequences that all who share one can share in their ratios."""
    cuts = {sum(ratios) for *_, stage in plan.stages for ratios in stage.axes}
    together = min(math.lcm(*cuts), MOST_LENGTH)
    return -(-LEAST_LENGTH // together) * together


@dataclass(frozen=True)
class TrialSizes:
    """The rows of a trial's batch, and the length of its sequences; None: as the example has it."""

    rows: int | None
    length: int | None = None


def cut_batch(batch: Batch, program: Program, sizes: TrialSizes, narrowing: Narrowing, dtype: torch.dtype) -> Batch:
    """Return a batch like an example in other sizes, on the host, real numbers in the dtype.

    Where it has more rows than the example, those are taken again. Real numbers that are alike everywhere are moved.
    """
    tree, tensors = flatten_batch(batch)
    now = program.bind(tensors)
    wanted = _wanted(now, program, sizes)
    cut = {name: _cut(tensors[name].detach(), shape, now, wanted) for name, shape in program.shapes.items()}
    made = {
        name: _told_apart(in_dtype(narrowing.numbers(cut.get(name, tensor)), dtype), number)
        for number, (name, tensor) in enumerate(tensors.items())
    }
    result: Batch = unflatten(tree, made)
    return result


def _wanted(now: Mapping[sympy.Symbol, int], program: Program, sizes: TrialSizes) -> dict[sympy.Symbol, int]:
    """Return what the symbols of a program's sizes are to stand for."""
    rows = program.graph.batch_symbol
    wanted = {}
    for symbol, size in now.items():
        length = size if sizes.length is None else min(size, sizes.length)
        wanted[symbol] = (size if sizes.rows is None else sizes.rows) if symbol == rows else length
    return wanted


def _cut(
    tensor: Tensor, shape: Sequence[object], now: Mapping[sympy.Symbol, int], wanted: Mapping[sympy.Symbol, int]
) -> Tensor:
    """Return the first entries of a tensor in every dim whose size has other symbols; again and again if too few."""
    for dim, size in enumerate(shape):
        if isinstance(size, sympy.Expr) and size.subs(now) != size.subs(wanted):
            places = torch.arange(int(size.subs(wanted)), device=tensor.device) % max(1, tensor.size(dim))
            tensor = tensor.index_select(dim, places)
    return tensor


def _told_apart(tensor: Tensor, number: int) -> Tensor:
    """Move real numbers that are all alike, as zeros and ones of a made-up batch are."""
    if not is_real(tensor.dtype) or tensor.numel() < 2 or bool((tensor != tensor.flatten()[0]).any()):
        return tensor
    source = torch.Generator().manual_seed(number)
    return tensor + torch.randn(tensor.shape, generator=source, dtype=torch.float64).to(tensor.dtype) * 0.1


def split_rows_by_rank(batch: Batch, names: Mapping[str, int], counts: Sequence[int]) -> Iterator[Batch]:
    """Yield the rows that each rank brings of a batch; `names` has the dim of rows by input."""
    tree, tensors = flatten_batch(batch)
    start = 0
    for count in counts:
        own = {name: x.narrow(names[name], start, count) if name in names else x for name, x in tensors.items()}
        start += count
        yield unflatten(tree, own)


def cut_rows(batch: Batch, dims: Mapping[str, int], rows: int, dtype: torch.dtype) -> Batch:
    """Return so many rows of a batch of which no graph is known; `dims` has the dim of rows by input."""
    tree, tensors = flatten_batch(batch)
    made = {name: _rows_of(x, dims[name], rows) if name in dims else x for name, x in tensors.items()}
    made = {name: _told_apart(in_dtype(x.detach(), dtype), number) for number, (name, x) in enumerate(made.items())}
    result: Batch = unflatten(tree, made)
    return result


def _rows_of(tensor: Tensor, dim: int, rows: int) -> Tensor:
    """Return rows of a tensor, as far apart as they can be; again and again if it has too few."""
    given, places = tensor.size(dim), torch.arange(rows, device=tensor.device)
    return tensor.index_select(dim, places * given // rows if given > rows else places % max(1, given))


def with_few_pipelines(plan: Plan) -> Plan:
    """Return a plan with two of each kind of pipelines, on devices that follow each other."""
    kinds: dict[object, int] = {}
    left = []
    for pipeline in plan.pipelines:
        stages = tuple(replace(stage, devices=tuple(range(len(stage.devices)))) for stage in pipeline.stages)
        kind = str(replace(pipeline, stages=stages))
        kinds[kind, pipeline.share] = kinds.get((kind, pipeline.share), 0) + 1
        if kinds[kind, pipeline.share] <= _ALIKE:
            left.append(pipeline)
    number = {device: place for place, device in enumerate(d for p in left for d in p.devices)}
    return replace(plan, pipelines=tuple(_on(pipeline, number) for pipeline in left))


def _on(pipeline: Pipeline, number: Mapping[int, int]) -> Pipeline:
    stages = tuple(replace(stage, devices=tuple(number[d] for d in stage.devices)) for stage in pipeline.stages)
    return replace(pipeline, stages=stages)
