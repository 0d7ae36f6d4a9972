"""Home parameters: what the user's optimizer sees (DESIGN 3.5).

`HomeTensor` has the global shape of a parameter and holds the piece that this rank owns. Torch's own
optimizers (loop, foreach and fused), `clip_grad_norm_`, `clip_grad_value_`, `GradScaler`, `state_dict` round
trips and torch.distributed.checkpoint work on it unchanged.

All ranks must do the same things to the same tensors: sums, norms, and ops that need the whole tensor
(Adafactor's row means, Muon's and LBFGS's products) talk to the other ranks.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hetu_fx.base.torch_private import types_of_list_kernels
from hetu_fx.switching.home.gathered import WholeView, run_whole
from hetu_fx.switching.home.layout import HomeLayout, home_layout
from hetu_fx.switching.home.pointwise import LOCAL_OPS, find_local
from hetu_fx.switching.home.reductions import REDUCE_OPS, PendingNorm
from hetu_fx.switching.home.tensor import FIND_HANDLER, OPS, Handler, HomeTensor, gather_whole

__all__ = ["HomeLayout", "HomeTensor", "PendingNorm", "WholeView", "gather_whole", "home_layout", "is_home"]


def is_home(value: Any) -> bool:
    """Tell whether a value is a home tensor."""
    return isinstance(value, HomeTensor)


def _find_handler(func: Any) -> Handler:
    """Serve an op that is in no table: on the pieces if it is point-wise, else on the whole tensors."""
    return find_local(func) or run_whole


def _admit_to_foreach() -> None:
    """Put home tensors among the types that torch's foreach paths take.

    Torch decides by exact type; without this, clipping 150 gradients takes 300 dispatches instead of two.
    """
    for types in types_of_list_kernels():
        if HomeTensor not in types:
            types.append(HomeTensor)


OPS.update(LOCAL_OPS | REDUCE_OPS)
FIND_HANDLER[:] = [_find_handler]
_admit_to_foreach()


def layout_of(home: nn.Parameter) -> Any:
    """Return the layout of a home parameter (a HomeTensor that torch's type hints call a Parameter)."""
    assert isinstance(home, HomeTensor)
    return home.home_layout
