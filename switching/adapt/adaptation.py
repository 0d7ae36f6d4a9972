"""Plan again when devices are not as fast as planned: the new plan becomes a variant.

The first steps correct what was measured before the first plan (calibration): the model's own work tells the devices'
speeds better than the matrix products of half a second. Later steps tell which device has become slow (health). Every
rank sees the same agreed facts and so asks for the same plan. Training goes on until it is made (`replanning`).

Of steps under plans with programs, which costs do not tell, what was predicted is expected, at other speeds: the
prediction of the process that has planned, as the others, whose examples may have other sizes, cannot make it anew.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.cluster.measure import group_speeds
from hetu_fx.comm_ops.wire.consensus import StepFacts
from hetu_fx.errors import HetuFxError, StateError
from hetu_fx.planner.price.stage_seconds import stage_costs
from hetu_fx.planner.simulate.simulate import expect
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Plan, micro_batch_rows
from hetu_fx.plans.prediction import DeviceCost, Prediction
from hetu_fx.switching.adapt.health import HealthTracker, Probe, Standby
from hetu_fx.switching.adapt.replanning import (
    ALIKE,
    Conditions,
    MadePlan,
    Planner,
    PlanRequest,
    Replanning,
    nearest_known,
)
from hetu_fx.switching.adapt.tried import TriedPlans
from hetu_fx.switching.runtime import Runtime
from hetu_fx.switching.step.step_report import LastStep

_log = logging.getLogger("hetu_fx.health")

CALIBRATED = "calibrated"
"""The variant that the first steps lead to, where it is another one than they ran."""

CALIBRATED_TOLERANCE = 0.02
"""Speeds nearer than this to each other are one speed: whole steps tell them better than `measure.TOLERANCE`."""

LEAST_GAIN = 0.02
"""A plan for corrected speeds replaces the first one if it is faster by at least so much."""

REFINED_GAIN = 0.01
"""A plan for rates that are known better replaces the one for about these if it is faster by at least so much."""


@dataclass(frozen=True)
class PlanChange:
    """A change of plan: for which rates, to which variant.

    Attributes:
        step: before which the plan was taken over.
        rates: those that are not 1.
        variant: what runs the plan.
        asked: the step before which the plan was asked for.
        planning_seconds: what making the plan took, wherever that was; 0 if it was known.
    """

    step: int
    rates: Mapping[int, float]
    variant: str
    asked: int
    planning_seconds: float = 0.0


class Adaptation:
    """Watches the devices' health and replaces the plan that suits them no more.

    Args:
        runtime: what runs; steps are observed from now on.
        costs: of the program, for the work that each device has.
        cluster: the devices as measured at the start; None if they were not, then plans are never replaced.
        planner: makes a plan of a given name for a cluster; asked on rank 0 only.
        health: when a device counts as slow, and as healthy again; see `HealthTracker`, which has what is left out.
        calibrates: the cluster's speeds are a first guess, which the first steps are to correct; not so where the
            user has said what the devices are.
        tried: tries plans before they train; None: nobody does.
        length: of the rows that `costs` were counted for, 0 without sequences; None: they are no count of a graph.
    """

    def __init__(
        self,
        runtime: Runtime,
        costs: ProgramCosts,
        cluster: Cluster | None,
        planner: Planner,
        *,
        health: Mapping[str, float] | None = None,
        calibrates: bool = False,
        tried: TriedPlans | None = None,
        length: int | None = None,
    ) -> None:
        self.runtime, self.costs, self.cluster, self.length = runtime, costs, cluster, length
        self.tracker, self.plans = HealthTracker.of(health or {}), dict[Conditions, Plan]()
        self._calibrates = calibrates
        self.changes: list[PlanChange] = []
        self.tried = tried or TriedPlans(runtime.table, None)
        self.replanning = Replanning(runtime.table, planner, runtime.variants, self.tried)
        self._run_before: set[str] = set()
        self._ran = ""
        self._expectation: tuple[object, Mapping[int, float]] = None, {}  # of what, which most steps have in common
        probe = Probe(next(runtime.model.parameters()).device)
        self.standby = Standby(runtime.table.rank, probe, self.tracker.window)

    @property
    def rates(self) -> dict[int, float]:
        """Return the current straggling rate of each device: 1 healthy, 2 twice as slow."""
        return self.tracker.rates

    @property
    def is_planning(self) -> bool:
        """Tell whether a plan is being made in the background; the same on every rank."""
        return self.replanning.asked is not None

    def tell(self) -> dict[str, float]:
        """Say whether this rank has made a plan, and what its last probe took."""
        return {"has_plan": self.replanning.has_plan, "probe_seconds": self.standby.told_seconds()}

    def observe(self, facts: StepFacts) -> None:
        """Take over a plan that is ready; take in the last step's compute times, which may call for another."""
        was_planning = self.is_planning
        if facts.has_plan:
            self._take_over()
        report = self.runtime.report
        if self.cluster is None or report.variant == "":
            return
        if len(self.cluster.devices) == 1 and not self._calibrates:
            return  # nobody could take its work
        before, self._ran = self._ran, report.variant
        if report.variant not in self._run_before:
            self._run_before.add(report.variant)
            return  # a first step makes graphs, and is unlike others
        if before != report.variant:
            self.tracker.refine_anew()
        seconds = dict(enumerate(facts.compute_seconds))
        if was_planning:
            seconds.pop(0, None)  # it has shared its processor with the planner
        expected = self._expected(self.cluster, report)
        standby = self.standby.observe(facts, [rank for rank, work in expected.items() if work > 0])
        self.tracker.observe(seconds, expected, standby)
        if self._calibrates and self.tracker.normals:
            self.calibrate(self.cluster, self.tracker.normals)
        rates = (
            self.tracker.changed() if self.runtime.variants.pinned is None else None
        )  # told when the policy chooses again
        if rates is not None and report.work is not None:
            self.runtime.variants.set_rates(rates)  # sequences go where they are done first
        elif rates is not None:
            self.adapt(rates)

    def stand_by(self) -> None:
        """Measure this device while others compute, where devices are known and this one is not drained."""
        if self.cluster is not None and self.runtime.table.rank not in self.runtime.variants.drained:
            self.standby.run()

    def _expected(self, cluster: Cluster, report: LastStep) -> Mapping[int, float]:
        """Return the compute seconds that each device is expected to take for a step while it is healthy.

        Not just FLOPs: what an op takes besides its work would make a device with few rows look slow, so that it
        gets fewer still.
        """
        if report.work is not None:
            return report.work(cluster)
        asked = self.runtime.variants[report.variant].plan, report.rows, cluster
        if asked != self._expectation[0]:
            self._expectation = asked, self._expected_of(*asked)
        return self._expectation[1]

    def _expected_of(self, given: Plan, rows: Sequence[int], cluster: Cluster) -> Mapping[int, float]:
        plan = given.with_blocks(self.costs.num_blocks)
        if plan.has_program:
            return compute_seconds(plan, sum(rows) / self.costs.rows)
        return expected_seconds(plan, self.costs, rows, cluster)

    def calibrate(self, cluster: Cluster, normals: Mapping[int, float]) -> None:
        """Correct the devices' speeds by the first steps, and ask for a plan, in case it is one worth changing to.

        `normals` are the devices' measured compute seconds over those expected of the cluster's speeds; of a device
        that is left out, which had no work, nothing new is known.
        """
        self._calibrates = False
        self.cluster = calibrate_cluster(cluster, normals)
        _log.info("the first steps correct the devices' speeds to\n%s", self.cluster)
        speeds = {device.rank: device.flops_per_second for device in cluster.devices}
        self.tracker.rescale({rank: self.cluster.device(rank).flops_per_second / speeds[rank] for rank in normals})
        self.plans.clear()  # what there were was made for other speeds
        for variant in self.runtime.variants.values():
            if variant.plan.predicted is not None:
                variant.expect(self._predicted(variant.plan, variant.plan.predicted, cluster), variant.planned_rates)
        conditions = Conditions.of({}, self.runtime.variants.drained)
        self.replanning.ask(PlanRequest(conditions, CALIBRATED, self.runtime.step, LEAST_GAIN), self.cluster)

    def _predicted(self, plan: Plan, before: Prediction, cluster: Cluster) -> Prediction:
        """Return what a step is expected to take at the devices' speeds now, which were those of `cluster`."""
        now = self._known_cluster()
        return at_speeds(before, cluster, now) if plan.has_program else expect(plan, self.costs, now)

    def adapt(self, rates: Mapping[int, float]) -> None:
        """Go by new rates: the policy weighs the variants there are by them at once, and one made for them later."""
        conditions = Conditions.of(rates, self.runtime.variants.drained)
        self.runtime.variants.set_rates(dict(conditions.rates))
        _log.info("devices' rates are %s", dict(conditions.rates) or "those of healthy ones")
        known = nearest_known(self.plans, conditions)
        asked = self._asked(conditions)
        if known is not None:
            self.replanning.drop()
            self._adopt(self._asked(known), MadePlan(self.plans[known]))
            if known.distance(conditions) < ALIKE:
                return
            asked = replace(asked, least_gain=REFINED_GAIN)
        self.replanning.ask(asked, self._known_cluster())

    def replan(self, rates: Mapping[int, float]) -> str:
        """Make a plan for the given rates now; the policy weighs it against the others from the next step on.

        Drained devices are left out. Collective. Returns the new variant's name.
        """
        cluster = self._known_cluster()
        asked = self._asked(Conditions.of(rates, self.runtime.variants.drained))
        known = self.plans.get(asked.conditions)
        made = self.replanning.make_now(asked, cluster) if known is None else MadePlan(known)
        self.replanning.drop()
        self.runtime.variants.set_rates(dict(asked.conditions.rates))
        return self._adopt(asked, made)

    def _asked(self, conditions: Conditions) -> PlanRequest:
        return PlanRequest(conditions, conditions.name, self.runtime.step)

    def _known_cluster(self) -> Cluster:
        if self.cluster is None:
            raise StateError(
                "the devices were not measured, so there is nothing to plan from\n"
                "hint: pass cluster=... or plan='auto' to hetu_fx.auto_parallelize"
            )
        return self.cluster

    def _take_over(self) -> None:
        """Get the plan that is ready; where it could not be made, go on with those there are. Collective."""
        asked, outcome = self.replanning.take()
        if isinstance(outcome, HetuFxError):
            why = f"{type(outcome).__name__}: {outcome}"
            _log.warning("no plan for %r, training goes on as planned before: %s", asked.conditions.name, why)
            return
        if asked.least_gain is not None and not self._is_worth_it(asked, outcome.plan, asked.least_gain):
            self.plans[asked.conditions] = self.runtime.variants[self.runtime.current].plan
            return
        self._adopt(asked, outcome)

    def _is_worth_it(self, asked: PlanRequest, plan: Plan, least_gain: float) -> bool:
        """Tell whether a plan is faster than the one that runs, which is expected to take what it does by the rates."""
        current, rates = self.runtime.variants[self.runtime.current], dict(asked.conditions.rates)
        if current.plan.predicted is not None and rates and not current.plan.has_program:
            cluster = self._known_cluster().with_rates(rates)
            current.expect(expect(current.plan, self.costs, cluster), rates)
        return _gains(plan, current.predicted_seconds, least_gain)

    def _adopt(self, asked: PlanRequest, made: MadePlan) -> str:
        """Give the policy a plan to choose from the next step on; return its variant's name."""
        self.plans[asked.conditions] = made.plan
        rates = dict(asked.conditions.rates)
        name = self._variant_for(rates, made, asked.conditions.name)
        self.tracker.restart()
        self.changes.append(PlanChange(self.runtime.step, rates, name, asked.step, made.seconds))
        _log.info("%s, planned in %.2g s for rates %s: %s", name, made.seconds, rates, made.plan.summary())
        return name

    def _variant_for(self, rates: Mapping[int, float], made: MadePlan, named: str) -> str:
        """Return the variant that runs a plan: one that does the same work already, expected as now, or a new one."""
        plan = made.plan
        for name, variant in self.runtime.variants.items():
            if replace(plan, name=variant.plan.name) == variant.plan:  # whatever is predicted of them
                variant.expect(plan.predicted, rates)
                return name
        name = plan.name or named
        if name not in self.runtime.variants:  # rates that differ in the fourth digit have one name, and one plan
            self.runtime.add_variant(plan, name, rates, made.deduced)
        return name


