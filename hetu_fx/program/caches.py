"""Tell a cache that a forward fills (`if self.grid is None: self.grid = ...`) from state, by calling it twice.

What is kept must follow from sizes and constants alone (also from buffers that are neither saved nor written), and a
call that finds it must make the same as one that does not: two graphs of fixed sizes are compared, each of a call after
another one, which has the same sizes, larger or smaller ones, other plain values, or the other mode. Such a cache is
made anew by each captured graph, and left alone where it is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from types import EllipsisType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn

from hetu_fx.base.dtypes import carries_gradient
from hetu_fx.base.torch_private import buffer_slots, tree_leaves
from hetu_fx.errors import CaptureError
from hetu_fx.graph import meta
from hetu_fx.graph.bind import Batch, flatten_batch, output_and_loss
from hetu_fx.graph.calls import evaluate_op, is_random, is_unset
from hetu_fx.graph.capture import in_mode
from hetu_fx.graph.containers import Constant, Tree, map_leaves, unflatten, walk
from hetu_fx.graph.edit import ancestors
from hetu_fx.graph.graph import Graph, LeafKind, OutputKind
from hetu_fx.graph.leaves.leaf_ops import told_arguments
from hetu_fx.graph.tracing.contents import PLAIN
from hetu_fx.program.program import Program, evaluate
from hetu_fx.program.reads import Access

LossFn = Callable[..., Any]
Capture = Callable[[nn.Module, Batch], Graph]
ConstantOf = Callable[[str], Tensor | None]

_MOST_ELEMENTS = 2**24  # of all values of a graph that are computed to be compared
_ULPS = 8
_PLAIN = (*PLAIN, slice, EllipsisType)


class TwoCalls(nn.Module):
    """Calls a model twice, and returns what both calls make and what is kept after each.

    Args:
        model: the user's.
        loss_fn: what makes the loss, if the model does not.
        kept: attributes that its forward reads and leaves otherwise; they are put back at the end.
        forgets: put them back between the calls, too.
        other_mode: make the first call in evaluation, where the model is in training, or the reverse.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        kept: Sequence[Access],
        *,
        forgets: bool,
        other_mode: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.forgets, self.other_mode = model, forgets, other_mode
        # In an object, which torch.export neither takes for state nor gives back as it was: what makes the loss, what
        # the forward leaves otherwise, and what is kept besides tensors after each call of the last trace.
        self.about = SimpleNamespace(loss_fn=loss_fn, kept=kept, outlines=list[str]())

    def constant_of(self, name: str) -> Tensor | None:
        """Return a buffer of this module, on the host; None where that is kept itself, or has no values."""
        path, _, own = name.rpartition(".")
        slots = buffer_slots(self.get_submodule(path))
        buffer = slots[own]
        is_kept = any(access.owner is slots and access.name == own for access in self.about.kept)
        return None if is_kept or buffer is None or buffer.is_meta else buffer.detach().cpu()

    def forward(self, first: Batch, second: Batch) -> dict[str, Any]:
        """Return the outputs of both calls, and the tensors that are kept after the first, and after both."""
        self.about.outlines.clear()
        before = [access.as_now() for access in self.about.kept]  # each trace has buffers of its own
        try:
            with in_mode(self.model, self.model.training is not self.other_mode):
                made = self._call(first)
            kept = self._kept()
            if self.forgets:
                _put_back(before)
            return {"first": made, "kept": kept, "second": self._call(second), "still": self._kept()}
        finally:
            _put_back(before)

    def _call(self, batch: Batch) -> Any:
        made = output_and_loss(self.model, self.about.loss_fn, batch)
        return made[0] if self.about.loss_fn is None else made

    def _kept(self) -> list[Tensor]:
        """Return the tensors that are kept."""
        leaves = [leaf for access in self.about.kept for leaf in tree_leaves(access.now)]
        self.about.outlines.append(" ".join(repr(leaf) if isinstance(leaf, _PLAIN) else "*" for leaf in leaves))
        return [_as_tensor(leaf) for leaf in leaves if not isinstance(leaf, _PLAIN)]


def _put_back(before: Iterable[Access]) -> None:
    for access in before:
        access.put_back()


def _as_tensor(leaf: Any) -> Tensor:
    """Return a tensor of what is kept. Raises `CaptureError` for an object of which nothing is known."""
    if isinstance(leaf, Tensor):
        return leaf.detach()
    if isinstance(leaf, meta.SYMBOLIC):
        return torch.scalar_tensor(leaf)  # type: ignore[arg-type]
    raise CaptureError(f"an object of type {type(leaf).__name__} is kept")


