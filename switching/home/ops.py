"""Home parameters: what the user's optimizer sees (DESIGN 3.5).

`HomeTensor` has the global shape of a parameter and holds the piece that this rank owns. Torch's own
optimizers (loop, foreach and fused), `clip_grad_norm_`, `clip_grad_value_`, `GradScaler`, `state_dict` round
trips and torch.distributed.checkpoint work on it unchanged.

All ranks must do the same things to the same tensors: sums, norms, and ops that need the whole tensor
(Adafactor's row means, Muon's and LBFGS's products) talk to the other ranks.

Ops with one value for all ranks (norms, sums, means, dots, extremes) stand here, the others in `pointwise` and
`gathered`. Each rank reduces the elements that it counts, and the ranks' values meet in one all-reduce. Norms are put
off: `vector_norm` gives a PendingNorm, and all those that meet in one op (`torch.stack` in torch's own
`clip_grad_norm_`) are summed in one message.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.base.dtypes import carries_gradient, is_complex, is_real, widest
from hetu_fx.base.patches import Patch, register_patch
from hetu_fx.base.torch_private import TYPES_OF_LIST_KERNELS, foreach_norm, make_subclass
from hetu_fx.comm_ops.wire.collectives import reduce_world
from hetu_fx.switching.home.async_tensor import Pending
from hetu_fx.switching.home.gathered import WholeView, run_whole
from hetu_fx.switching.home.journal import journal
from hetu_fx.switching.home.layout import HomeLayout, home_layout
from hetu_fx.switching.home.pointwise import LOCAL_OPS, find_local
from hetu_fx.switching.home.tensor import (
    OPS,
    Handler,
    HomeTensor,
    Read,
    ReadRun,
    counting_writes,
    cut_like,
    gather_whole,
    home_layout_of,
    local_of,
    wrap,
)

__all__ = ["HomeLayout", "HomeTensor", "PendingNorm", "WholeView", "gather_whole", "home_layout"]


aten = torch.ops.aten


class PendingNorm(Pending):
    """The norm of a home tensor, of which this rank knows its own elements' part only.

    Settling sums it over ranks, with all other pending norms in the op, in one message: every rank must do so alike.
    """

    part: torch.Tensor
    order: float
    world: int
    read: tuple[ReadRun, Read] | None  # as in `_reading`

    @classmethod
    def settle(cls, pending: Sequence[PendingNorm]) -> None:
        """Sum norms over ranks: one message for all of an order and a world."""
        open_norms = {id(norm): norm for norm in pending if norm.value is None}.values()
        by_kind: dict[Any, list[PendingNorm]] = {}
        for norm in open_norms:
            by_kind.setdefault((norm.order, norm.world, norm.read and norm.read[0]), []).append(norm)
        for (order, world, _), norms in sorted(by_kind.items(), key=lambda item: item[0][:2]):
            parts = torch.stack([norm.part.double() for norm in norms])
            values = _total_norms(parts, order, world, [norm.read for norm in norms])
            for norm, value in zip(norms, values.unbind(), strict=True):
                norm.value = value.to(norm.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self.value is not None:
            return repr(self.value)
        return f"PendingNorm(order={self.order}, not summed over the ranks yet; .item() on every rank does)"


_CLIP = nn.utils.clip_grad_norm_.__wrapped__.__code__  # type: ignore[attr-defined]
_MOST_FRAMES = 12  # from a norm out to what clips by it

Reading = tuple[ReadRun, Read] | None
"""How one rank alone reads a number of a home tensor; None: all ranks must ask."""


def _reading(home: HomeTensor, part: torch.Tensor, *reduced: Any) -> Reading:
    """Return how a number is read, of which this rank has a part, and keep that for ranks that read it later."""
    found = None if home.home_layout.world == 1 or _is_clipping() else OPS.reads.expression(home)
    if found is None:
        return None
    run, of = found
    read = of, reduced
    run.keep(read, part.reshape(-1))
    return run, read


def _is_clipping() -> bool:
    """Tell whether torch clips gradients by their norm: all ranks do, and one message brings many."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame is None or frame.f_code is _CLIP:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code is _CLIP


