"""A plan for the module as it is: a whole copy of the parameters on each replica, one device each."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from hetu_fx.annotations.annotation import Annotation, Duplicate, Partial
from hetu_fx.comm_ops.wire.consensus import any_of
from hetu_fx.plans.plan import Plan
from hetu_fx.switching.bridge.bridge import Bridge, BridgeEntry
from hetu_fx.switching.bridge.compute import Compute
from hetu_fx.switching.home.ops import layout_of
from hetu_fx.switching.step.variant import Variant


class EagerVariant(Variant):
    """A data parallel plan, and the bridge to and from its replicas."""

    def __init__(self, name: str, plan: Plan, compute: Compute, planned_rates: Mapping[int, float]) -> None:
        super().__init__(name, plan, compute, planned_rates)
        self._bridge = self._made()

    @property
    def bridge(self) -> Bridge:
        """Return the bridge to and from the replicas."""
        self.renew()
        return self._bridge

    def renew(self) -> None:
        """Lead the bridge to the present homes."""
        if self._bridge.is_outdated:
            self._bridge = self._made()

    def _made(self) -> Bridge:
        with self.first_use.making():
            return self.compute.bridge_between([self._entry(name, home) for name, home in self.homes.items()])

    def _entry(self, name: str, home: nn.Parameter) -> BridgeEntry:
        """Every replica reads a copy, and has a summand of the gradient."""
        copies = on_replicas(self.plan)
        gradient = Annotation.on(self.plan.devices, Partial(len(self.plan.devices)))
        trained = name in self.trained
        at_home = layout_of(home).annotation
        return BridgeEntry(name, tuple(home.shape), home.dtype, at_home, copies, gradient if trained else copies)

    def flush(self) -> None:
        """Bring gradients that were kept back home, of the parameters that some rank has used; collective."""
        if self.kept_back.bridge is not None:
            used = self.used_anywhere(self.kept_back.local.keys())
            self.kept_back.flush({name: self.homes[name] for name in used})

    def used_anywhere(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the trained parameters that are among some rank's `names`; collective.

        A module may leave out parts of itself in some steps.
        """
        trained = [name for name in self.homes if name in self.trained]
        flags = any_of(self.table, [name in names for name in trained])
        return tuple(name for name, is_used in zip(trained, flags, strict=True) if is_used)


def on_replicas(plan: Plan) -> Annotation:
    """Return the annotation of a parameter: whole on each of the plan's devices."""
    return Annotation.on(plan.devices, Duplicate(len(plan.devices)))
