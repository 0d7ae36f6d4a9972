"""A captured model made ready for plans: the graph after the graph passes, and what they found out about it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from hetu_fx.base.once import once
from hetu_fx.deduction.factors.factors import FactorMap
from hetu_fx.errors import BatchError, DeductionError, PlanError
from hetu_fx.graph import meta
from hetu_fx.graph.forward_checks import Check
from hetu_fx.graph.graph import Graph, Leaf, LeafKind, OutputKind
from hetu_fx.graph.leaves.leaf_ops import CONSTANTS, told_nodes
from hetu_fx.graph.row_dims import RowDims, count_rows, with_rows
from hetu_fx.plans.plan import Plan
from hetu_fx.program.loss_type import LossType, loss_type
from hetu_fx.transforms.layouts.analysed_graph import Analyse, AnalysedGraph
from hetu_fx.transforms.layouts.annotate import Annotate
from hetu_fx.transforms.layouts.axis import AxisDeduction, deduce_batch_axis
from hetu_fx.transforms.layouts.deduce import Deduce
from hetu_fx.transforms.layouts.deduced_graph import DeducedGraph
from hetu_fx.transforms.layouts.exchange import exchanged_classes
from hetu_fx.transforms.layouts.flow import Flow
from hetu_fx.transforms.layouts.reshard_cost import node_bytes, travelling_work
from hetu_fx.transforms.layouts.work_shares import (
    Split,
    WorkShares,
    expert_splits,
    larger_work_shares,
    wide_work_shares,
    work_shares,
)
from hetu_fx.transforms.passes import rewrites_for, run_pass, run_rewrites
from hetu_fx.transforms.rewrites.counts import Prologue, extract_prologue
from hetu_fx.transforms.rewrites.op_overrides import OpOverrides
from hetu_fx.transforms.specialize.device_graph import LogicalShape

Bindings = Mapping[sympy.Symbol, int]

Shapes = Mapping[str, tuple[Any, ...]]
"""What a program expects inputs to be, by name: numbers, symbols and what is made of them."""


@dataclass(frozen=True, eq=False)
class _Sizes:
    """What a graph asks of the sizes of a batch.

    Attributes:
        shapes: of the inputs.
        of_parts: of the inputs, where the batch may have any part of its rows.
        conditions: what must hold of sizes, where rows are not compared.
        conditions_of_rows: the same where they are.
        open_dims: the dims, rows aside, whose sizes the graph leaves open, as (input, dim).
    """

    shapes: Shapes
    of_parts: Shapes
    conditions: tuple[sympy.Expr, ...]
    conditions_of_rows: tuple[sympy.Expr, ...]
    open_dims: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, graph: Graph, of_parts: Shapes) -> _Sizes:
        rows = {} if graph.fixed_rows is None else graph.fixed_rows.dims
        number = 0 if graph.fixed_rows is None else graph.fixed_rows.number
        found: dict[bool, list[sympy.Expr]] = {False: [], True: []}
        for condition in graph.conditions:
            found[graph.batch_symbol in condition.free_symbols].append(condition)
        return cls(
            {**of_parts, **{name: with_rows(of_parts[name], dim, number) for name, dim in rows.items()}},
            of_parts,
            tuple(found[False]),
            tuple(found[True]),
            tuple(
                (name, dim)
                for name, shape in of_parts.items()
                for dim, size in enumerate(shape)
                if isinstance(size, sympy.Expr) and size != graph.batch_symbol
            ),
        )

    def misfit(self, conditions: Iterable[sympy.Expr], bindings: Bindings) -> str:
        """Say which condition does not hold, as far as sizes of inputs tell; nothing where all do."""
        known = frozenset(bindings.items())
        condition = next((one for one in conditions if _in_numbers(one, known) is sympy.false), None)
        if condition is None:
            return ""
        named = [
            (size, f"{name}.shape[{dim}]") for name, sizes in self.shapes.items() for dim, size in enumerate(sizes)
        ]
        names = {size: name for size, name in reversed(named) if isinstance(size, sympy.Symbol)}
        told = condition.xreplace({symbol: sympy.Symbol(name) for symbol, name in names.items()})
        sizes = ", ".join(f"{name} is {bindings[s]}" for s, name in names.items() if condition.has(s) and s in bindings)
        return (
            f"the captured graph holds for batches of which {told}, and {sizes} now: the forward, or an op, compares "
            f"them\nhint: give batches of such sizes, or compare them outside of the model"
        )


@dataclass(frozen=True, eq=False)
class Program:
    """One captured graph, ready for any plan.

    Attributes:
        analysed: the graph after the rewrites, its factor classes, and what its values depend on.
        doubt: why rows of several ranks must not be put together, as it is not clear which dims of inputs count them.
        graph: that of `analysed`.
        inputs: the leaves that the batch is fed to.
        shapes: what the inputs of a batch are expected to be.
        counts: the names of the global counts that the graph divides by.
        checks: what the forward checks of values in the middle of a step.
        prologue: a function from the inputs of some rows to their counts, in the order of `counts`.
        fingerprint: equal where the same graph was captured, whatever the example's sizes.
        loss_name: the name of the loss output; empty if the model has none.
        in_float16: gradients may be of float16, in which small ones vanish and large ones overflow.
    """

    analysed: AnalysedGraph
    doubt: str = ""
    graph: Graph = field(init=False)
    inputs: tuple[Leaf, ...] = field(init=False)
    shapes: Shapes = field(init=False)
    counts: tuple[str, ...] = field(init=False)
    checks: tuple[Check, ...] = field(init=False)
    prologue: Prologue = field(init=False)
    fingerprint: str = field(init=False)
    loss_name: str = field(init=False)
    in_float16: bool = field(init=False)
    _sizes: _Sizes = field(init=False)

    def __post_init__(self) -> None:
        graph = self.analysed.graph
        checked = {leaf.name for leaf, _ in graph.outputs_of(OutputKind.CHECK)}
        inputs = graph.leaves_of(LeafKind.INPUT)
        sizes = _Sizes.of(graph, input_shapes(inputs))
        made = {
            "graph": graph,
            "inputs": inputs,
            "shapes": sizes.shapes,
            "counts": tuple(leaf.name for leaf in graph.leaves_of(LeafKind.COUNT)),
            "checks": tuple(check for check in graph.checks if check.name in checked),
            "prologue": extract_prologue(graph),
            "fingerprint": _fingerprint(graph),
            "loss_name": next((leaf.name for leaf, _ in graph.outputs_of(OutputKind.LOSS)), ""),
            "in_float16": any(
                meta.is_tensor(node) and meta.dtype(node) == torch.float16 for node in self.flow.differentiable
            ),
            "_sizes": sizes,
        }
        vars(self).update(made)

    @property
    def factors(self) -> FactorMap:
        """Return its factor classes."""
        return self.analysed.factors

    @property
    def flow(self) -> Flow:
        """Return what its values depend on."""
        return self.analysed.flow

    def bind(self, tensors: Mapping[str, Tensor]) -> dict[sympy.Symbol, int]:
        """Return what each symbol stands for in a batch, or in a part of it that has some of its rows.

        Raises `BatchError` where it does not fit.
        """
        bindings = bind(self._sizes.of_parts, tensors)
        _raise_any(self._sizes.misfit(self._sizes.conditions, bindings))
        return bindings

    def check_rows(self, bindings: Bindings, rows: int) -> None:
        """Raise `BatchError` unless the graph holds for a batch of so many rows, over all ranks."""
        _raise_any(self._misfit_of_rows(bindings, rows))

    def takes_rows(self, bindings: Bindings, rows: int) -> bool:
        """Tell whether the graph holds for a batch of so many rows, over all ranks."""
        return not self._misfit_of_rows(bindings, rows)

    def _misfit_of_rows(self, bindings: Bindings, rows: int) -> str:
        """Say why the graph does not hold for a batch of so many rows, over all ranks; nothing where it does."""
        fixed, symbol = self.graph.fixed_rows, self.graph.batch_symbol
        if fixed is not None and fixed.number != rows:
            return (
                f"the captured graph holds for batches of {fixed.number} rows, and this one has {rows} over all ranks "
                f"({'; '.join(self.graph.notes)})\nhint: give batches of {fixed.number} rows, or rewrite the line"
            )
        of_all = bindings if symbol is None else {**bindings, symbol: rows}
        return self._sizes.misfit(self._sizes.conditions_of_rows, of_all)

    @property
    def asks_rows(self) -> bool:
        """Tell whether the graph compares rows, with other sizes maybe, and so holds for some numbers of rows only."""
        return bool(self._sizes.conditions_of_rows)

    def holds(self, sizes: Bindings) -> bool:
        """Tell whether the graph holds for batches of some sizes, as far as these tell."""
        return not self._sizes.misfit(self.graph.conditions, sizes)

    def check_counts(self, counts: Sequence[float | Tensor]) -> None:
        """Raise what the forward raises for values of its inputs, by the counts of the whole batch, in their order."""
        asked = {check.name: check for check in self.graph.checks}
        for name, count in zip(self.counts, counts, strict=True):
            if name in asked and count > 0:
                raise asked[name].error()

    @property
    def identity(self) -> str:
        """Return a text that is the same on ranks that run the same graph for batches of the same sizes.

        They must cut the same inputs by rows, and have the same doubt of it.
        """
        fixed = self.graph.fixed_rows
        of_rows = "" if fixed is None else f", for {fixed.number} rows"
        return f"graph {self.fingerprint}{of_rows}, rows {dict(self.row_dims)}{' in doubt' if self.doubt else ''}"

    @property
    def sequence_units(self) -> int:
        """Return by how many devices a sequence of the example can be shared at most, 1 where it cannot be."""
        return self._units[0]

    @property
    def head_units(self) -> int:
        """Return by how many devices attention can be shared by heads at most, 1 where it cannot be."""
        return self._units[1]

    @cached_property
    def _units(self) -> tuple[int, int]:
        try:
            annotated = Annotate(Plan.context_parallel((0, 1)), wants_values=False)(self.analysed)
            Deduce()(annotated)
        except (PlanError, DeductionError):
            return 1, 1
        of_sequence = max((factor.size or factor.hint for factor in annotated.sequence), default=1)
        heads = exchanged_classes(self.graph, self.factors) if of_sequence > 1 else ()
        return of_sequence, min((c.size or 1 for c in heads), default=1)

    @cached_property
    def loss_type(self) -> LossType:
        """Return what the loss is: a proven sum over rows is shared out to ranks, any other is one device's for all."""
        return loss_type(self.analysed, self.batch_axis)

    @property
    def row_dims(self) -> RowDims:
        """Return which dim of each input counts the rows of the batch; inputs without rows are left out."""
        return self.graph.row_dims

    def num_rows(self, tensors: Mapping[str, Tensor]) -> int:
        """Return the rows of a batch, or of a part of it, given by input name.

        Raises:
            BatchError: inputs have different numbers of rows.
        """
        return count_rows(tensors, self.row_dims)

    def longest(self, tensors: Mapping[str, Tensor]) -> int:
        """Return the largest size of a batch that the graph leaves open, rows aside: the sequence length."""
        return max((int(tensors[name].shape[dim]) for name, dim in self._sizes.open_dims), default=0)

    @property
    def mixes_rows(self) -> bool:
        """Tell whether rows meet in the middle of the model (or its batch is fixed): no micro-batches then."""
        return self.batch_axis is None or self.batch_axis.talks

    @property
    def summed_over_rows(self) -> tuple[fx.Node, ...]:
        """Return the values that replicas sum in the middle of a step, and those whose cotangents they sum."""
        return () if self.batch_axis is None else self.batch_axis.exchanged

    @cached_property
    def batch_axis(self) -> AxisDeduction | None:
        """Return how values lie where rows are spread over replicas; None where they cannot be."""
        rows = frozenset(factor for factor in self.factors.classes if factor.is_batch)
        if self.graph.batch_symbol is None:
            return None
        try:
            return deduce_batch_axis(self.graph, self.factors, self.flow, rows)
        except DeductionError:
            return None

    @once
    def work_shares(self, split: Split = ()) -> WorkShares:
        """Return what a tensor parallel group shares of this program if it cuts these dims first.

        Raises `PlanError` where a parameter has no such dim.
        """
        return work_shares(self.analysed, split)

    @property
    def expert_splits(self) -> tuple[Split, ...]:
        """Return how a group is asked to split experts, if it would not by itself; empty where there are none."""
        return expert_splits(self.analysed, self.work_shares().classes)

    @once
    def wide_work_shares(self, split: Split = ()) -> WorkShares | None:
        """Return what a group shares of more devices than what it cuts has parts; None where none can be so large.

        Raises `PlanError` where a parameter has no such dim.
        """
        return wide_work_shares(self.analysed, split)

    @once
    def larger_work_shares(self, split: Split) -> WorkShares | None:
        """Return what a group shares of more devices than what it cuts besides has parts, which it leaves whole.

        None where none can be so large. Raises `PlanError` where a parameter has no such dim.
        """
        return larger_work_shares(self.analysed, split)


