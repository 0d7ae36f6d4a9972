"""Rounds of the contestants on sequences of mixed lengths, and what a table says of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.kit.contest import slowest, timed
from benchmarks.kit.fleet import say
from benchmarks.kit.report import median_ratio
from benchmarks.lengths.contest import Texts, Took
from hetu_fx.comm_ops.wire.consensus import all_gather_object
from hetu_fx.comm_ops.wire.groups import GroupTable

Train = Callable[[], Took]
Columns = Mapping[str, list[Any]]

SHARES = ("computing", "on_processor")  # of a round's time


class Round(NamedTuple):
    """A batch of so many tokens: seconds until the last rank was done, and what it took on this one.

    `took.computing` is that of the rank that computed longest, `took.slowness` the mean of all.
    """

    tokens: int
    seconds: float
    took: Took

    def __str__(self) -> str:
        took = self.took
        planned = f"predicted {took.predicted:.2f}, planning {took.planning:.3f}, waited for it {took.waited:.3f}"
        return f"{self.seconds:.2f} s: computing {took.computing:.2f}, {planned}, {took.variant}"


class Rounds:
    """The rounds that each contestant has run, and the time since the contest began."""

    def __init__(self, start: float) -> None:
        self._start = start
        self.of: dict[str, list[Round]] = {}

    def run(self, who: str, train: Train, texts: Texts) -> None:
        """Time a contestant's next batch, which has these texts; collective."""
        took: list[Took] = []
        seconds = slowest(timed(lambda: took.append(train())))
        slowness = statistics.fmean(all_gather_object(GroupTable(), took[0].slowness))
        longest = replace(took[0], computing=slowest(took[0].computing), slowness=slowness)
        found = Round(sum(map(len, texts)), seconds, longest)
        self.of.setdefault(who, []).append(found)
        self.say(f"{who}: {found}")

    def in_turn(self, trains: Mapping[str, Train], batches: Sequence[Texts]) -> None:
        """Time everybody on each batch, in an order that turns round by round; collective."""
        names = list(trains)
        for number, texts in enumerate(batches):
            for who in names[number % len(names) :] + names[: number % len(names)]:
                self.run(who, trains[who], texts)

    def columns(self) -> dict[str, Columns]:
        """Return what all rounds took by contestant; the first of those that ran more is left out."""
        kept = {who: rounds[len(rounds) > 1 :] for who, rounds in self.of.items()}
        return {
            who: {key: [getattr(one, key) for one in rounds] for key in ("tokens", "seconds")}
            | {key: [getattr(one.took, key) for one in rounds] for key in Took.__slots__}
            for who, rounds in kept.items()
        }

    def say(self, text: str) -> None:
        """Tell how far it is."""
        say(f"{time.monotonic() - self._start:.0f} s: {text}")


def speed(one: Columns) -> float:
    """Return tokens per second over all rounds."""
    return float(sum(one["tokens"]) / sum(one["seconds"]))


def gain(of: Columns, over: Columns) -> float:
    """Return by how much a contestant is faster: by round where both ran the same ones, otherwise by their speeds."""
    alike = of["tokens"] == over["tokens"]
    return median_ratio(over["seconds"], of["seconds"]) if alike else speed(of) / speed(over)


def predicted_gain(of: Columns, over: Columns) -> dict[str, object]:
    """Return the gain that was expected as an entry of the table; none where nothing was."""
    ratio = [sum(one["tokens"]) / sum(one["predicted"]) for one in (of, over) if sum(one["predicted"])]
    return {"predicted": ratio[0] / ratio[1]} if len(ratio) == len((of, over)) else {}


def predicted_share(one: Columns) -> dict[str, float]:
    """Return the seconds that were expected over those that all rounds took as an entry; none where nothing was."""
    expected = float(sum(one["predicted"]))
    return {"predicted / measured": expected / sum(one["seconds"])} if expected else {}


def terms(one: Columns) -> dict[str, float]:
    """Return what was expected and measured of the device that computes longest, and of the rest of a round."""
    if not sum(one["predicted"]):
        return {}
    keys = ("to_compute", "computing", "predicted", "seconds")
    expected, measured, predicted, seconds = (statistics.mean(one[key]) for key in keys)
    return {
        "compute s predicted": expected,
        "compute s": measured,
        "all ranks' over expected": statistics.mean(one["slowness"]),
        "rest s predicted": predicted - expected,
        "rest s": seconds - measured,
    }


def details(one: Columns) -> dict[str, object]:
    """Return the end of a line of the table: where the time went, and planning."""
    found: dict[str, object] = {
        f"{key} share": statistics.median(one[key]) / statistics.median(one["seconds"]) for key in SHARES
    }
    if planning := sum(one["planning"]):
        found["planning s"] = planning / len(one["planning"])
        found["hidden share"] = max(0.0, 1 - sum(one["waited"]) / planning)
    return found
