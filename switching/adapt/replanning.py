"""Makes a plan on rank 0 while all ranks go on training, and hands it to all of them before the same step.

Every rank asks for the same plan, from facts that all have agreed on. Rank 0 alone makes it, in a process of its own
(graphs of examples of unequal sizes differ, so that one rank plans for all); its facts of a step say that the plan is
ready, and so all ranks receive it then. What went wrong in planning is received in its place.

The process deduces the plan's graph too, which is the same for all ranks and most of what the first step under the plan
would wait for (three quarters to nine tenths of making its graphs); it travels with the plan, as 0.3 MB for 550 nodes.
The process is one that `begin` has started before training; one that is started later slows the step that follows.

What a plan is made for, besides model and devices, and which plans have been made: the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from time import perf_counter

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.wire.consensus import by_first
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import CommError, HetuFxError
from hetu_fx.plans.plan import Plan
from hetu_fx.switching.adapt.background import Background
from hetu_fx.switching.adapt.tried import Tried, TriedPlans
from hetu_fx.switching.variants import Variants

Planner = Callable[[Cluster, str], Plan]


@dataclass(frozen=True)
class Made:
    """A plan, the seconds that making it took (0 where it was known), what has been deduced for it, and what was found
    when it was tried (None: it was known)."""

    plan: Plan
    seconds: float = 0.0
    deduced: bytes | None = None
    tried: Tried | None = None


@dataclass(frozen=True)
class Asked:
    """A plan that is wanted: for what, under which name, and before which step it was asked for.

    `least_gain` is the share by which it must be faster than what runs, None where it is taken in any case.
    """

    conditions: Conditions
    name: str
    step: int
    least_gain: float | None = None


_Wanted = tuple[Asked, Cluster, Collection[Plan]]  # a plan, for a cluster; the compute layouts that are known before


class Replanning:
    """The plan that is being made, if any; `asked` is the same on every rank.

    Args:
        table: all ranks.
        planner: makes a plan of a given name for a cluster; called on rank 0 only.
        variants: those there are; they deduce of a plan what takes long and is the same for all ranks, on rank 0 too.
        tried: tries a plan where it is made: one that is wrong is none.
    """

    def __init__(self, table: GroupTable, planner: Planner, variants: Variants, tried: TriedPlans) -> None:
        self.table, self.planner, self.variants, self.tried = table, planner, variants, tried
        self.asked: Asked | None = None
        self._background: Background[_Wanted, Made] | None = None

    def begin(self) -> None:
        """Start the process in which plans will be made."""
        if self.table.rank == 0 and (self._background is None or self._background.is_gone):
            self._background = Background(self._made)

    def end(self) -> None:
        """End that process."""
        if self._background is not None:
            self._background.stop()
        self._background = None

    @property
    def has_plan(self) -> bool:
        """Tell whether this rank has made the plan."""
        return self.asked is not None and self._background is not None and self._background.is_done

    def ask(self, asked: Asked, cluster: Cluster) -> None:
        """Begin to make a plan, in place of one for other conditions that is being made."""
        if self.asked is not None and self.asked.conditions.distance(asked.conditions) < NEAR:
            return
        self.drop()
        self.asked = asked
        self.begin()
        if self._background is not None:
            self._background.ask((asked, cluster, self.variants.layouts()))

    def drop(self) -> None:
        """Leave the plan that is being made, and the process that makes it."""
        if self.asked is not None:
            self.end()
        self.asked = None

    def take(self) -> tuple[Asked, Made | HetuFxError]:
        """Return the plan that is ready, or what went wrong, on every rank; collective."""
        assert self.asked is not None, "facts say that a plan is ready which nobody has asked for"
        asked, self.asked = self.asked, None
        try:
            made = by_first(self.table, self._result)
        except CommError:
            raise
        except HetuFxError as error:
            return asked, error
        self._note(made)
        return asked, made

    def make_now(self, asked: Asked, cluster: Cluster) -> Made:
        """Make a plan while all ranks wait; collective. Raises on every rank what went wrong."""
        self.drop()
        made = by_first(self.table, lambda: self._made((asked, cluster, self.variants.layouts())))
        self._note(made)
        return made

    def _note(self, made: Made) -> None:
        if made.tried is not None:
            self.tried.note(made.plan, made.tried)

    def _made(self, wanted: _Wanted) -> Made:
        start, (asked, cluster, layouts) = perf_counter(), wanted
        devices = cluster.without(tuple(asked.conditions.drained)).with_rates(dict(asked.conditions.rates))
        plan = self.planner(devices, asked.name)
        seconds = perf_counter() - start
        return Made(plan, seconds, self.variants.deduced(plan, layouts), self.tried.ask_here(plan))

    def _result(self) -> Made:
        assert self._background is not None, "rank 0 makes plans"
        return self._background.result()


NEAR = 0.05
"""The plan for rates that differ by less than this is used for others at once: rates of few steps are no better."""

ALIKE = 0.01
"""Where rates differ by more than this, a plan of their own may still be faster."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """The devices' straggling rates, of those that are not 1, and the devices that are drained."""

    rates: tuple[tuple[int, float], ...] = ()
    drained: frozenset[int] = frozenset()

    @classmethod
    def of(cls, rates: Mapping[int, float], drained: Collection[int] = ()) -> Conditions:
        """Return the conditions that some rates are, those of drained devices left out."""
        slow = ((rank, rate) for rank, rate in sorted(rates.items()) if rate != 1.0 and rank not in drained)
        return cls(tuple(slow), frozenset(drained))

    @property
    def name(self) -> str:
        """Return a name that is fit for a file: `slow-1x2.5` where device 1 takes 2.5 times as long.

        Devices that are left out stand first: `without-3-slow-1x2.5`.
        """
        left_out = ["without", *map(str, sorted(self.drained))] if self.drained else []
        slow = [f"{rank}x{rate:.3g}" for rank, rate in self.rates]
        return "-".join([*left_out, *(["slow", *slow] if slow else [])]) or "healthy"

    def distance(self, other: Conditions) -> float:
        """Return by how much the rates of one device differ at most; infinite if other devices are slow or drained."""
        mine, theirs = dict(self.rates), dict(other.rates)
        if mine.keys() != theirs.keys() or self.drained != other.drained:
            return float("inf")
        return max((max(rate / theirs[rank], theirs[rank] / rate) - 1 for rank, rate in mine.items()), default=0.0)


def nearest_known(plans: Iterable[Conditions], conditions: Conditions) -> Conditions | None:
    """Return which of the conditions that have a plan are these, as far as can be measured; None if none are."""
    near = min(plans, key=conditions.distance, default=None)
    return None if near is None or conditions.distance(near) >= NEAR else near
