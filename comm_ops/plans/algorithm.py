"""The algorithm by which an op is carried out, by value: flat, padded, or in two levels.

Ops carry it as text, so that a graph says how it runs, and every rank of a group takes the same way. What
depends on the size is a bound in bytes, as sizes may be symbolic where the algorithm is chosen (`lowering`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hetu_fx.errors import CommError

_NUMBERS = r"\d+(?:,\d+)*"
_TEXT = re.compile(
    rf"(?:nodes (?P<nodes>{_NUMBERS})(?P<outer>(?: in {_NUMBERS})*)(?: from (?P<least>\d+))?)?"
    r"(?:(?:^|(?<=.); )padded below (?P<pads>\d+))?"
)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Says when a collective goes in two levels, and when its uneven parts are padded.

    `nodes` has the node of each of the op's ranks (empty: flat), `outer` what else they stand in, from inside out, by
    which lanes go in two levels again. `two_level_from` is the number of bytes of the
    whole tensor from which it goes in two levels (None: never), `padded_below` the number below which uneven
    parts are padded to the largest, in one collective, instead of sent one by one.
    """

    nodes: tuple[int, ...] = ()
    two_level_from: int | None = None
    padded_below: int = 0
    outer: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        """Write it as `nodes 0,0,1,1 from 4096; padded below 512`, which `parse_algorithm` reads; flat is empty."""
        bound = "" if self.two_level_from is None else f" from {self.two_level_from}"
        tiers = " in ".join(",".join(map(str, tier)) for tier in self.tiers)
        nodes = [f"nodes {tiers}{bound}"] if self.nodes else []
        return "; ".join([*nodes, *([f"padded below {self.padded_below}"] if self.padded_below else [])])

    @property
    def tiers(self) -> tuple[tuple[int, ...], ...]:
        """Return the nodes, and what these stand in."""
        return (self.nodes, *self.outer)

    def in_two_levels(self, num_bytes: int) -> bool:
        """Tell whether a tensor of so many bytes in all goes in two levels."""
        return self.two_level_from is not None and num_bytes >= self.two_level_from and spans(self.nodes)

    def pads(self, num_bytes: int) -> bool:
        """Tell whether uneven parts of so many bytes in all are padded."""
        return num_bytes < self.padded_below

    def node_of(self, ranks: Sequence[int]) -> Mapping[int, int]:
        """Return the node of each of the op's ranks."""
        return dict(zip(ranks, self.nodes, strict=True))

    def within(self, ranks: Sequence[int], members: Sequence[int]) -> Algorithm:
        """Return the algorithm for a collective of some members of the op's ranks."""
        if not self.nodes:
            return self
        nodes, *outer = member_tiers(self.tiers, ranks, members)
        return Algorithm(nodes, self.two_level_from, self.padded_below, tuple(outer))


FLAT = Algorithm()


def spans(nodes: Sequence[int]) -> bool:
    """Tell whether ranks stand on several nodes, and several on one of them: else two levels are one."""
    return 1 < len(set(nodes)) < len(nodes)


@lru_cache(maxsize=4096)
def parse_algorithm(text: str) -> Algorithm:
    """Read what `str(form)` wrote; raise CommError on anything else."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise CommError(f"cannot read the form {text!r}\nhint: write 'nodes 0,0,1,1 from 4096; padded below 512'")
    nodes = tuple(map(int, match["nodes"].split(","))) if match["nodes"] else ()
    least = int(match["least"]) if match["least"] else None
    outer = tuple(tuple(map(int, tier.split(","))) for tier in (match["outer"] or "").split(" in ")[1:])
    return Algorithm(nodes, least, int(match["pads"] or 0), outer)


def member_tiers(
    tiers: Sequence[Sequence[int]], ranks: Sequence[int], members: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Return what some of `ranks` stand in."""
    if not tiers:
        return ()
    place = {rank: index for index, rank in enumerate(ranks)}
    return tuple(tuple(tier[place[rank]] for rank in members) for tier in tiers)


@lru_cache(maxsize=4096)
def by_node(ranks: tuple[int, ...], nodes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """List the ranks of each node, nodes and ranks in the order of `ranks`."""
    if len(ranks) != len(nodes):
        raise CommError(f"a form of {len(nodes)} nodes does not fit ranks {list(ranks)}")
    found: dict[int, list[int]] = {}
    for rank, node in zip(ranks, nodes, strict=True):
        found.setdefault(node, []).append(rank)
    return tuple(map(tuple, found.values()))


def lanes(levels: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """List groups of one rank of every node, as many as the fullest node has ranks; others' ranks take turns."""
    return tuple(lane_at(levels, place) for place in range(max(map(len, levels))))


def lane_at(levels: tuple[tuple[int, ...], ...], place: int) -> tuple[int, ...]:
    """Return the group at one place of `lanes`."""
    return tuple(ranks[place % len(ranks)] for ranks in levels)
