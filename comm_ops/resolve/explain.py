"""What a resolved change does, for people: its class, its steps, what every link carries, how long it takes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetu_fx.comm_ops.plans.cost import Topology
from hetu_fx.comm_ops.resolve.resolution import (
    CommStep,
    MoveStep,
    Resolution,
    TopStep,
    ring_turns,
    steps_bytes,
    steps_seconds,
)
from hetu_fx.show.table import table_text

_MOST_LINKS = 24  # more are summed up

Links = Mapping[tuple[int, int], float]


@dataclass(frozen=True, slots=True)
class StepExplanation:
    """One step: who meets whom, the bytes that all ranks send, and its seconds where links are known."""

    op: str
    tier: str
    groups: tuple[tuple[int, ...], ...]
    num_bytes: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Describes a resolution; `str()` of it is what `explain` prints.

    `kind` is "identity", or the tiers that a tensor passes ("bottom", "top", "BSR") joined by "then"; parts of the
    change that share no rank are joined by "beside". `links` has the bytes per (sender, receiver), collectives
    counted as rings.
    """

    change: str
    kind: str
    steps: tuple[StepExplanation, ...]
    links: Links
    num_bytes: int
    seconds: float | None

    def __str__(self) -> str:
        """Write it in lines."""
        lines = [self.change, f"class: {self.kind}"]
        if self.steps:
            lines += [table_text(("step", "tier", "groups", "bytes", "seconds"), list(map(_row, self.steps)))]
            lines += [f"links: {_links_text(self.links)}"]
        lines += [f"bytes: {self.num_bytes}"]
        if self.seconds is not None:
            lines += [f"predicted: {self.seconds:.3g} seconds"]
        return "\n".join(lines)


def explain(resolution: Resolution, topology: Topology | None = None, itemsize: int = 4) -> Explanation:
    """Explain a resolution for entries of `itemsize` bytes; print the result. Seconds need a topology.

    Raises ResolveError on symbolic sizes, whose bytes are not known.
    """
    steps = resolution.steps
    links: dict[tuple[int, int], float] = {}
    for step in steps:
        for link, num_bytes in _step_links(step, itemsize).items():
            links[link] = links.get(link, 0.0) + num_bytes
    return Explanation(
        change=str(resolution).partition("\n")[0],
        kind=_kind(steps),
        steps=tuple(_report(step, topology, itemsize) for step in steps),
        links=dict(sorted(links.items())),
        num_bytes=resolution.bytes(itemsize),
        seconds=None if topology is None else resolution.seconds(itemsize, topology),
    )


def _step_links(step: CommStep, itemsize: int) -> dict[tuple[int, int], float]:
    """Count the bytes of a step per (sender, receiver)."""
    found: dict[tuple[int, int], float] = {}
    if isinstance(step, MoveStep):
        for sender, receiver, num_bytes in itertools.chain.from_iterable(step.rounds(itemsize)):
            found[sender, receiver] = found.get((sender, receiver), 0.0) + num_bytes
        return found
    for ranks, numel in step.collectives():
        share = ring_turns(step.op) * (len(ranks) - 1) * numel * itemsize / len(ranks)
        for link in zip(ranks, (*ranks[1:], ranks[0]), strict=True):
            if share:
                found[link] = found.get(link, 0.0) + share
    return found


def _report(step: CommStep, topology: Topology | None, itemsize: int) -> StepExplanation:
    if isinstance(step, MoveStep):
        groups = [tuple(sorted({*step.source.ranks, *step.target.ranks}))]
    else:
        groups = [ranks for ranks, _ in step.collectives()]
    seconds = None if topology is None else steps_seconds((step,), itemsize, topology)
    return StepExplanation(step.op, _tier(step), tuple(groups), steps_bytes((step,), itemsize), seconds)


def _tier(step: CommStep) -> str:
    if isinstance(step, MoveStep):
        return "BSR"
    return "top" if isinstance(step, TopStep) else "bottom"


def _kind(steps: Sequence[CommStep]) -> str:
    """Name the tiers of every part of the change that no other part touches."""
    parts: list[tuple[set[int], list[str]]] = []
    for step in steps:
        ranks = {*step.source.ranks, *step.target.ranks}
        touched = [part for part in parts if part[0] & ranks]
        parts = [part for part in parts if not part[0] & ranks]
        before = [tier for _, tiers in touched[:1] for tier in tiers]
        parts.append((ranks.union(*(part[0] for part in touched)), [*before, _tier(step)]))
    chains = [" then ".join(tier for tier, _ in itertools.groupby(tiers)) for _, tiers in parts]
    return " beside ".join(dict.fromkeys(chains)) or "identity"


def _row(step: StepExplanation) -> list[str]:
    groups = " ".join(f"[{','.join(map(str, ranks))}]" for ranks in step.groups[:8])
    more = f" and {len(step.groups) - 8} more" if len(step.groups) > 8 else ""
    seconds = "" if step.seconds is None else f"{step.seconds:.3g}"
    return [step.op, step.tier, groups + more, str(step.num_bytes), seconds]


def _links_text(links: Links) -> str:
    if not links:
        return "none is used"
    shown = [f"{a}->{b} {num_bytes:.0f}" for (a, b), num_bytes in list(links.items())[:_MOST_LINKS]]
    rest = list(links.values())[_MOST_LINKS:]
    more = [f"{len(rest)} more {sum(rest):.0f}"] if rest else []
    return ", ".join(shown + more)
