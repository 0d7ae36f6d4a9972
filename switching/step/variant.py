"""What every variant is, however the model runs: a plan, and the way of parameters from home and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch

from hetu_fx.comm_ops.wire.process_group import GroupCreation
from hetu_fx.plans.plan import Plan
from hetu_fx.plans.prediction import Prediction
from hetu_fx.switching.bridge.compute import Compute
from hetu_fx.switching.step.gradients import KeptBack
from hetu_fx.switching.step.policy import VariantFacts


@dataclass
class FirstUse:
    """What it has taken this rank to get a variant running; paid once, and again for graphs that were evicted.

    Attributes:
        graph_seconds: making its graphs and what stands around them; a compiler's work is not in it. 0 where another
            variant of the same compute layout had made them.
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
    """A plan made ready to run; what more it takes is in the subclass of each way of running.

    `compute` is what runs under the plan's compute layout; variants of the same layout share it.
    """

    def __init__(self, name: str, plan: Plan, compute: Compute, planned_rates: Mapping[int, float]) -> None:
        self.name, self.plan, self.planned_rates = name, plan, planned_rates
        self.compute, self.table, self.homes = compute, compute.table, compute.homes
        self.trained = frozenset(n for n, home in self.homes.items() if home.requires_grad)
        self.kept_back = KeptBack()
        self.first_use = FirstUse()

    @property
    def device(self) -> torch.device:
        """Return where this rank computes: where its parameters are."""
        return self.compute.device

    @property
    def predicted_seconds(self) -> float:
        """Return what the planner expected of a step; 0 if the plan was given by hand."""
        return self.plan.predicted.seconds if self.plan.predicted else 0.0

    @property
    def facts(self) -> VariantFacts:
        """Return what a policy is told of it."""
        limits = (self.plan.max_length, *(pipeline.max_length for pipeline in self.plan.pipelines))
        return VariantFacts(
            name=self.name,
            max_length=min((limit for limit in limits if limit is not None), default=None),
            predicted_seconds=self.predicted_seconds,
            devices=self.plan.devices,
            planned_rates=self.planned_rates,
        )

    def expect(self, predicted: Prediction | None, planned_rates: Mapping[int, float]) -> None:
        """Take over what the planner expects of the plan at other rates of the devices."""
        self.plan = replace(self.plan, predicted=predicted)
        self.planned_rates = dict(planned_rates)

    def flush(self) -> None:
        """Bring gradients that were kept back home into `.grad`; collective if there are any."""
        self.kept_back.flush({name: self.homes[name] for name in self.trained})
