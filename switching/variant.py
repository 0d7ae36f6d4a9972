"""What every variant is, however the model runs: a plan, and the way of parameters from home and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch
from torch import Tensor, nn

from hetu_fx.comm_ops.groups import GroupTable
from hetu_fx.comm_ops.process_group import GroupCreation
from hetu_fx.plans import Plan
from hetu_fx.prediction import Prediction
from hetu_fx.switching.bridge import Bridge, BridgeEntry
from hetu_fx.switching.gradients import KeptBack
from hetu_fx.switching.home import HomeTensor


@dataclass
class FirstUse:
    """What it has taken this rank to get a variant running; paid once.

    Attributes:
        graph_seconds: making its graphs and what stands around them; a compiler's work is not in it.
        groups: the process groups that were first used, and so created, while this variant ran.
    """

    graph_seconds: float = 0.0
    groups: list[GroupCreation] = field(default_factory=list)

    @contextmanager
    def making(self) -> Iterator[None]:
        """Count the time inside as that of making graphs."""
        start = perf_counter()
        yield
        self.graph_seconds += perf_counter() - start

    def __str__(self) -> str:
        seconds = sum(group.seconds for group in self.groups)
        return f"graphs made in {self.graph_seconds:.3g} s, {len(self.groups)} process groups in {seconds:.3g} s"


class Variant:
    """A plan made ready to run; what more it takes is in the subclass of each way of running."""

    def __init__(
        self,
        name: str,
        plan: Plan,
        table: GroupTable,
        homes: Mapping[str, nn.Parameter],
        planned_rates: Mapping[int, float],
    ) -> None:
        self.name, self.plan, self.table, self.homes = name, plan, table, homes
        self.planned_rates = planned_rates
        self.trained = frozenset(n for n, home in homes.items() if home.requires_grad)
        self.kept_back = KeptBack()
        self.first_use = FirstUse()
        self._gathered: tuple[object, dict[str, Tensor]] = (None, {})
        self._bridges: dict[tuple[BridgeEntry, ...], Bridge] = {}

    @property
    def device(self) -> torch.device:
        """Return where this rank computes: where its parameters are."""
        return next(iter(self.homes.values())).device

    @property
    def predicted_seconds(self) -> float:
        """Return what the planner expected of a step; 0 if the plan was given by hand."""
        return self.plan.predicted.seconds if self.plan.predicted else 0.0

    def expect(self, predicted: Prediction | None, planned_rates: Mapping[int, float]) -> None:
        """Take over what the planner expects of the plan at other rates of the devices."""
        self.plan = replace(self.plan, predicted=predicted)
        self.planned_rates = dict(planned_rates)

    def gather(self, bridge: Bridge) -> dict[str, Tensor]:
        """Return this rank's compute parameters; collective unless home has not changed since the last call."""
        pieces = {name: local_of(home) for name, home in self.homes.items()}
        state = (bridge, tuple(piece._version for piece in pieces.values()))
        if self._gathered[0] != state:
            self._gathered = (state, bridge.gather(pieces))
        return dict(self._gathered[1])

    def bridge_between(self, entries: Sequence[BridgeEntry]) -> Bridge:
        """Return the bridge of some entries; made once per home layout, which the entries tell."""
        key = tuple(entries)
        if key not in self._bridges:
            self._bridges[key] = Bridge(key, self.table)
        self._bridges[key].is_outdated = False
        return self._bridges[key]

    def rehome(self) -> None:
        """Forget what belongs to the present homes of the parameters: they are about to change."""
        self._gathered = (None, {})
        for bridge in self._bridges.values():
            bridge.is_outdated = True

    def flush(self) -> None:
        """Bring gradients that were kept back home into `.grad`; collective if there are any."""
        self.kept_back.flush({name: self.homes[name] for name in self.trained})


def local_of(home: nn.Parameter) -> Tensor:
    """Return this rank's piece of a home parameter."""
    assert isinstance(home, HomeTensor)
    return home.local
