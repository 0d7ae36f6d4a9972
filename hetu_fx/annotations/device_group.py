"""An ordered group of devices, by logical rank."""

from __future__ import annotations

from dataclasses import dataclass

from hetu_fx.errors import AnnotationError


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Names the devices that hold a tensor; the order is that of the positions in a sharding."""

    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        ranks = tuple(self.ranks)
        object.__setattr__(self, "ranks", ranks)
        if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0:
            raise AnnotationError(f"a device group needs distinct ranks >= 0, at least one, got {ranks}")

    def __len__(self) -> int:
        return len(self.ranks)
