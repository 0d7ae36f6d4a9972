"""Seconds of work and of layout changes at given ratios.

Ratios r_si say which share of a tensor that segment s splits device i gets. Only some devices can be the
slowest: one that another exceeds in r_si / v_i for every s and in 1 / v_i (v its FLOPs per second) never is, and
is left out; in proportion to the speeds, one device stands for all.

A collective over all devices takes a fixed part, and one in proportion to the bytes that count. Parts of unequal size
are gathered (or scattered) in one of two ways, chosen tensor by tensor at n devices:

    padded     every part as large as the largest: n max_i r_i S bytes                           (1)
    grouped    a message per part, of the exact size: S bytes                                    (2)

with ratios r and S the whole tensor's bytes (HAP, EuroSys 2024, section 2.5.1). (1) is faster when parts are
near equal, as one collective is faster than messages of the same bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from hetu_fx.base.checks import check_not_negative
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.plans.cost import (
    BUCKET_BYTES,
    cheapest_all_reduce_cost,
    cheapest_ring_cost,
    padded_cost,
    ring_cost,
    send_cost,
)
from hetu_fx.errors import PlanError
from hetu_fx.planner.search.hap.op_forms import OpForm
from hetu_fx.planner.search.hap.tensor_states import ChangeKind, Layout, changes
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.tensor_program import Tensor

Ratios = tuple[tuple[float, ...], ...]
"""For each segment, each device's share; each adds up to 1."""

Vector = tuple[float, ...]
_EPSILON = 1e-9

REFERENCE_BYTES = 1 << 24
"""Size at which a cluster's costs are taken as lines through their value at no bytes."""


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collectives of all devices; without the grouped ones everything is padded.

    The bytes of an all-to-all and of padded parts are (1), those of others S. `shift` moves boundaries of
    parts: its bytes are what passes the busiest boundary, times two. `meeting_seconds` is what devices that compute
    lose to meet for each turn around them, besides.
    """

    all_gather: Line
    reduce_scatter: Line
    all_reduce: Line
    all_to_all: Line
    shift: Line
    grouped_all_gather: Line | None = None
    grouped_reduce_scatter: Line | None = None
    meeting_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_not_negative(PlanError, "collectives", meeting_seconds=self.meeting_seconds)
        lines = (getattr(self, field.name) for field in fields(self) if field.name != "meeting_seconds")
        for seconds, per_byte in (line for line in lines if line is not None):
            if not all(math.isfinite(value) and value >= 0 for value in (seconds, per_byte)):
                raise PlanError(f"a collective has {seconds} seconds, {per_byte} per byte\nhint: give 0 or more")

    @classmethod
    def of_cluster(cls, cluster: Cluster) -> Collectives:
        """Build them from a cluster's collectives among all its devices where they were timed, else from its links.

        The links price them as the comm ops that run are priced.
        """
        ranks = cluster.ranks
        lines = {
            "all_gather": padded_cost,
            "reduce_scatter": padded_cost,
            "all_reduce": cheapest_all_reduce_cost,
            "all_to_all": _all_to_all_cost,
            "shift": send_cost,
            "grouped_all_gather": cheapest_ring_cost,
            "grouped_reduce_scatter": cheapest_ring_cost,
        }
        found = {name: _line(cost, ranks, cluster) for name, cost in lines.items()} | _timed(cluster)
        return cls(**found, meeting_seconds=cluster.meeting_seconds(ranks))

    def meetings(self, change: ChangeKind, tensor: Tensor) -> float:
        """Return what devices lose to meet for a change of a tensor; parameters and their gradients share buckets."""
        turns = 2 if change is ChangeKind.ALL_REDUCE else 1
        share = min(1.0, tensor.bytes / BUCKET_BYTES) if tensor.kind == "parameter" else 1.0
        return turns * share * self.meeting_seconds


def _timed(cluster: Cluster) -> dict[str, Line]:
    """Return the collectives that were timed among all devices of a cluster."""
    where = "inter" if len({device.node for device in cluster.devices}) > 1 else "intra"
    return {
        timed.name: Line(timed.latency_seconds, 1 / timed.bytes_per_second)
        for timed in cluster.collectives
        if (timed.where, timed.num_ranks) == (where, len(cluster.ranks))
    }


_Cost = Callable[[float, Sequence[int], Cluster], float]


def _line(cost: _Cost, ranks: Sequence[int], cluster: Cluster) -> Line:
    fixed = cost(0.0, ranks, cluster)
    return Line(fixed, (cost(float(REFERENCE_BYTES), ranks, cluster) - fixed) / REFERENCE_BYTES)


def _all_to_all_cost(num_bytes: float, ranks: Sequence[int], cluster: Cluster) -> float:
    """Price an all-to-all of a tensor: of its part, a device keeps what stays its own."""
    return ring_cost(num_bytes / len(ranks), ranks, cluster)


def round_shares(ratios: Sequence[float], total: int) -> tuple[int, ...]:
    """Return whole shares of `total` near the ratios: floors, then one more for the largest remainders.

    Equal remainders go to the last device, as in HAP's released code; a share may be 0.
    """
    shares = [math.floor(ratio * total) for ratio in ratios]
    order = sorted(range(len(shares)), key=lambda i: (ratios[i] * total - shares[i], i), reverse=True)
    for index in order[: total - sum(shares)]:
        shares[index] += 1
    return tuple(shares)


def _check_ratios(ratios: Ratios, num_devices: int) -> None:
    """Raise `PlanError` unless every segment's ratios are shares of all devices."""
    for segment, shares in enumerate(ratios):
        if len(shares) != num_devices or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
            raise PlanError(
                f"ratios of segment {segment} are {shares} for {num_devices} devices\n"
                f"hint: give one each, adding up to 1"
            )


