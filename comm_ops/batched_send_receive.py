"""hetu::batched_send_receive: any annotation into any other, each rank getting what it lacks."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from hetu_fx.comm_ops.bsr_plan import BsrPlan, Move, plan_moves
from hetu_fx.comm_ops.bsr_run import run_moves
from hetu_fx.comm_ops.change import Change, parse_change
from hetu_fx.comm_ops.cost import send_cost
from hetu_fx.comm_ops.groups import active
from hetu_fx.comm_ops.op import CommOp, call
from hetu_fx.comm_ops.packing import local_shape_like
from hetu_fx.comm_ops.wire import fresh
from hetu_fx.errors import CommError


@lru_cache(maxsize=4096)
def plan_change(change: Change, itemsize: int) -> BsrPlan:
    """Plan the op's messages for entries of `itemsize` bytes: what runs, and what it is priced by."""
    return plan_moves([Move(change.source, change.target, change.shape, itemsize)], relays=True)


def _eager(x: Tensor, change: str, adjoint: str) -> Tensor:
    parsed, table = parse_change(change), active()
    mine = x.detach() if parsed.source.holds(table.rank) else None
    (result,) = run_moves(plan_change(parsed, x.element_size()), [mine], table, like=[x])
    if result is None:
        return _fake(x, change, adjoint)
    return fresh(result) if result is mine else result


def _fake(x: Tensor, change: str, adjoint: str) -> Tensor:
    parsed = parse_change(change)
    return x.new_empty(local_shape_like(parsed.target, active().rank, parsed.shape, x))


def _adjoint(gradient: Tensor, change: str, adjoint: str) -> Tensor:
    if not adjoint:
        raise CommError(f"no second derivative through batched_send_receive ({change})")
    return call("batched_send_receive", gradient, adjoint, "")


BATCHED_SEND_RECEIVE = CommOp(
    name="batched_send_receive",
    summary="Makes the change of annotation `change`; the gradient makes the change `adjoint`.",
    schema="(Tensor x, str change, str adjoint) -> Tensor",
    eager=_eager,
    fake=_fake,
    adjoint=_adjoint,
    cost=send_cost,
).register()
