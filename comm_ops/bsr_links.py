"""The batched send-receive that is cheapest on given links, of concrete sizes: direct, or by relays (H2's SR&AG)."""

from __future__ import annotations

from collections.abc import Sequence

from hetu_fx.comm_ops.plans.bsr_plan import BsrPlan, Move, plan_moves
from hetu_fx.comm_ops.plans.cost import Topology, rounds_cost


def plan_on_links(moves: Sequence[Move], topology: Topology | None, choice: str = "auto") -> BsrPlan:
    """Plan moves whose receivers share what they all get from another node, where that is cheaper.

    `choice` is "auto" (by price), "flat" (never) or "two_level" (always). Without a topology nothing is shared.
    """
    if topology is None:
        return plan_moves(moves)
    direct, shared = (plan_moves(moves, node_of=topology.node_of, relays=relays) for relays in (False, True))
    match choice:
        case "flat":
            return direct
        case "two_level":
            return shared
    return min((direct, shared), key=lambda plan: seconds_of(plan, topology))


def seconds_of(plan: BsrPlan, topology: Topology) -> float:
    """Price a plan: its rounds one after the other."""
    return rounds_cost([part.messages for part in plan.rounds], topology)
