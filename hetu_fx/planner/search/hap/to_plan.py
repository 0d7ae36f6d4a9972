"""The plan that runs a HAP program, or the nearest one that a plan can say, with what that loses.

A plan says two things of all devices together: rows for each (data parallel), or one tensor parallel group that
splits certain factors wherever they stand, and, if asked to, the sequence where it splits none of them. A HAP program
may mix these op by op. So each of the two is searched again, with nothing else allowed, and the faster one is taken.
What that costs more than the program is the loss. Factors' names must mean the same in all ops, as
`count.graph_problem_of` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import PlanError
from hetu_fx.planner.search.hap.prices import Collectives, round_shares
from hetu_fx.planner.search.hap.search import search
from hetu_fx.planner.search.hap.synthesised_program import HapResult
from hetu_fx.planner.values.tensor_program import Op, Tensor, TensorProgram
from hetu_fx.plans.plan import Pipeline, Plan, Stage

PARTS = 100
"""Ratios of a tensor parallel group add up to about so many."""

FactorSet = frozenset[str]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Translation:
    """A plan and what it takes.

    Attributes:
        plan: the plan.
        result: the program that the plan runs, at its own ratios.
        seconds: of a step, at the plan's whole-number ratios, by the same prices as the program's.
        loss_seconds: by how much that is above the program that was translated.
        why: what could not be said, if something.
    """

    plan: Plan
    result: HapResult
    seconds: float
    loss_seconds: float
    why: str


def translations(
    problem: TensorProgram,
    result: HapResult,
    cluster: Cluster,
    *,
    collectives: Collectives | None = None,
    memory_fraction: float = 0.9,
    zero: int = 1,
) -> tuple[Translation, ...]:
    """Return the plans that come near to a HAP program, those that take least seconds by its prices first.

    Raises `PlanError` when neither data nor tensor parallelism of all devices fits their memory.
    """
    ask = _Ask(problem.in_one_segment(), result, cluster, collectives, memory_fraction, zero)
    refusals: list[str] = []

    def tried(way: Callable[[], T]) -> list[T]:
        try:
            return [way()]
        except PlanError as refusal:
            refusals.append(str(refusal))
            return []

    found = tried(ask.data_parallel)
    for split in tried(ask.split):
        found += [*tried(partial(ask.group, split)), *tried(partial(ask.with_sequence, split))]
    if not found:
        raise PlanError(f"no plan can say what the program does: {'; '.join(dict.fromkeys(refusals))}")
    return tuple(sorted(found, key=lambda each: each.seconds))


@dataclass(frozen=True, slots=True)
class _Ask:
    """The program to translate, and the ways to say something like it."""

    problem: TensorProgram
    result: HapResult
    cluster: Cluster
    collectives: Collectives | None
    memory_fraction: float
    zero: int

    def data_parallel(self) -> Translation:
        """Return the plan of a pipeline per device, each with its rows."""
        total = max((t.shape[t.row_dim] for t in self.problem.tensors if t.row_dim is not None), default=0)
        if not total:
            raise PlanError("no tensor of the program has rows of the batch")
        allowed = {op.name: _row_factors(op, self.problem) for op in self.problem.ops}
        found = self._search(_confined(self.problem, allowed))
        shares = round_shares(found.ratios[0], total)
        pairs = zip(self.cluster.ranks, shares, strict=True)
        pipelines = tuple(Pipeline((Stage((rank,)),), share=rows) for rank, rows in pairs if rows)
        return self._told(Plan(pipelines, zero=self.zero), found, shares)

    def split(self) -> FactorSet:
        """Return the factors of parameters that the best program cuts that cuts no rows."""
        ops = (replace(op, whole=op.whole | _row_factors(op, self.problem)) for op in self.problem.ops)
        split = _split_factors(self.problem, self._search(replace(self.problem, ops=tuple(ops))))
        if not split:
            raise PlanError("the program splits no factor of a parameter")
        return split

    def with_sequence(self, split: FactorSet) -> Translation:
        """Return the plan of one group that splits these, and shares the sequence besides."""
        carried = _carried_factors(self.problem)
        if not carried:
            raise PlanError("the program has no sequence")
        return self.group(split, carried)

    def group(self, split: FactorSet, carried: FactorSet = frozenset()) -> Translation:
        """Return the plan of one group that splits these factors, and carried ones where it splits none of them."""
        ops = self.problem.ops
        allowed = {op.name: frozenset(op.factors) & split or frozenset(op.factors) & carried for op in ops}
        found = self._search(_confined(self.problem, allowed, split))
        asked, pipelines = tuple(_asked_for(self.problem, split)), one_group(found, PARTS)
        plan = Plan(pipelines, zero=self.zero, split=asked, sequence_parallel=bool(carried))
        return self._told(plan, found, round_shares(found.ratios[0], PARTS))

    def _told(self, plan: Plan, found: HapResult, shares: Sequence[int]) -> Translation:
        ratios = tuple(share / sum(shares) for share in shares)
        seconds = found.program.seconds(found.speeds, (ratios,) * len(found.ratios))
        loss = seconds - self.result.seconds
        return Translation(plan, found, seconds, loss, _why(plan, self.problem, self.result, loss))

    def _search(self, problem: TensorProgram) -> HapResult:
        return search(
            problem,
            self.cluster,
            collectives=self.collectives,
            memory_fraction=self.memory_fraction,
            zero=self.zero,
        )


def one_group(found: HapResult, parts: int) -> tuple[Pipeline]:
    """Return one group with shares of whole parts; devices whose share is none are left out."""
    pairs = zip(found.ranks, round_shares(found.ratios[0], parts), strict=True)
    ranks, shares = zip(*((rank, share) for rank, share in pairs if share), strict=True)
    return (Pipeline((Stage(ranks, shares),)),)


def _confined(problem: TensorProgram, allowed: dict[str, FactorSet], forced: FactorSet | None = None) -> TensorProgram:
    """Return the problem with no op cut on anything else; one that can be cut on a forced factor is."""
    ops = []
    for op in problem.ops:
        may = allowed[op.name] - op.whole
        must = may if forced is None else may & forced
        whole = op.whole | (frozenset(op.factors) - may)
        ops.append(replace(op, whole=whole, copyable=not must))
    return replace(problem, ops=tuple(ops))


def _row_factors(op: Op, problem: TensorProgram) -> FactorSet:
    """Return the factors of an op that are rows of the batch."""
    return frozenset(factors[tensor.row_dim] for tensor, factors in _places(op, problem) if tensor.row_dim is not None)


def _of_parameters(problem: TensorProgram) -> FactorSet:
    places = (place for op in problem.ops for place in _places(op, problem))
    return frozenset(name for tensor, factors in places if tensor.kind == "parameter" for name in factors)


def _split_factors(problem: TensorProgram, result: HapResult) -> FactorSet:
    """Return the factors of parameters that the program cuts, without those that rival more work in some op."""
    of_parameters = _of_parameters(problem)
    flops: dict[str, float] = {}
    for step in result.program.steps:
        if step.form.cut in of_parameters:
            flops[str(step.form.cut)] = flops.get(str(step.form.cut), 0.0) + step.form.cut_flops
    chosen: list[str] = []
    for factor in sorted(flops, key=lambda name: (-flops[name], name)):
        if not any(_are_rivals(factor, other, problem) for other in chosen):
            chosen.append(factor)
    return frozenset(chosen)


def _carried_factors(problem: TensorProgram) -> FactorSet:
    """Return the factors that no parameter has and that are no rows: sequences."""
    rows = {factor for op in problem.ops for factor in _row_factors(op, problem)}
    return frozenset(factor for op in problem.ops for factor in op.factors) - rows - _of_parameters(problem)


def _asked_for(problem: TensorProgram, split: FactorSet) -> Iterator[tuple[str, int]]:
    """Yield (parameter, its dim in the model) for each factor that stands alone in some dim of a parameter."""
    told: set[str] = set()
    for op in problem.ops:
        for tensor, factors in _places(op, problem):
            for factor, dim in zip(factors, tensor.origin, strict=True):
                is_alone = tensor.kind == "parameter" and tensor.origin.count(dim) == 1
                if is_alone and factor in split - told:
                    told.add(factor)
                    yield tensor.name, dim


def _are_rivals(one: str, other: str, problem: TensorProgram) -> bool:
    return any({one, other} <= set(op.factors) - op.whole for op in problem.ops)


def _places(op: Op, problem: TensorProgram) -> Iterator[tuple[Tensor, tuple[str, ...]]]:
    pairs = zip((*op.reads, *op.makes), (*op.operands, *op.results), strict=True)
    return ((problem.by_name[name], factors) for name, factors in pairs)


def _why(plan: Plan, problem: TensorProgram, result: HapResult, loss: float) -> str:
    said = "data parallel" if len(plan.pipelines) > 1 else "tensor parallel"
    if plan.sequence_parallel:
        said += " with the sequence"
    if loss <= 1e-3 * result.seconds:
        return f"{said}: all that matters of the program can be said"
    cuts = [bool(step.form.cut in _row_factors(step.op, problem)) for step in result.program.steps if step.form.cut]
    mixed = any(cuts) and not all(cuts)
    reason = (
        "rows are cut in some ops and parameters in others" if mixed else "ops of one kind are done in several ways"
    )
    return f"{said} loses {loss:.4g} s of {result.seconds:.4g} s: {reason}, which no plan can say"