AS_IT_STANDS = OpOverrides()


def make_program(graph: Graph, frozen: frozenset[str], overrides: OpOverrides = AS_IT_STANDS) -> Program:
    """Rewrite a captured graph, with ops as `overrides` say, and analyse the result; parameters in `frozen` are not
    trained."""
    return Program(run_pass(Analyse(frozen), run_rewrites(graph, rewrites_for(overrides))))


def deduction_weights(program: Program) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return what deduction weighs ways by: bytes of values, and work that travels; of this rank's example."""
    return node_bytes(program.graph), travelling_work(program.graph, program.factors)


def deduce_program(program: Program, plan: Plan, *, wants_values: bool, deduce: Deduce | None = None) -> DeducedGraph:
    """Put a plan on a program and deduce every value's state; without `deduce`, for typical links."""
    return run_pass(deduce or Deduce(), run_pass(Annotate(plan, wants_values), program.analysed))


def _fingerprint(graph: Graph) -> str:
    """Return a short hash that is equal where the same graph was captured, whatever the example's sizes.

    Numbers in it count, but for whole ones where the example has fixed the batch.
    """
    lines = told_nodes(graph.graph, (*CONSTANTS, int) if graph.takes_any_rows else CONSTANTS)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]


def same_constants(one: Graph, other: Graph) -> bool:
    """Tell whether two graphs have the same constants, with the same values."""
    own, others = one.constants, other.constants
    return own.keys() == others.keys() and all(torch.equal(own[name], others[name]) for name in own)


