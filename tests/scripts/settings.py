"""The ways in which every script is run: how many processes, and under which plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetu_fx.plans.plan import Pipeline, Plan, Stage


@dataclass(frozen=True)
class Setting:
    """One way of running a script in parallel.

    Attributes:
        name: a short word.
        title: what it is, for tables.
        world: how many processes.
        plan: makes the plan.
    """

    name: str
    title: str
    world: int
    plan: Callable[[], Plan]


def _unequal_groups() -> Plan:
    return Plan((Pipeline((Stage((0, 1)),), share=3), Pipeline((Stage((2, 3)),), share=1)))


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("one", "1 process", 1, Plan.single),
        Setting("dp2", "2, data parallel 3:1", 2, lambda: Plan.data_parallel((0, 1), (3, 1))),
        Setting("tp2", "2, tensor parallel", 2, lambda: Plan.tensor_parallel((0, 1))),
        Setting("pp2", "2, pipeline", 2, lambda: Plan((Pipeline((Stage((0,)), Stage((1,))), micro_batches=2),))),
        Setting("dp4", "4, data parallel 3:1:3:1", 4, lambda: Plan.data_parallel((0, 1, 2, 3), (3, 1, 3, 1))),
        Setting("mix4", "4, 3:1 of tensor parallel pairs", 4, _unequal_groups),
    )
}

SEVERAL = ("dp2", "tp2", "dp4", "mix4")
"""Those of more than one process."""

USUAL = ("one", *SEVERAL)
"""Those of scripts that say nothing else."""
