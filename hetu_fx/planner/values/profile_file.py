"""Profiles: what a program costs, and how fast kinds of devices were seen to be, in a file of its own.

A `Profile` is what planning needs to know of a model, so that a plan can be made where neither the model nor its
devices are. It is written for a captured model (`hetu_fx.profile`) or by hand, and read strictly, as plan and
cluster files are (`hetu_fx.profile/1`). Every figure says where it comes from.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hetu_fx.base.checks import Source, check_not_negative, check_positive, check_source, standing_twice
from hetu_fx.base.json_values import many, object_by_number
from hetu_fx.base.records import REQUIRED, Document, Key, record, run_length_list
from hetu_fx.base.words import bytes_text, rate_text
from hetu_fx.errors import ProfileError
from hetu_fx.planner.values.exchanged_values import ROW_SUMS, TiedParameter
from hetu_fx.planner.values.footprint import PartMemory, ProgramMemory
from hetu_fx.planner.values.part_costs import NO_COSTS, PartCosts
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.planner.values.state import STATE, UNSAID, ParameterState


@dataclass(frozen=True, slots=True)
class BlockTime:
    """How long one block takes on a healthy tensor parallel group of one kind of devices.

    A sequence of s tokens takes `t(s) = a s^2 + b s + c` seconds, forward and backward; each device of the group
    keeps `bytes_per_token` bytes of it for the backward. `r_squared` is how well measured times lie on that curve.
    """

    kind: str
    tensor_parallel: int
    a: float
    b: float
    c: float = 0.0
    bytes_per_token: float = 0.0
    r_squared: float | None = None
    source: Source = "given"

    def __post_init__(self) -> None:
        where = f"time of a block on {self.tensor_parallel} x {self.kind!r}"
        check_positive(ProfileError, where, tensor_parallel=self.tensor_parallel)
        check_not_negative(ProfileError, where, a=self.a, b=self.b, c=self.c, bytes_per_token=self.bytes_per_token)
        check_source(ProfileError, where, self.source)
        if self.a == self.b == 0:
            raise ProfileError(f"{where} has a = b = 0, so that tokens cost nothing\nhint: give one of them above 0")

    def seconds(self, length: int) -> float:
        """Return t(s) of a sequence of so many tokens."""
        return (self.a * length + self.b) * length + self.c


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Malleus' alpha: how much longer a block takes on smaller groups than on the largest, by number of devices."""

    kind: str
    factors: Mapping[int, float] = field(hash=False)
    source: Source = "given"

    def __post_init__(self) -> None:
        where = f"alpha of {self.kind!r}"
        check_positive(ProfileError, where, **{f"factors[{degree}]": v for degree, v in self.factors.items()})
        check_source(ProfileError, where, self.source)
        if min(self.factors, default=0) < 1:
            raise ProfileError(f"{where} has degrees {sorted(self.factors)}\nhint: give one at least, from 1")


BLOCK_TIME = record(
    BlockTime,
    ProfileError,
    c=Key(written="always"),
    bytes_per_token=Key(written="always"),
    source=Key(written="always"),
)
SLOWDOWN = record(
    Slowdown,
    ProfileError,
    factors=Key(object_by_number("devices of a group", ProfileError)),
    source=Key(written="always"),
)


FORMAT = "hetu_fx.profile/1"


@dataclass(frozen=True)
class Profile(Document):
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

    What stands beside parameters (`costs.state`) is the same for all lengths.
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
        others = sorted(self.other_lengths, key=lambda pair: pair[0])
        told = tuple((length, replace(costs, state=self.costs.state)) for length, costs in others)
        object.__setattr__(self, "other_lengths", told)
        check_source(ProfileError, "program", self.source)
        check_not_negative(ProfileError, "sequences", **{f"[{n}]": count for n, count in self.sequences.items()})
        lengths = [length for length, _ in self.other_lengths]
        if min(self.tokens_per_row, *lengths, 0) < 0 or min(self.sequences, default=1) < 1:
            raise ProfileError(
                f"lengths are {[self.tokens_per_row, *lengths, *self.sequences]}\nhint: give tokens from 1"
            )
        _check_once("lengths of a row", [self.tokens_per_row, *lengths])
        _check_once("times", [(time.kind, time.tensor_parallel) for time in self.times])
        _check_once("alpha", [slowdown.kind for slowdown in self.alpha])
        blocks = {costs.num_blocks for _, costs in self.other_lengths} - {self.costs.num_blocks}
        if blocks:
            raise ProfileError(
                f"other_lengths have {blocks} blocks, program {self.costs.num_blocks}\nhint: give one model"
            )

    def __repr__(self) -> str:
        whole, counted = self.costs.whole, {"estimate": "counted"}.get(self.source, self.source)
        size = f"{self.costs.num_blocks} blocks, {bytes_text(whole.parameter_bytes)} of parameters"
        work = f"{rate_text(whole.flops, 'FLOP')} a row, {counted}"
        return f"<Profile: {self.costs.rows} rows, {size}, {work}; to_json() has all>"

    def with_rows(self, rows: int) -> Profile:
        """Return the same model with another number of rows in a step."""
        others = tuple((length, replace(costs, rows=rows)) for length, costs in self.other_lengths)
        return replace(self, costs=replace(self.costs, rows=rows), other_lengths=others)

    def with_state(self, state: ParameterState) -> Profile:
        """Return the same model, of whose parameters and optimizer this is known."""
        return replace(self, costs=replace(self.costs, state=state))

    @property
    def state(self) -> ParameterState:
        """Return what stands beside parameters."""
        return self.costs.state

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

    @property
    def program(self) -> _ProgramEntry:
        """Return what a file says of the program itself."""
        return _ProgramEntry(self.costs, self.source, self.tokens_per_row)


