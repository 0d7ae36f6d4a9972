"""Gradients of home parameters that come from outside of the model's own calls: a submodule or a parameter used alone.

There a home parameter is whole, and so is its gradient: of the rows that this rank used. Ranks that used other rows
have unlike ones, of which each would keep its part. Those that used the same (a penalty of weights) have the gradient
of one device. Which it is shows by signs of the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.autograd.graph import get_gradient_edge

from hetu_fx.switching.home.tensor import HomeTensor
from hetu_fx.switching.home.values import Sign, Signed, signed


class OutsideGradients:
    """The whole gradients that have been added to those of home parameters on this rank since they were forgotten."""

    def __init__(self) -> None:
        self._nodes: dict[str, Any] = {}
        self._new: dict[str, list[Signed]] = {}
        self._signs: dict[str, Sign] = {}

    def watch(self, homes: Mapping[str, nn.Parameter]) -> None:
        """Watch these, by name, from now on; what is watched already is not watched twice."""
        nodes = {name: get_gradient_edge(home).node for name, home in homes.items() if home.requires_grad}
        for name, node in nodes.items():
            if node is not self._nodes.get(name):
                node.register_prehook(partial(self._see, name))
        self._nodes = nodes

    @property
    def signs(self) -> Mapping[str, Sign]:
        """Return the sign of the sum of each parameter's gradients of this kind."""
        for name, found in self._new.items():
            for one in found:
                self._signs[name] = one.sign.plus(self._signs.get(name))
        self._new = {}
        return self._signs

    def forget(self) -> None:
        """Begin anew."""
        self._new, self._signs = {}, {}

    def _see(self, name: str, gradients: tuple[Any, ...]) -> None:
        for gradient in gradients:
            if gradient is not None and not isinstance(gradient, HomeTensor):
                self._new.setdefault(name, []).append(signed(gradient))
