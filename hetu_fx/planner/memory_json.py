"""What the parts of a program hold as JSON: `memory` of a program in a profile file. What is 0 is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hetu_fx.documents import Fields, located
from hetu_fx.errors import ProfileError
from hetu_fx.planner.footprint import Amount, PartMemory, ProgramMemory
from hetu_fx.planner.repeated import read_repeated, repeated_json
from hetu_fx.planner.tied import Tied

_AMOUNT_KEYS = tuple(f.name for f in fields(Amount))
_PART_KEYS = tuple(f.name for f in fields(PartMemory))


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
    return {name: written for name in _PART_KEYS if (written := _amount_json(getattr(part, name)))}


def _amount_json(amount: Amount) -> dict[str, float]:
    return {name: getattr(amount, name) for name in _AMOUNT_KEYS if getattr(amount, name)}


def _part_of(view: Fields) -> PartMemory:
    return PartMemory(*(_amount_of(view.mapping(name, {}), f"{view.where}.{name}") for name in _PART_KEYS))


def _amount_of(value: Mapping[str, Any], where: str) -> Amount:
    view = Fields(value, where, ProfileError, _AMOUNT_KEYS)
    return Amount(*(view.number(name, 0.0) for name in _AMOUNT_KEYS))
