"""The op that calls a leaf, and the one that its backward is, which calls the leaf again.

- `values`, `state`: what the leaf is given, and its parameters and buffers: never written to, all whole;
- `random_state`, `site`: what its random numbers follow from (see `transforms.rewrites.random_ops`);
- `name`: of the call in this process (`leaves.call`); `forms`: of its results (`leaves.forms`).

To a compiler both are opaque.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils.flop_counter import register_flop_formula

from hetu_fx.base.dtypes import carries_gradient
from hetu_fx.base.torch_private import tree_leaves
from hetu_fx.errors import StateError
from hetu_fx.graph import meta
from hetu_fx.graph.calls import argument
from hetu_fx.graph.leaves.leaf_call import call_label, call_of_name, call_seed, without_number
from hetu_fx.graph.leaves.result_shapes import read_form
from hetu_fx.graph.leaves.uses import RAN, Use, noting_uses
from hetu_fx.graph.leaves.work import LeafWork

_SIGNATURE = "Tensor[] values, Tensor[] state, Tensor? random_state, SymInt site, str name, str[] forms"


@torch.library.custom_op("hetu::leaf", mutates_args=(), schema=f"({_SIGNATURE}) -> Tensor[]")
def _call_leaf(
    values: Sequence[Tensor],
    state: Sequence[Tensor],
    random_state: Tensor | None,
    site: int,
    name: str,
    forms: Sequence[str],
) -> list[Tensor]:
    """Return what a leaf makes, and what it leaves in the buffers that it writes to.

    Raises:
        StateError: its results are not of these forms.
    """
    return call_of_name(name).made([*values, *state], call_seed(random_state, site))


@_call_leaf.register_fake
def _(
    values: Sequence[Tensor], state: Sequence[Tensor], random_state: Tensor | None, site: int, name: str, forms: Any
) -> list[Tensor]:
    shapes = [tensor.shape for tensor in values]
    like = next((tensor for tensor in (*values, *state)), torch.empty(()))
    found = map(read_form, forms)
    return [like.new_empty(form.shape(shapes), dtype=form.dtype) for form in found]


@torch.library.custom_op(
    "hetu::leaf_backward",
    mutates_args=(),
    schema=f"(Tensor[] cotangents, int[] places, {_SIGNATURE}, int[] wanted) -> Tensor[]",
)
def _call_leaf_backward(
    cotangents: Sequence[Tensor],
    places: Sequence[int],
    values: Sequence[Tensor],
    state: Sequence[Tensor],
    random_state: Tensor | None,
    site: int,
    name: str,
    forms: Sequence[str],
    wanted: Sequence[int],
) -> list[Tensor]:
    """Return the gradients of the `wanted` ones of values and state, by those of the results in some places."""
    given = dict(zip(places, cotangents, strict=True))
    return call_of_name(name).gradients([*values, *state], call_seed(random_state, site), given, wanted)


@_call_leaf_backward.register_fake
def _(
    cotangents: Sequence[Tensor],
    places: Sequence[int],
    values: Sequence[Tensor],
    state: Sequence[Tensor],
    random_state: Tensor | None,
    site: int,
    name: str,
    forms: Any,
    wanted: Sequence[int],
) -> list[Tensor]:
    operands = [*values, *state]
    return [operands[place].new_empty(operands[place].shape) for place in wanted]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    values, state, random_state, *ctx.call = inputs
    ctx.num_values, ctx.num_state = len(values), len(state)
    ctx.save_for_backward(*values, *state, random_state)
    ctx.set_materialize_grads(False)  # zeros would be gradients of what makes nothing of the loss


def _backward(ctx: Any, cotangents: Sequence[Tensor | None]) -> tuple[Any, ...]:
    *operands, random_state = ctx.saved_tensors
    values, state = operands[: ctx.num_values], operands[ctx.num_values :]
    site, name, forms = ctx.call
    pairs = enumerate(zip(cotangents, map(read_form, forms), strict=True))
    given = {place: one for place, (one, form) in pairs if one is not None and carries_gradient(form.dtype)}
    needed = [*ctx.needs_input_grad[0], *ctx.needs_input_grad[1]]
    wanted = [place for place, is_needed in enumerate(needed) if is_needed]
    uses = set[Use]()
    with noting_uses(uses):
        made = torch.ops.hetu.leaf_backward(
            list(given.values()), list(given), values, state, random_state, site, name, list(forms), wanted
        )
    is_traced = (name, RAN) not in uses  # by a compiler, which has all of them
    gradients = [None] * len(operands)
    for place, gradient in zip(wanted, made, strict=True):
        gradients[place] = gradient if is_traced or (name, place) in uses else None
    return gradients[: ctx.num_values], gradients[ctx.num_values :], None, None, None, None


def _refuse(ctx: Any, *_: Any) -> NoReturn:
    raise StateError(
        f"a gradient of leaf {call_label(ctx.name)} is part of the loss (a penalty?), and has no derivative\n"
        "hint: take the derivative of what is not behind a leaf, or name a leaf that has all of it (hetu_fx.leaf)"
    )


def _remember_name(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *_, ctx.name, _, _ = inputs


_call_leaf.register_autograd(_backward, setup_context=_remember)
_call_leaf_backward.register_autograd(_refuse, setup_context=_remember_name)

LEAF = torch.ops.hetu.leaf.default


def leaf_operands(node: fx.Node) -> list[fx.Node]:
    """Return what a call of a leaf is given: values, parameters and buffers, in order."""
    return [*argument(node, "values"), *argument(node, "state")]


@register_flop_formula(torch.ops.hetu.leaf)
def _flops(
    values: Sequence[Sequence[int]], state: Any, random_state: Any, site: Any, name: str, *_: Any, **__: Any
) -> int:
    return round(call_of_name(name).work.at(values).flops)


def leaf_work(node: fx.Node, size_of: Callable[[meta.Size], int]) -> LeafWork:
    """Return what a leaf's op takes, forward; `size_of` says what sizes are."""
    shapes = [list(map(size_of, meta.shape(value))) for value in argument(node, "values")]
    return call_of_name(argument(node, "name")).work.at(shapes)


CONSTANTS = (bool, float, str, torch.dtype)


def told_nodes(graph: fx.Graph, kinds: tuple[type, ...]) -> Iterator[str]:
    """Yield a text for each node of a graph that is the same in every capture; constants of these kinds count."""
    for node in graph.nodes:
        constants = [leaf for leaf in tree_leaves(told_arguments(node)) if isinstance(leaf, kinds)]
        yield f"{node.name} {node.target} {node.all_input_nodes} {constants}"


def told_arguments(node: fx.Node) -> Any:
    """Return an op's (args, kwargs) as they are in every capture: of the name of a leaf not its number."""
    if node.target not in (LEAF, torch.ops.hetu.leaf_backward.default):
        return node.args, node.kwargs
    return map_aggregate((node.args, node.kwargs), lambda item: without_number(item) if isinstance(item, str) else item)


def told_op(node: fx.Node) -> str:
    """Return what an op is, for people: the leaf that it calls, or its name."""
    return f"leaf {call_label(argument(node, 'name'))}" if node.target is LEAF else str(node.target)
