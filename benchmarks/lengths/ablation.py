"""What each part of Hydraulis brings on sequences of mixed lengths: its batching modes, and its strategies.

The modes are those of its artifact. Sequences are of what two devices hold at most, so that there is a heterogeneous
plan that takes all of them. All arms train one model, whose variants they may use or not. Rows that go by shares need
pipelines that all hold them, so that modes 0 to 2 are for homogeneous plans alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.kit.report import Row
from benchmarks.lengths.contest import Among, Scale, Series, Texts, Trained, corpus, sample_of
from benchmarks.lengths.rounds import Columns, Rounds, details, gain, predicted_gain, speed
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.dispatch.assignment import Batching
from hetu_fx.planner.dispatch.policies import EarliestFinish, HotSPa, Hydraulis, SequencePolicy

HELD_BY = 2  # devices hold the longest sequence
PADDED_PART = 4  # every 4th sequence of a batch is trained on padded
PLANS = ("CP2 + CP2", "CP2 + 1 + 1", "1 + 1 + 1 + 1")
HOMOGENEOUS = ("CP2 + CP2", "1 + 1 + 1 + 1")
MODES = {
    "0 padding": Batching.PADDED,
    "1 packing in order": Batching.IN_ORDER,
    "2 greedy packing": Batching.GREEDY,
    "3 dispatch, greedy packing": Batching.DISPATCHED,
    "4 dispatch, packing by time": Batching.PACKED,
}
BASE = "static homogeneous, 1 packing in order"


class Strategy(NamedTuple):
    """Which variants may run, and in which modes."""

    names: tuple[str, ...]
    modes: tuple[str, ...]


STRATEGIES = {
    "static homogeneous": Strategy(("CP2 + CP2",), tuple(MODES)),
    "static heterogeneous": Strategy(("CP2 + 1 + 1",), tuple(MODES)[3:]),
    "dynamic homogeneous": Strategy(HOMOGENEOUS, tuple(MODES)[4:]),
    "dynamic heterogeneous": Strategy(PLANS, tuple(MODES)[3:]),
}


def arms(held: int) -> dict[str, SequencePolicy]:
    """Return the policy of each line of the table."""
    found: dict[str, SequencePolicy] = {
        f"{name}, {mode}": Among(strategy.names, Hydraulis(MODES[mode]))
        for name, strategy in STRATEGIES.items()
        for mode in strategy.modes
    }
    bounds = (held,)
    found["groups of lengths, greedy packing (HotSPa)"] = Among(HOMOGENEOUS, HotSPa(bounds))
    found["groups of lengths, packing by time"] = HotSPa(bounds, batching=Batching.PACKED)
    found["mixed lengths: the sooner"] = EarliestFinish((Hydraulis(), HotSPa(bounds, batching=Batching.PACKED)))
    return found


def ablate(rounds: Rounds, scale: Scale, cluster: Cluster, count: int) -> None:
    """Run all arms for so many rounds, and one before them that warms up; collective."""
    scale = replace(scale, longest=HELD_BY * scale.held)
    batches = corpus(scale, count + 1)
    trained = Trained(scale, cluster, PLANS)
    rounds.say(f"the arms are ready, on\n{cluster}")
    for part in _parts(batches):
        policies = {who: one for who, one in arms(scale.held).items() if _is_padded(who) == part.padded}
        series = {who: Series(trained, policy, part.batches) for who, policy in policies.items()}
        rounds.in_turn({who: one.train for who, one in series.items()}, part.batches)


class _Part(NamedTuple):
    padded: bool
    batches: Sequence[Texts]


def _parts(batches: Sequence[Texts]) -> tuple[_Part, ...]:
    """Return what is trained on padded, once, and what everybody else is."""
    return _Part(True, [sample_of(batches[0], PADDED_PART)]), _Part(False, batches)


def _is_padded(who: str) -> bool:
    return who.endswith("0 padding")


def ablation_rows(found: Mapping[str, Columns]) -> list[Row]:
    """Return the lines of the table: gains over fixed-length packing on the homogeneous plan."""
    base = found[BASE]
    return [
        {
            "who": who,
            "rounds": len(one["seconds"]),
            "tokens per second": speed(one),
            "gain": gain(one, base),
            **predicted_gain(one, base),
            **details(one),
        }
        for who, one in found.items()
    ]
