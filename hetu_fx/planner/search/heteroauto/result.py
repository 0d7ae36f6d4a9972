"""What the HeteroAuto search returns: equal replicas of one pipeline over kinds of chips."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hetu_fx.planner.search.heteroauto.cost import HeteroStage


@dataclass(frozen=True, slots=True)
class HeteroResult:
    """The best plan that was found.

    Attributes:
        replicas: data parallel degree: so many copies of the pipeline, each on groups of its own.
        stages: the pipeline, first stage first.
        seconds: predicted seconds of a step.
        coarse_seconds: those of the best plan in which every kind has groups of one size, which is proved.
        num_arranged: for how many choices of groups the lower level was solved.
    """

    replicas: int
    stages: tuple[HeteroStage, ...]
    seconds: float
    coarse_seconds: float
    num_arranged: int

    @property
    def chips(self) -> Mapping[str, int]:
        """Return how many chips of each kind are used."""
        count: Counter[str] = Counter()
        for stage in self.stages:
            count[stage.groups.kind.name] += self.replicas * stage.groups.degree
        return count

    def __str__(self) -> str:
        return f"{self.replicas} x " + " > ".join(map(str, self.stages))
