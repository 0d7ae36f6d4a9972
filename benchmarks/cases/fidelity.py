"""Closed form and simulation of plans drawn at random, and what explains their difference.

A simulation says what a step would take if nothing overlapped and pipelines' links had room for all
(`one_by_one_seconds`), what overlap hides of that and what sharing links loses. So of what the closed form differs from
the simulation that is explained but for what it differs from one thing after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.cases.any_plans import drawn
from hetu_fx.planner.price.step import predict
from hetu_fx.planner.simulate.simulate import simulate, simulated_seconds

LIMIT = 0.03
"""A difference of this share of a step is one."""

NOTHING = 1e-3
"""Less than this share of a step, hidden and lost, is none."""


@dataclass(frozen=True)
class Fidelity:
    """One plan: shares of the simulated step.

    Attributes:
        plan: in words.
        difference: what the closed form says more.
        hidden, lost: by overlap, and by sharing links.
        unexplained: how far the closed form is from one thing after the other.
        folded: how far the simulation of pipelines that are alike as one is from that of all.
    """

    plan: str
    difference: float
    hidden: float
    lost: float
    unexplained: float
    folded: float

    @property
    def is_plain(self) -> bool:
        """Tell whether nothing overlaps, or shares a link."""
        return abs(self.hidden) + abs(self.lost) < NOTHING


def fidelity(count: int, seed: int = 0) -> Iterator[Fidelity]:
    """Measure so many plans."""
    for one in drawn(count, seed):
        given = one.plan, one.costs, one.cluster
        closed, step, folded = predict(*given).seconds, simulate(*given), simulated_seconds(*given)
        yield Fidelity(
            plan=one.plan.summary(),
            difference=closed / step.seconds - 1,
            hidden=step.hidden_seconds / step.seconds,
            lost=step.lost_seconds / step.seconds,
            unexplained=abs(closed - step.one_by_one_seconds) / step.seconds,
            folded=abs(folded / step.seconds - 1),
        )


def share_over(values: Sequence[float], limit: float = LIMIT) -> float:
    """Return the share of values that are over a limit."""
    return sum(value > limit for value in values) / max(1, len(values))
