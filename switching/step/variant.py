"""What every variant is, however the model runs: a plan, and the way of parameters from home and back."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from hetu_fx.base.progress import telling
from hetu_fx.comm_ops.wire.process_group import GroupCreation
from hetu_fx.plans.plan import Plan
from hetu_fx.plans.prediction import Prediction
from hetu_fx.switching.bridge.bridge import Bridge, Reduction
from hetu_fx.switching.bridge.compute import Compute
from hetu_fx.switching.home.layout import HomeLayout
from hetu_fx.switching.home.ops import HomeTensor
from hetu_fx.switching.home.tensor import give, make_awaited
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
        with telling("making graphs"):
            yield
        self.graph_seconds += perf_counter() - start

    def __str__(self) -> str:
        seconds = sum(group.seconds for group in self.groups)
        return f"graphs made in {self.graph_seconds:.3g} s, {len(self.groups)} process groups in {seconds:.3g} s"


@dataclass(frozen=True, slots=True)
class _Shown:
    """What stands in `.grad` while gradients are kept back, what stood there before, and where it lies."""

    gradient: HomeTensor
    before: HomeTensor | None
    layout: HomeLayout


class DeferredGradients:
    """What steps leave behind: gradients under `no_sync`, local to this rank, until they are synchronised.

    Meanwhile `.grad` shows tensors that wait: a step outside of `no_sync` brings home what was kept with its own
    gradients; whoever reads one before has all brought home, which is collective, as reading a home tensor is. What the
    user has cleared is forgotten.
    """

    def __init__(self) -> None:
        self.local: dict[str, Tensor] = {}
        self.bridge: Bridge | None = None
        self.under_way: Reduction | None = None
        self.begun: weakref.WeakSet[Any] = weakref.WeakSet()  # collectors of steps
        self._shown: dict[str, _Shown] = {}

    @property
    def awaits_backward(self) -> bool:
        """Tell whether there is a step that can have its backward and has not had it."""
        return bool(self.begun)

    @property
    def shown(self) -> tuple[str, ...]:
        """Return what has a gradient that is kept back."""
        return tuple(self._shown)

    def settle(self) -> None:
        """Wait for the messages of a step whose loss has not been asked for its gradient, which it may be yet."""
        left, self.under_way = self.under_way, None
        if left is not None:
            left.settle()

    def add(self, bridge: Bridge, gradients: Mapping[str, Tensor | None], homes: Mapping[str, nn.Parameter]) -> None:
        """Add a step's gradients of `homes`; they lie as `bridge` says."""
        self.bridge = bridge
        for name, gradient in gradients.items():
            if gradient is not None:
                kept = self.local.get(name)
                self.local[name] = gradient if kept is None else kept.add_(gradient)
        for name in (bridge.names & homes.keys()) - self._shown.keys():
            home: Any = homes[name]
            if home.grad is not None:
                home.grad.to_local()  # what another variant keeps comes home: one cannot wait for the other
            self._shown[name] = _Shown(make_awaited(home, self.read), home.grad, home.home_layout)
            home.grad = self._shown[name].gradient

    def take(self, name: str, gradient: Tensor | None) -> Tensor | None:
        """Return a gradient with what was kept of it; nothing is kept of it any more."""
        kept = self.local.pop(name, None)
        return gradient if kept is None else kept if gradient is None else kept.add_(gradient)

    def drop_cleared(self, homes: Mapping[str, nn.Parameter]) -> None:
        """Forget what the user has cleared, or replaced, in `.grad`."""
        for name, shown in list(self._shown.items()):
            if homes[name].grad is not shown.gradient:
                del self._shown[name]
                self.local.pop(name, None)
        if not self._shown:
            self.bridge = None

    def withdraw(self, homes: Mapping[str, nn.Parameter]) -> None:
        """Show in `.grad` what was there before: what is kept comes home now."""
        for name, shown in self._shown.items():
            homes[name].grad = shown.before
        self._shown, self.bridge, self.under_way = {}, None, None

    def flush(self, homes: Mapping[str, nn.Parameter]) -> None:
        """Bring what was kept into `.grad`, unless it was cleared; collective if something was kept, on all alike."""
        self.settle()
        self.drop_cleared(homes)
        self.read()

    def read(self) -> None:
        """Bring all that is kept home, to where it is shown; collective if something is, on all ranks alike."""
        bridge, self.bridge = self.bridge, None
        if bridge is None:
            return
        (kept, self.local), (waiting, self._shown) = (self.local, {}), (self._shown, {})
        with torch.no_grad():
            pieces = bridge.reduce(kept)
            for name, shown in waiting.items():
                own = pieces[name] if shown.before is None else shown.before.local + pieces[name]
                give(shown.gradient, own, shown.layout)


class Variant:
    """A plan made ready to run; what more it takes is in the subclass of each way of running.

    `compute` is what runs under the plan's compute layout; variants of the same layout share it. `facts` are what a
    policy is told of it.

    Attributes:
        repeats_rows: each pipeline takes all rows of a batch.
        rows_told: how pipelines share the rows, where that is not as the plan says; else empty.
    """

    repeats_rows = False
    rows_told = ""

    def __init__(self, name: str, plan: Plan, compute: Compute, planned_rates: Mapping[int, float]) -> None:
        self.name = name
        self._go_by(plan, planned_rates)
        self.compute, self.table, self.homes = compute, compute.table, compute.homes
        self.look_at_homes()
        self.kept_back = DeferredGradients()
        self.first_use = FirstUse()

    def look_at_homes(self) -> None:
        """Take in which parameters are trained, in order."""
        self.trained = dict.fromkeys(n for n, home in self.homes.items() if home.requires_grad).keys()

    @property
    def device(self) -> torch.device:
        """Return where this rank computes: where its parameters are."""
        return self.compute.device

    @property
    def predicted_seconds(self) -> float:
        """Return what the planner expected of a step; 0 if the plan was given by hand."""
        return self.plan.predicted.seconds if self.plan.predicted else 0.0

    def _go_by(self, plan: Plan, planned_rates: Mapping[int, float]) -> None:
        self.plan, self.planned_rates = plan, planned_rates
        limits = (plan.max_length, *(pipeline.max_length for pipeline in plan.pipelines))
        self.facts = VariantFacts(
            name=self.name,
            max_length=min((limit for limit in limits if limit is not None), default=None),
            predicted_seconds=self.predicted_seconds,
            devices=plan.devices,
            planned_rates=planned_rates,
        )

    def expect(self, predicted: Prediction | None, planned_rates: Mapping[int, float]) -> None:
        """Take over what the planner expects of the plan at other rates of the devices."""
        self._go_by(replace(self.plan, predicted=predicted), dict(planned_rates))

    def flush(self) -> None:
        """Bring gradients that were kept back home into `.grad`; collective if there are any."""
        self.kept_back.flush(self.homes)
