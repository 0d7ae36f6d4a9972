"""Profiles: what a program costs, and how fast kinds of devices were seen to be, in a file of its own.

A `Profile` is what planning needs to know of a model, so that a plan can be made where neither the model nor its
devices are. It is written for a captured model (`hetu_fx.profile`) or by hand, and read strictly, as plan and
cluster files are (`hetu_fx.profile/1`). Every figure says where it comes from.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hetu_fx.base.checks import Source, check_not_negative, check_source
from hetu_fx.base.documents import Fields, json_text, located, read_json, write_atomically
from hetu_fx.errors import PlanError, ProfileError
from hetu_fx.planner.values.block_times import (
    BlockTime,
    Slowdown,
    numbered_json,
    read_block_time,
    read_numbered,
    read_slowdown,
)
from hetu_fx.planner.values.json import PROGRAM_KEYS, program_json, read_program
from hetu_fx.planner.values.program import ProgramCosts

FORMAT = "hetu_fx.profile/1"


@dataclass(frozen=True)
class Profile:
    """What a model costs.

    Attributes:
        costs: its step, for rows of `tokens_per_row` tokens (0: it has no sequences).
        tokens_per_row: the length of a row that `costs` holds for.
        source: where `costs` comes from.
        mixes_rows: whether rows meet in its forward, so that neither micro-batches nor stages can cut it.
        other_lengths: costs for rows of other lengths, as (tokens per row, costs).
        times: seconds of a block by kind of device and tensor parallel degree.
        alpha: slowdown of a block on smaller groups, by kind of device.
        sequences: how many sequences of each length a batch has on average.
    """

    costs: ProgramCosts
    tokens_per_row: int = 0
    source: Source = "given"
    mixes_rows: bool = False
    other_lengths: tuple[tuple[int, ProgramCosts], ...] = ()
    times: tuple[BlockTime, ...] = ()
    alpha: tuple[Slowdown, ...] = ()
    sequences: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "other_lengths", tuple(sorted(self.other_lengths, key=lambda pair: pair[0])))
        check_source(ProfileError, "program", self.source)
        check_not_negative(ProfileError, "sequences", **{f"[{n}]": count for n, count in self.sequences.items()})
        lengths = [length for length, _ in self.other_lengths]
        if min(self.tokens_per_row, *lengths, 0) < 0 or min(self.sequences, default=1) < 1:
            raise ProfileError(f"lengths are {[self.tokens_per_row, *lengths, *self.sequences]}; give tokens from 1")
        _check_once("lengths of a row", [self.tokens_per_row, *lengths])
        _check_once("times", [(time.kind, time.tensor_parallel) for time in self.times])
        _check_once("alpha", [slowdown.kind for slowdown in self.alpha])
        blocks = {costs.num_blocks for _, costs in self.other_lengths} - {self.costs.num_blocks}
        if blocks:
            raise ProfileError(f"other_lengths have {blocks} blocks, program {self.costs.num_blocks}; give one model")

    def with_rows(self, rows: int) -> Profile:
        """Return the same model with another number of rows in a step."""
        others = tuple((length, replace(costs, rows=rows)) for length, costs in self.other_lengths)
        return replace(self, costs=replace(self.costs, rows=rows), other_lengths=others)

    @property
    def by_length(self) -> Mapping[int, ProgramCosts]:
        """Return the costs by length of a row, shortest first; none for a model without sequences."""
        known = (*self.other_lengths, (self.tokens_per_row, self.costs))
        return dict(sorted((pair for pair in known if pair[0]), key=lambda pair: pair[0]))

    def block_times(self, kind: str) -> Mapping[int, BlockTime]:
        """Return the times of a block on a kind of device by tensor parallel degree; empty if nobody knows."""
        return {time.tensor_parallel: time for time in self.times if time.kind == kind}

    def slowdown(self, kind: str) -> Mapping[int, float]:
        """Return alpha of a kind of device by tensor parallel degree; empty if nobody knows."""
        return next((alpha.factors for alpha in self.alpha if alpha.kind == kind), {})

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of a profile file."""
        result: dict[str, Any] = {"format": FORMAT}
        result["program"] = {"source": self.source, **_program_json(self.tokens_per_row, self.costs)}
        result |= {"mixes_rows": True} if self.mixes_rows else {}
        optional = {
            "other_lengths": [_program_json(length, costs) for length, costs in self.other_lengths],
            "times": [time.to_json() for time in self.times],
            "alpha": [slowdown.to_json() for slowdown in self.alpha],
            "sequences": numbered_json(self.sequences),
        }
        return result | {key: value for key, value in optional.items() if value}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], where: str = "profile") -> Profile:
        """Build a profile from the JSON object of a profile file; `where` is shown in errors."""
        try:
            return _read_profile(value, where)
        except PlanError as problem:  # costs that cannot be, whoever gives them
            raise ProfileError(str(problem)) from None

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile file. Raises `ProfileError` naming the file, the place, the value and what to do."""
        return cls.from_json(read_json(path, ProfileError), os.fspath(path))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a profile file, atomically."""
        write_atomically(path, json_text(self.to_json()) + "\n")


def _check_once(what: str, keys: Sequence[Hashable]) -> None:
    twice = sorted(str(key) for key, count in Counter(keys).items() if count > 1)
    if twice:
        raise ProfileError(f"{what}: {', '.join(twice)} stand twice; give each once")


def _program_json(tokens_per_row: int, costs: ProgramCosts) -> dict[str, Any]:
    length = {"tokens_per_row": tokens_per_row} if tokens_per_row else {}
    return length | program_json(costs)


def _read_profile(value: Mapping[str, Any], where: str) -> Profile:
    keys = ("format", "program", "mixes_rows", "other_lengths", "times", "alpha", "sequences")
    view = Fields(value, where, ProfileError, keys)
    view.format("format", FORMAT)
    given = (*PROGRAM_KEYS, "tokens_per_row", "source")
    program = Fields(view.mapping("program"), f"{where}: program", ProfileError, given)
    others = enumerate(view.objects("other_lengths", ()))
    parts: dict[str, Any] = {
        "costs": read_program(program),
        "tokens_per_row": program.integer("tokens_per_row", 0),
        "source": program.text("source", "given"),
        "mixes_rows": view.flag("mixes_rows", False),
        "other_lengths": tuple(_read_other(other, f"{where}: other_lengths[{i}]") for i, other in others),
        "times": _read_all(view, "times", read_block_time),
        "alpha": _read_all(view, "alpha", read_slowdown),
        "sequences": read_numbered(view, "sequences", "tokens", {}),
    }
    return located(Profile, parts, where)


def _read_other(value: Mapping[str, Any], where: str) -> tuple[int, ProgramCosts]:
    view = Fields(value, where, ProfileError, (*PROGRAM_KEYS, "tokens_per_row"))
    return view.integer("tokens_per_row"), read_program(view)


def _read_all(view: Fields, key: str, read: Any) -> tuple[Any, ...]:
    return tuple(read(value, f"{view.where}: {key}[{i}]") for i, value in enumerate(view.objects(key, ())))
