"""What a rendezvous of machines waits for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hetu_fx.errors import EnvironmentProblem


@dataclass(frozen=True)
class Times:
    """What the rendezvous waits for, in seconds; given as `--rdzv-conf beat=0.3,silent=1.5`.

    Attributes:
        beat: between two signs of life of a node.
        silent: without one, after which a node counts as gone.
        last_call: for which the first round waits for more nodes once there are enough.
        come: within which a member must come to a next round although it shows signs of life.
        reach: for which a node tries to reach an endpoint at its start.
        timeout: within which a round must be settled.
        alone_after: after which nodes that are too few to put out the others, as they cannot know whether these are
            gone, go on without them; infinite: never. Where only the network was cut, two jobs are the price.
    """

    beat: float = 0.3
    silent: float = 1.5
    last_call: float = 0.5
    come: float = 60.0
    reach: float = 10.0
    timeout: float = 600.0
    alone_after: float = float("inf")

    def __post_init__(self) -> None:
        for each in fields(self):
            if not getattr(self, each.name) > 0:
                raise EnvironmentProblem(f"--rdzv-conf {each.name}={getattr(self, each.name):g}: seconds are above 0")
        if self.silent < 3 * self.beat:
            raise EnvironmentProblem(
                f"--rdzv-conf silent={self.silent:g} with beat={self.beat:g}: a beat that is late would count as "
                f"silence\nhint: give at least silent={3 * self.beat:g}"
            )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Times:
        """Read what `--rdzv-conf` says. Raises EnvironmentProblem for what is no time of these."""
        known = {each.name for each in fields(cls)}
        if unknown := set(given) - known:
            raise EnvironmentProblem(f"--rdzv-conf has {sorted(unknown)}\nhint: it takes {', '.join(sorted(known))}")
        try:
            return cls(**{name: float(value) for name, value in given.items() if name in known})
        except ValueError as error:
            raise EnvironmentProblem(f"--rdzv-conf: {error}; times are numbers of seconds") from error
