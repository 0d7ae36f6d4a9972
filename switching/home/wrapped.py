"""Pieces of gradients as home tensors. Those of parameters that a rank has nothing of are the same in every step."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from sys import getrefcount
from weakref import getweakrefcount

from torch import Tensor, nn

from hetu_fx.base.torch_private import use_count
from hetu_fx.switching.home.tensor import HomeTensor, wrap

_needs_gradient = attrgetter("requires_grad")


class Wrapped:
    """Makes home tensors of gradients; empty ones are used again once nobody has them any more.

    A stage of a pipeline has nothing of the parameters of all other stages, and to make a home tensor takes longer than
    all else that is done for such a gradient. Others are made anew, as what is kept of them would be memory.
    """

    def __init__(self) -> None:
        self._empty: dict[str, HomeTensor] = {}

    def of(self, pieces: Mapping[str, Tensor], homes: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Wrap pieces of gradients, which fit, in the layouts of their parameters; plain ones have plain gradients."""
        unused, made = self._unused(), dict[str, Tensor]()
        for name, piece in pieces.items():
            home = homes[name]
            if not isinstance(home, HomeTensor):
                made[name] = piece
                continue
            layout, one = home.home_layout, unused.get(name)
            if one is None or one.home_layout is not layout or one.local is not piece:
                one = wrap(piece, layout)
                if not piece.numel():
                    self._empty[name] = one
            made[name] = one
        return made

    def _unused(self) -> Mapping[str, HomeTensor]:
        """Return the empty ones, as they were made, if nobody has any of them; else none."""
        if set(_references(self._empty)) - {_OWN}:
            return {}
        held = list(self._empty.values())
        if set(map(use_count, held)) - {1} or any(map(_needs_gradient, held)) or any(map(getweakrefcount, held)):
            return {}
        for one in held:  # a script may have left something on it
            local, layout, fields = one.local, one.home_layout, vars(one)
            fields.clear()
            fields["local"], fields["home_layout"] = local, layout
        return self._empty


def _references(known: Mapping[str, object]) -> list[int]:
    """Return how many references there are to each value, those of this call among them."""
    return list(map(getrefcount, list(known.values())))


(_OWN,) = _references({"": object()})
"""Where nobody else has a value."""
