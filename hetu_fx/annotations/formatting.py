"""Writing annotations as text; `hetu_fx.annotations.text` says how it looks and reads it."""

from __future__ import annotations

from collections.abc import Sequence

from hetu_fx.annotations.sharding import DeviceGroup, Sharding
from hetu_fx.annotations.states import Duplicate, Partial, Split, State


def format_state(state: State) -> str:
    """Write one state."""
    match state:
        case Duplicate(ways):
            return f"D({ways})"
        case Partial(ways):
            return f"P({ways})"
        case Split(dim, units, outer, inner):
            even = len(units) > 1 and set(units) == {1}
            parts = str(len(units)) if even else ":".join(map(str, units))
            factor = f", {outer}x_x{inner}" if (outer, inner) != (1, 1) else ""
            return f"S({dim}, {parts}{factor})"


def format_sharding(sharding: Sharding) -> str:
    """Write the axes of a sharding."""
    return " ".join(map(format_state, sharding.axes))


def format_group(group: DeviceGroup) -> str:
    """Write ranks, runs of three or more as a range."""
    pieces: list[str] = []
    for first, last in _runs(group.ranks):
        if last - first > 1:
            pieces.append(f"{first}-{last}")
        else:
            pieces += [str(rank) for rank in range(first, last + 1)]
    return f"[{','.join(pieces)}]"


def format_annotation(groups: Sequence[DeviceGroup], shardings: Sequence[Sharding], top: State | None) -> str:
    """Write an annotation."""
    members = [
        f"{format_group(group)} {format_sharding(sharding)}".rstrip()
        for group, sharding in zip(groups, shardings, strict=True)
    ]
    return members[0] if top is None else f"{format_state(top)} over {{{'; '.join(members)}}}"


def _runs(ranks: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and runs[-1][1] + 1 == rank:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return runs
