"""Seconds that no plan of a step can be faster than.

The devices have the work of all rows to do, at the speed of all of them together; each parameter is moved by one device
at least, and updated by one. Memory, communication, waiting and whatever cannot be divided are left out. So, with R
rows, the sums being over the parts of the program and the devices,

    step >= (3 R (flops + traffic f) + 3 ops o + parameters (moves + update) f) / speed                   (1)

f are the FLOPs in the time of a byte and o those in the time that running an op takes, of the device that has least.
It holds for every plan, as a step takes no less than any device computes, and then what any device updates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hetu_fx.cluster.cluster import Device
from hetu_fx.planner.price.stage_seconds import FORWARD_AND_BACKWARD, OP_SECONDS, WEIGHT_MOVES
from hetu_fx.planner.price.step_end import OPTIMIZER_MOVES
from hetu_fx.planner.values.program import ProgramCosts


def bound_seconds(costs: ProgramCosts, devices: Sequence[Device]) -> float:
    """Return (1)."""
    whole, top_speeds = costs.between(0, costs.num_blocks), dict[str, float]()
    for device in devices:
        top_speeds[device.kind] = max(device.speed, top_speeds.get(device.kind, 0.0))
    per_byte, per_op = min(device.flops_per_byte for device in devices), OP_SECONDS * min(top_speeds.values())
    work = costs.rows * (whole.flops + whole.traffic_bytes * per_byte) + whole.num_ops * per_op
    moved = whole.parameter_bytes * (WEIGHT_MOVES + OPTIMIZER_MOVES) * per_byte
    return (FORWARD_AND_BACKWARD * work + moved) / math.fsum(device.speed for device in devices)