def are_caches(
    kept: Sequence[Access],
    model: nn.Module,
    loss_fn: LossFn | None,
    batch: Batch,
    program: Program,
    capture: Capture,
) -> bool:
    """Tell whether attributes that a forward has left otherwise are caches, which change nothing that it makes.

    Args:
        kept: the attributes, which have again what they had before.
        model: the user's.
        loss_fn: what makes the loss, if the model does not.
        batch: the example.
        program: of a call that has found them as they were.
        capture: gives the graph of another module, of which the model is a part, for a batch of just these sizes.
    """

    keeps, forgets = (TwoCalls(model, loss_fn, kept, forgets=forgets) for forgets in (False, True))
    in_other_mode = [TwoCalls(model, loss_fn, kept, forgets=forgets, other_mode=True) for forgets in (False, True)]

    def graph(calls: TwoCalls, other: Batch) -> Graph | None:
        try:
            return capture(calls, (other, batch))
        except CaptureError:
            return None

    def agree(other: Batch, keeps: TwoCalls, forgets: TwoCalls) -> bool | None:
        """Tell whether a call after one of another batch makes the same; None where the forward takes no such batch."""
        forgetting = graph(forgets, other)
        keeping = None if forgetting is None else graph(keeps, other)
        return None if forgetting is None else keeping is not None and alike(keeping, forgetting)

    def alike(keeping: Graph, forgetting: Graph) -> bool:
        return _are_alike(keeping, forgetting, keeps.constant_of)

    keeping, forgetting = graph(keeps, batch), graph(forgets, batch)
    if keeping is None or forgetting is None or not alike(keeping, forgetting):
        return False
    if len(set(keeps.about.outlines)) != 1 or not _stays(keeping, keeps.constant_of):
        return False
    if agree(batch, *in_other_mode) is False:
        return False
    for others, is_open in _other_first_batches(batch, program):
        found = next((said for other in others if (said := agree(other, keeps, forgets)) is not None), None)
        if found is False or (found is None and is_open):
            return False
    return True


