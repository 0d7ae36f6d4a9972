"""Program costs as JSON: what `program` says in a profile file. Parts that repeat are written once, with a count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from hetu_fx.base.checks import check_not_negative
from hetu_fx.base.documents import Fields, located
from hetu_fx.errors import ProfileError
from hetu_fx.planner.memory_json import memory_json, read_memory, read_tied, tied_json
from hetu_fx.planner.repeated import read_repeated, repeated_json
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.planner.values.row_sums import read_row_sums

PROGRAM_KEYS = ("rows", "units", "before", "blocks", "after", "boundary_bytes", "tied", "memory", "row_sums")

_PART_KEYS = tuple(f.name for f in fields(PartCosts))
_WHOLE = tuple(name for name, kind in get_type_hints(PartCosts).items() if kind is int)


def program_json(costs: ProgramCosts) -> dict[str, Any]:
    """Return the JSON object of a program's costs, defaults left out."""
    result: dict[str, Any] = {"rows": costs.rows, "units": costs.units, "before": _part_json(costs.before)}
    result["blocks"] = repeated_json(costs.blocks, _part_json)
    result["after"] = _part_json(costs.after)
    result["boundary_bytes"] = repeated_json(costs.boundary_bytes, lambda size: {"bytes": size})
    result |= {"tied": [tied_json(one) for one in costs.tied]} if costs.tied else {}
    result |= {"row_sums": costs.row_sums.to_json()} if costs.row_sums else {}
    return result if costs.memory is None else result | {"memory": memory_json(costs.memory)}


def read_program(view: Fields) -> ProgramCosts:
    """Read a program's costs from an object whose keys have been checked; raise `ProfileError` with the place."""
    where = view.where
    edges, memory = view.objects("boundary_bytes", ()), view.mapping("memory", None)
    parts: dict[str, Any] = {
        "rows": view.integer("rows"),
        "units": view.integer("units", 1),
        "before": _read_part(view.mapping("before", {}), f"{where}.before"),
        "blocks": read_repeated(view.objects("blocks", ()), f"{where}.blocks", _PART_KEYS, _part_of),
        "after": _read_part(view.mapping("after", {}), f"{where}.after"),
        "boundary_bytes": read_repeated(edges, f"{where}.boundary_bytes", ("bytes",), _edge_of),
        "tied": tuple(read_tied(one, f"{where}.tied[{i}]") for i, one in enumerate(view.objects("tied", ()))),
        "row_sums": read_row_sums(view.mapping("row_sums", {"count": 0}), f"{where}.row_sums"),
        "memory": None if memory is None else read_memory(memory, f"{where}.memory"),
    }
    return located(ProgramCosts, parts, where)


def _part_json(part: PartCosts) -> dict[str, Any]:
    return {name: getattr(part, name) for name in _PART_KEYS if getattr(part, name)}


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
