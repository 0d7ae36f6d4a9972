"""Kinds of chips and problems that the tests of HeteroAuto share."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetu_fx.cluster.cluster import Link
from hetu_fx.planner.search.heteroauto.chip_cost import HeteroStage
from hetu_fx.planner.search.heteroauto.chip_problem import ChipKind, HeteroProblem, Layer
from hetu_fx.plans.schedule import Action, Phase, actions

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


def kind(
    name: str, nodes: tuple[int, ...], layers: Mapping[int, Layer], memory: float = 1e15, **given: float
) -> ChipKind:
    """Return a kind with links that cost nothing."""
    return ChipKind(name, nodes, memory, layers, FREE, FREE, **given)


def problem(*kinds: ChipKind, layers: int = 6, micro_batches: int = 8) -> HeteroProblem:
    """Return a problem in which handing over costs nothing."""
    return HeteroProblem(kinds, layers, micro_batches, FREE)


def simulated_seconds(stages: Sequence[HeteroStage], count: int) -> float:
    """Return how long 1F1B takes for so many micro-batches, action by action, if handing over costs nothing."""
    left = [list(actions("1f1b", index, len(stages), count)) for index in range(len(stages))]
    free = [0.0] * len(stages)
    done: dict[tuple[int, Action], float] = {}
    while any(left):
        for index, waiting in enumerate(left):
            while waiting and all(need in done for need in _needs(index, waiting[0], len(stages))):
                action, layer = waiting.pop(0), stages[index].groups.layer
                start = max(free[index], *(done[need] for need in _needs(index, action, len(stages))), 0.0)
                is_forward = action.phase is Phase.FORWARD
                seconds = layer.forward_seconds if is_forward else layer.backward_seconds
                done[index, action] = free[index] = start + stages[index].layers * seconds
    return max(free)


def _needs(index: int, action: Action, num_stages: int) -> list[tuple[int, Action]]:
    """Return what has to be done before: the stage in front forward, the stage behind backward."""
    other = index - 1 if action.phase is Phase.FORWARD else index + 1
    return [(other, action)] if 0 <= other < num_stages else []
