"""Seconds and bytes of switches among plans, for the state of a model with AdamW on four processes.

Two kinds: another variant (parameters are gathered from home into another plan's layout) and another home (parameters
and optimizer state change their owners). Both beside torch.distributed.checkpoint, which saves the same state from one
home and loads it into the other. And steps: what a change of variant adds to a step, which gathers anyway, and what a
change of home adds to the step after it, where all has come at once and where the optimizer's state comes beside it.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import start_processes

from benchmarks.kit.report import Bar, Row, finish, median_ratio, parser
from benchmarks.kit.smallest import is_smallest
from benchmarks.workers.switch import BESIDE, FULL, HOME, LONG, QUICK, RESULT, SHORT, STEP, VARIANT, WORLD, work

SPEEDUP_BAR, BYTES_BAR, STEP_BAR = 10.0, 1.0, 1.05
Switch = Mapping[str, Any]


def main() -> int:
    """Run on processes of this machine and judge."""
    options = parser("switch", "Seconds and bytes of switches among plans, against a checkpoint.").parse_args()
    size, rounds = (QUICK, LONG) if options.quick else (FULL, SHORT)
    with tempfile.TemporaryDirectory() as folder:
        how = "fork" if is_smallest() else "spawn"
        start_processes(work, (Path(folder), size, rounds), nprocs=WORLD, start_method=how)
        return judge(json.loads((Path(folder) / RESULT).read_text()))


def judge(result: Mapping[str, Any]) -> int:
    """Turn seconds and bytes into bars and rows."""
    saved, loaded = result["save"], result["load"]
    checkpoint = statistics.median(saved) + statistics.median(loaded)
    bars, rows = [], []
    for kind in (HOME, VARIANT):
        switches: Sequence[Switch] = result[kind]
        speedups = [checkpoint / statistics.median(switch["seconds"]) for switch in switches]
        excess = sum(switch["bytes"] for switch in switches) / sum(switch["least bytes"] for switch in switches)
        bars.append(Bar(f"checkpoint over {kind}, median", statistics.median(speedups), SPEEDUP_BAR, at_least=True))
        bars.append(Bar(f"bytes of {kind} over the least", excess, BYTES_BAR, at_least=False))
        rows += [row(kind, switch, speedup) for switch, speedup in zip(switches, speedups, strict=True)]
    ratios = [median_ratio(step["changed"], step["stayed"]) for step in result[STEP]]
    bars.append(
        Bar("step after a change of variant over the next", statistics.median(ratios), STEP_BAR, at_least=False)
    )
    rows += [step_row(step, ratio) for step, ratio in zip(result[STEP], ratios, strict=True)]
    rows += [beside_row(change, checkpoint) for change in result[BESIDE]]
    rows += [{"what": f"checkpoint {way}", "seconds": statistics.median(result[way])} for way in ("save", "load")]
    return finish("switch", bars, rows, **result["about"])


def step_row(step: Switch, ratio: float) -> Row:
    """Make a line of steps."""
    return {
        "what": f"step after {step['from']} to {step['to']}",
        "seconds": statistics.median(step["changed"]),
        "next step": statistics.median(step["stayed"]),
        "of the next step": ratio,
    }


def cost_of(change: Switch) -> float:
    """Return what a change of home costs: what training waits for, and by how much the next step is longer."""
    slower = [after - stayed for after, stayed in zip(change["next"], change["after"], strict=True)]
    return float(statistics.median(change["stall"]) + max(statistics.median(slower), 0.0))


def beside_row(change: Switch, checkpoint: float) -> Row:
    """Make a line of a change of home with the steps after it."""
    way = "beside a step" if change["overlap"] else "at once"
    return {
        "what": f"home {change['from']} to {change['to']}, {way}",
        "stall": statistics.median(change["stall"]),
        "arrived": statistics.median(change["arrived"]),
        "step after it": statistics.median(change["next"]),
        "next step": statistics.median(change["after"]),
        "stall and longer step": cost_of(change),
        "checkpoint takes, times": checkpoint / cost_of(change),
    }


def row(kind: str, switch: Switch, speedup: float) -> Row:
    """Make a line of the table."""
    return {
        "what": f"{kind} {switch['from']} to {switch['to']}",
        "seconds": statistics.median(switch["seconds"]),
        "first": switch["seconds"][0],
        "MB": switch["bytes"] / 1e6,
        "least MB": switch["least bytes"] / 1e6,
        "messages": switch["messages"],
        "extra memory, of the state": switch["extra"],
        "checkpoint takes, times": speedup,
    }


if __name__ == "__main__":
    sys.exit(main())
