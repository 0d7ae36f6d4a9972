"""Every place where a decided move becomes messages: what is decided there is listed, or replaced by a wrong one.

Four kinds of decisions: transfers of a batched send-receive, groups of slices of a split collective, calls of a
resolved change, boxes of the bridge's messages. They are replaced where they are decided, so that every rank and every
message that goes by one goes by the wrong one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper
from typing import Any
from unittest.mock import patch

from hetu_fx.comm_ops.plans.bsr_plan import BsrPlan, SliceTransfer
from hetu_fx.comm_ops.plans.routes import SliceGroup
from hetu_fx.comm_ops.plans.transition import Transition
from hetu_fx.comm_ops.resolve.resolution import OpCall, Resolution
from hetu_fx.comm_ops.wire import bsr_run
from hetu_fx.deduction.rules.forms import PartCall
from hetu_fx.switching.bridge import bridge
from hetu_fx.switching.bridge.bridge_plan import BridgeEntry, BridgePlan

ChangeCalls = Callable[[tuple[OpCall, ...]], tuple[OpCall, ...]]


@dataclass(frozen=True)
class Transfers:
    """By which plan ranks send, and by which they receive: of a right plan it is the same."""

    sent: BsrPlan
    received: BsrPlan

    @classmethod
    def of(
        cls, plan: BsrPlan, sent: Iterable[SliceTransfer], received: Iterable[SliceTransfer] | None = None
    ) -> Transfers:
        """Have others in a plan's place; without `received`, the same are received as sent."""
        sending = BsrPlan(plan.moves, tuple(sent))
        return cls(sending, sending if received is None else BsrPlan(plan.moves, tuple(received)))

    def put_in(self, plan: BsrPlan) -> BsrPlan:
        """Have a plan say this."""
        object.__setattr__(plan, "outgoing", self.sent.outgoing)
        object.__setattr__(plan, "incoming", self.received.incoming)
        return plan


@dataclass
class Decisions:
    """What is decided in a run, in the order in which it is first used; each once.

    `unordered` are resolutions that bring statistics of parts together, of which sums and maxima are made: in whatever
    order they arrive, nothing changes.
    """

    plans: dict[BsrPlan, None] = field(default_factory=dict)
    groups: dict[Transition, None] = field(default_factory=dict)
    resolutions: dict[Resolution, None] = field(default_factory=dict)
    unordered: set[Resolution] = field(default_factory=set)
    bridges: dict[tuple[BridgeEntry, ...], BridgePlan] = field(default_factory=dict)


@dataclass(frozen=True)
class Wrong:
    """Wrong decisions, in the place of right ones."""

    plans: Mapping[BsrPlan, Transfers] = field(default_factory=dict)
    groups: Mapping[Transition, tuple[SliceGroup, ...]] = field(default_factory=dict)
    resolutions: Mapping[Resolution, ChangeCalls] = field(default_factory=dict)
    bridges: Mapping[tuple[BridgeEntry, ...], BridgePlan] = field(default_factory=dict)


@contextmanager
def listed() -> Iterator[Decisions]:
    """List what is decided and used inside."""
    found, write, groups_of = Decisions(), bsr_run._write, bsr_run.collectives_of_rank
    calls, plan_bridge, joined = Resolution.calls, bridge.plan_bridge, PartCall.joined
    joining: list[PartCall] = []

    def writing(plan: BsrPlan, *args: Any) -> None:
        found.plans[plan] = None
        write(plan, *args)

    def grouping(transition: Transition, rank: int) -> tuple[SliceGroup, ...]:
        found.groups[transition] = None
        return groups_of(transition, rank)

    def calling(self: Resolution, rank: int) -> tuple[OpCall, ...]:
        found.resolutions[self] = None
        if joining:
            found.unordered.add(self)
        return calls(self, rank)

    def joining_parts(self: PartCall, *args: Any, **kwargs: Any) -> Any:
        joining.append(self)
        made = joined(self, *args, **kwargs)
        joining.pop()
        return made

    def bridging(entries: tuple[BridgeEntry, ...], *args: Any) -> BridgePlan:
        made = found.bridges[tuple(entries)] = plan_bridge(entries, *args)
        return made

    with (
        patch.object(bsr_run, "_write", writing),
        patch.object(bsr_run, "collectives_of_rank", grouping),
        patch.object(Resolution, "calls", calling),
        patch.object(bridge, "plan_bridge", bridging),
        patch.object(PartCall, "joined", joining_parts),
    ):
        yield found


@contextmanager
def planted(wrong: Wrong) -> Iterator[None]:
    """Have wrong decisions taken inside."""
    post_init, groups_of = BsrPlan.__post_init__, bsr_run.collectives_of_rank
    calls, plan_bridge = Resolution.calls, bridge.plan_bridge

    def planning(self: BsrPlan) -> None:
        post_init(self)
        if self in wrong.plans:
            wrong.plans[self].put_in(self)

    def grouping(transition: Transition, rank: int) -> tuple[SliceGroup, ...]:
        if transition not in wrong.groups:
            return groups_of(transition, rank)
        return tuple(group for group in wrong.groups[transition] if rank in group.ranks)

    def calling(self: Resolution, rank: int) -> tuple[OpCall, ...]:
        right = calls(self, rank)
        return wrong.resolutions[self](right) if self in wrong.resolutions else right

    def bridging(entries: tuple[BridgeEntry, ...], *args: Any) -> BridgePlan:
        right = plan_bridge(entries, *args)
        return wrong.bridges.get(tuple(entries), right)

    forget()
    with (
        patch.object(BsrPlan, "__post_init__", planning),
        patch.object(bsr_run, "collectives_of_rank", grouping),
        patch.object(Resolution, "calls", calling),
        patch.object(bridge, "plan_bridge", bridging),
    ):
        yield
    forget()


def forget() -> None:
    """Forget what was decided before."""
    for module in [module for name, module in sys.modules.items() if name.startswith("hetu_fx.")]:
        for value in vars(module).values():
            if isinstance(value, _lru_cache_wrapper):
                value.cache_clear()
