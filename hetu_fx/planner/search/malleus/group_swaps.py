"""Exchanges of groups between two pipelines, and which of them can make a placement better.

T of a placement is lower, or as low with more micro-batches per second (what the descent of `search` lowers), only if
the two pipelines then do by T, or before, what the others leave. That takes no longer to tell for many pipelines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetu_fx.planner.search.malleus.device_groups import GroupKind
from hetu_fx.planner.search.malleus.layers import FilledPipeline, Kinds, micro_batches_within, most_below

_ROUNDED = 1 - 1e-9  # a sum that is greater by less than rounding


@dataclass(frozen=True, slots=True)
class ExchangeGoal:
    """What two pipelines of some have to reach for all to be better, whatever the others do.

    Attributes:
        seconds: T of all.
        missing: micro-batches that the others cannot do by then.
        missing_before: those that they cannot do before.
        rate: micro-batches per second of the two as they are.
    """

    seconds: float
    missing: int
    missing_before: int
    rate: float

    @classmethod
    def of(cls, pipelines: Sequence[FilledPipeline], total: int, seconds: float, pair: tuple[int, int]) -> ExchangeGoal:
        """Return it for two of some pipelines, which do `total` micro-batches in so many seconds."""
        rest = [one for number, one in enumerate(pipelines) if number not in pair]
        missing = total - sum(micro_batches_within(one, seconds) for one in rest)
        before = total - sum(most_below(one, seconds) for one in rest)
        rate = sum(1 / pipelines[number].bottleneck for number in pair)
        return cls(seconds, missing, before, rate)

    def allows(self, one: FilledPipeline | None, other: FilledPipeline | None) -> bool:
        """Tell whether no bound rules out that these in place of the two are better."""
        if one is None or other is None:
            return False
        if most_below(one, self.seconds) + most_below(other, self.seconds) >= self.missing_before:
            return True
        is_faster = 1 / one.bottleneck + 1 / other.bottleneck > self.rate * _ROUNDED
        return (
            is_faster
            and micro_batches_within(one, self.seconds) + micro_batches_within(other, self.seconds) >= self.missing
        )


def different_pairs(bins: Sequence[Kinds]) -> Iterator[tuple[int, int]]:
    """Yield pairs of positions, one for each pair of different pipelines, slower ones first.

    Pipelines may be exchanged meanwhile, which makes new pairs.
    """
    seen, done = set[tuple[Kinds, Kinds]](), set[Kinds]()
    for i in range(len(bins)):
        first = bins[i]
        for j in range(i + 1, len(bins)) if first not in done else ():
            pair = (bins[i], bins[j]) if bins[i] >= bins[j] else (bins[j], bins[i])
            if pair not in seen:
                seen.add(pair)
                before = bins[i], bins[j]
                yield i, j
                if (bins[i], bins[j]) != before:
                    done.clear()
        if bins[i] == first:
            done.add(first)


def exchanges(one: Kinds, other: Kinds) -> Iterator[tuple[Kinds, Kinds]]:
    """Yield both pipelines after a group of one was moved to the other, or two groups swapped."""
    for mine in (None, *dict.fromkeys(one)):
        for theirs in (None, *dict.fromkeys(other)):
            if mine != theirs:
                yield replace_kind(one, mine, theirs), replace_kind(other, theirs, mine)


def replace_kind(kinds: Kinds, gone: GroupKind | None, new: GroupKind | None) -> Kinds:
    left = list(kinds)
    if gone is not None:
        left.remove(gone)
    return tuple(sorted([*left, *([] if new is None else [new])], reverse=True))