def _raise_any(misfit: str) -> None:
    if misfit:
        raise BatchError(misfit)


def input_shapes(leaves: Iterable[Leaf]) -> Shapes:
    """Return what inputs are expected to be."""
    return {leaf.name: tuple(map(_number_or_expression, meta.shape(leaf.node))) for leaf in leaves}


def _number_or_expression(size: meta.Size) -> Any:
    found = meta.expression(size)
    return found if isinstance(found, sympy.Expr) and found.free_symbols else int(found)


def bind(shapes: Shapes, tensors: Mapping[str, torch.Tensor]) -> dict[sympy.Symbol, int]:
    """Return what each symbol of the inputs' shapes stands for in this batch.

    Raises:
        BatchError: an input is missing, has another rank, or a size that the captured graph fixes.
    """
    bindings: dict[sympy.Symbol, int] = {}
    for name, expected in shapes.items():
        actual = tensors[name].shape
        if len(actual) != len(expected):
            raise BatchError(
                f"input {name!r} has {len(actual)} dims {tuple(actual)}, but the model was captured with "
                f"{len(expected)}\nhint: pass an example batch of that form to hetu_fx.auto_parallelize"
            )
        for dim, size in enumerate(expected):
            if size.__class__ is not int or size != actual[dim]:
                _bind_size(bindings, name, dim, size, int(actual[dim]))
    return bindings


def _bind_size(bindings: dict[sympy.Symbol, int], name: str, dim: int, expected: Any, actual: int) -> None:
    if isinstance(expected, sympy.Symbol):
        expected = bindings.setdefault(expected, actual)
    elif isinstance(expected, sympy.Expr) and expected.free_symbols:
        expected = expected.subs(bindings)
        if expected.free_symbols:
            return
    if int(expected) != actual:
        raise BatchError(
            f"dim {dim} of input {name!r} has size {actual}, but the captured graph needs {int(expected)} there\n"
            f"hint: pad the batch to that size, or call hetu_fx.auto_parallelize with an example of the new size"
        )


def evaluate(shape: LogicalShape, bindings: Bindings) -> tuple[int, ...]:
    """Return a logical shape in numbers; every micro-batch asks for those of all that its stage hands on."""
    known = frozenset(bindings.items())
    return tuple(int(_in_numbers(size, known)) if isinstance(size, sympy.Expr) else size for size in shape)


@lru_cache(maxsize=4096)
def _in_numbers(expression: sympy.Expr, bindings: frozenset[tuple[sympy.Symbol, int]]) -> Any:
    return expression.subs(dict(bindings))
