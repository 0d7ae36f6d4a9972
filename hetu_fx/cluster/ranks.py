"""The ranks that measure together, and how they tell each other what they found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Exchange = Callable[[Any], list[Any]]
"""Gives every rank's value to every rank; collective."""


class RankTable(Protocol):
    """What measuring needs of a group table (`hetu_fx.comm_ops.wire.groups.GroupTable`)."""

    @property
    def rank(self) -> int:
        """This process's logical rank."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def group(self, ranks: Sequence[int]) -> Any:
        """Return the process group of some logical ranks."""
        ...

    def to_global(self, rank: int) -> int:
        """Return torch.distributed's rank of a logical rank."""
        ...


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of torch.distributed's default group, or this process alone."""

    rank: int
    size: int

    def group(self, ranks: Sequence[int]) -> Any:
        """Return torch.distributed's default group."""
        return None

    def to_global(self, rank: int) -> int:
        """Return the rank itself."""
        return rank


def world() -> World:
    """Return the ranks of this job."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    return World(0, 1)


def exchange_of(table: RankTable) -> Exchange:
    """Return a function that gives every rank's value to every rank."""
    if table.size == 1:
        return lambda value: [value]
    import torch.distributed as dist

    group = table.group(tuple(range(table.size)))

    def exchange(value: Any) -> list[Any]:
        values: list[Any] = [None] * table.size
        dist.all_gather_object(values, value, group=group)
        return values

    return exchange


def message_device(group: Any, device: str) -> str:
    """Return where messages of a group have to be: on the device for NCCL, else in host memory."""
    import torch.distributed as dist

    return device if dist.get_backend(group) == "nccl" else "cpu"
