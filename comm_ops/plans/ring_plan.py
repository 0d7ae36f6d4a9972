"""Ring attention on paper: which part of the keys and values is where at which step, and how far each travels.

Keys and values go from neighbour to neighbour (Liu et al., Ring Attention with Blockwise Transformers, section 3): at
step t, position p has the part of position p - t. With a causal mask a part is read by no query before it, so that it
stops where its last reader is, and positions that need nothing more wait for nobody. In the backward the gradients of
a part follow it one step behind, and go home from its last reader.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Ring:
    """The parts of the queries, and of the keys and values, that each position of the ring has.

    With `is_causal` query i attends to the keys up to i, both counted from the start of the whole.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    is_causal: bool = False

    @property
    def steps(self) -> range:
        """Number the steps."""
        return range(len(self.keys))

    def part_at(self, position: int, step: int) -> int:
        """Tell whose part comes to a position at a step."""
        return (position - step) % len(self.keys)

    def offset(self, position: int, part: int) -> int:
        """Tell how much later the queries of a position start than the keys of a part."""
        return sum(self.queries[:position]) - sum(self.keys[:part])

    def reads(self, position: int, part: int) -> bool:
        """Tell whether some query of a position attends to some key of a part, as far as causality tells."""
        some = self.queries[position] > 0 and self.keys[part] > 0
        return some and (not self.is_causal or self.offset(position, part) + self.queries[position] > 0)

    def last_step(self, part: int) -> int:
        """Tell at which step a part is read last; 0 if nobody but its owner reads it."""
        return _last_steps(self)[part]

    def is_there(self, position: int, step: int) -> bool:
        """Tell whether the part of a step comes to a position at all."""
        return step in self.steps and self.last_step(self.part_at(position, step)) >= step


@lru_cache(maxsize=4096)
def _last_steps(ring: Ring) -> tuple[int, ...]:
    ways = len(ring.keys)
    reading = ([step for step in ring.steps if ring.reads((part + step) % ways, part)] for part in range(ways))
    return tuple(max(steps, default=0) for steps in reading)
