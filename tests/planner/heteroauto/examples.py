"""Kinds of chips and problems that the tests of HeteroAuto share."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetu_fx.planner.heteroauto.cost import HeteroStage
from hetu_fx.planner.heteroauto.problem import HeteroProblem, Kind, Layer
from hetu_fx.planner.simulate import StageTimes, run_pipeline
from hetu_fx.topology import Link

FREE = Link(1e15)


def layers_of(seconds: float, degrees: Mapping[int, float] | None = None, **given: float) -> dict[int, Layer]:
    """Return a layer that takes 3 x `seconds` on a chip, by degree; bytes are cut evenly, and so is time by default.

    `degrees` says how many chips a group is worth.
    """
    whole = Layer(seconds, 2 * seconds, **given)
    worth = degrees or {1: 1.0, 2: 2.0, 4: 4.0}
    return {degree: _cut(whole, degree, speed) for degree, speed in worth.items()}


def _cut(layer: Layer, degree: int, speed: float) -> Layer:
    return replace(
        layer,
        forward_seconds=layer.forward_seconds / speed,
        backward_seconds=layer.backward_seconds / speed,
        parameter_bytes=layer.parameter_bytes / degree,
        kept_bytes=layer.kept_bytes / degree,
    )


def kind(name: str, nodes: tuple[int, ...], layers: Mapping[int, Layer], memory: float = 1e15, **given: float) -> Kind:
    """Return a kind with links that cost nothing."""
    return Kind(name, nodes, memory, layers, FREE, FREE, **given)


def problem(*kinds: Kind, layers: int = 6, micro_batches: int = 8) -> HeteroProblem:
    """Return a problem in which handing over costs nothing."""
    return HeteroProblem(kinds, layers, micro_batches, FREE)


def simulated_seconds(stages: Sequence[HeteroStage], count: int) -> float:
    """Return how long a pipeline takes for so many micro-batches, event by event, if handing over costs nothing."""
    layers = [(stage.layers, stage.groups.layer) for stage in stages]
    nothing = (0.0,) * count
    times = [
        StageTimes((n * x.forward_seconds,) * count, (n * x.backward_seconds,) * count, nothing, nothing)
        for n, x in layers
    ]
    return max(span.end_seconds for span in run_pipeline(times, "1f1b"))
