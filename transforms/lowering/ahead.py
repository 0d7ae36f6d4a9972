"""All pieces of a module compiled before the first of them runs, so that compilers see them together."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from hetu_fx.base.torch_compile import Symbols
from hetu_fx.transforms.lowering.block_modules import BlockModule
from hetu_fx.transforms.lowering.compiled import Compiled, compiling
from hetu_fx.transforms.lowering.forms import Like, is_number, is_told_by_values

Together = Callable[[], AbstractContextManager[None]]
"""Around what is compiled together; nothing of it may run before the end."""


class Piece(nn.Module):
    """A block's module, compiled for all who have it, where one module calls it."""

    def __init__(self, block: BlockModule, compiled: Compiled) -> None:
        super().__init__()
        self.block, self.compiled = block, compiled  # whoever has a block keeps it, for others to find
        self.open_dims: list[set[int]] = [set() for node in block.graph.nodes if node.op == "placeholder"]

    def forward(self, *inputs: Any) -> Any:
        """Run it."""
        return self.compiled(inputs, self.open_dims)

    def note(self, arguments: Sequence[Any]) -> None:
        """Take note of which sizes of arguments, which are traced, are open."""
        for known, argument in zip(self.open_dims, arguments, strict=True):
            if isinstance(argument, Tensor):
                known |= {d for d, size in enumerate(argument.shape) if isinstance(size, torch.SymInt)}


class CompiledAhead:
    """A module whose pieces are all compiled at the first call of its kind.

    Which sizes are open follows from the module's inputs: what is computed of open sizes is open. Calls with gradients
    and without are of two kinds, and so are sizes of 0 and 1 and larger ones, which compiled graphs differ by. What a
    later call needs besides is compiled when a piece meets it.
    """

    def __init__(self, module: fx.GraphModule, fixed: Sequence[bool], together: Together) -> None:
        self._module, self._fixed, self._together = module, fixed, together
        self._open = tuple(i for i, is_fixed in enumerate(fixed) if not is_fixed)
        self._prepared: set[Hashable] = set()

    def __call__(self, *inputs: Any) -> Any:
        """Run it."""
        opened = (inputs[i] for i in self._open)
        small = (tuple(size < 2 for size in given.shape) for given in opened if isinstance(given, Tensor))
        kind = torch.is_grad_enabled(), *small
        if kind not in self._prepared:
            self._prepare(inputs)
            self._prepared.add(kind)
        return self._module.forward(*inputs)

    def _prepare(self, inputs: Sequence[Any]) -> None:
        calls = list(_calls(self._module, inputs, self._fixed))  # all, as each says what is open
        with compiling, self._together():
            for piece, likes in calls:
                if not any(map(is_told_by_values, likes)):
                    piece.compiled.prepared(likes, piece.open_dims)


def _calls(module: fx.GraphModule, inputs: Sequence[Any], fixed: Sequence[bool]) -> Iterator[tuple[Piece, list[Any]]]:
    """Yield every call of a piece, with what its inputs are like."""
    symbols, given = Symbols(), zip(inputs, fixed, strict=True)
    values, known = dict[fx.Node, Any](), dict[Hashable, Any]()
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = _traced(symbols, *next(given))
        elif node.op == "call_function":
            values[node] = operator.getitem(*fx.map_arg(node.args, values.__getitem__))
        elif node.op == "call_module":
            piece, arguments = cast(Piece, module.get_submodule(str(node.target))), fx.map_arg(node.args, values.get)
            likes = [Like.of(argument) for argument in arguments]
            key = (piece, *zip(likes, map(_text, arguments), strict=True))
            if key not in known:
                known[key] = symbols.run(piece.block, arguments)
            values[node] = known[key]
            piece.note(arguments)
            yield piece, likes


def _traced(symbols: Symbols, given: Any, is_fixed: bool) -> Any:
    like = Like.of(given)
    if isinstance(like, Like):
        return like.form(() if is_fixed else range(len(like.sizes))).traced(symbols, like)
    return symbols.number(like) if is_number(like) and not is_fixed else like


def _text(argument: Any) -> str:
    """Return what tells open sizes and numbers from each other."""
    return str(tuple(argument.shape)) if isinstance(argument, Tensor) else str(argument)
