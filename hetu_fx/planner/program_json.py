"""Program costs as JSON: what `program` says in a profile file. Parts that repeat are written once, with a count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import chain, groupby
from typing import Any, get_type_hints

from hetu_fx.checks import check_not_negative
from hetu_fx.documents import Fields, located
from hetu_fx.errors import ProfileError
from hetu_fx.planner.program import PartCosts, ProgramCosts

PROGRAM_KEYS = ("rows", "units", "before", "blocks", "after", "boundary_bytes")

_PART_KEYS = tuple(f.name for f in fields(PartCosts))
_WHOLE = tuple(name for name, kind in get_type_hints(PartCosts).items() if kind is int)


def program_json(costs: ProgramCosts) -> dict[str, Any]:
    """Return the JSON object of a program's costs, defaults left out."""
    result: dict[str, Any] = {"rows": costs.rows, "units": costs.units, "before": _part_json(costs.before)}
    result["blocks"] = [{"count": len(list(same))} | _part_json(part) for part, same in groupby(costs.blocks)]
    result["after"] = _part_json(costs.after)
    edges = [{"count": len(list(same)), "bytes": size} for size, same in groupby(costs.boundary_bytes)]
    return result | {"boundary_bytes": edges}


def read_program(view: Fields) -> ProgramCosts:
    """Read a program's costs from an object whose keys have been checked; raise `ProfileError` with the place."""
    where = view.where
    edges = view.objects("boundary_bytes", ())
    parts: dict[str, Any] = {
        "rows": view.integer("rows"),
        "units": view.integer("units", 1),
        "before": _read_part(view.mapping("before", {}), f"{where}.before"),
        "blocks": _repeated(view.objects("blocks", ()), f"{where}.blocks", _PART_KEYS, _part_of),
        "after": _read_part(view.mapping("after", {}), f"{where}.after"),
        "boundary_bytes": _repeated(edges, f"{where}.boundary_bytes", ("bytes",), _edge_of),
    }
    return located(ProgramCosts, parts, where)


def _part_json(part: PartCosts) -> dict[str, Any]:
    return {name: getattr(part, name) for name in _PART_KEYS if getattr(part, name)}


def _repeated(values: Sequence[Any], where: str, keys: Sequence[str], read: Any) -> tuple[Any, ...]:
    """Read a list of objects that each stand for `count` equal things in a row."""
    return tuple(chain.from_iterable(_run(v, f"{where}[{i}]", keys, read) for i, v in enumerate(values)))


def _run(value: Mapping[str, Any], where: str, keys: Sequence[str], read: Any) -> tuple[Any, ...]:
    view = Fields(value, where, ProfileError, ("count", *keys))
    count: int = view.integer("count", 1)
    if count < 1:
        raise ProfileError(f"{where}: count is {count}; give how many of these stand in a row, from 1")
    return (read(view),) * count


def _read_part(value: Mapping[str, Any], where: str) -> PartCosts:
    return _part_of(Fields(value, where, ProfileError, _PART_KEYS))


def _part_of(view: Fields) -> PartCosts:
    numbers: dict[str, Any] = {
        name: view.integer(name, 0) if name in _WHOLE else view.number(name, 0.0) for name in _PART_KEYS
    }
    check_not_negative(ProfileError, view.where, **numbers)
    return located(PartCosts, numbers, view.where)


def _edge_of(view: Fields) -> float:
    size = float(view.number("bytes"))
    check_not_negative(ProfileError, view.where, bytes=size)
    return size