def _other_first_batches(batch: Batch, program: Program) -> Iterator[tuple[Iterable[Batch], bool]]:
    """Yield what else the first call is given: other sizes, larger and smaller, and other plain values, one by one.

    Of the batches, which differ from the example in one way, the first is tried that the forward takes; a forward that
    takes none of them is not known if the graph takes batches that differ so, which is told beside them.
    """
    tree, tensors = flatten_batch(batch)
    known = program.bind({name: tensors[name] for name in program.shapes})

    def resized(changed: Any, number: int) -> Batch:
        shapes = {
            name: tuple(number if size == changed else size for size in shape) for name, shape in program.shapes.items()
        }
        sizes = {**known, changed: number}
        made = {name: tensors[name].new_zeros(evaluate(shape, sizes)) for name, shape in shapes.items()}
        other: Batch = unflatten(tree, {**tensors, **made})
        return other

    sizes = {size for shape in program.shapes.values() for size in shape}
    for changed in sorted((size for size in sizes if size.__class__ is not int or size > 1), key=str):
        number = known.get(changed, changed)
        if isinstance(number, int):  # else it is made of others
            for numbers in ((3 * number, 2 * number, number + 1), (number // 2, number - 1)):
                others = [resized(changed, other) for other in numbers if other > 1]
                yield others, changed in known and bool(others)
    for leaf in walk(tree):
        if isinstance(leaf, Constant) and isinstance(leaf.value, bool | int | float):
            other = replace(leaf, value=not leaf.value if isinstance(leaf.value, bool) else leaf.value + 1)
            yield [unflatten(_with_leaf(tree, leaf, other), tensors)], False


def _with_leaf(tree: Tree, leaf: Constant, other: Constant) -> Tree:
    return map_leaves(tree, lambda one: other if one is leaf else one)


def _stays(keeping: Graph, constant_of: ConstantOf) -> bool:
    """Tell whether the same tensors are kept after a second call, and follow from sizes and constants."""
    values = _Values(keeping, {}, constant_of)
    kept, still = _outputs(keeping, "kept").values(), _outputs(keeping, "still").values()
    return [values.numbers[x] for x in kept] == [values.numbers[x] for x in still] and values.steady.issuperset(kept)


def _outputs(graph: Graph, *keys: str) -> dict[str, fx.Node]:
    """Return the outputs under some keys of what two calls return, by name."""
    pairs = zip(graph.outputs, graph.output_values, strict=True)
    return {leaf.name: node for leaf, node in pairs if leaf.name.partition(".")[0] in keys}


def _made(graph: Graph) -> dict[str, fx.Node]:
    """Return all outputs but what is kept: what calls return, what they write to buffers, what they check."""
    named = {leaf.name: node for leaf, node in zip(graph.outputs, graph.output_values, strict=True)}
    return {name: node for name, node in named.items() if name not in _outputs(graph, "kept", "still")}


def _are_alike(keeping: Graph, forgetting: Graph, constant_of: ConstantOf) -> bool:
    """Tell whether both calls make the same in two graphs."""
    numbers = dict[Any, int]()
    values = _Values(keeping, numbers, constant_of), _Values(forgetting, numbers, constant_of)
    made, others = _made(keeping), _made(forgetting)
    if not made or made.keys() != others.keys():
        return False
    pairs = [(node, others[name]) for name, node in made.items()]
    seen = set[tuple[fx.Node, fx.Node]]()
    while pairs:
        pair = one, other = pairs.pop()
        if pair in seen or values[0].numbers[one] == values[1].numbers[other]:
            continue
        seen.add(pair)
        if one in values[0].steady and other in values[1].steady:
            if not _equal(values[0].computed(one), values[1].computed(other)):
                return False
        elif values[0].form(one) == values[1].form(other):
            pairs += zip(one.all_input_nodes, other.all_input_nodes, strict=True)
        else:
            return False
    return True


class _Values:
    """The values of a graph: which are the same as others, and which follow from constants alone.

    Args:
        graph: of fixed sizes; its ops have no effects.
        known: the numbers of values by what they are, of several graphs.
        constant_of: gives a buffer by its name, if it is a constant.

    Attributes:
        numbers: one for each node; values of one number are the same.
        steady: the values that follow from constants alone, as all sizes are.
    """

    def __init__(self, graph: Graph, known: dict[Any, int], constant_of: ConstantOf) -> None:
        self.graph = graph
        self._constants = dict(_constants(graph, constant_of))
        self._computed: dict[fx.Node, Any] = {}
        self._elements = 0
        self._draws = dict(zip(filter(is_random, graph.graph.nodes), count()))
        self.numbers: dict[fx.Node, int] = {}
        self.steady: set[fx.Node] = set()
        for node in graph.graph.nodes:
            if node.op != "output":
                key = (self.form(node), tuple(self.numbers[given] for given in node.all_input_nodes))
                self.numbers[node] = known.setdefault(key, len(known))
            if node in self._constants or (_is_steady_op(node) and self.steady.issuperset(node.all_input_nodes)):
                self.steady.add(node)

    def form(self, node: fx.Node) -> Any:
        """Return what a value is, but for what it is made of."""
        if node.op == "placeholder":
            leaf = self.graph.leaf_of(node)
            if leaf.kind is not LeafKind.CONSTANT:
                return leaf.kind, leaf.name
            value = self.graph.constants[leaf.name].detach().cpu().contiguous()
            return leaf.kind, value.dtype, tuple(value.shape), value.view(-1).view(torch.uint8).numpy().tobytes()
        order = {given: place for place, given in enumerate(node.all_input_nodes)}
        literals = fx.node.map_arg(told_arguments(node), lambda given: f"%{order[given]}")
        return node.target, repr(literals), self._draws.get(node)

    def computed(self, node: fx.Node) -> Any:
        """Compute a steady value; None where it is too large."""
        needed = ancestors([node], lambda one: () if one in self._computed else one.all_input_nodes)
        with torch.no_grad():
            for one in self.graph.graph.nodes:
                if one in needed and one not in self._computed:
                    self._computed[one] = self._compute(one)
        return self._computed[node]

    def _compute(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._constants[node]
        self._elements += meta.numel(node) if meta.is_tensor(node) else 0
        given = [self._computed[one] for one in node.all_input_nodes]
        if self._elements > _MOST_ELEMENTS or any(value is None for value in given):
            return None
        return evaluate_op(node, self._computed)


def _constants(graph: Graph, constant_of: ConstantOf) -> Iterator[tuple[fx.Node, Tensor]]:
    """Yield the leaves that are the same in every call: constants, and buffers that are neither saved nor written."""
    written = {leaf.name for leaf, _ in graph.outputs_of(OutputKind.BUFFER_UPDATE)}
    for leaf in graph.leaves:
        if leaf.kind is LeafKind.CONSTANT:
            yield leaf.node, graph.constants[leaf.name]
        elif leaf.kind is LeafKind.BUFFER and not leaf.persistent and leaf.name not in written:
            buffer = constant_of(leaf.name)
            if buffer is not None:
                yield leaf.node, buffer


def _is_steady_op(node: fx.Node) -> bool:
    return node.op == "call_function" and not is_random(node) and not is_unset(node)


def _equal(one: Any, other: Any) -> bool:
    """Tell whether two values are the same but for the last bits: how ops round depends on where a part lies."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is not None and type(one) is type(other) and one == other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    rounding = _ULPS * torch.finfo(one.dtype).eps if carries_gradient(one.dtype) else 0.0
    return torch.allclose(one, other, rtol=rounding, atol=0.0, equal_nan=True)
