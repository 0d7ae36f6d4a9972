"""hetu::batched_send_receive: any annotation into any other, each rank getting what it lacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from hetu_fx.comm_ops.ops.op import CommOp, call
from hetu_fx.comm_ops.plans.algorithm import FLAT, Algorithm, parse_algorithm, spans
from hetu_fx.comm_ops.plans.bsr_plan import BsrPlan, TensorMove, plan_moves
from hetu_fx.comm_ops.plans.choose_algorithm import bound, number_nodes
from hetu_fx.comm_ops.plans.cost import Topology, rounds_cost, send_cost
from hetu_fx.comm_ops.plans.transition import Transition, parse_transition
from hetu_fx.comm_ops.wire.bsr_run import run_moves
from hetu_fx.comm_ops.wire.collectives import fresh
from hetu_fx.comm_ops.wire.groups import active
from hetu_fx.comm_ops.wire.packing import local_shape_like
from hetu_fx.errors import CommError


@lru_cache(maxsize=4096)
def plan_transition(change: Transition, itemsize: int, nodes: tuple[int, ...] = (), *, afar: bool = True) -> BsrPlan:
    """Plan the op's messages for entries of `itemsize` bytes: what runs, and what it is priced by.

    `nodes` has the node of each of the change's ranks (empty: all on one). With `afar`, ranks of a node share
    what all of them get from another node.
    """
    node_of = dict(zip(change.ranks, nodes, strict=True)).__getitem__ if nodes else lambda rank: 0
    move = TensorMove(change.source, change.target, change.shape, itemsize)
    return plan_moves([move], node_of=node_of, relays=True, afar=afar)


def _eager(x: Tensor, change: str, adjoint: str, form: str = "") -> Tensor:
    parsed, chosen, table = parse_transition(change), parse_algorithm(form), active()
    mine = x.detach() if parsed.source.holds(table.rank) else None
    plan = plan_transition(parsed, x.element_size(), chosen.nodes, afar=chosen.in_two_levels(_bytes(parsed, x)))
    (result,) = run_moves(plan, [mine], table, like=[x])
    if result is None:
        return _fake(x, change, adjoint)
    return fresh(result) if result is mine else result


def _fake(x: Tensor, change: str, adjoint: str, form: str = "") -> Tensor:
    parsed = parse_transition(change)
    return x.new_empty(local_shape_like(parsed.target, active().rank, parsed.shape, x))


def _adjoint(gradient: Tensor, change: str, adjoint: str, form: str = "") -> Tensor:
    if not adjoint:
        raise CommError(f"no second derivative through batched_send_receive ({change})")
    return call("batched_send_receive", gradient, adjoint, "", form)


def _form(args: Sequence[Any], topology: Topology, choice: str) -> Algorithm:
    """Tell the nodes, so that neighbours are asked first, and from how many bytes neighbours share what is far."""
    change = parse_transition(args[0])
    nodes = number_nodes(change.ranks, topology)
    if choice == "flat" or not spans(nodes):
        return FLAT
    direct, shared = (plan_transition(change, 1, nodes, afar=afar) for afar in (False, True))
    if direct == shared:
        return Algorithm(nodes)
    return Algorithm(nodes, bound(choice, _price(direct, change, topology), _price(shared, change, topology)))


def _price(plan: BsrPlan, change: Transition, topology: Topology) -> Callable[[float], float]:
    """Return the seconds of a plan as a function of the bytes of the whole tensor."""
    entries = math.prod(1 if size is None else size for size in change.shape)
    rounds = [part.messages for part in plan.rounds]

    def seconds(num_bytes: float) -> float:
        scale = num_bytes / max(1, entries)
        return rounds_cost([[(a, b, size * scale) for a, b, size in sent] for sent in rounds], topology)

    return seconds


def _bytes(change: Transition, x: Tensor) -> int:
    sizes = (x.shape[dim] if size is None else size for dim, size in enumerate(change.shape))
    return math.prod(sizes) * x.element_size()


BATCHED_SEND_RECEIVE = CommOp(
    name="batched_send_receive",
    summary="Makes the change of annotation `change`; the gradient makes the change `adjoint`.",
    schema='(Tensor x, str change, str adjoint, str form="") -> Tensor',
    eager=_eager,
    fake=_fake,
    adjoint=_adjoint,
    cost=send_cost,
    algorithm=_form,
).register()
