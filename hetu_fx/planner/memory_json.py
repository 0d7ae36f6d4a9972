"""What the parts of a program hold as JSON: `memory` of a program in a profile file. What is 0 is left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from hetu_fx.base.documents import Fields, located
from hetu_fx.errors import ProfileError
from hetu_fx.planner.repeated import read_repeated, repeated_json
from hetu_fx.planner.values.affine import Amount
from hetu_fx.planner.values.footprint import PartMemory, ProgramMemory
from hetu_fx.planner.values.recompute_memory import Again, Piece
from hetu_fx.planner.values.tied import Tied

_AMOUNT_KEYS = tuple(f.name for f in fields(Amount))
_WAY_KEYS = tuple(f.name for f in fields(Again))
_PIECE_KEYS = tuple(f.name for f in fields(Piece))
_HELD_KEYS = ("kept", "forward", "backward", "later", "largest")
_PART_KEYS = (*_HELD_KEYS, "again")


def memory_json(memory: ProgramMemory) -> dict[str, Any]:
    """Return the JSON object that `read_memory` reads."""
    return {"everywhere": _amount_json(memory.everywhere), "parts": repeated_json(memory.parts, _part_json)}


def read_memory(value: Mapping[str, Any], where: str) -> ProgramMemory:
    """Read what parts hold; raise `ProfileError` with the place."""
    view = Fields(value, where, ProfileError, ("everywhere", "parts"))
    parts = read_repeated(view.objects("parts"), f"{where}.parts", _PART_KEYS, _part_of)
    return ProgramMemory(parts, _amount_of(view.mapping("everywhere", {}), f"{where}.everywhere"))


def tied_json(tied: Tied) -> dict[str, Any]:
    """Return the JSON object that `read_tied` reads."""
    return {"bytes": tied.bytes, "split_bytes": tied.split_bytes, "readers": list(tied.readers)}


def read_tied(value: Mapping[str, Any], where: str) -> Tied:
    """Read a parameter that several parts read; raise `ProfileError` with the place."""
    view = Fields(value, where, ProfileError, ("bytes", "split_bytes", "readers"))
    readers = tuple(view.integers("readers"))
    parts = {"bytes": view.number("bytes"), "split_bytes": view.number("split_bytes", 0.0), "readers": readers}
    return located(Tied, parts, where)


def _part_json(part: PartMemory) -> dict[str, Any]:
    again = {
        way: [_amounts_json(p, _PIECE_KEYS) for p in found] for way in _WAY_KEYS if (found := getattr(part.again, way))
    }
    return _amounts_json(part, _HELD_KEYS) | ({"again": again} if again else {})


def _amounts_json(holder: PartMemory | Piece, keys: Iterable[str]) -> dict[str, Any]:
    return {name: written for name in keys if (written := _amount_json(getattr(holder, name)))}


def _amount_json(amount: Amount) -> dict[str, float]:
    return {name: getattr(amount, name) for name in _AMOUNT_KEYS if getattr(amount, name)}


def _part_of(view: Fields) -> PartMemory:
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
