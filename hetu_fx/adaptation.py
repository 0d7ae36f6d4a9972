"""Plan again when devices are not as fast as planned: the new plan becomes a variant.

The first steps correct what was measured before the first plan (calibration): the model's own work tells the devices'
speeds better than the matrix products of half a second. Later steps tell which device has become slow (health). Every
rank sees the same agreed facts and plans alike, so nobody has to be asked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from hetu_fx.errors import StateError
from hetu_fx.measure import snapped
from hetu_fx.planner.cost import predict, stage_costs
from hetu_fx.planner.program import ProgramCosts
from hetu_fx.plans import Plan, micro_batch_rows
from hetu_fx.switching.agreement import StepFacts
from hetu_fx.switching.health import HealthTracker
from hetu_fx.switching.policy import Health
from hetu_fx.switching.runtime import Runtime
from hetu_fx.topology import Cluster

_log = logging.getLogger("hetu_fx.health")

CALIBRATED = "calibrated"
"""The variant that the first steps lead to, where it is another one than they ran."""

CALIBRATED_TOLERANCE = 0.02
"""Speeds nearer than this to each other are one speed: whole steps tell them better than `measure.TOLERANCE`."""

LEAST_GAIN = 0.02
"""A plan for corrected speeds replaces the first one if it is faster by at least so much."""

Planner = Callable[[Cluster, str], Plan]


@dataclass(frozen=True)
class Replanned:
    """A change of plan: at which step, for which rates, to which variant."""

    step: int
    rates: Mapping[int, float]
    variant: str


class Adaptation:
    """Watches the devices' health and replaces the plan that suits them no more.

    Args:
        runtime: what runs.
        costs: of the program, for the work that each device has.
        cluster: the devices as measured at the start; None if they were not, then plans are never replaced.
        planner: makes a plan of a given name for a cluster.
        calibrates: the cluster's speeds are a first guess, which the first steps are to correct; not so where the
            user has said what the devices are.
    """

    def __init__(
        self,
        runtime: Runtime,
        costs: ProgramCosts,
        cluster: Cluster | None,
        planner: Planner,
        *,
        calibrates: bool = False,
    ) -> None:
        self.runtime, self.costs, self.cluster, self.planner = runtime, costs, cluster, planner
        self.tracker = HealthTracker()
        self._calibrates = calibrates
        self.changes: list[Replanned] = []

    @property
    def rates(self) -> dict[int, float]:
        """Return the current straggling rate of each device: 1 healthy, 2 twice as slow."""
        return self.tracker.rates

    def observe(self, facts: StepFacts) -> None:
        """Take in the last step's compute times; plan again if a device has become slower or healthy again."""
        report = self.runtime.report
        if self.cluster is None or report.variant == "" or report.planned is not None:
            return
        seconds = dict(enumerate(facts.compute_seconds))
        self.tracker.observe(seconds, self._work(self.cluster, report.variant, report.rows))
        if self._calibrates and self.tracker.normals:
            self.calibrate(self.cluster, self.tracker.normals)
        rates = self.tracker.changed()
        if rates is not None and self.runtime.pinned is None:
            self.replan(rates)

    def _work(self, cluster: Cluster, variant: str, rows: tuple[int, ...]) -> dict[int, float]:
        """Return the compute seconds that each device is expected to take for a step while it is healthy.

        Not just FLOPs: what an op takes besides its work would make a device with few rows look slow, so that it
        gets fewer still.
        """
        plan = self.runtime.variants[variant].plan.with_blocks(self.costs.num_blocks)
        work: dict[int, float] = {}
        for pipeline, count in zip(plan.pipelines, rows, strict=True):
            micro_batches = [rows for rows in micro_batch_rows(count, pipeline.micro_batches) if rows]
            for stage in stage_costs(pipeline, self.costs, cluster):
                for device, seconds in zip(stage.stage.devices, stage.compute, strict=True):
                    work[device] = sum(map(seconds, micro_batches))
        return work

    def calibrate(self, cluster: Cluster, normals: Mapping[int, float]) -> None:
        """Correct the devices' speeds by the first steps, and plan again if that gives a plan worth changing to.

        `normals` are the devices' measured compute seconds over those expected of the cluster's speeds; of a device
        that is left out, which had no work, nothing new is known.
        """
        self._calibrates = False
        self.cluster = calibrated(cluster, normals)
        self.tracker = HealthTracker(normal=dict.fromkeys(normals, 1.0))
        for variant in self.runtime.variants.values():
            if variant.plan.predicted is not None:
                variant.expect(predict(variant.plan, self.costs, self.cluster), variant.planned_rates)
        plan = self.planner(self.cluster.without(tuple(self.runtime.drained)), CALIBRATED)
        current = self.runtime.variants[self.runtime.current]
        if plan.predicted and plan.predicted.seconds < current.predicted_seconds * (1 - LEAST_GAIN):
            name = self._variant_for({}, plan)
            _log.info("the first steps correct the devices' speeds to\n%s\n%s: %s", self.cluster, name, plan.summary())

    def replan(self, rates: Mapping[int, float]) -> str:
        """Make a plan for the given rates; the policy weighs it against the others from the next step on.

        Drained devices are left out. Returns the new variant's name.
        """
        if self.cluster is None:
            raise StateError(
                "the devices were not measured, so there is nothing to plan from; pass cluster=... or plan='auto' to "
                "hetu_fx.auto_parallelize"
            )
        drained = self.runtime.drained
        cluster = self.cluster.without(tuple(drained))
        rates = {rank: rate for rank, rate in rates.items() if rank not in drained}
        name = self._variant_for(rates, self.planner(cluster.with_rates(rates), name_for(rates, drained)))
        self.runtime.health = Health(dict(rates))
        self.tracker.restart()
        self.changes.append(Replanned(self.runtime.step, dict(rates), name))
        _log.info("devices' rates are %s: %s", dict(rates), self.runtime.variants[name].plan.summary())
        return name

    def _variant_for(self, rates: Mapping[int, float], plan: Plan) -> str:
        """Return the variant that runs a plan: one that does the same work already, expected as now, or a new one."""
        for name, variant in self.runtime.variants.items():
            if replace(plan, name=variant.plan.name) == variant.plan:  # whatever is predicted of them
                variant.expect(plan.predicted, rates)
                return name
        name = plan.name or name_for(rates, self.runtime.drained)
        if name not in self.runtime.variants:  # rates that differ in the fourth digit have one name, and one plan
            self.runtime.add_variant(plan, name, planned_rates=rates)
        return name


def calibrated(cluster: Cluster, normals: Mapping[int, float]) -> Cluster:
    """Return the cluster with speeds at which the measured seconds would have been expected."""
    known = [device for device in cluster.devices if device.rank in normals]
    speeds = snapped([d.flops_per_second / normals[d.rank] for d in known], CALIBRATED_TOLERANCE)
    return cluster.with_speeds({device.rank: speed for device, speed in zip(known, speeds, strict=True)})


def name_for(rates: Mapping[int, float], drained: Collection[int] = ()) -> str:
    """Name a variant for straggling rates, fit for a file name: `slow-1x2.5` where device 1 takes 2.5 times as long.

    Devices that are left out stand first: `without-3-slow-1x2.5`.
    """
    left_out = ["without", *map(str, sorted(drained))] if drained else []
    slow = [f"{rank}x{rate:.3g}" for rank, rate in sorted(rates.items()) if rate != 1.0]
    return "-".join([*left_out, *(["slow", *slow] if slow else [])]) or "healthy"
