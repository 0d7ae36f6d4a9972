"""Whether inputs can be filled up to greater sizes without a trace in what the model makes of them: found by trying.

Ranks that pad their own rows have sequences of unequal lengths. Whether a program does the same for the longer rows
depends on all of it: masks that follow from inputs or from places, labels that the loss leaves out, which token a head
reads, what a mean divides by. So the program is run on a few tokens, in double precision and on random parameters, once
as they are and once filled up; what it returns must be equal where both have it.

Whether the sequences of a packed row can be kept apart, and whether what fills a row is seen by it. Where tokens of a
row meet, parameters still to come, something must say which may: an attention mask. In a packed row it has to follow
from position ids, which restart with each sequence, and is made for such a row to see. In a row that is filled up at
its end a causal mask will do. Any other op in which tokens meet (a convolution, a recurrence, a mean) knows nothing of
sequences.

What counts tokens along a row, or compares them, tells where in its row a token stands. Masks may be made of that, as
they are checked for sequences; an activation that learns it otherwise (a table of positions that is read by counting up
instead of by position ids) is another one for a sequence that does not stand first.

Whether an attention mask keeps the sequences of a packed row apart: found by making it for such a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from hetu_fx.base.device_types import HOST
from hetu_fx.base.dtypes import carries_gradient, in_double, is_real
from hetu_fx.base.frameworks import label_inputs, position_input
from hetu_fx.base.torch_private import OpOverload, short_name
from hetu_fx.batches.packing import IGNORED, Filling
from hetu_fx.deduction.factors.factors import FactorMap, OpFactors
from hetu_fx.graph import meta
from hetu_fx.graph.calls import argument, evaluate_op
from hetu_fx.graph.edit import ancestors, descendants
from hetu_fx.graph.graph import Graph, Leaf, LeafKind, OutputKind
from hetu_fx.graph.simplify import ATTENTION
from hetu_fx.program.program import Bindings, Program, evaluate
from hetu_fx.transforms.layouts.flow import Flow
from hetu_fx.transforms.layouts.sequence_parallel import Classes, activations, sequence_classes
from hetu_fx.transforms.rewrites.per_sequence import PER_SEQUENCE


def why_not_packed(graph: Graph, factors: FactorMap, flow: Flow, positions: str) -> str:
    """Return why position ids do not keep the sequences of a row apart; "" where they do.

    Args:
        graph: a captured program that has the input `positions`.
        factors, flow: what is known of it.
        positions: the input of position ids.
    """
    follows = descendants(graph, [leaf.node for leaf in graph.leaves_of(LeafKind.INPUT) if leaf.name == positions])
    masks = {mask for node in graph.graph.nodes for mask in _masks(node) if mask in follows}
    apart = {mask for mask in masks if _keeps_apart(graph, mask, positions)}
    lacks = f"has no mask that follows from {positions!r} and keeps sequences apart"
    unmasked = _first_reason(graph, factors, flow, lambda node: not apart.isdisjoint(_masks(node)), lacks)
    return unmasked or _reader_of_places(graph, factors, flow)


def why_whole_rows(graph: Graph, factors: FactorMap, flow: Flow) -> str:
    """Return why attention in packed rows is paid for all pairs of their tokens; "" where it is paid by sequence."""
    lacks = "has a mask of which is not known that it keeps sequences apart"
    return _first_reason(graph, factors, flow, lambda node: node.target is PER_SEQUENCE, lacks)


def why_not_padded(graph: Graph, factors: FactorMap, flow: Flow) -> str:
    """Return why tokens may see what fills a row after them; "" where they do not."""
    return _first_reason(graph, factors, flow, lambda node: bool(argument(node, "is_causal")), "is not causal")


def _first_reason(
    graph: Graph, factors: FactorMap, flow: Flow, is_masked: Callable[[fx.Node], bool], lacks: str
) -> str:
    for node in _meetings(graph, factors, flow):
        where = f"{node.target} ({meta.source_line(node)})"
        if node.target not in _MASKS:
            return f"tokens of a row meet in {where}, which takes no mask"
        if not is_masked(node):
            return f"{where} {lacks}"
    return ""


def _reader_of_places(graph: Graph, factors: FactorMap, flow: Flow) -> str:
    """Return which activation learns the places of tokens in their row by other ways than a mask; "" if none does."""
    tokens = sequence_classes(graph, factors, flow, frozenset())
    feeding, active = _before_parameters(graph, flow), activations(graph, factors, flow)
    places: set[fx.Node] = set()
    for node in graph.graph.nodes:
        told = [operand for operand in _read(node, factors) if operand in places]
        if node not in active:
            if told or (factors.is_op(node) and _meets(factors.op(node), tokens)):
                places.add(node)
        elif told and node in feeding:
            where, source = meta.source_line(node), told[0]
            return (
                f"{node.target} ({where}) reads places of tokens in their row, from {source.target}, not position ids"
            )
    return ""


def _read(node: fx.Node, factors: FactorMap) -> list[fx.Node]:
    """Return the tensors whose values an op reads, but for an attention's mask; those of an item, the tuple's."""
    if not factors.is_op(node):
        return list(node.all_input_nodes) if node.op == "call_function" and meta.has_tensor(node) else []
    op = factors.op(node)
    return [o.node for i, o in enumerate(op.operands) if i not in op.unread and o.node not in _masks(node)]


def _meets(op: OpFactors, tokens: Classes) -> bool:
    return not op.known or bool(tokens & (op.whole | op.reduced | op.sharded | op.placed))


def _meetings(graph: Graph, factors: FactorMap, flow: Flow) -> Iterator[fx.Node]:
    """Yield the ops on activations in which tokens meet before the last parameter is read."""
    tokens = sequence_classes(graph, factors, flow, frozenset())
    feeding = _before_parameters(graph, flow)
    for node in graph.graph.nodes:
        if not factors.is_op(node) or node not in feeding or not flow.is_mixed(node):
            continue
        if _meets(factors.op(node), tokens):
            yield node


def _before_parameters(graph: Graph, flow: Flow) -> frozenset[fx.Node]:
    """Return the nodes from whose values something is computed with a parameter."""
    found: set[fx.Node] = set()
    for node in reversed(graph.graph.nodes):
        if node in found or any(operand in flow.parameters - flow.inputs for operand in node.all_input_nodes):
            found.update(node.all_input_nodes)
    return frozenset(found)


_MASKS: Mapping[Any, tuple[str, ...]] = {
    ATTENTION: ("attn_mask",),
    PER_SEQUENCE: ("attn_mask", "query_places", "key_places"),
}
"""What says which tokens see each other, by op."""


def _masks(node: fx.Node) -> list[fx.Node]:
    given = (argument(node, name) for name in _MASKS.get(node.target, ()))
    return [mask for mask in given if isinstance(mask, fx.Node)]


_HIDDEN = -1e4  # what is added to the score of a token that is not seen, or less


def _keeps_apart(graph: Graph, mask: fx.Node, positions: str) -> bool:
    """Tell whether no token sees one of another sequence under the mask; False where that cannot be told.

    Two sequences are laid into each row of the example's length, all else being ones. `positions` is the input of
    position ids.
    """
    needed = ancestors([mask])
    inputs = {leaf.node: leaf for leaf in graph.leaves_of(LeafKind.INPUT)}
    others = {node for node in needed if node.op in ("placeholder", "get_attr")} - inputs.keys()
    (length,) = {meta.hints(leaf.node)[-1] for leaf in inputs.values() if leaf.name == positions}
    if others or length < 2:
        return False
    first = length // 2
    values = {node: _row_value(leaf, positions, first) for node, leaf in inputs.items() if node in needed}
    for node in graph.graph.nodes:
        if node in needed and node.op == "call_function":
            values[node] = evaluate_op(node, values, device=HOST)
    sees = _seen(values[mask])
    across = sees[..., :first, first:], sees[..., first:, :first]
    return sees.shape[-2:] == (length, length) and not any(part.any() for part in across)


def _seen(mask: Tensor) -> Tensor:
    """Return which tokens see each other by a mask: one of truths, of numbers that are added, or places of tokens."""
    if not is_real(mask.dtype) and mask.dtype != torch.bool:
        return mask[:, :, None, 0] == mask[:, None, :, 0]
    return mask if mask.dtype == torch.bool else mask > _HIDDEN


def _row_value(leaf: Leaf, positions: str, first: int) -> Tensor:
    """Return an input of the example's shape: ones, or the position ids of two sequences."""
    like = meta.value(leaf.node)
    ones = torch.ones(meta.hints(leaf.node), dtype=like.dtype)
    if leaf.name != positions:
        return ones
    counted = torch.arange(ones.shape[-1])
    return torch.where(counted < first, counted, counted - first).to(like.dtype).expand_as(ones).contiguous()


