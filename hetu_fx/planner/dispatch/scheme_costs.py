"""What Hydraulis knows of a parallel scheme: its seconds, by a quadratic fit, and how long a row it can hold.

On scheme k a sequence of s tokens takes, forward and backward, on each stage

    t_k(s) = a s^2 + b s                                                      (1)

and a micro-batch that packs the sequences Q, attention being paid per sequence and c per micro-batch,

    T_k(Q) = sum_{s in Q} t_k(s) + c                                          (2)

A pipeline of p stages runs v micro-batches Q_j in

    (p - 1 + v) max_j T_k(Q_j)                                                (3)

seconds (1F1B), and never in less than what is asked of a pipeline before its sequences are packed:

    sum_s t_k(s) + (p - 1) max_s t_k(s)                                       (4)

(1) to (4) are the cost model of Hydraulis (arXiv 2412.07894, SIGMOD 2026) as its planner states it. Where stages hold
several chunks, through which micro-batches go round by round, (p - 1) is divided by their number. What a scheme is
besides groups and stages (by how many parts tokens are shared, what is recomputed, on which devices) is in its seconds
and in the rows that it holds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import NamedTuple

import numpy as np
import scipy  # whose parts are imported when they are first used
from numpy.typing import NDArray

from hetu_fx.base.checks import check_not_negative
from hetu_fx.errors import PlanError

Numbers = NDArray[np.float64]

_UNKNOWNS = 3


@dataclass(frozen=True, slots=True)
class TimeFit:
    """The constants of (1) and (2): a and b in seconds per squared token and per token, c in seconds."""

    a: float
    b: float
    c: float = 0.0

    def __post_init__(self) -> None:
        check_not_negative(PlanError, "time fit", a=self.a, b=self.b, c=self.c)
        if self.a == self.b == 0:
            raise PlanError("time fit has a = b = 0, so that sequences cost nothing\nhint: give one of them above 0")

    def seconds(self, length: float) -> float:
        """Return (1): the seconds per stage of a sequence of `length` tokens."""
        return (self.a * length + self.b) * length

    def micro_batch_seconds(self, runs: Iterable[float]) -> float:
        """Return (2): the seconds per stage of a micro-batch whose tokens attend to each other in runs of these."""
        return math.fsum(map(self.seconds, runs)) + self.c

    def all_seconds(self, lengths: Iterable[int]) -> Numbers:
        """Return (1) for each length, shape (sequences,)."""
        tokens = np.array(tuple(lengths), dtype=np.float64)
        return (self.a * tokens + self.b) * tokens


class FitQuality(NamedTuple):
    """A time fit, and the share of the variance of the samples that it explains."""

    fit: TimeFit
    r_squared: float


def fit_times(samples: Sequence[tuple[int, float]]) -> FitQuality:
    """Fit a, b, c to `(length, seconds)` of micro-batches of one sequence, by non-negative least squares.

    Relative errors are minimised, as short and long rows matter alike. Lengths below the one that fills a
    device bend the fit and are better left out. Raises `PlanError` for fewer than three lengths.
    """
    lengths = [length for length, _ in samples]
    if len(set(lengths)) < _UNKNOWNS or not all(length > 0 and 0 < s < math.inf for length, s in samples):
        raise PlanError(
            f"cannot fit a, b, c to {list(samples)}\n"
            f"hint: give (length, seconds), both above 0, of at least {_UNKNOWNS} different lengths"
        )
    tokens, seconds = (np.array(column, dtype=np.float64) for column in zip(*samples, strict=True))
    scale = tokens.max()  # so that the columns are of like size
    columns = np.stack([(tokens / scale) ** 2, tokens / scale, np.ones_like(tokens)], axis=1)
    found, _ = scipy.optimize.nnls(columns / seconds[:, None], np.ones_like(seconds))
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    error = float(((columns @ found - seconds) ** 2).sum())
    a, b, c = (float(value) for value in found)
    return FitQuality(TimeFit(a / scale**2, b / scale, c), 1 - error / spread if spread else 1.0)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one pipeline runs: stages of tensor parallel groups, their time fit, and the tokens a row may have.

    `filling_tokens` is the shortest row that keeps the devices busy; more and shorter micro-batches are not
    tried. `context` is by how many groups the tokens of a row are shared in each stage; `recomputes` tells whether
    blocks are computed again in the backward; `kinds` is how many devices of each kind a stage has (left out: there is
    one kind); `chunks` is in how many the blocks of a stage are dealt out.
    """

    tensor_parallel: int
    stages: int
    times: TimeFit
    max_length: int
    filling_tokens: int = 1
    context: int = field(default=1, kw_only=True)
    recomputes: bool = field(default=False, kw_only=True)
    kinds: tuple[int, ...] = field(default=(), kw_only=True)
    chunks: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "stages", "max_length", "filling_tokens", "context", "chunks"):
            if getattr(self, name) < 1:
                raise PlanError(f"scheme {self} has {name} {getattr(self, name)}\nhint: give a whole number from 1")
        if self.kinds and sum(self.kinds) != self.group:
            raise PlanError(
                f"scheme {self} has {sum(self.kinds)} devices in a stage by their kinds {self.kinds}, but {self.group} "
                f"by its groups\nhint: give the same number of devices by both"
            )

    @property
    def group(self) -> int:
        """Return how many devices a stage takes."""
        return self.tensor_parallel * self.context

    @property
    def devices(self) -> int:
        """Return how many devices a pipeline takes."""
        return self.group * self.stages

    @property
    def by_kind(self) -> tuple[int, ...]:
        """Return how many devices of each kind a pipeline takes."""
        return tuple(count * self.stages for count in self.kinds or (self.group,))

    @property
    def fill(self) -> float:
        """Return for how many of its slowest micro-batches a stage waits: p - 1 of (3) and (4)."""
        return (self.stages - 1) / self.chunks

    def seconds(self, slowest: float, micro_batches: int) -> float:
        """Return (3), `slowest` being the largest sum of (1) over a micro-batch."""
        return (slowest + self.times.c) * (self.fill + micro_batches)

    def done(self, times: Sequence[float]) -> float:
        """Return the seconds of a pipeline whose micro-batches take so many on each stage, one not like the other."""
        return math.fsum(times) + self.fill * max(times, default=0.0)

    def __str__(self) -> str:
        sizes = [f"tp {self.tensor_parallel}", *([f"cp {self.context}"] if self.context > 1 else [])]
        devices = [f"of {' + '.join(map(str, self.kinds))}"] if self.kinds else []
        chunks = [f"in {self.chunks} chunks"] if self.chunks > 1 else []
        return f"<{', '.join([*sizes, f'pp {self.stages}', *devices, *chunks, *['recomputed'] * self.recomputes])}>"