def expected_seconds(
    plan: Plan, costs: ProgramCosts, pipeline_rows: Sequence[int], cluster: Cluster
) -> dict[int, float]:
    """Return what each device is expected to compute for so many rows of each pipeline, in all chunks of its stage."""
    work: dict[int, float] = defaultdict(float)
    for pipeline, count in zip(plan.parts(costs.num_blocks), pipeline_rows, strict=True):
        micro_batches = [rows for rows in micro_batch_rows(count, pipeline.micro_batches) if rows]
        for stage in stage_costs(pipeline, costs, cluster):
            for device, seconds in zip(stage.stage.devices, stage.compute, strict=True):
                work[device] += sum(seconds(rows) for rows in micro_batches)
    return work


def _gains(plan: Plan, seconds: float, least_gain: float) -> bool:
    return plan.predicted is not None and plan.predicted.seconds < seconds * (1 - least_gain)


def calibrate_cluster(cluster: Cluster, normals: Mapping[int, float]) -> Cluster:
    """Return the cluster with speeds at which the measured seconds would have been expected."""
    known = [device for device in cluster.devices if device.rank in normals]
    speeds = group_speeds([d.flops_per_second / normals[d.rank] for d in known], CALIBRATED_TOLERANCE)
    return cluster.with_speeds({device.rank: speed for device, speed in zip(known, speeds, strict=True)})


COMPUTE = "compute"


def compute_seconds(plan: Plan, share: float) -> Mapping[int, float]:
    """Return the compute seconds of each device for so much of the batch that was planned for.

    Empty where nobody has predicted them: then no device is judged by them.
    """
    devices = plan.predicted.devices if plan.predicted else ()
    return {device.rank: share * dict(device.seconds).get(COMPUTE, 0.0) for device in devices}


def at_speeds(predicted: Prediction, before: Cluster, after: Cluster) -> Prediction:
    """Return a prediction for devices that turn out to have other speeds: a step waits for who is slowed most."""
    ranks = [device.rank for device in predicted.devices]
    slowed = {rank: before.device(rank).speed / after.device(rank).speed for rank in ranks}
    devices = tuple(_slowed(device, slowed[device.rank]) for device in predicted.devices)
    return replace(predicted, seconds=predicted.seconds * max(slowed.values(), default=1.0), devices=devices)


def _slowed(device: DeviceCost, factor: float) -> DeviceCost:
    seconds = tuple((term, own * factor if term == COMPUTE else own) for term, own in device.seconds)
    return replace(device, seconds=seconds)
