"""The user's module as it is: which of its inputs have rows, calls of it on some of them, and what replicas have made.

What they have made is told to all ranks, as a module that runs as it is may do anything. Every rank learns in every
step what the others' outputs look like and whether their forward failed, so that a replica without rows can return what
the others do, and all ranks raise together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hetu_fx.annotations.annotation import Sharding
from hetu_fx.base.dtypes import is_real
from hetu_fx.comm_ops.wire.consensus import LocalFacts, all_gather_object
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import BatchError, StateError
from hetu_fx.graph.bind import Batch, GivenBatch, LossCall, as_call
from hetu_fx.graph.containers import (
    LOSS,
    Constant,
    Entries,
    Items,
    Leaf,
    TensorSlot,
    Tree,
    WithheldNumber,
    flatten,
    loss_among,
    map_leaves,
    unflatten,
    walk,
    without_opaque,
)
from hetu_fx.graph.row_dims import NOTHING_ASKED, AskedRowDims, RowDims, count_rows, find_row_dims, with_rows
from hetu_fx.plans.plan import Plan
from hetu_fx.program.batch import batch_form, batch_from_call
from hetu_fx.program.structure import Structure, told_hook
from hetu_fx.program.tracer import Forward
from hetu_fx.switching.step.batches import longest_side, needing_gradients, sizes_besides_rows
from hetu_fx.switching.step.frame import ValueRoute
from hetu_fx.switching.step.rows import RowPlan, at_pipelines, at_ranks

OUTPUT = "output"


@dataclass(frozen=True)
class EagerBatch:
    """One rank's batch of a step.

    Attributes:
        tree: its structure.
        tensors: its tensors by name.
        row_dims: the dim that counts rows of each tensor that has some.
        facts: what the other ranks must know.
    """

    tree: Tree
    tensors: Mapping[str, Tensor]
    row_dims: RowDims
    facts: LocalFacts

    @property
    def needing(self) -> Mapping[str, Tensor]:
        """Return the inputs that need a gradient."""
        return needing_gradients(self.tensors, self.row_dims)


@dataclass(frozen=True)
class EagerOutput:
    """What the module made of some rows.

    Attributes:
        tree: structure of the model's own output; a bare tensor has the name "loss" or "output".
        values: its tensors by name, the loss left out.
        loss_name: where the loss stands; empty if there is none.
        loss: a mean over the rows.
    """

    tree: Tree
    values: Mapping[str, Tensor]
    loss_name: str = ""
    loss: Tensor | None = None


class EagerModule:
    """Calls a module's own forward on some rows of a batch.

    Which dims count rows is as asked, or as the sizes of the example batch tell (of inputs that the example lacks,
    those of the first batch that has them).

    Attributes:
        structure: of the module when a batch was last read.
        in_lists: entries of lists in the example that were taken to have rows by their sizes alone: entries of a list
            may as well be samples, as a detector's images are.
        row_bytes: of the example's tensors with rows.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        example: Batch,
        row_dims: AskedRowDims = NOTHING_ASKED,
    ) -> None:
        self.model, self.loss_fn, self._asked = model, loss_fn, row_dims
        self.structure = Structure(model)
        self.become(vars(model).get("forward"))
        self._known: dict[str, int | None] = {}
        args, kwargs = as_call(example)
        batch = self.read(args, kwargs, training=True)  # notes which inputs have rows
        row_dims.check_names(batch.tensors)
        self.row_bytes = sum(batch.tensors[name].nbytes for name in batch.row_dims)
        self.in_lists = tuple(n for n in _in_lists(batch.tree) if n in batch.row_dims and not row_dims.has(n))

    def become(self, replaced: Forward | None) -> None:
        """Call this in the place of the model's forward from now on; None: its class's."""
        self.replaced = replaced
        self.forward: Forward = replaced or MethodType(type(self.model).forward, self.model)
        self.signature = LossCall(self.forward, self.loss_fn).signature
        self._caller = _Caller(self.model, self.forward, self.loss_fn)
        self._told = f" by {told_hook(replaced)}" if replaced else ""

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> EagerBatch:
        """Read the arguments of a call of the model.

        Raises:
            BatchError: they do not fit the forward, or have no rows, or not the same number of them.
        """
        if not self.structure.holds():
            self.structure = Structure(self.model)
        given = GivenBatch.of(batch_from_call(self.signature, args, kwargs))
        given.check_no_objects()
        tree, tensors = given.tree, given.tensors
        dims = self._row_dims(tensors)
        sizes = sizes_besides_rows(tensors, dims)
        needing = sorted(needing_gradients(tensors, dims))
        facts = LocalFacts(
            rows=count_rows(tensors, dims),
            # All ranks must cut the same inputs by rows.
            signature=f"{batch_form(given, training)} state {self.structure.digest} rows of {dims} "
            f"gradients of {needing}{self._told}",
            sizes=tuple(sizes.values()),
            size_names=tuple(sizes),
            longest=longest_side(tensors, dims),
            state=lambda: {**given.plain_facts(), **self.structure.facts},
        )
        return EagerBatch(tree, tensors, dims, facts)

    def _row_dims(self, tensors: Mapping[str, Tensor]) -> RowDims:
        """Return the dims that count rows, as they were found when an input was first seen."""
        if tensors.keys() - self._known.keys():
            found = find_row_dims(tensors, self._asked)
            self._known = {name: found.get(name) for name in tensors} | self._known
        dims = {name: dim for name in sorted(tensors) if (dim := self._known[name]) is not None}
        lost = [name for name, dim in dims.items() if tensors[name].dim() <= dim]
        if lost or not dims:
            raise BatchError(
                f"inputs {lost or sorted(tensors)} have no rows, but had some in the example batch\nhint: give one row "
                f"per sample in each input that had as many as the first one in the example, or name the dims that "
                f"count rows by row_dims"
            )
        return dims

    def call(self, batch: EagerBatch, rows: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> EagerOutput:
        """Run the module on `rows` of the row inputs, the batch's other inputs, and `parameters` by first name.

        Buffers are the module's own, and are written where it writes them. Ambient autocast and torch's random state
        apply as to any call of a module.
        """
        arguments = unflatten(batch.tree, {**batch.tensors, **rows})
        named = {f"model.{name}": tensor for name, tensor in parameters.items()}
        made, loss = functional_call(self._caller, named, (arguments,))
        tree, tensors = flatten(made)
        return _with_loss(tree, tensors, loss)


def _in_lists(tree: Tree) -> Iterator[str]:
    """Yield the names of tensors that are entries of lists."""
    for child in tree.children if isinstance(tree, Items | Entries) else ():
        if isinstance(child, TensorSlot) and isinstance(tree, Items) and tree.type is list:
            yield child.name
        yield from _in_lists(child)


class _Caller(nn.Module):
    """Runs the model's own forward: calling the model itself would come back to hetu_fx."""

    def __init__(self, model: nn.Module, forward: Forward, loss_fn: Callable[..., Any] | None) -> None:
        super().__init__()
        self.model, self.own_forward = model, forward
        # Not as a submodule: what a loss module holds is no state of the model.
        self.loss_of = None if loss_fn is None else partial(loss_fn)
        self.call = LossCall(forward, loss_fn)

    def forward(self, arguments: Any) -> tuple[Any, Tensor | None]:
        args, kwargs = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
        output = self.own_forward(*args, **self.call.of_model(kwargs))
        return output, None if self.loss_of is None else self.loss_of(output, *args, **self.call.of_loss(kwargs))


def _with_loss(tree: Tree, tensors: Mapping[str, Tensor], given: Tensor | None) -> EagerOutput:
    """Find the loss: what loss_fn gave, else that among the outputs."""
    if given is not None and not is_loss(given):
        raise BatchError(
            f"loss_fn gave a tensor of shape {tuple(given.shape)} and {given.dtype}\nhint: return a mean over rows"
        )
    numbers = [name for name, tensor in tensors.items() if is_loss(tensor)]
    trained = [name for name in numbers if tensors[name].requires_grad or not torch.is_grad_enabled()]
    name = LOSS if given is not None else loss_among(list(tensors), numbers, trained)
    loss = given if given is not None else tensors.get(LOSS if name is None else name)
    if name is None or loss is None:
        return EagerOutput(_named(tree, OUTPUT), {n or OUTPUT: t for n, t in tensors.items()})
    own = LOSS if given is None and name == "" else OUTPUT
    values = {n or OUTPUT: t for n, t in tensors.items() if n != name}
    return EagerOutput(_named(tree, own), values, name or LOSS, loss)


def _named(tree: Tree, name: str) -> Tree:
    """Give the slot of a bare tensor a name."""
    return TensorSlot(name) if tree == TensorSlot("") else tree


def is_loss(tensor: Tensor) -> bool:
    """Tell whether a tensor can be a loss: a floating-point scalar."""
    return tensor.dim() == 0 and is_real(tensor.dtype)


_OF_REPLICAS = (
    "it differs between replicas, as each has made it of its own rows\nhint: work it out outside of the forward"
)
_WAY_OUT = 'or take no other outputs than the loss: hetu_fx.auto_parallelize(..., outputs="loss")'


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
        size: what it amounts to: its loss, and the sizes of what has real numbers; may be no number.
    """

    tree: Tree
    values: Mapping[str, Spec]
    loss_name: str
    loss_dtype: torch.dtype
    size: float = 0.0

    @property
    def constants(self) -> dict[str, object]:
        """Return the plain values in the output by name."""
        return {leaf.name: leaf.value for leaf in walk(self.tree) if isinstance(leaf, Constant)}

    def alike(self) -> OutputForm:
        """Return what must be alike on all replicas: sizes and plain values may differ."""
        values = {name: replace(spec, shape=(len(spec.shape),)) for name, spec in self.values.items()}
        return replace(self, tree=_without_constants(self.tree, self.constants), values=values, size=0.0)


def form_of_output(output: EagerOutput, *, sized: bool = False) -> OutputForm:
    """Return the form of what this rank's replica made; `sized`: with what it amounts to, for which a host waits."""
    values = {name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in output.values.items()}
    dtype = torch.float64 if output.loss is None else output.loss.dtype
    return OutputForm(without_opaque(output.tree), values, output.loss_name, dtype, _size(output) if sized else 0.0)


def _size(output: EagerOutput) -> float:
    made = [tensor.detach().abs().double().sum() for tensor in output.values.values() if is_real(tensor.dtype)]
    return float(sum(made, torch.zeros(()) if output.loss is None else output.loss.detach().double()))


def check_same(forms: Mapping[int, OutputForm], dtypes: Iterable[torch.dtype]) -> None:
    """Refuse outputs that differ between replicas which all have run the same rows.

    Args:
        forms: of their outputs, by rank.
        dtypes: in which they compute: more than their rounding is a difference.

    Raises:
        StateError: on all ranks.
    """
    own = (form.loss_dtype for form in forms.values())
    rounding = max(torch.finfo(dtype).eps for dtype in (*dtypes, *own))
    sizes = {rank: form.size for rank, form in forms.items()}
    first, *others = sizes.values()
    if any(not _are_near(first, other, rounding) for other in others):
        raise StateError(
            f"replicas that all run the whole batch have made other values of it: losses and outputs amount to {sizes} "
            f"by rank, though each draws the same random numbers of torch, random and numpy.random\n"
            f"hint: let the module follow from its inputs, parameters and these generators alone, or use one device: "
            f"hetu_fx.Plan.single()"
        )


def _are_near(one: float, other: float, rounding: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return str(one) == str(other)
    return abs(one - other) <= math.sqrt(rounding) * max(abs(one), abs(other)) + rounding


def tell(table: GroupTable, mine: OutputForm | Exception | None) -> dict[int, OutputForm]:
    """Tell all ranks what this one has made (None: it had no rows), or that it failed; collective.

    Returns the forms by rank.

    Raises:
        Exception: this rank's own.
        StateError: another rank failed, or its output cannot be told; on all other ranks.
    """
    everyone = all_gather_object(table, f"{type(mine).__name__}: {mine}" if isinstance(mine, Exception) else mine)
    if isinstance(mine, Exception):
        raise mine
    failed = [f"rank {rank}: {told}" for rank, told in enumerate(everyone) if isinstance(told, str)]
    if failed:
        raise StateError(f"the module failed on another rank: {'; '.join(failed)}")
    return {rank: told for rank, told in enumerate(everyone) if isinstance(told, OutputForm)}


def common_form(forms: Mapping[int, OutputForm]) -> OutputForm:
    """Return the form that all replicas' outputs have; plain values that differ between replicas say so when used.

    Raises:
        StateError: on all ranks, if their structures, losses, or dtypes differ.
    """
    (first_rank, first), *others = forms.items()
    for rank, form in others:
        if form.alike() != first.alike():
            raise StateError(
                f"the module's outputs differ in form between replicas: rank {first_rank} made {_told(first)}, rank "
                f"{rank} made {_told(form)}\nhint: return the same structure for any rows"
            )
    return replace(first, tree=_without_constants(first.tree, _differing_constants(forms), named=True))


def _differing_constants(forms: Mapping[int, OutputForm]) -> dict[str, dict[int, object]]:
    """Return the plain values that are not the same on all replicas, by name and rank."""
    columns = {rank: form.constants for rank, form in forms.items()}
    names = next(iter(columns.values()))
    values = {name: {rank: constants.get(name) for rank, constants in columns.items()} for name in names}
    return {name: by_rank for name, by_rank in values.items() if len(set(map(repr, by_rank.values()))) > 1}


def _without_constants(tree: Tree, names: Mapping[str, object], *, named: bool = False) -> Tree:
    def blank(leaf: Leaf) -> Tree:
        if not isinstance(leaf, Constant) or leaf.name not in names:
            return leaf
        return Constant(leaf.name, WithheldNumber(leaf.name, _OF_REPLICAS) if named else None)

    return map_leaves(tree, blank)


def _told(form: OutputForm) -> str:
    values = ", ".join(f"{name} {spec.dtype}{list(spec.shape)}" for name, spec in form.values.items())
    return f"({values or 'no tensors'}; loss {form.loss_name or 'none'}; {sorted(form.constants)})"


def eager_routes(
    forms: Mapping[int, OutputForm], row_dims: RowDims, plan: Plan, rows: RowPlan, *, shared: bool
) -> tuple[ValueRoute, ...]:
    """Return how each output but the loss goes back to the ranks whose rows it belongs to; the same on all ranks.

    Where replicas have all run all rows, what has none comes back whole.

    Raises:
        StateError: on all ranks, for an output of several replicas that has not one entry per row, of their own rows.
    """
    for name, values in _differing_constants(forms).items():
        raise StateError(
            f"output {name!r} is {values} on ranks {sorted(values)}: a plain value of each replica's rows alone\n"
            f"hint: return a tensor with one entry per row, {_WAY_OUT}"
        )
    specs = {
        name: {rank: form.values[name] for rank, form in forms.items()} for name in next(iter(forms.values())).values
    }
    usual = set(row_dims.values()) <= {0}
    return tuple(_route(name, by_rank, plan, rows, shared, usual) for name, by_rank in specs.items())


def _route(name: str, specs: Mapping[int, Spec], plan: Plan, rows: RowPlan, shared: bool, usual: bool) -> ValueRoute:
    """Return the route of an output; its rows are dim 0 if they are so (as `usual`) in all inputs."""
    held = {pipeline.devices[0]: len(part) for pipeline, part in zip(plan.pipelines, rows.pipelines, strict=True)}
    first, found = next(iter(specs.values())), _dims_with_rows(specs, held)
    clear = found[:1] if usual and found[:1] == [0] else found
    is_whole = rows.repeats and not found and len({spec.shape for spec in specs.values()}) == 1
    if len(clear) != 1 and len(plan.pipelines) > 1 and not is_whole:
        shapes = {rank: list(spec.shape) for rank, spec in specs.items()}
        raise StateError(
            f"output {name!r} has shapes {shapes} by rank, whose replicas have {held} rows: replicas' outputs other "
            f"than the loss can be joined only along rows, and here dims {found} may count them\n"
            f"hint: return one entry per row, {_WAY_OUT}"
        )
    rows_dim = clear[0] if len(clear) == 1 else None
    groups = [pipeline.devices for pipeline in plan.pipelines]
    source = at_pipelines(groups, [Sharding(()) for _ in groups], rows_dim, rows)
    shape = first.shape if rows_dim is None else with_rows(first.shape, rows_dim, rows.total)
    return ValueRoute(name, source, at_ranks(rows, rows_dim, shared=shared), shape, first.dtype, rows_dim)


def _dims_with_rows(specs: Mapping[int, Spec], held: Mapping[int, int]) -> list[int]:
    """Return the dims along which the replicas' outputs can be joined: as large as each has rows, all others alike."""
    first = next(iter(specs.values()))
    return [
        dim
        for dim in range(len(first.shape))
        if all(spec.shape == with_rows(first.shape, dim, held[rank]) for rank, spec in specs.items())
    ]
