"""Parameters' homes on unequal devices, all with as much against each as its speed: what a step becomes shorter by.

A large model and few tokens, so that the end of a step counts: gradient sync, gather and the update by AdamW. Rows are
shared out by the devices' speeds all the time; only the homes change, in turns. Beside what steps take stands what
`hetu_fx.planner.price.step_end` predicts for their end, from the devices as they are measured and from what updates
took with equal homes.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.kit.contest import adamw, slowest, timed, train_step
from benchmarks.kit.fleet import in_fleet, run_workers, say, set_speeds, worker_parser, write_result
from benchmarks.kit.models import Size, batch, llama, num_parameters
from benchmarks.kit.report import Bar, finish, median_ratio
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.wire.consensus import all_gather_object
from hetu_fx.planner.price.step_end import ParameterHome, home_end_seconds, owned_bytes, update_seconds_per_byte
from hetu_fx.plans.plan import Plan
from hetu_fx.switching.adapt.rehome import UpdateTimes, parameter_homes
from hetu_fx.switching.step.timer import find_clock
from hetu_fx_emulate.emulate import EmulateSpec

SPEEDS = (0.5, 0.25, 0.125)
SIZE = Size(width=832, layers=4, rows=7, tokens=16)
EQUAL, WEIGHED = "equal", "by speed"
SHARES: Mapping[str, Mapping[int, float]] = {EQUAL: dict.fromkeys(range(3), 1.0), WEIGHED: {0: 4.0, 1: 2.0, 2: 1.0}}
STEPS = 2
GAIN_BAR = 1.05


def main() -> int:
    """Run the contest under the emulator and judge it."""
    options = worker_parser("homes", "Homes of equal size against homes by speed.").parse_args()
    if options.worker is not None:
        return work(options.worker, rounds=1 if options.quick else 5)
    spec = EmulateSpec(speeds=(SPEEDS[0],) * len(SPEEDS))  # until all is prepared
    return judge(run_workers("homes", ["--quick"] * options.quick, spec, timeout_seconds=1800))


def judge(result: Mapping[str, Any]) -> int:
    """Turn what was measured into a bar and rows."""
    gain = median_ratio(result[EQUAL]["seconds"], result[WEIGHED]["seconds"])
    rows = [
        {
            "homes": name,
            "seconds a step": statistics.median(result[name]["seconds"]),
            "its update, by device": " ".join(f"{seconds:.3f}" for seconds in result[name]["updates"]),
            "its end, predicted": result[name]["predicted"],
            "MB owned": " ".join(f"{size / 1e6:.3g}" for size in result[name]["owned"]),
            "seconds to change to it": statistics.median(result[name]["moves"]),
        }
        for name in SHARES
    ]
    bars = [Bar("speed-up by homes of the devices' speeds", gain, GAIN_BAR, at_least=True)]
    return finish("homes", bars, rows, speeds=SPEEDS, size=str(SIZE), **result["about"])


def work(result: Path, *, rounds: int) -> int:
    """Be one rank of the contest."""
    with in_fleet():
        contest = Contest()
        set_speeds(SPEEDS)
        cluster = Cluster.measure(contest.runtime.table, seconds=1.0)
        for number in range(rounds):
            for name in list(SHARES)[:: -1 if number % 2 else 1]:
                contest.run(name)
            say(f"{number}: {contest.seconds}")
        found = contest.found(cluster)
        write_result(result, {**found, "about": {"parameters": contest.num_parameters, "rounds": rounds}})
    return 0


class Contest:
    """One model, whose homes change."""

    def __init__(self) -> None:
        import hetu_fx

        plain, whole = llama(SIZE), batch(SIZE.rows, SIZE.tokens)
        self.num_parameters, optimizer = num_parameters(plain), adamw(plain)
        plan = Plan.data_parallel((0, 1, 2), (4, 2, 1))
        self.model = hetu_fx.auto_parallelize(plain, whole, plan=plan, optimizer=optimizer, data="global")
        self.runtime = self.model.hetu._runtime
        self.times = UpdateTimes(find_clock(torch.device("cpu")))
        self.times.time_steps_of([optimizer])
        self.step = train_step(self.model, optimizer, whole)
        self.step()
        self.seconds: dict[str, list[float]] = {name: [] for name in SHARES}
        self.moves: dict[str, list[float]] = {name: [] for name in SHARES}
        self.updates: dict[str, list[float]] = {name: [] for name in SHARES}
        self.housed: dict[str, list[ParameterHome]] = {}

    def run(self, name: str) -> None:
        """Change homes, run a step that is not timed, and time some; collective."""
        self.moves[name].append(slowest(timed(lambda: self.model.hetu.switch_home(SHARES[name]))))
        self.step()
        self.housed[name] = parameter_homes(self.runtime.variants[self.runtime.current].compute.entries)
        self.times.taken()
        for _ in range(STEPS):
            self.seconds[name].append(slowest(timed(self.step)))
            self.updates[name].append(self.times.taken())

    def found(self, cluster: Cluster) -> dict[str, Any]:
        """Return what each way took, and what is predicted for it; collective."""
        table = self.runtime.table
        updates = {name: all_gather_object(table, statistics.median(seconds)) for name, seconds in self.updates.items()}
        equal = self.housed[EQUAL]
        per_byte = update_seconds_per_byte(dict(enumerate(updates[EQUAL])), owned_bytes(equal), cluster)
        return {
            name: {
                "seconds": self.seconds[name],
                "moves": self.moves[name],
                "updates": updates[name],
                "predicted": home_end_seconds(homes, cluster, per_byte),
                "owned": list(owned_bytes(homes).values()),
            }
            for name, homes in self.housed.items()
        }


if __name__ == "__main__":
    sys.exit(main())
