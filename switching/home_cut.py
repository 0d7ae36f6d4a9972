"""The part of any tensor that stands beside the piece of a home tensor."""

from __future__ import annotations

import torch

from hetu_fx.switching.home.layout import HomeLayout
from hetu_fx.switching.home.tensor import HomeTensor, gather_whole


def cut_like(tensor: torch.Tensor, layout: HomeLayout) -> torch.Tensor:
    """Give the part of a tensor, home or plain, that stands beside the piece of `layout`.

    Scalars stay; what broadcasts is expanded first; a home tensor of another layout is gathered.
    """
    if type(tensor) is HomeTensor:
        if tensor.home_layout is layout or same_layout(tensor.home_layout, layout):
            return tensor.local
        tensor = gather_whole([tensor])[0]
    if not tensor.dim():
        return tensor
    return layout.take(tensor.expand(layout.shape))


def same_layout(first: HomeLayout, second: HomeLayout) -> bool:
    """Tell whether two layouts give every rank the same piece."""
    return first.annotation == second.annotation and first.shape == second.shape
