"""What a program costs for rows of another length than it was counted for.

Work and bytes of a row are polynomials of second degree in its tokens (attention is the square), so three counted
lengths tell every other one exactly. With fewer they are taken as proportional to tokens, which leaves out the square.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetu_fx.errors import ProfileError
from hetu_fx.planner.values.footprint import ProgramMemory
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.program import ProgramCosts

ENOUGH = 3
"""So many lengths determine a polynomial of second degree."""

_WHOLE = ("flops", "traffic_bytes", "activation_bytes")
_SHARED = ("traffic_bytes", "activation_bytes")
_MOVED = ("reduced_bytes", "returned_bytes", "gathered_bytes")


def costs_at(by_length: Mapping[int, ProgramCosts], length: int) -> ProgramCosts:
    """Return the costs for rows of `length` tokens. Raises `ProfileError` if none are known for any length."""
    if not by_length:
        raise ProfileError("the profile does not say what length of rows it is for; give tokens_per_row")
    if length in by_length:
        return by_length[length]
    known = sorted(by_length)
    if len(known) < ENOUGH:
        nearest = min(known, key=lambda one: (abs(one - length), one))
        return _combined([by_length[nearest]], [length / nearest])
    chosen = [known[0], known[len(known) // 2], known[-1]]
    return _combined([by_length[one] for one in chosen], [_weight(one, chosen, length) for one in chosen])


def _weight(one: int, nodes: Sequence[int], at: int) -> float:
    """Return Lagrange's weight of a node for the value at another place."""
    result = 1.0
    for other in nodes:
        result *= (at - other) / (one - other) if other != one else 1.0
    return result


def _combined(programs: Sequence[ProgramCosts], weights: Sequence[float]) -> ProgramCosts:
    """Return the weighted sum of what a row costs; what does not depend on rows is taken from the first."""
    blocks = zip(*(program.blocks for program in programs), strict=True)
    edges = zip(*(program.boundary_bytes for program in programs), strict=True)
    return replace(
        programs[0],
        before=_part([program.before for program in programs], weights),
        blocks=tuple(_part(parts, weights) for parts in blocks),
        after=_part([program.after for program in programs], weights),
        boundary_bytes=tuple(_sum(sizes, weights) for sizes in edges),
        memory=_memory(programs, weights),
    )


def _memory(programs: Sequence[ProgramCosts], weights: Sequence[float]) -> ProgramMemory | None:
    """Return what parts hold; None where that is not known of all lengths."""
    known = [program.memory for program in programs if program.memory is not None]
    return ProgramMemory.combined(known, weights) if len(known) == len(programs) else None


def _part(parts: Sequence[PartCosts], weights: Sequence[float]) -> PartCosts:
    def of(name: str) -> float:
        return _sum([getattr(part, name) for part in parts], weights)

    values = {name: of(name) for name in (*_MOVED, *_WHOLE)}
    # rounding may lift a part above the whole
    values |= {f"split_{name}": min(values[name], of(f"split_{name}")) for name in _WHOLE}
    rest = {name: values[name] - values[f"split_{name}"] for name in _SHARED}
    values |= {f"sequence_{name}": min(rest[name], of(f"sequence_{name}")) for name in _SHARED}
    return replace(parts[0], **values)  # type: ignore[arg-type]


def _sum(values: Sequence[float], weights: Sequence[float]) -> float:
    return max(0.0, sum(value * weight for value, weight in zip(values, weights, strict=True)))
