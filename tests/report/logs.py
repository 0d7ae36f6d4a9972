"""Logs as runs write them, made on paper: for a few devices and many, for a step and thousands of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.price.step import predict
from hetu_fx.planner.values.gathered_op import GATHERED_OP, GatheredOp
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.report.run_log import FORMAT
from hetu_fx.report.updates import Entry
from tests.planner.examples import paper, transformer

GATHERED = GatheredOp("rows", "aten.matmul.default", "loss.py:4", 8, 2.5e6, "head", "return u @ v.t() < 0", 0.002)
NAMES = ("first", "a plan for a device that is slow")


def log(devices: int = 2, steps: int = 3, *, length: int = 64) -> list[Entry]:
    """Return the log of a run that changes its plan half-way: replicas, then pipelines of two stages."""
    cluster = paper(*(3.0 if rank % 2 else 2.0 for rank in range(devices)), memory_bytes=1 << 30)
    costs = transformer(rows=4 * devices, length=length)
    plans = [_priced(plan, costs, cluster) for plan in (Plan.data_parallel(range(devices)), _pipelines(devices))]
    told = [{"name": name, "plan": plan.to_json(), "rates": {}} for name, plan in zip(NAMES, plans, strict=True)]
    start = {"event": "start", "format": FORMAT, "processes": devices, "variants": [NAMES[0]], "plans": told[:1]}
    known = {"cluster": cluster.to_json(), "profile": Profile(costs, source="estimate").to_json()}
    return [{**start, **known}, *_steps(devices, steps, plans, told[1])]


def _pipelines(devices: int) -> Plan:
    pairs = [Pipeline((Stage((rank,)), Stage((rank + 1,))), micro_batches=4) for rank in range(0, devices - 1, 2)]
    return Plan(tuple(pairs))


def _priced(plan: Plan, costs: ProgramCosts, cluster: Cluster) -> Plan:
    return replace(plan, predicted=predict(plan, costs, cluster))


def _steps(devices: int, steps: int, plans: list[Plan], later: Entry) -> Iterator[Entry]:
    for number in range(1, steps + 1):
        index = int(number > (steps + 1) // 2)
        if number == (steps + 1) // 2 + 1:
            yield {"event": "health", "step": number, "rates": {"1": 2.5}}
            yield {"event": "plan", "step": number, **later}
            yield {"event": "switch", "step": number, "from": NAMES[0], "to": NAMES[1]}
        yield _step(number, NAMES[index], plans[index], devices)
        if number == 1:
            yield {"event": "memory", "step": number, "peak_bytes": [10**8 + rank for rank in range(devices)]}
            yield {"event": "gathered", "step": number, "variant": NAMES[0], "ops": [GATHERED_OP.write(GATHERED)]}


def _step(number: int, name: str, plan: Plan, devices: int) -> Entry:
    assert plan.predicted is not None
    seconds = plan.predicted.seconds * (1.2 + 0.1 * math.sin(number) + 10 * (number == 1))
    computed = [dict(device.seconds)["compute"] * 1.1 for device in plan.predicted.devices]
    times = {"seconds": seconds, "predicted_seconds": plan.predicted.seconds, "compute_seconds": computed}
    times |= {"host_seconds": [0.001 * (rank + 1) for rank in range(devices)]}
    what = {"event": "step", "step": number, "variant": name, "longest": 64, "rows": [4] * len(plan.pipelines)}
    return {**what, **times, "loss": 5.0 / math.sqrt(number) + 0.1 * math.sin(7 * number)}