def _of_all(readings: Sequence[Reading], parts: torch.Tensor) -> torch.Tensor | None:
    """Return all ranks' parts of numbers, a row for each rank; None where all ranks must ask."""
    asked = [reading for reading in readings if reading is not None]
    if len(asked) < len(readings) or len({id(run) for run, _ in asked}) != 1:
        return None
    return asked[0][0].parts([read for _, read in asked], parts)


def _total_norms(parts: torch.Tensor, order: float, world: int, readings: Sequence[Reading] = ()) -> torch.Tensor:
    """Combine a vector of this rank's norms (float64) with the other ranks'; all of one run, or of none."""
    what = f"norms of order {order:g}"
    if math.isinf(order):
        return _extremes(parts, world, what, readings, largest=order > 0)
    if world == 1 and order:
        return parts
    found = _of_all(readings, parts)
    powers = (parts if found is None else found).pow(order or 1)
    total = reduce_world(powers, world, dist.ReduceOp.SUM, what) if found is None else powers.sum(0)
    return total.pow_(1 / order) if order else total


def _extremes(
    parts: torch.Tensor, world: int, what: str, readings: Sequence[Reading] = (), *, largest: bool
) -> torch.Tensor:
    """Take the largest (smallest) over ranks; gloo's maximum loses NaNs, so they are flagged beside."""
    if world == 1:
        return parts
    if (found := _of_all(readings, parts)) is not None:
        return found.amax(0) if largest else found.amin(0)
    values = parts if largest else -parts
    flags = values.isnan().to(values.dtype)
    both = torch.cat([values.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf), flags])
    values, flags = reduce_world(both, world, dist.ReduceOp.MAX, what).chunk(2)
    values = values.masked_fill(flags > 0, math.nan)
    return values if largest else -values


