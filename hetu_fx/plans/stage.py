"""Stages, in which devices hold some of the model's blocks together, and pipelines of stages one after another.

Both check and canonicalise themselves: equal meaning is an equal value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from hetu_fx.base.json_values import many
from hetu_fx.base.low_dtypes import STAGE_DTYPES
from hetu_fx.base.records import Key, record
from hetu_fx.errors import PlanError
from hetu_fx.plans.op_regions import OpRegion, check_program
from hetu_fx.plans.recomputed import RecomputedOps, check_recomputed_ops

LATER = {
    "annotations": "leave it out (per-tensor annotations follow from the stages)",
    "home": "leave it out (optimizer states are placed by 'zero')",
}


@dataclass(frozen=True, slots=True)
class Stage:
    """A group of devices that holds `blocks` of the model's repeated blocks, tensor parallel or context parallel.

    `devices` are ranks in order; `ratios` their relative shard sizes (left out: even; kept without common
    factor); `blocks` may be None, in all stages of a pipeline at once: as even as possible. `context` is by how
    many parts of the group the sequence is shared: by none (1), or by every device (context parallel), which then
    holds all parameters of the stage and computes its own part of the tokens. A number between makes the devices a
    grid: so many tensor parallel groups of neighbours, with `ratios` inside each, and the sequence shared between the
    groups by `context_ratios`, which only a grid has. `recompute` is how many of its blocks, the first ones, keep only
    what enters them, and compute the rest again in backward (Chen et al., Training Deep Nets with Sublinear Memory
    Cost); of these blocks `recompute_ops` are computed again, and what the others make is kept too. A stage with a
    `dtype` computes in it what torch.autocast computes in it on the host, and what it hands on has the dtype that the
    model gives it; parameters stay as they are. A stage with a
    `program` cuts each op on what that says, instead of what tensor parallel groups choose for all ops together.
    """

    devices: tuple[int, ...]
    ratios: tuple[int, ...] = ()
    blocks: int | None = None
    context: int = 1
    recompute: int = 0
    context_ratios: tuple[int, ...] = ()
    recompute_ops: RecomputedOps = "all"
    dtype: str | None = None
    program: tuple[OpRegion, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(self.devices))
        check_devices(self.devices, "a stage")
        self._check_context()
        group = len(self.devices) // self.context if self.is_grid else len(self.devices)
        each = f"one per device of a tensor parallel group ({group})" if self.is_grid else "one per device"
        object.__setattr__(self, "ratios", self._checked("ratios", self.ratios, group, each))
        if self.is_grid:
            each = f"one per part of the sequence ({self.context})"
            shares = self._checked("context_ratios", self.context_ratios, self.context, each)
            object.__setattr__(self, "context_ratios", shares)
        if self.blocks is not None and self.blocks < 0:
            raise PlanError(f"{self._called} has {self.blocks} blocks\nhint: give 0 or more")
        if self.recompute < 0:
            raise PlanError(f"{self._called} has recompute {self.recompute}\nhint: give 0 or more")
        check_recomputed_ops(self.recompute_ops, self.recompute, self._called)
        if self.dtype is not None:
            self._check_dtype(self.dtype)
        self._check_program()
        if self.blocks is not None:
            self.check_recompute(self.blocks)

    def _check_context(self) -> None:
        count = len(self.devices)
        if self.context < 1 or count % self.context:
            raise PlanError(
                f"{self._called} has context {self.context}\n"
                f"hint: give {count} to share the sequence between all of them, a divisor of {count} to share it "
                f"between tensor parallel groups, or leave it out"
            )
        object.__setattr__(self, "context_ratios", tuple(self.context_ratios))
        if self.context_ratios and not self.is_grid:
            raise PlanError(
                f"{self._called} has context_ratios {list(self.context_ratios)}, but its context is {self.context}\n"
                f"hint: give them as 'ratios' where all devices share the sequence. Only tensor parallel groups that "
                f"share it (a context between 1 and the number of devices) have both"
            )

    def _check_dtype(self, dtype: str) -> None:
        if dtype not in STAGE_DTYPES:
            raise PlanError(
                f"{self._called} has dtype {dtype!r}\n"
                f"hint: give {' or '.join(map(repr, STAGE_DTYPES))}, or leave it out (float16 needs a scaled loss: use "
                f"torch.autocast and a GradScaler)"
            )

    def _check_program(self) -> None:
        object.__setattr__(self, "program", tuple(self.program))
        check_program(self.program, len(self.devices), self._called)
        if self.program and self.shares_sequence:
            raise PlanError(
                f"{self._called} has a program and context {self.context}\n"
                f"hint: leave one of them out (a program can cut the sequence as a dim of an input)"
            )

    def _checked(self, key: str, given: tuple[int, ...], count: int, each: str) -> tuple[int, ...]:
        """Return ratios without common factor, even where none are given."""
        ratios = tuple(given) or (1,) * count
        if len(ratios) != count:
            raise PlanError(
                f"{self._called} has {len(ratios)} {key} {list(ratios)}\n"
                f"hint: give {each}, or leave them out for even shards"
            )
        if any(ratio < 1 for ratio in ratios):
            raise PlanError(
                f"{self._called} has {key} {list(ratios)}, but each must be at least 1\n"
                f"hint: leave devices that hold nothing out of the stage"
            )
        return divide_by_gcd(ratios)

    def recomputing(self, blocks: int, ops: RecomputedOps = "all") -> Stage:
        """Return the stage with so many blocks recomputed, of which those ops are."""
        asked: RecomputedOps = ops if blocks else "all"
        same = (blocks, asked) == (self.recompute, self.recompute_ops)
        return self if same else replace(self, recompute=blocks, recompute_ops=asked)

    @property
    def recompute_text(self) -> str:
        """Return what is recomputed: `recompute 5 pointwise`; empty for nothing."""
        if not self.recompute:
            return ""
        return f"recompute {self.recompute}" + (f" {self.recompute_ops}" if self.recompute_ops != "all" else "")

    @property
    def manner_text(self) -> str:
        """Return what is recomputed, and the dtype it computes in: `recompute 5, bfloat16`; empty for neither."""
        return ", ".join(filter(None, [self.recompute_text, self.dtype]))

    def chunks(self, count: int, blocks: int) -> Iterator[Stage]:
        """Yield the stage in chunks of its blocks (`chunk_sizes`)."""
        for own, again in chunk_sizes(count, blocks, self.recompute):
            yield replace(self.recomputing(again, self.recompute_ops), blocks=own)

    def check_recompute(self, blocks: int) -> None:
        """Raise `PlanError` where fewer blocks than are to be recomputed come to this stage."""
        if self.recompute > blocks:
            raise PlanError(
                f"{self._called} recomputes {self.recompute} blocks, but holds {blocks}\n"
                f"hint: give a recompute of at most that, or leave it out (only repeated blocks are recomputed)"
            )

    @property
    def _called(self) -> str:
        return f"stage on devices {list(self.devices)}"

    @property
    def shares_sequence(self) -> bool:
        """Tell whether devices share the sequence, alone or besides what the model's parameters have in common."""
        return self.context > 1

    @property
    def is_grid(self) -> bool:
        """Tell whether the devices are tensor parallel groups that share the sequence."""
        return 1 < self.context < len(self.devices)

    @property
    def axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ratios of the sequence, the outer axis of the devices, and of the split weights, the inner one.

        (1,) stands for an axis that the stage does not have.
        """
        if self.is_grid:
            return self.context_ratios, self.ratios
        return (self.ratios, (1,)) if self.shares_sequence else ((1,), self.ratios)

    @property
    def shares(self) -> tuple[tuple[float, float], ...]:
        """Return each device's share of the sequence, and of what is split of the weights."""
        context, tensor = ([ratio / sum(ratios) for ratio in ratios] for ratios in self.axes)
        return tuple(itertools.product(context, tensor))

    @property
    def work_shares(self) -> tuple[float, ...]:
        """Return each device's share of the sequence where the devices share that, else of what is split."""
        return tuple(context if self.shares_sequence else tensor for context, tensor in self.shares)

    @property
    def tensor_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the devices that split weights with each other, one group for each part of the sequence."""
        size = len(self.devices) // self.context
        return tuple(self.devices[i : i + size] for i in range(0, len(self.devices), size))

    @property
    def context_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the devices that share the sequence, and hold the same of all weights."""
        return tuple(zip(*self.tensor_groups, strict=True))

    def beside(self, rank: int) -> tuple[int, ...]:
        """Return the other devices that hold the same of all weights as one of the stage does."""
        return tuple(other for group in self.context_groups if rank in group for other in group if other != rank)

    def repeating(self, rank: int, parts: int) -> tuple[int, ...]:
        """Return the devices of a rank's tensor parallel group that hold the same of what is split in `parts` alone."""
        group = next(group for group in self.tensor_groups if rank in group)
        each = max(1, len(group) // parts)
        first = group.index(rank) // each * each
        return group[first : first + each]

    def __str__(self) -> str:
        devices = ",".join(map(str, self.devices))
        ratios = "" if _is_even(self.ratios) else f" {ratios_text(self.ratios)}"
        blocks = "" if self.blocks is None else f"x{self.blocks}"
        program = f" program of {len(self.program)}" if self.program else ""
        return f"[{devices}{ratios}{self._context_text}{program}]{blocks} {self.manner_text}".rstrip()

    @property
    def _context_text(self) -> str:
        if not self.is_grid:
            return " context" if self.shares_sequence else ""
        return f" context {self.context if _is_even(self.context_ratios) else ratios_text(self.context_ratios)}"


def _is_even(ratios: tuple[int, ...]) -> bool:
    return len(set(ratios)) <= 1


def ratios_text(ratios: tuple[int, ...]) -> str:
    """Write ratios as tables and summaries have them: `2:1`."""
    return ":".join(map(str, ratios))


def chunk_sizes(count: int, blocks: int, recompute: int) -> Iterator[tuple[int, int]]:
    """Yield how many blocks each chunk of a stage has, as even as possible, and recomputes: first ones do."""
    small, more = divmod(blocks, count)
    for chunk in range(count):
        own = small + (chunk < more)
        yield own, min(recompute, own)
        recompute -= min(recompute, own)


def divide_by_gcd(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Divide whole numbers by their greatest common divisor."""
    common = math.gcd(*numbers)
    return tuple(number // common for number in numbers)


def check_devices(devices: tuple[int, ...], what: str) -> None:
    """Raise `PlanError` for no devices, a negative one, or one that stands twice."""
    if not devices:
        raise PlanError(f"{what} has no devices\nhint: give at least one")
    if min(devices) < 0:
        raise PlanError(f"{what} has device {min(devices)} in {list(devices)}\nhint: give ranks, from 0")
    if len(set(devices)) < len(devices):  # asked of thousands of devices again and again
        twice = sorted({device for device in devices if devices.count(device) > 1})
        raise PlanError(f"{what} uses devices {twice} twice ({list(devices)})\nhint: use each device once")


STAGE = record(
    Stage,
    PlanError,
    order="devices ratios context context_ratios blocks recompute recompute_ops dtype program",
    later=LATER,
    ratios=Key(omit=_is_even),
    context_ratios=Key(omit=_is_even),
)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """`stages` one after another. `share` is its share of the batch relative to others', cut into `micro_batches`.

    `max_length` is the longest sequence that it takes, None: any that the plan does.
    """

    stages: tuple[Stage, ...]
    share: int = 1
    micro_batches: int = 1
    max_length: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        if not self.stages:
            raise PlanError("a pipeline has no stages\nhint: give at least one, such as {'devices': [0]}")
        if self.share < 1:
            raise PlanError(f"{self} has rows {self.share}\nhint: give 1 or more, or leave the pipeline out")
        if self.micro_batches < 1:
            raise PlanError(f"{self} has {self.micro_batches} micro-batches\nhint: give 1 or more")
        if self.max_length is not None and self.max_length < 1:
            raise PlanError(f"{self} has max_length {self.max_length}\nhint: give 1 or more, or leave it out")
        given = [stage.blocks for stage in self.stages]
        if None in given and any(blocks is not None for blocks in given):
            raise PlanError(f"{self} gives blocks for some stages only: {given}\nhint: give them for all or for none")
        if 0 in given[1:-1]:
            raise PlanError(f"{self} has a stage without blocks in the middle: {given}\nhint: leave that stage out")

    @property
    def devices(self) -> tuple[int, ...]:
        """Return the ranks of all stages, in order."""
        return tuple(device for stage in self.stages for device in stage.devices)

    def blocks(self, num_blocks: int) -> tuple[int, ...]:
        """Return the number of blocks of each stage, left-out ones as even as possible (earlier stages more).

        Raises `PlanError` when they do not add up to `num_blocks`, or are fewer than a stage is to recompute.
        """
        given = tuple(stage.blocks for stage in self.stages if stage.blocks is not None)
        if not given:
            even = self._even_blocks(num_blocks)
            for stage, blocks in zip(self.stages, even, strict=True):
                stage.check_recompute(blocks)
            return even
        if sum(given) != num_blocks:
            raise PlanError(
                f"blocks {list(given)} of {self} add up to {sum(given)}, but the model has {num_blocks} "
                f"repeated blocks\nhint: make them add up, or leave 'blocks' out"
            )
        return given

    def _even_blocks(self, num_blocks: int) -> tuple[int, ...]:
        if 0 < num_blocks < len(self.stages):
            raise PlanError(
                f"{self} has {len(self.stages)} stages, but the model has only {num_blocks} repeated blocks\n"
                f"hint: use fewer stages"
            )
        small, more = divmod(num_blocks, len(self.stages))
        return tuple(small + (i < more) for i in range(len(self.stages)))

    def __str__(self) -> str:
        return " > ".join(map(str, self.stages))


PIPELINE = record(
    Pipeline,
    PlanError,
    order="share micro_batches max_length stages",
    later=LATER,
    share=Key(name="rows", alias="share", written="always"),
    micro_batches=Key(written="always"),
    stages=Key(many(STAGE.values)),
)


def _read_pipelines(values: Any, where: str) -> tuple[Pipeline, ...]:
    """Return the pipelines; fractions of the batch become whole shares: rows 0.75 and 0.25 are 3 and 1."""
    given = [value.get("rows", value.get("share", 1)) if isinstance(value, dict) else 1 for value in values]
    if all(isinstance(share, int | float) and not isinstance(share, bool) and 0 < share < math.inf for share in given):
        exact = [Fraction(str(share)) for share in given]
        whole = math.lcm(*(share.denominator for share in exact))
        if whole > 1:
            shares = divide_by_gcd(tuple(int(share * whole) for share in exact))
            values = [_with_share(value, share) for value, share in zip(values, shares, strict=True)]
    pipelines: tuple[Pipeline, ...] = _PIPELINES.read(values, where)
    return pipelines


def _with_share(value: dict[str, Any], share: int) -> dict[str, Any]:
    return {key: one for key, one in value.items() if key != "share"} | {"rows": share}


_PIPELINES = many(PIPELINE.values)
PIPELINES = replace(_PIPELINES, read=_read_pipelines)