_TOKENS, _MORE = 6, 3  # of every size that the graph leaves open, and what it is filled up by
_TRIALS = 2  # with other parameters, as one may have a maximum where the filling does not show
_NUMBERS = 1_000_003  # random ones of which large parameters are made: a prime, so that no two of their rows are alike
_TOLERANCE = 1e-9  # relative, in double precision
_LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")

Buffers = Callable[[str], Tensor]
"""Gives a buffer of the model by its name."""


@dataclass(frozen=True)
class Difference:
    """An output that is another one for inputs that are filled up; None: all may be, as it cannot be found out."""

    kind: OutputKind | None
    text: str


def possible_fillings(graph: Graph, paddings: Mapping[str, int]) -> tuple[Filling, ...]:
    """Return what may fill each input: what the loss ignores where it is its target, counted on in positions, else 0.

    Where choices are inputs, they may also say what is hidden: then they are filled with True.

    Args:
        graph: of the model.
        paddings: what the framework of the model pads inputs with, by name.
    """
    usual = _usual_filling(graph, paddings)
    choices = {leaf.name: 1 for leaf in graph.leaves_of(LeafKind.INPUT) if meta.dtype(leaf.node) is torch.bool}
    return (usual, replace(usual, padding={**usual.padding, **choices})) if choices else (usual,)


