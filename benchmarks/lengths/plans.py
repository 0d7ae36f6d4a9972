"""The plans of the contest on sequences of mixed lengths: four equal devices as groups, stages and replicas.

What a pipeline holds is as Hydraulis' memory model has it (SIGMOD 2026): the devices of a group share what a row keeps
for its backward, so that each has its part of the heads, or of the tokens, and a group of n holds rows n times as long;
stages share it not, as the first of p stages keeps p micro-batches under way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from hetu_fx.plans.plan import Pipeline, Plan, Stage


class Group(NamedTuple):
    """A stage of so many devices; `context` of them share the tokens of a row, the others its heads."""

    devices: int
    context: int = 1


ONE, HEADS2, HEADS4 = Group(1), Group(2), Group(4)
TOKENS2, TOKENS4, GRID = Group(2, 2), Group(4, 4), Group(4, 2)

PIPELINES: Mapping[str, tuple[tuple[Group, ...], ...]] = {
    "TP4": ((HEADS4,),),
    "CP4": ((TOKENS4,),),
    "CP2 x TP2": ((GRID,),),
    "CP2 + CP2": ((TOKENS2,), (TOKENS2,)),
    "CP2 + 1 + 1": ((TOKENS2,), (ONE,), (ONE,)),
    "TP2 x PP2": ((HEADS2, HEADS2),),
    "TP2 + TP2": ((HEADS2,), (HEADS2,)),
    "PP4": ((ONE, ONE, ONE, ONE),),
    "1 + 1 + 1 + 1": ((ONE,), (ONE,), (ONE,), (ONE,)),
}
"""By name, the stages of each pipeline."""

LONGEST = 4  # of sequences, in what a device holds
STATIC = ("TP4", "CP4", "CP2 x TP2")  # take the longest sequences
DYNAMIC = ("CP4", "CP2 + CP2", "CP2 + 1 + 1", "1 + 1 + 1 + 1")
HOMOGENEOUS = ("CP4", "CP2 + CP2", "1 + 1 + 1 + 1")
BOUNDS = (1, 2)  # of HotSPa's groups of lengths, in what a device holds: for one device, for two, for four


def plans_of(names: Sequence[str], layers: int, held: int) -> list[Plan]:
    """Return plans whose pipelines take rows of what their devices hold; one device holds `held` tokens."""
    return [_plan(name, layers, held) for name in names]


def _plan(name: str, layers: int, held: int) -> Plan:
    sizes = [sum(group.devices for group in stages) for stages in PIPELINES[name]]
    starts = [0, *accumulate(sizes)]
    pairs = zip(PIPELINES[name], starts, strict=False)
    pipelines = tuple(_pipeline(stages, start, layers, held) for stages, start in pairs)
    return Plan(pipelines, name=name, max_length=max(p.max_length or 0 for p in pipelines))


def _pipeline(stages: Sequence[Group], start: int, layers: int, held: int) -> Pipeline:
    made, blocks = [], [layers // len(stages) + (i < layers % len(stages)) for i in range(len(stages))]
    for group, some in zip(stages, blocks, strict=True):
        devices = tuple(range(start, start + group.devices))
        made.append(Stage(devices, blocks=some, context=group.context))
        start += group.devices
    rows = sum(group.devices for group in stages)
    return Pipeline(tuple(made), share=rows, max_length=held * min(group.devices for group in stages))
