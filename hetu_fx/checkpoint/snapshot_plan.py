"""Who keeps whose snapshot, and which snapshot a restarted job can go on from: pure values."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class Moment:
    """A step's end in one life of the job (from one start of its processes to the next)."""

    step: int
    life: str
    world: int


@dataclass(frozen=True, order=True, slots=True)
class SnapshotPart:
    """What `owner` counts of the state at a moment, in the memory of rank `holder` of the same life."""

    moment: Moment
    owner: int
    holder: int

    @property
    def file_name(self) -> str:
        """The name of the file that holds the part."""
        moment = self.moment
        return (
            f"step-{moment.step:012d}.life-{moment.life}.rank-{self.owner:05d}-of-{moment.world:05d}"
            f".held-by-{self.holder:05d}.safetensors"
        )


_NAME = re.compile(r"step-(\d+)\.life-([0-9a-f]+)\.rank-(\d+)-of-(\d+)\.held-by-(\d+)\.safetensors")


def read_name(name: str) -> SnapshotPart | None:
    """Return the part that a file of this name holds; None where it is no part's name."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    step, life, owner, world, holder = found.groups()
    return SnapshotPart(Moment(int(step), life, int(world)), int(owner), int(holder))


def holders(nodes: Sequence[str]) -> tuple[int | None, ...]:
    """Return for each rank the rank that keeps a copy of its part: on another node where there is one.

    Of several, one that keeps the fewest copies so far, then the next one after it. All on one node: the next rank.
    None for a rank that is alone.
    """
    world = len(nodes)
    kept = [0] * world
    chosen: list[int | None] = []
    for rank, node in enumerate(nodes):
        others = [other for other in range(world) if other != rank]
        candidates = [other for other in others if nodes[other] != node] or others
        best = min(candidates, key=lambda other: (kept[other], (other - rank) % world), default=None)
        if best is not None:
            kept[best] += 1
        chosen.append(best)
    return tuple(chosen)


@dataclass(frozen=True, slots=True)
class SnapshotChoice:
    """The snapshot to go on from.

    Attributes:
        moment: the newest one of which every rank's part is there; None if there is none.
        nodes: for each owner, the nodes that have its part, sorted.
        lost: moments later than it that are incomplete, and the owners whose parts are nowhere.
    """

    moment: Moment | None
    nodes: tuple[tuple[str, ...], ...] = ()
    lost: tuple[tuple[Moment, tuple[int, ...]], ...] = ()


def choose(found: Mapping[str, Collection[SnapshotPart]]) -> SnapshotChoice:
    """Choose from the parts that each node has in its memory; ranks that know the same choose the same.

    A moment counts only if the parts of all ranks of its life are there: all of them finished that step.
    """
    where: dict[Moment, dict[int, set[str]]] = {}
    for node, parts in found.items():
        for part in parts:
            where.setdefault(part.moment, {}).setdefault(part.owner, set()).add(node)
    lost: list[tuple[Moment, tuple[int, ...]]] = []
    for moment in sorted(where, reverse=True):
        owners = where[moment]
        missing = tuple(rank for rank in range(moment.world) if rank not in owners)
        if not missing:
            nodes = tuple(tuple(sorted(owners[rank])) for rank in range(moment.world))
            return SnapshotChoice(moment, nodes, tuple(lost))
        lost.append((moment, missing))
    return SnapshotChoice(None, (), tuple(lost))


@dataclass(frozen=True, order=True, slots=True)
class PartTransfer:
    """One part to be copied from a rank's memory to that of another rank's node."""

    owner: int
    sender: int
    receiver: int


def plan_transfers(
    choice: SnapshotChoice, nodes: Sequence[str], needs: Sequence[Iterable[int]]
) -> tuple[PartTransfer, ...]:
    """Return what must travel so that each node has all the parts that its ranks need.

    Args:
        choice: says where parts are.
        nodes: of the ranks as they are now; a node's first rank sends and receives for it.
        needs: the owners whose parts each rank needs.
    """
    first = {node: rank for rank, node in reversed(list(enumerate(nodes)))}
    wanted: dict[str, set[int]] = {node: set() for node in nodes}
    for node, owners in zip(nodes, needs, strict=True):
        wanted[node].update(owners)
    return tuple(
        PartTransfer(owner, first[choice.nodes[owner][0]], first[node])
        for node in sorted(wanted)
        for owner in sorted(wanted[node])
        if node not in choice.nodes[owner]
    )
