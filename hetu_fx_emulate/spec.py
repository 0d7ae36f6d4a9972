"""What to emulate: speeds, memory sizes and nodes, as one value that checks itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetu_fx.base.checks import number_in, size_parts
from hetu_fx.errors import EnvironmentProblem

SLOWEST_SPEED = 0.001  # the kernel's shortest quota, 1 ms, in its longest period, 1 s
NUM_NODES_MAX = 200  # node addresses are the last byte of one /24 network


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulateSpec:
    """Describe unequal devices on one machine, one rank each.

    Attributes:
        speeds: cores per rank; 0.5 is half of one core's time, 2.0 two cores.
        memory: bytes per rank, or None for no limit. An empty tuple limits nobody.
        num_nodes: ranks are spread in order over so many nodes, as evenly as they go.
        link_bits_per_second: the rate of each node's link to the others, both ways; None does not limit it.

    Raises:
        EnvironmentProblem: for values that cannot be.
    """

    speeds: tuple[float, ...]
    memory: tuple[int | None, ...] = ()
    num_nodes: int = 1
    link_bits_per_second: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "speeds", tuple(float(speed) for speed in self.speeds))
        object.__setattr__(self, "memory", tuple(self.memory) or (None,) * len(self.speeds))
        self._check_ranks()
        self._check_nodes()

    @property
    def world_size(self) -> int:
        return len(self.speeds)

    def node_of(self, rank: int) -> int:
        """Return the node that holds `rank`."""
        return rank * self.num_nodes // self.world_size

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """List the ranks of `node`, in order."""
        return tuple(rank for rank in range(self.world_size) if self.node_of(rank) == node)

    def _check_ranks(self) -> None:
        if not self.speeds:
            raise EnvironmentProblem("no speeds given\nhint: name one per rank, e.g. --speeds 0.8,0.4,0.2,0.2")
        for rank, speed in enumerate(self.speeds):
            check_speed(rank, speed)
        if len(self.memory) != self.world_size:
            raise EnvironmentProblem(
                f"{len(self.memory)} memory sizes for {self.world_size} speeds\nhint: give one per rank, or none"
            )
        for rank, size in enumerate(self.memory):
            if size is not None and size < 1 << 20:
                raise EnvironmentProblem(f"rank {rank} would get {size} bytes of memory\nhint: give at least 1M")

    def _check_nodes(self) -> None:
        if not 1 <= self.num_nodes <= min(self.world_size, NUM_NODES_MAX):
            raise EnvironmentProblem(
                f"cannot spread {self.world_size} ranks over {self.num_nodes} nodes\nhint: give every node a rank"
            )
        if self.link_bits_per_second is None:
            return
        if self.num_nodes == 1:
            raise EnvironmentProblem("a link rate needs two nodes or more to link\nhint: add --nodes 2")
        if not 8e3 <= self.link_bits_per_second < math.inf:
            raise EnvironmentProblem(f"a link of {self.link_bits_per_second:g} bit/s\nhint: give at least 8kbit")


def check_speed(rank: int, speed: float) -> None:
    """Raise EnvironmentProblem unless `speed` is a number of cores that a quota can express."""
    if not SLOWEST_SPEED <= speed < math.inf:
        raise EnvironmentProblem(
            f"speed {speed:g} of rank {rank} is no share of cores\nhint: give {SLOWEST_SPEED} or more"
        )


def check_cores(speeds: tuple[float, ...], num_cores: float) -> None:
    """Raise EnvironmentProblem unless the speeds leave some of the cores free.

    With quotas that fill the machine a rank is slowed by its neighbours and not by its own quota.
    """
    total = sum(speeds)
    if total < num_cores:
        return
    scaled = ",".join(f"{math.floor(speed / total * num_cores * 900) / 1000:g}" for speed in speeds)
    raise EnvironmentProblem(
        f"speeds {', '.join(f'{speed:g}' for speed in speeds)} sum to {total:g}, but must sum to less than "
        f"the {num_cores:g} cores there are\nhint: the same ratios fit as --speeds {scaled}"
    )


def parse_speeds(text: str) -> tuple[float, ...]:
    """Read "0.8,0.4" as cores per rank."""
    return tuple(number_in(part, "speed") for part in text.split(","))


def parse_memory(text: str) -> tuple[int | None, ...]:
    """Read "2G,512M,-" as bytes per rank; "-" limits nothing."""
    return tuple(None if part.strip() in ("", "-") else parse_size(part) for part in text.split(","))


def parse_size(text: str) -> int:
    """Read "2G" or "512M" as bytes (K, M, G and T count by 1024)."""
    parts = size_parts(text, 1024)
    if parts is None:
        raise EnvironmentProblem(f"memory size {text!r} is not a number of bytes\nhint: write it like 512M or 2G")
    return int(number_in(parts[0], "memory size") * parts[1])
