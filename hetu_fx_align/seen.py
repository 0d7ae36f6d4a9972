"""One whole forward and backward: what every op makes, and the gradients that it hands on to its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx

from hetu_fx.base.dtypes import carries_gradient, in_double
from hetu_fx.base.torch_private import tree_leaves, tree_map_only
from hetu_fx.graph import meta
from hetu_fx.graph.calls import overload
from hetu_fx.graph.graph import Graph
from hetu_fx_align.call import Call
from hetu_fx_align.difference import scale_of
from hetu_fx_align.interpret import call_of, interpret, loss_of_graph
from hetu_fx_align.run import SEED, in_widest, shaken, up_cast
from hetu_fx_align.tolerances import allowed, class_of

Leaves = Mapping[fx.Node, Tensor]
RunCall = Callable[[Call], Any]


class Seen:
    """The results of every op of one run, and the gradients that each has handed on to its arguments."""

    def __init__(self) -> None:
        self.results: dict[fx.Node, list[Tensor]] = {}
        self.gradients: dict[fx.Node, dict[int, Tensor]] = {}
        self.loss = 0.0

    @cached_property
    def scales(self) -> Mapping[str, float]:
        """Return how large results are anywhere, and gradients, by direction."""
        gradients = chain.from_iterable(found.values() for found in self.gradients.values())
        return {"forward": scale_of(chain.from_iterable(self.results.values())), "backward": scale_of(gradients)}

    def watched(self, node: fx.Node, value: Any, noise: Noise | None, places: Iterator[int]) -> Any:
        """Return an argument of an op such that the gradient that the op hands on to it is seen."""

        def see(tensor: Tensor) -> Tensor:
            place = next(places)
            if not (tensor.requires_grad and torch.is_grad_enabled()):
                return tensor
            own = tensor.view_as(tensor)
            own.register_hook(lambda gradient: self._gradient(node, place, gradient, noise))
            return own

        return tree_map_only(Tensor, see, value)

    def _gradient(self, node: fx.Node, place: int, gradient: Tensor, noise: Noise | None) -> Tensor:
        given = gradient if noise is None else noise.disturb(gradient, node, backward=True)
        self.gradients.setdefault(node, {})[place] = given.detach().clone()  # autograd adds to it in place
        return given


class Noise:
    """Disturbs values by what their ops' tolerances allow in a dtype; truth values and whole numbers stay those of the
    reference, so that it decides nothing otherwise."""

    def __init__(self, dtype: torch.dtype | None, reference: Seen) -> None:
        self.dtype, self.reference = dtype, reference
        self.source = torch.Generator().manual_seed(SEED + 2)

    def disturb(self, tensor: Tensor, node: fx.Node, *, backward: bool) -> Tensor:
        """Return a tensor with every element off by up to the tolerance, relative to it."""
        return shaken(tensor, self.share(node, backward=backward), self.source)

    def of_result(self, node: fx.Node, result: Any) -> Any:
        """Return what an op makes, disturbed."""
        right = iter(self.reference.results[node])

        def other(tensor: Tensor) -> Tensor:
            decided = next(right)
            return self.disturb(tensor, node, backward=False) if carries_gradient(tensor.dtype) else decided

        return tree_map_only(Tensor, other, result)

    def share(self, node: fx.Node, *, backward: bool) -> float:
        """Return the tolerance of an op."""
        example = next((leaf for leaf in tree_leaves(meta.value(node)) if isinstance(leaf, Tensor)), None)
        own = example.dtype.to_real() if example is not None and carries_gradient(example.dtype) else torch.float32
        return allowed(class_of(overload(node)), self.dtype or own, backward=backward)


def wide(value: Tensor) -> Tensor:
    """Return a leaf's value in float64, on the cpu."""
    return value.detach().to("cpu", in_double(value.dtype)).requires_grad_(value.requires_grad)


def in_float64(call: Call) -> Any:
    """Run a call in float64, or where the op has none in float32."""
    made, _ = in_widest(lambda dtype: up_cast(call, dtype).run())
    return tree_map_only(Tensor, lambda t: t.to(in_double(t.dtype)), made)


def seen_run(graph: Graph, leaves: Leaves, run: RunCall, noise: Noise | None) -> Seen:
    """Run a graph forward and backward, and return what every op has made of it."""
    seen = Seen()

    def visit(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        places = iter(range(1 << 30))
        own_args, own_kwargs = seen.watched(node, (args, dict(kwargs)), noise, places)
        result = run(call_of(node, own_args, own_kwargs))
        result = result if noise is None else noise.of_result(node, result)
        seen.results[node] = [leaf.detach() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        return result

    with torch.enable_grad():
        loss = loss_of_graph(graph, interpret(graph, leaves, visit)).sum()
        wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
        if loss.requires_grad:
            torch.autograd.grad(loss, wanted, allow_unused=True)
    seen.loss = float(loss.detach())
    return seen
