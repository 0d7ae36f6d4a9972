"""What a HAP program does besides its seconds: how tensors lie, and what it takes when parts are whole indices."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hetu_fx.planner.search.hap.prices import round_shares
from hetu_fx.planner.search.hap.synthesised_program import HapResult
from hetu_fx.planner.search.hap.tensor_states import Layout


def layouts(result: HapResult) -> Mapping[str, Layout]:
    """Return the layout in which each parameter is held and each value is made."""
    found: dict[str, Layout] = {}
    for step in result.program.steps:
        found |= {**dict(step.homes), **dict(zip(step.op.makes, step.form.makes, strict=True))}
    return found


def rounded_seconds(result: HapResult) -> float:
    """Return the seconds of a step with the work of whole indices: 3 heads on 2 devices are 2 and 1."""
    stages: list[list[float]] = []
    for step in result.program.steps:
        if not stages or step.ends_stage:
            stages.append([0.0] * len(result.speeds))
        form = step.form
        shares = (
            [0.0] * len(result.speeds)
            if form.cut is None
            else [share / form.units for share in round_shares(result.ratios[form.segment], form.units)]
        )
        for device, speed in enumerate(result.speeds):
            stages[-1][device] += (form.cut_flops * shares[device] + form.whole_flops) / speed
    return math.fsum(map(max, stages)) + result.exchange_seconds
