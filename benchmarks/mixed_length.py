"""Sequences of mixed lengths on emulated devices: tokens per second, against static plans, HotSPa's mode and DDP.

The sequences are the sources of Python's standard library, as bytes: many short pieces and a long tail. A device holds
rows of `held` tokens, and a group that shares their work as many times that as it has devices. 2 in 100 pieces are
longer than that, so that the plans that take the longest ones share every row between all devices, short ones too: as
in Hydraulis' case study, where 97 % of the sequences fit groups of 4 and the longest need 16. Everybody runs the same
batches of so many tokens. The best single plan is found by racing all of them on a first batch (`--quick`: the one that
wins there); it runs with each packing that there is.

Packed rows attend sequence by sequence, and are packed by what that costs. One row of the table packs as if attention
were paid for all pairs of a row's tokens, as it is where masks cannot be told apart by sequence: in shorter rows.

Seconds are from the reading of the batch to the optimizer's step. Batches are planned ahead, in a thread that takes
part of the device's own share of a core. The gain comes from short sequences that need not be shared between devices;
where a batch has one that only all four hold, Hydraulis' mode runs all of it so, and mixed lengths may choose HotSPa's
groups instead. DDP is let off the limit: its devices run the longest sequences alone, which nobody else's may; the
table says how many times the limit they would have to hold.

`--ablation` runs Hydraulis' batching modes and strategies against each other instead. `--link-megabits` limits links:
here a byte travels in the time of 20 FLOPs of a device, on H20 in that of 160 (NVLink) to 3,000 (400 Gbit/s), and what
short sequences lose in shared rows is what travels.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.kit.fleet import in_fleet, measured_cluster, run_workers, worker_parser, write_result
from benchmarks.kit.models import Size, batch, llama, num_parameters
from benchmarks.kit.report import Bar, finish
from benchmarks.lengths.ablation import ablate, ablation_rows
from benchmarks.lengths.contest import Among, Scale, Series, Texts, Trained, corpus, sample_of
from benchmarks.lengths.ddp import Grouped, kept_over_limit
from benchmarks.lengths.plans import BOUNDS, DYNAMIC, HOMOGENEOUS, LONGEST, STATIC
from benchmarks.lengths.rounds import (
    Columns,
    Rounds,
    Train,
    details,
    gain,
    predicted_gain,
    predicted_share,
    speed,
    terms,
)
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.wire.consensus import from_first
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.planner.captured_program import CapturedProgram
from hetu_fx.planner.dispatch.assignment import Batching
from hetu_fx.planner.dispatch.policies import EarliestFinish, HotSPa, Hydraulis, SequencePolicy
from hetu_fx.program.captures import Programs
from hetu_fx_emulate.emulate import EmulateSpec

SPEEDS = (0.45,) * 4
BAR = 1.9  # Hydraulis' paper reports 1.32 to 2.66 against the best static plan
PREDICTED_BAR = 0.10  # of the seconds of each that is planned
HELD = 1024
SCALE = Scale(Size(width=256, layers=2, rows=1, tokens=4096), tokens=16384, held=HELD, longest=LONGEST * HELD)
ROUNDS, QUICK_ROUNDS = 8, 3
ABLATION_ROUNDS, QUICK_ABLATION_ROUNDS = 5, 2
PADDED_PART = 4  # every 4th sequence of a batch is trained on padded, as that takes many times as long
PROFILE_ROWS, PROFILE_TOKENS, PROFILE_ROUNDS = 2, 512, 9
MEASURE_SECONDS = 1.0
MIXED, HOTSPA, DDP = "mixed lengths", "HotSPa's mode", "DDP, length-grouped"
SINGLE, WHOLE_ROWS = "Hydraulis' mode", "mixed lengths, packed by whole rows"
QUICK_STATIC = ("CP4",)
PACKINGS = (Batching.GREEDY, Batching.PACKED)


def main() -> int:
    """Run the contest under the emulator and judge it."""
    made = worker_parser("mixed_length", "Tokens per second on sequences of mixed lengths.")
    made.add_argument("--ablation", action="store_true", help="Hydraulis' parts against each other")
    made.add_argument("--link-megabits", type=int, metavar="N", help="a node for each device, behind links of N Mbit/s")
    options = made.parse_args()
    if options.worker is not None:
        return work(options.worker, options.quick, options.ablation)
    spec, given = _spec(options.link_megabits), ["--quick"] * options.quick + ["--ablation"] * options.ablation
    found = run_workers("mixed_length", given, spec, timeout_seconds=1800, limit="cgroups")
    return judge_ablation(found) if options.ablation else judge(found)


def _spec(link_megabits: int | None) -> EmulateSpec:
    """Return the devices: of one machine, or each on a node of its own."""
    if link_megabits is None:
        return EmulateSpec(speeds=SPEEDS)
    return EmulateSpec(speeds=SPEEDS, num_nodes=len(SPEEDS), link_bits_per_second=link_megabits * 10**6)


def judge(found: Mapping[str, Any]) -> int:
    """Turn the seconds of the rounds into bars and rows."""
    rounds = found["rounds"]
    best = max(found["finalists"], key=lambda name: speed(rounds[name]))
    rows = {name: row(name, one, rounds[MIXED]) for name, one in rounds.items()}
    rows[DDP]["kept / limit"] = found["about"]["ddp over limit"]
    name = f"speed-up over the best single plan with packing, {best}"
    bars = [
        Bar(name, gain(rounds[MIXED], rounds[best]), BAR, at_least=True),
        *(
            Bar(f"{who}: predicted off by", abs(share - 1), PREDICTED_BAR, at_least=False)
            for who, one in rounds.items()
            for share in predicted_share(one).values()
        ),
    ]
    return finish("mixed_length", bars, list(rows.values()), speeds=SPEEDS, scale=str(SCALE), **found["about"])


def row(name: str, one: Columns, own: Columns) -> dict[str, object]:
    """Make a line of the table: measured, and what mixed lengths gain over it, measured and predicted."""
    return {
        "who": name,
        "rounds": len(one["seconds"]),
        "tokens per second": speed(one),
        "our gain": gain(own, one),
        **predicted_gain(own, one),
        **predicted_share(one),
        **terms(one),
        **details(one),
    }


def judge_ablation(found: Mapping[str, Any]) -> int:
    """Print the table; there is nothing to reach."""
    return finish("mixed_length", [], ablation_rows(found["rounds"]), speeds=SPEEDS, scale=str(SCALE))


def work(result: Path, quick: bool, ablation: bool) -> int:
    """Be one rank of the contest."""
    with in_fleet():
        rounds, cluster = Rounds(time.monotonic()), devices_now()
        rounds.say("devices are measured")
        if ablation:
            ablate(rounds, SCALE, cluster, QUICK_ABLATION_ROUNDS if quick else ABLATION_ROUNDS)
            write_result(result, {"rounds": rounds.columns()})
            return 0
        race = Race(rounds, cluster, QUICK_STATIC if quick else STATIC, QUICK_ROUNDS if quick else ROUNDS)
        race.run()
        over = kept_over_limit(SCALE, race.batches)
        about = {"parameters": num_parameters(llama(SCALE.size)), "ddp over limit": over}
        write_result(result, {"rounds": rounds.columns(), "finalists": race.finalists, "about": about})
    return 0


def devices_now() -> Cluster:
    """Measure the devices, by the model itself; collective."""
    table, given = GroupTable(), batch(PROFILE_ROWS, PROFILE_TOKENS)
    ids = given["input_ids"]
    small = {**given, "position_ids": torch.arange(ids.shape[1]).expand_as(ids).clone()}  # as rows of sequences have
    program = CapturedProgram.of(Programs(llama(SCALE.size), None), small)
    costs = from_first(table, program.costs(PROFILE_ROWS, memory=False))
    make = partial(llama, SCALE.size)
    return measured_cluster(table, costs, make, small, seconds=MEASURE_SECONDS, rounds=PROFILE_ROUNDS)


class Race:
    """The contestants: a first batch in which all are warmed up, and those that count."""

    def __init__(self, rounds: Rounds, cluster: Cluster, static: Sequence[str], count: int) -> None:
        self.rounds = rounds
        self.finalists: list[str] = []  # of single plans with packing
        self.batches = corpus(SCALE, count + 1)
        self.single: dict[str, Trained] = {}
        for name in static:
            self.single[name] = Trained(SCALE, cluster, [name])
            rounds.say(f"{name} is ready")
        self.many, self.ddp = Trained(SCALE, cluster, DYNAMIC), Grouped(SCALE, self.batches)
        rounds.say(f"all are ready, on\n{cluster}")

    def run(self) -> None:
        """Find the best single plan on the first batch, and race it against the others, with each packing."""
        first, *others = self.batches
        heats = {name: self.packings(name, [first]) for name in self.single}
        for heat in heats.values():
            self.rounds.in_turn(heat, [first])
        plan = min(heats, key=lambda name: min(self.rounds.of[who][0].seconds for who in heats[name]))
        newcomers = {who: Series(self.many, policy, self.batches).train for who, policy in self.own().items()}
        newcomers[DDP] = self.ddp.train
        self.rounds.in_turn(newcomers, [first])
        few = [sample_of(first, PADDED_PART)]
        padded = Series(self.single[plan], Hydraulis(Batching.PADDED), few)
        self.rounds.in_turn({f"{plan}, padded": padded.train}, few)
        best = self.packings(plan, others)
        self.finalists = list(best)
        self.rounds.in_turn({**best, **newcomers}, others)

    def packings(self, plan: str, batches: Sequence[Texts]) -> dict[str, Train]:
        """Give what trains a single plan on batches, with each packing."""
        model = self.single[plan]
        return {f"{plan}, {one.value}": Series(model, Hydraulis(one), batches).train for one in PACKINGS}

    def own(self) -> dict[str, SequencePolicy]:
        """Give those that change plans."""
        bounds = tuple(bound * SCALE.held for bound in BOUNDS)
        return {
            MIXED: EarliestFinish((Hydraulis(), HotSPa(bounds, batching=Batching.PACKED))),
            WHOLE_ROWS: EarliestFinish((Hydraulis(Batching.WHOLE_ROWS), HotSPa(bounds, batching=Batching.WHOLE_ROWS))),
            SINGLE: Hydraulis(),
            HOTSPA: Among(HOMOGENEOUS, HotSPa(bounds)),
        }


if __name__ == "__main__":
    sys.exit(main())