def _usual_filling(graph: Graph, paddings: Mapping[str, int]) -> Filling:
    targets = {**paddings, **{name: IGNORED for name in label_inputs()}}
    inputs = {leaf.node: leaf.name for leaf in graph.leaves_of(LeafKind.INPUT)}
    for node in graph.graph.nodes:
        if node.op == "call_function" and _name(node) in _LOSSES:
            made_of = [inputs[operand] for operand in ancestors([argument(node, "target")]) if operand in inputs]
            ignored = argument(node, "ignore_index")
            targets |= {name: int(ignored) for name in made_of if len(made_of) == 1}
    return Filling({name: targets[name] for name in inputs.values() if name in targets}, position_input() or None)


def pad_input(tensor: Tensor, shape: tuple[int, ...], name: str, filling: Filling) -> Tensor:
    """Return an input at the beginning of a larger one; positions are counted on from their last."""
    if tuple(tensor.shape) == shape:
        return tensor
    made = tensor.new_full(shape, filling.padding.get(name, 0))
    kept = tuple(slice(min(old, new)) for old, new in zip(tensor.shape, shape, strict=True))
    made[kept] = tensor[kept]
    if name == filling.positions and tensor.shape[-1] and tensor.shape[:-1] == shape[:-1]:
        more = torch.arange(1, shape[-1] - tensor.shape[-1] + 1, device=tensor.device, dtype=tensor.dtype)
        made[..., tensor.shape[-1] :] = tensor[..., -1:] + more
    return made


def way_of_filling(
    program: Program, paddings: Mapping[str, int], buffers: Buffers
) -> tuple[Filling, tuple[Difference, ...]]:
    """Return what to fill a program's inputs with, and the trace that it leaves.

    That is the first way that leaves none but in values beside the loss, or the usual one.
    """
    ways = []
    for filling in possible_fillings(program.graph, paddings):
        ways.append((filling, _trace_of_filling(program, filling, buffers)))
        if all(one.kind is OutputKind.VALUE for one in ways[-1][1]):
            return ways[-1]
    return ways[0]


@torch.no_grad()
def random_outputs(program: Program, buffers: Buffers, tensors: Mapping[str, Tensor], number: int) -> list[Any]:
    """Return what a program makes of inputs with parameters that are random numbers, different for each `number`.

    It is run on the CPU, op by op.
    """
    graph = program.graph
    leaves = zip(graph.leaves, _leaves(program, buffers, tensors, number), strict=True)
    values: dict[fx.Node, Any] = {leaf.node: value for leaf, value in leaves}
    last = {operand: node for node in graph.graph.nodes for operand in node.all_input_nodes}
    for node in graph.graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: _value(values[operand]))
            values[node] = _done(node, args, kwargs)
            for operand in node.all_input_nodes:
                if last[operand] is node:
                    del values[operand]
    return [_value(values[node]) if isinstance(node, fx.Node) else node for node in graph.output_values]


def _trace_of_filling(program: Program, filling: Filling, buffers: Buffers) -> tuple[Difference, ...]:
    """Return what a program makes otherwise of inputs that are filled up.

    Args:
        program: any; its parameters are not needed.
        filling: what fills its inputs.
        buffers: gives those of the model.
    """
    try:
        trials = (tuple(_differences(program, filling, buffers, number)) for number in range(_TRIALS))
        return next(filter(None, trials), ())
    except Exception as error:  # whatever ops raise on sizes and values that they were not meant for
        return (Difference(None, f"it cannot be tried on a few tokens ({type(error).__name__}: {error})"),)


def _differences(program: Program, filling: Filling, buffers: Buffers, number: int) -> Iterator[Difference]:
    sizes = [_sizes(program, count) for count in (_TOKENS, _TOKENS + _MORE)]
    short = {leaf.name: _sample(leaf, sizes[0], filling, number) for leaf in program.inputs}
    shapes = {leaf.name: _shape(leaf.node, sizes[1]) for leaf in program.inputs}
    long = {name: pad_input(tensor, shapes[name], name, filling) for name, tensor in short.items()}
    before, after = (random_outputs(program, buffers, tensors, number) for tensors in (short, long))
    checks = {check.name for check in program.graph.checks}
    for leaf, node, one, other in zip(program.graph.outputs, program.graph.output_values, before, after, strict=True):
        if leaf.name in checks:
            one, other = one > 0, other > 0
        if isinstance(one, Tensor) and not _alike(one, other):
            yield Difference(leaf.kind, f"its {leaf.kind} {leaf.name!r} is another one ({meta.source_line(node)})")


