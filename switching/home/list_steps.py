"""Steps of torch's point-wise optimizers, on the pieces of home tensors.

Kernels over lists take home tensors as they are (see `pointwise`), which for 48 parameters takes 0.1 ms more in each of
the seven to twelve of a step. What each element becomes depends on that element alone here, so all of a step's kernels
are given the pieces, once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim.optimizer import Optimizer

from hetu_fx.base.per_rank import PerRank
from hetu_fx.base.torch_private import Lists, give_list_kernels
from hetu_fx.switching.home.pointwise import are_numbers
from hetu_fx.switching.home.tensor import HomeTensor, PiecesWritten, home_layout_of

_POINTWISE = frozenset(
    {
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.Adamax,
        torch.optim.AdamW,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Adafactor and Muon look at whole parameters; what a subclass does is not known."""


class _Stepping:
    """What is known of the step that is under way.

    Attributes:
        is_pointwise: its kernels may have pieces.
        uncounted: how often they write without counting it in versions, as torch's fused kernels do once.
    """

    is_pointwise = False
    uncounted = 0


_stepping = PerRank(_Stepping)


def begin_step(optimizer: Optimizer) -> None:
    """Let an optimizer have pieces for its kernels, if it is a point-wise one."""
    fused = {bool(group.get("fused")) for group in optimizer.param_groups}
    stepping = _stepping()
    stepping.is_pointwise = type(optimizer) in _POINTWISE and len(fused) == 1
    stepping.uncounted = int(True in fused)


def end_step() -> None:
    """Let whatever follows have home tensors."""
    _stepping().is_pointwise = False


def _on_pieces(lists: Lists) -> tuple[Lists, Callable[[], None]] | None:
    """Return the lists with pieces in the places of home tensors, and what is to be called once they are written.

    None where there are none, or where kernels have more to do: tensors of several homes, or whole ones, side by side;
    or states that are made in the step.
    """
    if not _stepping().is_pointwise:
        return None
    are_homes = [set(map(type, tensors)) == {HomeTensor} for tensors in lists]
    homes = [tensors for tensors, here in zip(lists, are_homes, strict=True) if here]
    others = [tensors for tensors, here in zip(lists, are_homes, strict=True) if not here]
    if not homes or not all(map(are_numbers, others)):
        return None
    layout, *layouts = (list(map(home_layout_of, tensors)) for tensors in homes)
    if any(one != layout for one in layouts):
        return None
    written = PiecesWritten(homes, _stepping().uncounted)
    pieces = iter(written.pieces)
    return [next(pieces) if here else tensors for tensors, here in zip(lists, are_homes, strict=True)], written.end


give_list_kernels(_on_pieces)
