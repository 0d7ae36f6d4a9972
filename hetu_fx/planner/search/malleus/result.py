"""What the Malleus search returns: pipelines on devices, who stands by, what bounds the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.plans.prediction import Prediction


@dataclass(frozen=True, slots=True)
class MalleusStage:
    """A tensor parallel group with its layers; `layer_seconds` is y, for one layer and one micro-batch."""

    devices: tuple[int, ...]
    layers: int
    layer_seconds: float

    @property
    def seconds(self) -> float:
        """Return y l, for one micro-batch."""
        return self.layers * self.layer_seconds


@dataclass(frozen=True, slots=True)
class MalleusPipeline:
    """Stages one after another, and how many micro-batches go through them."""

    stages: tuple[MalleusStage, ...]
    micro_batches: int

    @property
    def bottleneck_seconds(self) -> float:
        """Return o = max y l, for one micro-batch."""
        return max(stage.seconds for stage in self.stages)

    @property
    def steady_seconds(self) -> float:
        """Return m o, what the pipeline takes when filling and draining it are left out."""
        return self.micro_batches * self.bottleneck_seconds

    @property
    def step_seconds(self) -> float:
        """Return (m - 1) o + sum y l, with filling and draining."""
        return (self.micro_batches - 1) * self.bottleneck_seconds + math.fsum(s.seconds for s in self.stages)

    @property
    def capacity(self) -> float:
        """Return sum 1 / y."""
        return math.fsum(1 / stage.layer_seconds for stage in self.stages)


@dataclass(frozen=True, slots=True)
class MalleusResult:
    """The best assignment that was found.

    Attributes:
        pipelines: stages of devices with layers, and micro-batches.
        standby: ranks that hold nothing, in order; they may join again when they are faster.
        least_seconds: a lower bound of `objective` for the grouping that has the largest capacity.
        is_exact: whether no placement of the groupings that were tried is better (else: none was found).
        crossings: node boundaries that gradient sync crosses, summed over layers.
        moved_layers: layers' worth of parameters that devices receive, coming from the plan before.
        num_pipelines_tried: different pipelines that were filled with layers.
    """

    pipelines: tuple[MalleusPipeline, ...]
    standby: tuple[int, ...]
    least_seconds: float
    is_exact: bool
    crossings: int
    moved_layers: float
    num_pipelines_tried: int

    @property
    def objective(self) -> float:
        """Return T = max_i m_i max_j y_ij l_ij in seconds, what the search lowers."""
        return max(pipeline.steady_seconds for pipeline in self.pipelines)

    @property
    def step_seconds(self) -> float:
        """Return the seconds of a step, with filling and draining of the pipelines."""
        return max(pipeline.step_seconds for pipeline in self.pipelines)

    @property
    def relaxed_seconds(self) -> tuple[float, float]:
        """Return T of the same stages if layers could be split at will, and if micro-batches could be too."""
        layers = sum(stage.layers for stage in self.pipelines[0].stages)
        micro_batches = sum(pipeline.micro_batches for pipeline in self.pipelines)
        by_layers = max(pipeline.micro_batches * layers / pipeline.capacity for pipeline in self.pipelines)
        return by_layers, micro_batches * layers / math.fsum(pipeline.capacity for pipeline in self.pipelines)

    @property
    def why(self) -> str:
        """Return what bounds the step, in a sentence."""
        i, pipeline = max(enumerate(self.pipelines), key=lambda pair: (pair[1].steady_seconds, -pair[0]))
        stage = max(pipeline.stages, key=lambda stage: stage.seconds)
        above = 100 * (self.objective / self.least_seconds - 1)
        return (
            f"bound by pipeline {i}: {pipeline.micro_batches} micro-batches x {stage.layers} layers x "
            f"{stage.layer_seconds:.4g} s on devices {list(stage.devices)}; {above:.1f} % above what work split "
            f"at will would take"
        )

    def to_plan(self, name: str | None = None) -> Plan:
        """Return the plan that runs this: 1F1B, a row share per micro-batch."""
        pipelines = tuple(
            Pipeline(
                tuple(Stage(stage.devices, blocks=stage.layers) for stage in pipeline.stages),
                share=pipeline.micro_batches,
                micro_batches=pipeline.micro_batches,
            )
            for pipeline in self.pipelines
        )
        return Plan(pipelines, name=name, predicted=Prediction(self.step_seconds, why=self.why))
