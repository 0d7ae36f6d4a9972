"""How much a step gets done: rows and tokens a second, and MFU; what is not known is left out."""

from __future__ import annotations

from collections.abc import Iterable

from hetu_fx.base.json_values import NUMBER
from hetu_fx.cluster.chips import find_chip
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.cluster.devices import Device
from hetu_fx.planner.price.stage_seconds import FORWARD_AND_BACKWARD
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.report.updates import Entry

RATES = dict.fromkeys(("rows_per_second", "tokens_per_second", "mfu"), NUMBER)
"""What entries of steps have beside what was measured, where it is known."""


def step_rates(entry: Entry, rows: int, peak_flops: float | None) -> dict[str, float]:
    """Return the rates of a step.

    Args:
        entry: of the step: its seconds, and where they are known its `tokens` and `flops`.
        rows: of the step, each once.
        peak_flops: of the devices together, per second; None where that is not known.
    """
    seconds, tokens, flops = entry["seconds"], entry.get("tokens"), entry.get("flops")
    if not seconds:
        return {}
    found = {"rows_per_second": rows / seconds}
    if tokens is not None:
        found["tokens_per_second"] = tokens / seconds
    if flops is not None and peak_flops:
        found["mfu"] = flops / seconds / peak_flops
    return found


def peak_flops(cluster: Cluster | None, ranks: Iterable[int]) -> float | None:
    """Return the FLOP/s that devices have together at most; None where that is not known of one of them.

    Of a device that was measured, the public figure of its kind; else what the cluster says of it.
    """
    devices = {} if cluster is None else {device.rank: device for device in cluster.devices}
    peaks = [_peak(devices[rank]) if rank in devices else None for rank in ranks]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) if known and len(known) == len(peaks) else None


def _peak(device: Device) -> float | None:
    if device.source != "measured":
        return device.flops_per_second
    chip = find_chip(device.kind)
    return None if chip is None else chip.flops()


def training_flops(costs: ProgramCosts, rows: int) -> float | None:
    """Return the FLOPs of the products of a model in a training step: its forward three times, nothing recomputed."""
    flops = costs.whole.flops
    return FORWARD_AND_BACKWARD * flops * rows if flops else None
