"""Program costs as JSON: what `program` says in a profile file. Parts that repeat are written once, with a count.

What the parts of a program hold as JSON: `memory` of a program in a profile file. What is 0 is left out.

Things in a row as JSON: those that are equal are written once, with a `count`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain, groupby
from typing import Any, TypeVar, get_type_hints

from hetu_fx.base.checks import check_not_negative
from hetu_fx.base.documents import Fields, located
from hetu_fx.errors import ProfileError
from hetu_fx.planner.values.affine import Amount
from hetu_fx.planner.values.footprint import PartMemory, ProgramMemory
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.planner.values.recompute_memory import Again, Piece
from hetu_fx.planner.values.row_sums import read_row_sums
from hetu_fx.planner.values.tied import Tied

PROGRAM_KEYS = ("rows", "units", "before", "blocks", "after", "boundary_bytes", "tied", "memory", "row_sums")

_PART_KEYS = tuple(f.name for f in fields(PartCosts))
_WHOLE = tuple(name for name, kind in get_type_hints(PartCosts).items() if kind is int)


def program_json(costs: ProgramCosts) -> dict[str, Any]:
    """Return the JSON object of a program's costs, defaults left out."""
    result: dict[str, Any] = {"rows": costs.rows, "units": costs.units, "before": _part_json(costs.before)}
    result["blocks"] = _repeated_json(costs.blocks, _part_json)
    result["after"] = _part_json(costs.after)
    result["boundary_bytes"] = _repeated_json(costs.boundary_bytes, lambda size: {"bytes": size})
    result |= {"tied": [_tied_json(one) for one in costs.tied]} if costs.tied else {}
    result |= {"row_sums": costs.row_sums.to_json()} if costs.row_sums else {}
    return result if costs.memory is None else result | {"memory": _memory_json(costs.memory)}


def read_program(view: Fields) -> ProgramCosts:
    """Read a program's costs from an object whose keys have been checked; raise `ProfileError` with the place."""
    where = view.where
    edges, memory = view.objects("boundary_bytes", ()), view.mapping("memory", None)
    parts: dict[str, Any] = {
        "rows": view.integer("rows"),
        "units": view.integer("units", 1),
        "before": _read_part(view.mapping("before", {}), f"{where}.before"),
        "blocks": _read_repeated(view.objects("blocks", ()), f"{where}.blocks", _PART_KEYS, _part_of),
        "after": _read_part(view.mapping("after", {}), f"{where}.after"),
        "boundary_bytes": _read_repeated(edges, f"{where}.boundary_bytes", ("bytes",), _edge_of),
        "tied": tuple(_read_tied(one, f"{where}.tied[{i}]") for i, one in enumerate(view.objects("tied", ()))),
        "row_sums": read_row_sums(view.mapping("row_sums", {"count": 0}), f"{where}.row_sums"),
        "memory": None if memory is None else _read_memory(memory, f"{where}.memory"),
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


_AMOUNT_KEYS = tuple(f.name for f in fields(Amount))
_WAY_KEYS = tuple(f.name for f in fields(Again))
_PIECE_KEYS = tuple(f.name for f in fields(Piece))
_HELD_KEYS = ("kept", "forward", "backward", "later", "largest")
_MEMORY_PART_KEYS = (*_HELD_KEYS, "again")


def _memory_json(memory: ProgramMemory) -> dict[str, Any]:
    """Return the JSON object that `_read_memory` reads."""
    return {
        "everywhere": _amount_json(memory.everywhere),
        "parts": _repeated_json(memory.parts, _memory_part_json),
    }


def _read_memory(value: Mapping[str, Any], where: str) -> ProgramMemory:
    """Read what parts hold; raise `ProfileError` with the place."""
    view = Fields(value, where, ProfileError, ("everywhere", "parts"))
    parts = _read_repeated(view.objects("parts"), f"{where}.parts", _MEMORY_PART_KEYS, _memory_part_of)
    return ProgramMemory(parts, _amount_of(view.mapping("everywhere", {}), f"{where}.everywhere"))


def _tied_json(tied: Tied) -> dict[str, Any]:
    """Return the JSON object that `_read_tied` reads."""
    return {"bytes": tied.bytes, "split_bytes": tied.split_bytes, "readers": list(tied.readers)}


def _read_tied(value: Mapping[str, Any], where: str) -> Tied:
    """Read a parameter that several parts read; raise `ProfileError` with the place."""
    view = Fields(value, where, ProfileError, ("bytes", "split_bytes", "readers"))
    readers = tuple(view.integers("readers"))
    parts = {"bytes": view.number("bytes"), "split_bytes": view.number("split_bytes", 0.0), "readers": readers}
    return located(Tied, parts, where)


def _memory_part_json(part: PartMemory) -> dict[str, Any]:
    again = {
        way: [_amounts_json(p, _PIECE_KEYS) for p in found] for way in _WAY_KEYS if (found := getattr(part.again, way))
    }
    return _amounts_json(part, _HELD_KEYS) | ({"again": again} if again else {})


def _amounts_json(holder: PartMemory | Piece, keys: Iterable[str]) -> dict[str, Any]:
    return {name: written for name in keys if (written := _amount_json(getattr(holder, name)))}


def _amount_json(amount: Amount) -> dict[str, float]:
    return {name: getattr(amount, name) for name in _AMOUNT_KEYS if getattr(amount, name)}


def _memory_part_of(view: Fields) -> PartMemory:
    return PartMemory(*_amounts_of(view, _HELD_KEYS), again=_again_of(view.mapping("again", {}), f"{view.where}.again"))


def _again_of(value: Mapping[str, Any], where: str) -> Again:
    view = Fields(value, where, ProfileError, _WAY_KEYS)
    return Again(**{way: tuple(_pieces_of(view.objects(way, ()), f"{where}.{way}")) for way in _WAY_KEYS})


def _pieces_of(values: Iterable[Mapping[str, Any]], where: str) -> Iterator[Piece]:
    for number, value in enumerate(values):
        yield Piece(*_amounts_of(Fields(value, f"{where}[{number}]", ProfileError, _PIECE_KEYS), _PIECE_KEYS))


def _amounts_of(view: Fields, keys: Iterable[str]) -> Iterator[Amount]:
    return (_amount_of(view.mapping(name, {}), f"{view.where}.{name}") for name in keys)


def _amount_of(value: Mapping[str, Any], where: str) -> Amount:
    view = Fields(value, where, ProfileError, _AMOUNT_KEYS)
    return Amount(*(view.number(name, 0.0) for name in _AMOUNT_KEYS))


T = TypeVar("T")


def _repeated_json(values: Iterable[T], one: Callable[[T], Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the objects of values, of equal ones in a row a single one."""
    return [{"count": len(list(same)), **one(value)} for value, same in groupby(values)]


def _read_repeated(
    values: Sequence[Any], where: str, keys: Sequence[str], read: Callable[[Fields], T]
) -> tuple[T, ...]:
    """Read a list of objects that each stand for `count` equal things in a row."""
    return tuple(chain.from_iterable(_run(v, f"{where}[{i}]", keys, read) for i, v in enumerate(values)))


def _run(value: Mapping[str, Any], where: str, keys: Sequence[str], read: Callable[[Fields], T]) -> tuple[T, ...]:
    view = Fields(value, where, ProfileError, ("count", *keys))
    count: int = view.integer("count", 1)
    if count < 1:
        raise ProfileError(f"{where}: count is {count}; give how many of these stand in a row, from 1")
    return (read(view),) * count