@dataclass(frozen=True, slots=True)
class Strategy:
    """Pipelines side by side, each with its scheme; a multiset, kept with the longest rows first."""

    pipelines: tuple[Scheme, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "pipelines", tuple(sorted(self.pipelines, key=strategy_order)))
        if not self.pipelines:
            raise PlanError("a strategy has no pipelines\nhint: give the scheme of at least one")

    @property
    def max_length(self) -> int:
        """Return the longest sequence that some pipeline can hold."""
        return self.pipelines[0].max_length

    def __str__(self) -> str:
        counts = Counter(self.pipelines).items()
        return " + ".join(f"{count}x{scheme}" if count > 1 else str(scheme) for scheme, count in counts)


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """The lengths of the sequences of a step, in tokens; a sequence is named by its position."""

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(map(index, self.lengths)))
        if not self.lengths:
            raise PlanError("a batch has no sequences\nhint: give the length of at least one")
        wrong = {position: length for position, length in enumerate(self.lengths) if length < 1}
        if wrong:
            raise PlanError(f"a batch has lengths below 1, by position: {wrong}\nhint: leave empty sequences out")

    @property
    def longest(self) -> int:
        """Return the length of the longest sequence."""
        return max(self.lengths)


def check_holds(strategy: Strategy, batch: SequenceBatch) -> None:
    """Raise `PlanError` unless some pipeline of the strategy can hold the longest sequence."""
    if batch.longest > strategy.max_length:
        raise too_long(batch, f"no pipeline of {strategy} holds", strategy.max_length)


def too_long(batch: SequenceBatch, holders: str, most: int) -> PlanError:
    """Return the error for a longest sequence where `holders` "more than" so many tokens; raised by the caller."""
    return PlanError(
        f"sequence {batch.lengths.index(batch.longest)} of the batch has {batch.longest} tokens, but {holders} "
        f"more than {most}\nhint: cut it, or give a strategy with more devices in a pipeline"
    )


def check_each_once(what: str, groups: Sequence[Sequence[int]], count: int) -> None:
    """Raise `PlanError` unless the groups together hold each of `count` sequences exactly once."""
    held = Counter(position for group in groups for position in group)
    wrong = sorted(held.keys() ^ set(range(count)))
    twice = sorted(position for position, times in held.items() if times > 1)
    if wrong or twice:
        raise PlanError(
            f"{what} has sequences {wrong} missing or unknown and {twice} twice\nhint: give each exactly once"
        )


def strategy_order(scheme: Scheme) -> tuple[float, ...]:
    """Return what the pipelines of a strategy are sorted by."""
    times = scheme.times
    sizes = (-scheme.max_length, -scheme.tensor_parallel, scheme.stages)
    others = (scheme.filling_tokens, scheme.context, scheme.chunks, scheme.recomputes, *scheme.kinds)
    return (*sizes, times.a, times.b, times.c, *others)
