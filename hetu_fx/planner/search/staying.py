"""Candidates priced with getting there, for a job that runs already.

Going from the plan that runs to another one takes seconds once; the steps ahead take theirs each. So plans compete by

    seconds of a step + seconds of the move / steps ahead                                               (1)

among which the plan that runs has no move. A search need not know of it: (1) is worked out of what it has found, for
every plan that can be the best by it: a plan whose step alone takes longer than (1) of another is not.

In a move, parameters and what optimizers keep change their homes. These are chosen by the function that the runtime
chooses them by, and what travels is planned by the one that it moves them by; only the tensors stand in for the model's
own: of each block, and of what stands before and after all blocks, one tensor that groups split and one that they do
not, each of the bytes that these are together. What the optimizer keeps goes along (`ProgramCosts.state`).

Devices that are gone give nothing. What they held comes from others that hold the same: replicas, where states are not
spread over these (zero 0; Hetu v2, section 9, and Oobleck train so where devices fail).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetu_fx.annotations.annotation import Annotation, DeviceGroup, Sharding
from hetu_fx.annotations.states import Duplicate, Split, State
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.plans.bsr_plan import TensorMove, plan_moves
from hetu_fx.comm_ops.plans.cost import messages_cost
from hetu_fx.errors import PlanError
from hetu_fx.planner.price.placement import block_holders
from hetu_fx.planner.price.step import memory_problems
from hetu_fx.planner.search.problem import Candidates, Problem, predict_by_costs
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.homes import choose_homes
from hetu_fx.plans.plan import Plan, Stage


def with_moves(found: Candidates, problem: Problem, running: Plan) -> dict[Plan, float]:
    """Return the candidates, and the plan that runs if it fits, by (1); those that cannot be the best by less.

    Raises `PlanError` where nobody has what a device held that the plan that runs uses and the cluster lacks.
    """
    priced = _staying(running, problem)
    least = min(priced.values(), default=math.inf)
    for plan, seconds in sorted(found.items(), key=lambda pair: pair[1]):
        if plan not in priced:
            move = moving_seconds(running, plan, problem.costs, problem.cluster) if seconds < least else 0.0
            priced[plan] = seconds + move / problem.steps_ahead
            least = min(least, priced[plan])
    return priced


def _staying(running: Plan, problem: Problem) -> dict[Plan, float]:
    """Return the plan that runs with its seconds, if these devices can go on running it."""
    if not set(running.devices) <= set(problem.cluster.ranks):
        return {}
    prediction = predict_by_costs(running, problem)
    return {} if memory_problems(prediction, problem.cluster) else {running: prediction.seconds}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor: the block by which its holders are found, whether groups split it, and its shape in bytes."""

    block: int
    is_split: bool
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Moving:
    """Messages of a change of homes, (sender, receiver, bytes), round after round."""

    rounds: tuple[tuple[tuple[int, int, float], ...], ...]

    @property
    def bytes(self) -> float:
        """Return what travels."""
        return math.fsum(size for messages in self.rounds for *_, size in messages)

    def seconds(self, cluster: Cluster) -> float:
        """Return how long the rounds take, one after the other."""
        return math.fsum(messages_cost(messages, cluster) for messages in self.rounds)


def moving_seconds(before: Plan, after: Plan, costs: ProgramCosts, cluster: Cluster) -> float:
    """Return the seconds in which all that has its home near one plan comes home near another one.

    Raises `PlanError` where nobody has what a device held that the cluster lacks.
    """
    return moving(before, after, costs, cluster).seconds(cluster)


def moving(before: Plan, after: Plan, costs: ProgramCosts, cluster: Cluster) -> Moving:
    """Return what travels until all that has its home near one plan is at home near another one.

    Raises `PlanError` where nobody has what a device held that the cluster lacks.
    """
    rows = math.lcm(*(sum(_units(stage)) for plan in (before, after) for *_, stage in plan.stages))
    tensors = {str(number): tensor for number, tensor in enumerate(_tensors(costs, rows))}
    weights = [0.0] * (1 + max(cluster.ranks))
    for device in cluster.devices:
        weights[device.rank] = device.speed
    gone = frozenset(before.devices) - frozenset(cluster.ranks)
    source = _left(before, tensors, costs, gone) if gone else _homes(before, tensors, costs.num_blocks, weights)
    target = _homes(after, tensors, costs.num_blocks, weights)
    moves = [TensorMove(source[name], target[name], one.shape, 1) for name, one in tensors.items()]
    share = 1.0 + costs.state.optimizer_share
    planned = plan_moves(moves, node_of=cluster.node_of)
    return Moving(tuple(tuple((a, b, share * size) for a, b, size in one.messages) for one in planned.rounds))


def _tensors(costs: ProgramCosts, rows: int) -> Iterator[_Tensor]:
    """Yield the tensors, an entry being a byte of a parameter; `rows` are what groups split."""
    for number, part in enumerate(costs.parts):
        block = min(max(0, number - 1), costs.num_blocks)
        whole = part.parameter_bytes - part.split_parameter_bytes
        for is_split, size in ((True, part.split_parameter_bytes), (False, whole)):
            if round(size / rows):
                yield _Tensor(block, is_split, (rows, round(size / rows)))


def _homes(
    plan: Plan, tensors: Mapping[str, _Tensor], num_blocks: int, weights: Sequence[float]
) -> dict[str, Annotation]:
    """Return where tensors have their homes near a plan."""
    pipelines = plan.parts(num_blocks)
    read = {name: _union(block_holders(one.block, pipelines), one.is_split) for name, one in tensors.items()}
    return choose_homes(plan, read, {name: one.shape for name, one in tensors.items()}, weights)


def _left(
    plan: Plan, tensors: Mapping[str, _Tensor], costs: ProgramCosts, gone: frozenset[int]
) -> dict[str, Annotation]:
    """Return where tensors are that had their homes near a plan, after devices are gone.

    Raises `PlanError` for what was nowhere else.
    """
    pipelines = plan.parts(costs.num_blocks)
    found: dict[str, Annotation] = {}
    for name, one in tensors.items():
        whole = [stage for stage in block_holders(one.block, pipelines) if gone.isdisjoint(stage.devices)]
        if plan.zero or not whole:
            why = "states are spread over replicas (zero 1)" if plan.zero else f"block {one.block} was nowhere else"
            raise PlanError(
                f"the plan that runs uses devices {sorted(gone)}, which are gone, and no other has what they held: "
                f"{why}\nhint: leave out the plan that runs, and load a checkpoint"
            )
        found[name] = _union(whole, one.is_split)
    return found


def _union(stages: Sequence[Stage], is_split: bool) -> Annotation:
    groups = tuple(DeviceGroup(stage.devices) for stage in stages)
    shardings = tuple(Sharding(tuple(_axes(stage, is_split))) for stage in stages)
    return Annotation(groups, shardings, Duplicate(len(stages)) if len(stages) > 1 else None)


def _axes(stage: Stage, is_split: bool) -> Iterator[State]:
    """Yield how the devices of a group hold a tensor; those that share a sequence hold the same."""
    count = len(stage.devices)
    if is_split and stage.context == 1:
        yield Split(0, _units(stage))
    else:
        yield Duplicate(count)


def _units(stage: Stage) -> tuple[int, ...]:
    return tuple(stage.ratios) or (1,) * len(stage.devices)
