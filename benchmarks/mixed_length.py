"""Sequences of mixed lengths on emulated devices: tokens per second, against static plans, HotSPa's mode and DDP.

The sequences are the sources of Python's standard library, as bytes: many short pieces and a long tail. A device holds
rows of `held` tokens, and a group that shares their work as many times that as it has devices. 2 in 100 pieces are
longer than that, so that the plans that take the longest ones share every row between all devices, short ones too: as
in Hydraulis' case study, where 97 % of the sequences fit groups of 4 and the longest need 16. Everybody runs the same
batches of so many tokens. The best single plan is found by racing all of them, each with each packing that there is.

Seconds are from the reading of the batch to the optimizer's step, planning included: it takes part of the device's own
share of a core. The gain comes from short sequences that need not be shared between devices; where a batch has one that
only all four hold, Hydraulis' mode runs all of it so, and mixed lengths may choose HotSPa's groups instead. DDP is let
off the limit: its devices run the longest sequences alone, which nobody else's may.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from benchmarks.contest import slowest, timed
from benchmarks.fleet import OwnSpeeds, in_fleet, run_workers, say, worker_parser, write_result
from benchmarks.mixed_length_contest import Among, Grouped, Scale, Texts, Took, Trained, corpus
from benchmarks.mixed_length_plans import BOUNDS, DYNAMIC, HOMOGENEOUS, STATIC
from benchmarks.models import Size, batch, llama, num_parameters
from benchmarks.report import Bar, Row, finish, median_ratio
from hetu_fx.comm_ops.groups import GroupTable
from hetu_fx.emulate import EmulateSpec
from hetu_fx.planner.hydraulis.assignment import Batching
from hetu_fx.planner.hydraulis.policies import HotSPa, Hydraulis, SequencePolicy, Soonest
from hetu_fx.switching.agreement import from_first
from hetu_fx.switching.graph_execution import GraphExecution
from hetu_fx.switching.programs import Programs
from hetu_fx.topology import Cluster

SPEEDS = (0.45,) * 4
BAR = 1.32  # the lower end of what Hydraulis' paper reports against the best static plan
SCALE = Scale(Size(width=256, layers=2, rows=1, tokens=4096), tokens=16384, held=1024)
BATCHES = 1  # of a round
ROUNDS, QUICK_ROUNDS = 8, 2
PADDED_PART = 4  # of a batch every 4th sequence is trained on padded, as that takes many times as long
PROFILE_ROWS, PROFILE_TOKENS, PROFILE_ROUNDS = 2, 512, 3
MEASURE_SECONDS = 1.0
MIXED, HOTSPA, DDP = "mixed lengths", "HotSPa's mode", "DDP, length-grouped"
SINGLE = "Hydraulis' mode"
SHARES = ("computing", "on_processor")  # of a round's time
PACKINGS = (Batching.GREEDY, Batching.PACKED)

Train = Callable[[Sequence[Texts]], Took]


class Round(NamedTuple):
    """A round of so many tokens: seconds until the last rank was done, and what it took on this one."""

    tokens: int
    seconds: float
    took: Took


def main() -> int:
    """Run the contest under the emulator and judge it."""
    options = worker_parser("mixed_length", "Tokens per second on sequences of mixed lengths.").parse_args()
    if options.worker is not None:
        return work(options.worker, QUICK_ROUNDS if options.quick else ROUNDS)
    spec = EmulateSpec(speeds=SPEEDS)
    found = run_workers("mixed_length", ["--quick"] * options.quick, spec, timeout_seconds=1800, limit="cgroups")
    return judge(found)


def judge(found: Mapping[str, Any]) -> int:
    """Turn the seconds of the rounds into bars and rows."""
    rounds = found["rounds"]
    own, best = rounds[MIXED], found["best"]
    gain = median_ratio(rounds[best]["seconds"], own["seconds"])
    rows = [row(name, one, own) for name, one in rounds.items()]
    bars = [Bar(f"speed-up over the best single plan with packing, {best}", gain, BAR, at_least=True)]
    return finish("mixed_length", bars, rows, speeds=SPEEDS, scale=str(SCALE), **found["about"])


def row(name: str, one: Mapping[str, list[Any]], own: Mapping[str, list[Any]]) -> Row:
    """Make a line of the table: measured, and what mixed lengths gain over it, measured and predicted."""
    found: dict[str, object] = {"who": name, "rounds": len(one["seconds"]), "tokens per second": speed(one)}
    if found["rounds"] == len(own["seconds"]):
        found["our gain"] = median_ratio(one["seconds"], own["seconds"])
        found["predicted"] = sum(one["predicted"]) / sum(own["predicted"])
    share = {key: statistics.median(one[key]) / statistics.median(one["seconds"]) for key in SHARES}
    return found | {f"{key} share": value for key, value in share.items()}


def speed(one: Mapping[str, list[Any]]) -> float:
    """Return tokens per second over all rounds."""
    return float(sum(one["tokens"]) / sum(one["seconds"]))


def work(result: Path, rounds: int) -> int:
    """Be one rank of the contest."""
    with in_fleet():
        race = Race(time.monotonic(), measured_cluster())
        race.run(rounds)
        about = {"parameters": num_parameters(llama(SCALE.size)), "planning": race.planning()}
        write_result(result, {"rounds": race.columns(), "best": race.best, "about": about})
    return 0


def measured_cluster() -> Cluster:
    """Measure the devices, by the model itself; collective."""
    table, small = GroupTable(), batch(PROFILE_ROWS, PROFILE_TOKENS)
    execution = GraphExecution(Programs(llama(SCALE.size), None), small, None)
    costs = from_first(table, execution.costs(PROFILE_ROWS, memory=False))
    cluster = Cluster.measure(table, seconds=MEASURE_SECONDS)
    own = OwnSpeeds(costs, lambda: llama(SCALE.size), small)
    return own.cluster(cluster, own.seconds(PROFILE_ROUNDS))


class Race:
    """The contestants, and the rounds that they have run."""

    def __init__(self, start: float, cluster: Cluster) -> None:
        self.start, self.best = start, ""
        self.rounds: dict[str, list[Round]] = {}
        self.single = {name: Trained(SCALE, cluster, [name]) for name in STATIC}
        self.say("static plans are ready")
        self.many, self.ddp = Trained(SCALE, cluster, DYNAMIC), Grouped(SCALE)
        self.say(f"all are ready, on\n{cluster}")

    def run(self, rounds: int) -> None:
        """Find the best single plan in a first round, in which all are warmed up, and race it against the others."""
        batches = corpus(SCALE, (rounds + 1) * BATCHES)
        first, *others = [batches[i : i + BATCHES] for i in range(0, len(batches), BATCHES)]
        heats = {f"{name}, {b.value}": (name, Hydraulis(b)) for name in STATIC for b in PACKINGS}
        for who, (name, policy) in heats.items():
            self.round(who, self.trains(self.single[name], policy), first)
        self.best = min(heats, key=lambda who: self.rounds[who][0].seconds)
        plan, policy = heats[self.best]
        finalists = {self.best: self.trains(self.single[plan], policy), **self.own(), DDP: self.ddp.train}
        for who in [name for name in finalists if name != self.best]:
            self.round(who, finalists[who], first)
        few = [first[0][::PADDED_PART]]
        self.round(f"{plan}, padded", self.trains(self.single[plan], Hydraulis(Batching.PADDED)), few)
        for number, part in enumerate(others):
            names = list(finalists)
            for who in names[number % len(names) :] + names[: number % len(names)]:
                self.round(who, finalists[who], part)

    def own(self) -> dict[str, Train]:
        """Give those that change plans."""
        bounds = tuple(bound * SCALE.held for bound in BOUNDS)
        policies: dict[str, SequencePolicy] = {
            MIXED: Soonest((Hydraulis(), HotSPa(bounds, batching=Batching.PACKED))),
            SINGLE: Hydraulis(),
            HOTSPA: Among(HOMOGENEOUS, HotSPa(bounds)),
        }
        return {who: self.trains(self.many, policy) for who, policy in policies.items()}

    @staticmethod
    def trains(model: Trained, policy: SequencePolicy) -> Train:
        """Give what trains a model under a policy."""
        return lambda batches: model.train(policy, batches)

    def round(self, who: str, train: Train, batches: Sequence[Texts]) -> None:
        """Time a round of a contestant; collective."""
        took: list[Took] = []
        seconds = slowest(timed(lambda: took.append(train(batches))))
        tokens = sum(len(text) for texts in batches for text in texts)
        self.rounds.setdefault(who, []).append(Round(tokens, seconds, took[0]))
        self.say(f"{who}: {seconds:.2f} s, {took[0]}")

    def columns(self) -> dict[str, dict[str, list[Any]]]:
        """Return the seconds of all rounds by contestant; the first of those that ran more is left out."""
        kept = {who: rounds[len(rounds) > 1 :] for who, rounds in self.rounds.items()}
        return {
            who: {key: [getattr(one, key) for one in rounds] for key in ("tokens", "seconds")}
            | {key: [getattr(one.took, key) for one in rounds] for key in Took.__slots__}
            for who, rounds in kept.items()
        }

    def planning(self) -> dict[str, float]:
        """Give the seconds that planning a batch of mixed lengths has taken, and the share that no step waited for."""
        stats = self.many.model.hetu.stats["planning"]
        return {"seconds a batch": stats.seconds / stats.batches, "hidden share": stats.hidden_share}

    def say(self, text: str) -> None:
        """Tell how far it is."""
        if dist.get_rank() == 0:
            say(f"{time.monotonic() - self.start:.0f} s: {text}")


if __name__ == "__main__":
    sys.exit(main())
