"""What is expected of steps under plans with programs, which costs do not tell: what was predicted, at other speeds.

A prediction comes from the process that has planned. The others cannot make it anew, as their examples may have other
sizes, but all scale it alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.plans.plan import Plan
from hetu_fx.plans.prediction import DeviceCost, Prediction

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
