"""Paces: how long blocks that were timed on a kind of device take, against what their counted costs would take there.

Costs are counted in FLOPs, bytes and ops. What a kind makes of them depends on how wide the products are, so that
halves of a block seldom take half as long. A pace says it for groups of one size; between sizes it is a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetu_fx.base.checks import check_not_negative, check_positive
from hetu_fx.base.records import record
from hetu_fx.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Pace:
    """What groups of `tensor_parallel` devices of a kind take, over what is counted.

    `work` is that of seconds that grow with rows, `fixed` that of the rest.
    """

    kind: str
    tensor_parallel: int
    work: float = 1.0
    fixed: float = 1.0

    def __post_init__(self) -> None:
        where = f"pace of {self.tensor_parallel} x {self.kind!r}"
        check_positive(ClusterError, where, tensor_parallel=self.tensor_parallel, work=self.work)
        check_not_negative(ClusterError, where, fixed=self.fixed)


PACE = record(Pace, ClusterError)


def interpolate_pace(paces: Sequence[Pace], degree: float) -> tuple[float, float]:
    """Return (work, fixed) of a group of so many devices, from paces of one kind by size; those of the nearest outside.

    `degree` is one over a device's share of what its group splits, so it need not be whole.
    """
    for low, high in pairwise(paces):
        if low.tensor_parallel <= degree <= high.tensor_parallel:
            way = (degree - low.tensor_parallel) / (high.tensor_parallel - low.tensor_parallel)
            return low.work + way * (high.work - low.work), low.fixed + way * (high.fixed - low.fixed)
    if not paces:
        return 1.0, 1.0
    nearest = paces[0] if degree < paces[0].tensor_parallel else paces[-1]
    return nearest.work, nearest.fixed