class PricedCollective(NamedTuple):
    """One collective: `fixed_seconds + seconds_per_share * x`.

    x is the largest ratio of segment `follows[0]`, or, with two segments, how far their boundaries are apart at
    most; without any, seconds are fixed. `bytes` are those of the whole tensor.
    """

    change: ChangeKind
    tensor: str
    is_backward: bool
    bytes: float
    fixed_seconds: float
    seconds_per_share: float = 0.0
    follows: tuple[int, ...] = ()
    is_grouped: bool = False

    def seconds(self, ratios: Ratios) -> float:
        """Return its seconds at other ratios; boundaries that agree need no shift."""
        driver = _driver(self.follows, ratios)
        if self.change is ChangeKind.SHIFT and driver < _EPSILON:
            return 0.0
        return self.fixed_seconds + self.seconds_per_share * driver

    def __str__(self) -> str:
        form = "grouped " if self.is_grouped else ""
        return f"{form}{self.change} of {self.tensor}{' (gradient)' if self.is_backward else ''}"


def _driver(follows: tuple[int, ...], ratios: Ratios) -> float:
    """Return the largest share, or how far boundaries between parts are apart at most, as a share of the dim."""
    match follows:
        case (segment,):
            return max(ratios[segment])
        case (one, other):
            boundaries = zip(itertools.accumulate(ratios[one]), itertools.accumulate(ratios[other]), strict=True)
            return max(abs(a - b) for a, b in boundaries)
        case _:
            return 0.0


@dataclass(frozen=True)
class RatioPrices:
    """What work and changes cost on devices of these speeds at these ratios.

    `per_flop` is, for each device that can be the slowest, seconds of a FLOP cut by each segment, then whole.
    """

    speeds: tuple[float, ...]
    collectives: Collectives
    ratios: Ratios
    per_flop: tuple[Vector, ...] = field(init=False, repr=False, compare=False)
    _changes: dict[tuple[str, Layout, Layout], tuple[PricedCollective, ...] | None] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        _check_ratios(self.ratios, len(self.speeds))
        object.__setattr__(self, "per_flop", _per_flop(self.speeds, self.ratios))

    @property
    def num_devices(self) -> int:
        """Return the number of devices."""
        return len(self.speeds)

    def work(self, form: OpForm) -> Vector:
        """Return the seconds of a form on each of those devices."""
        return tuple(form.cut_flops * device[form.segment] + form.whole_flops * device[-1] for device in self.per_flop)

    def change(self, tensor: Tensor, source: Layout, target: Layout) -> tuple[PricedCollective, ...] | None:
        """Return what changes a layout; None if nothing does."""
        key = (tensor.name, source, target)
        if key not in self._changes:
            self._changes[key] = self._change(tensor, source, target)
        return self._changes[key]

    def seconds(self, transfers: Sequence[PricedCollective]) -> float:
        """Return the seconds of transfers, one after another."""
        return sum(transfer.seconds(self.ratios) for transfer in transfers)

    def gathered(self, form: OpForm, tensors: Mapping[str, Tensor]) -> tuple[PricedCollective, ...]:
        """Return what sufficient-factor broadcasting gathers for a form; inputs are everywhere anyway."""
        segment, named = form.segment, (tensors[name] for name in form.gathered)
        split = (tensor for tensor in named if tensor.kind != "input")
        return tuple(self._transfer(ChangeKind.ALL_GATHER, each, segment, segment, is_backward=True) for each in split)

    def _change(self, tensor: Tensor, source: Layout, target: Layout) -> tuple[PricedCollective, ...] | None:
        found: list[PricedCollective] = []
        steps = list(changes(source, target))
        if not steps and source != target:
            return None
        for layout, both in steps:
            for change, is_backward in zip(both, (False, True), strict=True):
                if change is not None and (tensor.has_gradient or not is_backward):
                    other = target.segment if change is ChangeKind.SHIFT else layout.segment
                    found.append(self._transfer(change, tensor, source.segment, other, is_backward))
        return tuple(found)

    def _transfer(
        self, change: ChangeKind, tensor: Tensor, segment: int, other: int, is_backward: bool
    ) -> PricedCollective:
        start = (change, tensor.name, is_backward, tensor.bytes)
        follows = (segment, other) if change is ChangeKind.SHIFT else (other,)
        swell = 2.0 if change is ChangeKind.SHIFT else float(self.num_devices)
        line: Line = getattr(self.collectives, change.name.lower())
        lost = self.collectives.meetings(change, tensor)
        if change is ChangeKind.ALL_REDUCE:
            return PricedCollective(*start, line(tensor.bytes) + lost)
        padded = PricedCollective(*start, line.fixed + lost, line.slope * swell * tensor.bytes, follows)
        grouped_line: Line | None = getattr(self.collectives, f"grouped_{change.name.lower()}", None)
        if grouped_line is None:
            return padded
        grouped = PricedCollective(*start, grouped_line(tensor.bytes) + lost, is_grouped=True)
        return grouped if grouped.seconds(self.ratios) < padded.seconds(self.ratios) else padded


def _per_flop(speeds: Sequence[float], ratios: Ratios) -> tuple[Vector, ...]:
    columns = [(*(shares[i] / speed for shares in ratios), 1 / speed) for i, speed in enumerate(speeds)]
    kept: list[Vector] = []
    for column in sorted(columns, reverse=True):
        if not any(_covers(other, column) for other in kept):
            kept = [other for other in kept if not _covers(column, other)]
            kept.append(column)
    return tuple(kept)


def _covers(column: Vector, other: Vector) -> bool:
    return all(c >= k * (1 - _EPSILON) for c, k in zip(column, other, strict=True))
