"""What replicas of an eager module have made, told to all ranks: a module that runs as it is may do anything.

Every rank learns in every step what the others' outputs look like and whether their forward failed, so that a replica
without rows can return what the others do, and all ranks raise together.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from hetu_fx.annotations.annotation import Sharding
from hetu_fx.comm_ops.wire.consensus import of_all
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import StateError
from hetu_fx.graph.containers import Constant, Opaque, TensorSlot, Tree, map_leaves, walk, without_opaque
from hetu_fx.plans.plan import Plan
from hetu_fx.switching.eager.module import EagerOutput
from hetu_fx.switching.step.outputs import ValueRoute
from hetu_fx.switching.step.row_exchange import value_source, value_target
from hetu_fx.switching.step.rows import RowPlan

WAY_OUT = 'or take no other outputs than the loss: hetu_fx.auto_parallelize(..., outputs="loss")'


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of one output."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class OutputForm:
    """What one replica's output looks like.

    Attributes:
        tree: its structure, objects of unknown types left out.
        values: its tensors but the loss.
        loss_name: where the loss stands; empty if there is none.
        loss_dtype: the loss's.
    """

    tree: Tree
    values: Mapping[str, Spec]
    loss_name: str
    loss_dtype: torch.dtype

    @property
    def constants(self) -> dict[str, object]:
        """Return the plain values in the output by name."""
        return {leaf.name: leaf.value for leaf in walk(self.tree) if isinstance(leaf, Constant)}

    def alike(self) -> OutputForm:
        """Return what must be alike on all replicas: sizes and plain values may differ."""
        values = {name: replace(spec, shape=(len(spec.shape),)) for name, spec in self.values.items()}
        return replace(self, tree=_without_constants(self.tree, self.constants), values=values)


def form_of_output(output: EagerOutput) -> OutputForm:
    """Return the form of what this rank's replica made."""
    values = {name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in output.values.items()}
    dtype = torch.float64 if output.loss is None else output.loss.dtype
    return OutputForm(without_opaque(output.tree), values, output.loss_name, dtype)


def tell(table: GroupTable, mine: OutputForm | Exception | None) -> dict[int, OutputForm]:
    """Tell all ranks what this one has made (None: it had no rows), or that it failed; collective.

    Returns the forms by rank.

    Raises:
        Exception: this rank's own.
        StateError: another rank failed, or its output cannot be told; on all other ranks.
    """
    packed, problem = _packed(mine)
    everyone = of_all(table, packed)
    if problem is not None:
        raise problem
    failed = [f"rank {rank}: {told}" for rank, told in enumerate(everyone) if isinstance(told, str)]
    if failed:
        raise StateError(f"the module failed on another rank: {'; '.join(failed)}")
    return {rank: pickle.loads(told) for rank, told in enumerate(everyone) if isinstance(told, bytes)}


def _packed(mine: OutputForm | Exception | None) -> tuple[bytes | str | None, Exception | None]:
    if mine is None:
        return None, None
    if isinstance(mine, Exception):
        return f"{type(mine).__name__}: {mine}", mine
    try:
        return pickle.dumps(mine), None
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        problem = StateError(
            f"the module's output cannot be described to the other ranks: {error}; define the class of its output at "
            f"the top level of a module"
        )
        return f"{type(problem).__name__}: {problem}", problem


def common_form(forms: Mapping[int, OutputForm]) -> OutputForm:
    """Return the form that all replicas' outputs have; plain values that differ between replicas are None.

    Raises:
        StateError: on all ranks, if their structures, losses, or dtypes differ.
    """
    (first_rank, first), *others = forms.items()
    for rank, form in others:
        if form.alike() != first.alike():
            raise StateError(
                f"the module's outputs differ in form between replicas: rank {first_rank} made {_told(first)}, rank "
                f"{rank} made {_told(form)}; return the same structure for any rows"
            )
    return replace(first, tree=_without_constants(first.tree, _differing_constants(forms)))


def _differing_constants(forms: Mapping[int, OutputForm]) -> dict[str, dict[int, object]]:
    """Return the plain values that are not the same on all replicas, by name and rank."""
    columns = {rank: form.constants for rank, form in forms.items()}
    names = next(iter(columns.values()))
    values = {name: {rank: constants.get(name) for rank, constants in columns.items()} for name in names}
    return {name: by_rank for name, by_rank in values.items() if len(set(map(repr, by_rank.values()))) > 1}


def _without_constants(tree: Tree, names: Mapping[str, object]) -> Tree:
    def blank(leaf: TensorSlot | Constant | Opaque) -> Tree:
        return Constant(leaf.name, None) if isinstance(leaf, Constant) and leaf.name in names else leaf

    return map_leaves(tree, blank)


def _told(form: OutputForm) -> str:
    values = ", ".join(f"{name} {spec.dtype}{list(spec.shape)}" for name, spec in form.values.items())
    return f"({values or 'no tensors'}; loss {form.loss_name or 'none'}; {sorted(form.constants)})"


def eager_routes(forms: Mapping[int, OutputForm], plan: Plan, rows: RowPlan, *, shared: bool) -> tuple[ValueRoute, ...]:
    """Return how each output but the loss goes back to the ranks whose rows it belongs to; the same on all ranks.

    Raises:
        StateError: on all ranks, for an output of several replicas that has not one entry per row.
    """
    for name, values in _differing_constants(forms).items():
        raise StateError(
            f"output {name!r} is {values} on ranks {sorted(values)}: a plain value of each replica's rows alone; "
            f"return a tensor with one entry per row, {WAY_OUT}"
        )
    specs = {name: {rank: form.values[name] for rank, form in forms.items()} for name in _first(forms).values}
    return tuple(_route(name, by_rank, plan, rows, shared) for name, by_rank in specs.items())


def _first(forms: Mapping[int, OutputForm]) -> OutputForm:
    return next(iter(forms.values()))


def _route(name: str, specs: Mapping[int, Spec], plan: Plan, rows: RowPlan, shared: bool) -> ValueRoute:
    held = {pipeline.devices[0]: len(part) for pipeline, part in zip(plan.pipelines, rows.pipelines, strict=True)}
    per_row = all(spec.shape[:1] == (held[rank],) for rank, spec in specs.items())
    rests = {spec.shape[1:] for spec in specs.values()}
    first = next(iter(specs.values()))
    if (not per_row or len(rests) > 1) and len(plan.pipelines) > 1:
        shapes = {rank: list(spec.shape) for rank, spec in specs.items()}
        raise StateError(
            f"output {name!r} has shapes {shapes} by rank, whose replicas have {held} rows: replicas' outputs other "
            f"than the loss can be joined only along rows; return one entry per row, {WAY_OUT}"
        )
    rows_dim = 0 if per_row else None
    groups = [pipeline.devices for pipeline in plan.pipelines]
    source = value_source(groups, [Sharding(()) for _ in groups], rows_dim, rows)
    shape = (rows.total, *first.shape[1:]) if per_row else first.shape
    return ValueRoute(name, source, value_target(rows, rows_dim, shared=shared), shape, first.dtype, rows_dim)