def _local_norms(homes: Sequence[HomeTensor], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Give this rank's parts of norms of a dtype: those of the elements it counts, in float32 at least."""
    norms: dict[int, torch.Tensor] = {}
    for own in dict.fromkeys(home.dtype for home in homes):
        exact = dtype or own
        if own in (torch.float16, torch.bfloat16):
            exact = torch.promote_types(exact, torch.float32)
        alike = [position for position, home in enumerate(homes) if home.dtype == own]
        found = foreach_norm([_counted_values(homes[position]) for position in alike], order, dtype=exact)
        norms.update(zip(alike, found, strict=True))
    return [norms[position] for position in range(len(homes))]


def _counted_values(home: HomeTensor) -> torch.Tensor:
    """Return the elements that this rank counts, in one tensor; a zero where it counts none."""
    counted = [piece for piece in home.home_layout.counted_pieces(home.local) if piece.numel()]
    if len(counted) == 1:
        return counted[0]
    return torch.cat([piece.reshape(-1) for piece in counted]) if counted else home.local.new_zeros(1)


def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    home, order, dims, keepdim = (args[0], *_defaults(args[1:], (2, None, False)))
    if not _over_all(home, dims) or keepdim or order < 0 or is_complex(home.dtype):
        return run_whole(func, args, kwargs)
    dtype = kwargs.get("dtype") or home.dtype
    (part,) = _local_norms([home], float(order), dtype)
    pending = make_subclass(PendingNorm, part.to(dtype))
    pending.part, pending.order, pending.world, pending.value = part, float(order), home.home_layout.world, None
    pending.read = _norm_reading(home, part.double(), order, dtype)
    return pending


def _norm_reading(home: HomeTensor, part: torch.Tensor, order: float, dtype: torch.dtype | None) -> Reading:
    return _reading(home, part, "norm", float(order), str(dtype or home.dtype))


def _norm_readings(
    homes: Sequence[HomeTensor], parts: torch.Tensor, order: float, dtype: torch.dtype | None
) -> list[Reading]:
    """Return how the norms of a list are read; where all ranks must ask for one of them they do for all: none."""
    each = zip(homes, parts.unbind(), strict=True)
    found = list(takewhile(bool, (_norm_reading(home, part, order, dtype) for home, part in each)))
    return found if len(found) == len(homes) else []


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Take all norms of a list in one message; plain tensors in the list are whole on every rank."""
    tensors, order, dtype = args[0], *_defaults(args[1:], (2, kwargs.get("dtype")))
    homes = [tensor for tensor in tensors if type(tensor) is HomeTensor]
    if order < 0:
        return [aten.linalg_vector_norm(tensor, order, dtype=dtype) for tensor in tensors]
    parts = torch.stack(_local_norms(homes, float(order), dtype)).double()
    readings = _norm_readings(homes, parts, order, dtype)
    totals = iter(_total_norms(parts, float(order), homes[0].home_layout.world, readings).unbind())
    return [
        next(totals).to((dtype or tensor.dtype).to_real())
        if type(tensor) is HomeTensor
        else torch.linalg.vector_norm(tensor, order, dtype=dtype)
        for tensor in tensors
    ]


def _defaults(given: Sequence[Any], defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*given, *defaults[len(given) :])


def _over_all(home: HomeTensor, dims: Any) -> bool:
    return not dims or len({dim % max(home.dim(), 1) for dim in dims}) == home.dim()


def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sum or average over all elements; over some dims the op runs whole."""
    home, dims, keepdim = (args[0], *_defaults(args[1:], (None, False)))
    if not _over_all(home, dims) or keepdim:
        return run_whole(func, args, kwargs)
    given = kwargs.get("dtype")
    result_dtype = given or (home.dtype if carries_gradient(home.dtype) else torch.int64)
    part = _part_of_sum(home, None if given is None else str(given))
    reading = _reading(home, part, "sum", None if given is None else str(given))
    if (found := _of_all([reading], part.reshape(1))) is not None:
        total = found.sum()
    else:
        total = _over_ranks(part, home)
    if func.overloadpacket is aten.mean:
        total = total / home.numel()
    return total.to(result_dtype)


def _dot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    layout = next(arg.home_layout for arg in args if type(arg) is HomeTensor)
    first, second = (cut_like(arg, layout) for arg in args)
    home = next(arg for arg in args if type(arg) is HomeTensor)
    pairs = zip(layout.counted_pieces(first), layout.counted_pieces(second), strict=True)
    return _over_ranks(_total((a * b for a, b in pairs), home), home).to(home.dtype)


def _counted(home: HomeTensor) -> tuple[torch.Tensor, ...]:
    return home.home_layout.counted_pieces(home.local)


def _part_of_sum(home: HomeTensor, dtype: str | None) -> torch.Tensor:
    return _total((piece if dtype is None else piece.to(getattr(torch, dtype[6:])) for piece in _counted(home)), home)


def _total(pieces: Iterable[torch.Tensor], home: HomeTensor) -> torch.Tensor:
    """Sum pieces, in double precision where the values are real numbers."""
    exact = widest(home.dtype)
    total = torch.zeros((), dtype=exact, device=home.device)
    for piece in pieces:
        total = total + piece.sum(dtype=exact)
    return total


def _over_ranks(total: torch.Tensor, home: HomeTensor) -> torch.Tensor:
    return reduce_world(total, home.home_layout.world, dist.ReduceOp.SUM, f"a sum over {tuple(home.shape)}")


def _truth(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tell whether any, or all, elements are true."""
    home, every = args[0], func.overloadpacket is aten.all
    if home.dtype is torch.bool:
        return _extreme(aten.min.default if every else aten.max.default, (home,), {})
    found = home.local.all() if every else home.local.any()
    op = dist.ReduceOp.MIN if every else dist.ReduceOp.MAX
    return reduce_world(found.to(torch.int32), home.home_layout.world, op, "a truth value").to(torch.bool)


def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    home = next(arg for arg in args if type(arg) is HomeTensor)
    if args[0].shape != args[1].shape:
        return False
    pieces = [cut_like(arg, home.home_layout) for arg in args]
    found = torch.tensor(int(torch.equal(*pieces)), dtype=torch.int32)
    return bool(reduce_world(found, home.home_layout.world, dist.ReduceOp.MIN, "a comparison"))


def _extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take the largest or smallest element; over some dims, and of integers, the op runs whole."""
    home, dims, keepdim = (args[0], *_defaults(args[1:], (None, False)))
    largest = func.overloadpacket in (aten.max, aten.amax)
    if not _over_all(home, dims) or keepdim or not (is_real(home.dtype) or home.dtype is torch.bool):
        return run_whole(func, args, kwargs)
    what, part = f"an extreme over {tuple(home.shape)}", _part_of_extreme(home, largest)
    readings = [_reading(home, part, "extreme", largest)]
    return _extremes(part, home.home_layout.world, what, readings, largest=largest)[0].to(home.dtype)


def _part_of_extreme(home: HomeTensor, largest: bool) -> torch.Tensor:
    if not home.local.numel():
        return torch.tensor([-math.inf if largest else math.inf], dtype=torch.float64, device=home.device)
    return (home.local.max() if largest else home.local.min()).double().reshape(1)


PARTS: Mapping[str, Callable[..., torch.Tensor]] = {
    "norm": lambda home, order, dtype: _local_norms([home], order, getattr(torch, dtype[6:]))[0].double(),
    "sum": _part_of_sum,
    "extreme": _part_of_extreme,
}
"""How a rank works out its part of a number, by its name: see `Read`."""


def _take_over(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let a home tensor be another tensor, as adding a parametrization does with what its right inverse gives."""
    home, value = args
    if type(home) is not HomeTensor or value.shape != home.shape:
        return run_whole(func, args, kwargs)
    home.data = value
    return home


_REDUCE_OPS: dict[Any, Handler] = {
    aten.linalg_vector_norm.default: _vector_norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _sum,
    aten.mean.dim: _sum,
    aten.dot.default: _dot,
    aten.any.default: _truth,
    aten.all.default: _truth,
    aten.equal.default: _equal,
    aten.max.default: _extreme,
    aten.min.default: _extreme,
    aten.amax.default: _extreme,
    aten.amin.default: _extreme,
    aten.set_.source_Tensor: _take_over,
}


def _find_handler(func: Any) -> Handler:
    """Serve an op that is in no table: on the pieces if it is point-wise, else on the whole tensors."""
    return find_local(func) or run_whole


def _with_home_tensors(types: list[type[torch.Tensor]]) -> list[type[torch.Tensor]]:
    return [*types, HomeTensor]


OPS.update({op: counting_writes(op, handler) for op, handler in (LOCAL_OPS | _REDUCE_OPS).items()})
OPS.find = _find_handler
for place in TYPES_OF_LIST_KERNELS:
    register_patch(
        Patch(
            "torch",
            *place,
            why="clipping 150 gradients would take 300 dispatches instead of two",
            tested="2.13",
            wrap=_with_home_tensors,
            is_needed=False,
        )
    )


_ALONE = Annotation.on((0,))


def get_home_layout(home: torch.Tensor) -> HomeLayout:
    """Return the layout of a home parameter; that of a plain one is all of it, on a rank alone."""
    return home.home_layout if isinstance(home, HomeTensor) else home_layout(_ALONE, tuple(home.shape), 0, 1)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor of a parallel model: a parameter, a gradient, what an optimizer keeps.

    Collective: every rank must call it. On one process all tensors are plain, and a plain tensor is returned as it is.
    """
    return tensor.full_tensor() if isinstance(tensor, HomeTensor) else tensor


def own_pieces(homes: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this rank's pieces of home parameters; those of plain ones share their memory, and their versions."""
    if set(map(type, homes.values())) <= {HomeTensor}:
        return dict(zip(homes, map(local_of, homes.values()), strict=True))
    return {name: home.local if isinstance(home, HomeTensor) else home.detach() for name, home in homes.items()}


def as_home(pieces: Mapping[str, torch.Tensor], homes: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Wrap pieces of gradients, which fit, in the layouts of their parameters; plain ones have plain gradients."""
    found = list(map(homes.__getitem__, pieces))
    if not set(map(type, found)) <= {HomeTensor}:
        return dict(pieces)
    made: dict[str, torch.Tensor] = dict(
        zip(pieces, map(wrap, pieces.values(), map(home_layout_of, found)), strict=True)
    )
    journal().note_gradients(homes, made)
    return made
