"""How many layers each stage of a pipeline gets (Malleus' lower level), for stages given as kinds of groups.

Minimise the bottleneck o = max_j y_j l_j over whole l_j with sum_j l_j = L, within memory. A stage that gets
no layer is no stage: its devices stand by, and the next one becomes the first. Slow stages stand in front,
where 1F1B keeps most activations, as they hold few layers; where memory binds, the order by y times the
group's size is tried too (a split group of healthy devices is no straggler, but has little memory).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hetu_fx.planner.search.allocate import spread_evenly
from hetu_fx.planner.search.malleus.groups import GroupKind
from hetu_fx.planner.search.malleus.situation import MalleusSituation

Kinds = tuple[GroupKind, ...]


@dataclass(frozen=True, slots=True)
class Filled:
    """A pipeline's stages in order, the layers of each (1 or more), and its bottleneck seconds o."""

    kinds: Kinds
    layers: tuple[int, ...]
    bottleneck: float

    @property
    def fill_seconds(self) -> float:
        """Return the seconds of one micro-batch through all stages."""
        return math.fsum(kind.seconds * n for kind, n in zip(self.kinds, self.layers, strict=True))


class LayerFiller:
    """Fills pipelines with layers; remembers what it has filled."""

    def __init__(self, situation: MalleusSituation) -> None:
        self._situation = situation
        self._found: dict[Kinds, Filled | None] = {}

    @property
    def num_filled(self) -> int:
        """Return how many different pipelines were filled."""
        return len(self._found)

    def fill(self, kinds: Kinds) -> Filled | None:
        """Return the best filling with some of these groups (slowest first), or None when none fits memory."""
        if kinds not in self._found:
            self._found[kinds] = self._fill(kinds)
        return self._found[kinds]

    def _fill(self, kinds: Kinds) -> Filled | None:
        best = self._in_order(kinds)
        relaxed = self._situation.num_layers / math.fsum(1 / kind.seconds for kind in kinds) if kinds else math.inf
        if self._situation.memory is not None and (best is None or best.bottleneck > relaxed + kinds[0].seconds):
            weighted = sorted(kinds, key=lambda kind: (-kind.seconds * kind.size, kind))
            best = _better(best, self._in_order(tuple(weighted)))
        return _better(best, self._without_slowest(kinds, best))

    def _without_slowest(self, kinds: Kinds, best: Filled | None) -> Filled | None:
        """Return a filling without the slowest group, where its one layer is what bounds the pipeline."""
        if len(kinds) > 1 and (best is None or best.bottleneck == kinds[0].seconds):
            return self.fill(kinds[1:])
        return None

    def _in_order(self, kinds: Kinds) -> Filled | None:
        seconds = [kind.seconds for kind in kinds]
        layers = spread_evenly(self._situation.num_layers, seconds, [1] * len(kinds), self._most_layers(kinds))
        if layers is None:
            return None
        return Filled(kinds, layers, max(y * n for y, n in zip(seconds, layers, strict=True)))

    def _most_layers(self, kinds: Kinds) -> Sequence[int]:
        memory, last = self._situation.memory, len(kinds) - 1
        if memory is None:
            return ()
        rooms = [kind.room_bytes - (memory.edge_bytes if j in (0, last) else 0.0) for j, kind in enumerate(kinds)]
        return [max(0, int(room / memory.at(last - j))) for j, room in enumerate(rooms)]


def _better(one: Filled | None, other: Filled | None) -> Filled | None:
    if one is None or other is None:
        return one or other
    return min(one, other, key=lambda filled: (filled.bottleneck, len(filled.kinds)))