def _sizes(program: Program, tokens: int) -> dict[sympy.Symbol, int]:
    """Return so many tokens for every size that is open, and the example's rows."""
    graph, found = program.graph, {}
    for leaf in program.inputs:
        for size, hint in zip(meta.shape(leaf.node), meta.hints(leaf.node), strict=True):
            for symbol in getattr(meta.expression(size), "free_symbols", ()):
                found[symbol] = hint if symbol == graph.batch_symbol else tokens
    return found


def _shape(node: fx.Node, sizes: Bindings) -> tuple[int, ...]:
    return evaluate(tuple(meta.expression(size) for size in meta.shape(node)), sizes)


def _sample(leaf: Leaf, sizes: Bindings, filling: Filling, number: int) -> Tensor:
    """Return an input: positions from 0, numbers that differ, tokens that are none of padding, masks that hide none.

    Real numbers of up to two dims may be a mask or a series: they are ones in the first trial, and differ in others.
    """
    shape, dtype = _shape(leaf.node, sizes), meta.dtype(leaf.node)
    if leaf.name == filling.positions:
        return torch.arange(shape[-1]).to(dtype).expand(shape).clone()
    if carries_gradient(dtype) and (number or len(shape) > 2):
        return torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=in_double(dtype))
    hides = filling.padding.get(leaf.name) == 1
    return torch.full(shape, (0 if dtype is torch.bool else 2) if hides else 1, dtype=_doubled(dtype))


def _alike(one: Tensor, other: Any) -> bool:
    """Tell whether two results are equal where both have values."""
    if one.dim() != other.dim() or any(a > b for a, b in zip(one.shape, other.shape, strict=True)):
        return False
    common = other[tuple(slice(size) for size in one.shape)]
    if not carries_gradient(one.dtype):
        return torch.equal(one, common)
    scale = float(one.abs().max()) if one.numel() else 0.0
    return bool(one.isfinite().all()) and torch.allclose(one, common, rtol=0.0, atol=_TOLERANCE * max(scale, 1e-3))


def _leaves(program: Program, buffers: Buffers, tensors: Mapping[str, Tensor], trial: int) -> Iterator[Any]:
    """Yield a value for each leaf of a program; what is large is made when it is read."""
    counts = iter(program.prologue(tensors))
    for number, leaf in enumerate(program.graph.leaves):
        match leaf.kind:
            case LeafKind.INPUT:
                yield tensors[leaf.name]
            case LeafKind.PARAMETER:
                yield _Parameter(meta.hints(leaf.node), meta.dtype(leaf.node), number * _TRIALS + trial)
            case LeafKind.BUFFER:
                yield _double(buffers(leaf.name).cpu())
            case LeafKind.CONSTANT:
                yield _double(program.graph.constants[leaf.name].cpu())
            case LeafKind.COUNT:
                yield torch.tensor(next(counts), dtype=_doubled(meta.dtype(leaf.node)))
            case _:
                yield torch.zeros(meta.hints(leaf.node), dtype=meta.dtype(leaf.node))


@dataclass(frozen=True)
class _Parameter:
    """Random numbers, the same whenever they are read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int

    def made(self) -> Tensor:
        if not carries_gradient(self.dtype):
            return torch.zeros(self.shape, dtype=self.dtype)
        scale: float = max(1, self.shape[-1] if self.shape else 1) ** -0.5
        generator, count = torch.Generator().manual_seed(self.seed), math.prod(self.shape)
        few = torch.randn(min(count, _NUMBERS), generator=generator, dtype=in_double(self.dtype)).mul_(scale)
        return few.repeat(-(-count // _NUMBERS))[:count].view(self.shape)


def _value(value: Any) -> Any:
    return value.made() if isinstance(value, _Parameter) else value


def _done(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Run an op in double precision on the CPU; one that drops values at random drops none."""
    if node.target is torch.ops.hetu.dropout.default:
        return args[0]
    assert callable(node.target)
    args, kwargs = fx.node.map_aggregate((args, kwargs), _doubled)
    place = {"device": torch.device("cpu")} if "device" in kwargs else {}
    return node.target(*args, **{**kwargs, **place})


def _doubled(value: Any) -> Any:
    return in_double(value) if isinstance(value, torch.dtype) else value


def _double(tensor: Tensor) -> Tensor:
    return tensor.to(in_double(tensor.dtype))


def _name(node: fx.Node) -> str:
    return short_name(node.target).rpartition("::")[2] if isinstance(node.target, OpOverload) else ""