def _check_once(what: str, keys: Sequence[Hashable]) -> None:
    twice = sorted(map(str, standing_twice(keys)))
    if twice:
        raise ProfileError(f"{what}: {', '.join(twice)} are there twice\nhint: give each once")


def _check_part(where: str, numbers: Mapping[str, Any]) -> None:
    check_not_negative(ProfileError, where, **numbers)


@dataclass(frozen=True, slots=True)
class _BoundaryBytes:
    """What a file says of what one row hands over between blocks."""

    bytes: float


_PART = record(PartCosts, ProfileError, check=_check_part)
_BOUNDARY = record(lambda bytes: bytes, ProfileError, like=_BoundaryBytes, pack=_BoundaryBytes, check=_check_part)
_PART_MEMORY = record(PartMemory, ProfileError, order="kept forward backward later largest again")
_MEMORY = record(
    ProgramMemory,
    ProfileError,
    order="everywhere parts",
    everywhere=Key(written="always"),
    parts=Key(run_length_list(_PART_MEMORY)),
)
_KEYS: dict[str, Any] = {
    "units": Key(written="always"),
    "before": Key(_PART, default=PartCosts(), written="always"),
    "blocks": Key(run_length_list(_PART), default=(), written="always"),
    "after": Key(_PART, default=PartCosts(), written="always"),
    "boundary_bytes": Key(run_length_list(_BOUNDARY), written="always"),
    "tied": Key(many(record(TiedParameter, ProfileError, split_bytes=Key(default=0.0, written="always")).values)),
    "row_sums": Key(ROW_SUMS),
    "gathered_work": Key(_PART, default=NO_COSTS),
    "memory": Key(_MEMORY),
}
_ORDER = (
    "rows units sequence_units head_units repeated_parts before blocks after boundary_bytes tied row_sums "
    "gathered_work memory"
)
_WIDE = record(ProgramCosts, ProfileError, order=_ORDER, **_KEYS)
PROGRAM = record(ProgramCosts, ProfileError, order=f"{_ORDER} wide", wide=Key(_WIDE), **_KEYS)


@dataclass(frozen=True)
class _OtherLength:
    """What a file says of rows of another length."""

    tokens_per_row: int
    costs: ProgramCosts


@dataclass(frozen=True)
class _ProgramEntry:
    """What a file says of the program."""

    costs: ProgramCosts
    source: Source = "given"
    tokens_per_row: int = 0


def _profile(program: _ProgramEntry, state: ParameterState, **others: Any) -> Profile:
    return Profile(replace(program.costs, state=state), program.tokens_per_row, program.source, **others)


_COSTS = Key(PROGRAM, inline=True)
_PROGRAM = record(
    _ProgramEntry, ProfileError, order="source tokens_per_row costs", source=Key(written="always"), costs=_COSTS
)
_OTHER_LENGTH = record(
    lambda tokens_per_row, costs: (tokens_per_row, costs),
    ProfileError,
    like=_OtherLength,
    pack=lambda pair: _OtherLength(*pair),
    costs=_COSTS,
)
Profile.form = record(
    _profile,
    ProfileError,
    like=Profile,
    order="program state mixes_rows other_lengths times alpha sequences",
    format=FORMAT,
    program=Key(_PROGRAM, default=REQUIRED),
    state=Key(STATE, default=UNSAID),
    other_lengths=Key(many(_OTHER_LENGTH.values)),
    times=Key(many(BLOCK_TIME.values)),
    alpha=Key(many(SLOWDOWN.values)),
    sequences=Key(object_by_number("tokens", ProfileError)),
)
