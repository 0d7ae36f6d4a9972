"""Pipelines of stages: which devices hold what part of the model, one after another.

A `Stage` is a group of devices that hold some of the model's repeated blocks, tensor parallel or context parallel,
in shards proportional to ratios. A `Pipeline` is stages one after another, with its share of the batch. Both check and
canonicalise themselves: equal meaning is an equal value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetu_fx.documents import Fields, located
from hetu_fx.errors import PlanError

LATER = {
    "annotations": "leave it out (per-tensor annotations follow from the stages)",
    "home": "leave it out (optimizer states are placed by 'zero')",
}


@dataclass(frozen=True, slots=True)
class Stage:
    """A tensor parallel group that holds `blocks` of the model's repeated blocks.

    `devices` are ranks in order; `ratios` their relative shard sizes (left out: even; kept without common
    factor); `blocks` may be None, in all stages of a pipeline at once: as even as possible. `context` is by how
    many parts of the group the sequence is shared: by none (1), or by every device (context parallel), which then
    holds all parameters of the stage and computes its own part of the tokens. `recompute` is how many of its blocks,
    the first ones, keep only what enters them, and compute the rest again in backward (Chen et al., Training Deep Nets
    with Sublinear Memory Cost).
    """

    devices: tuple[int, ...]
    ratios: tuple[int, ...] = ()
    blocks: int | None = None
    context: int = 1
    recompute: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(self.devices))
        check_devices(self.devices, "a stage")
        ratios = tuple(self.ratios) or (1,) * len(self.devices)
        if len(ratios) != len(self.devices):
            raise PlanError(
                f"stage on devices {list(self.devices)} has {len(ratios)} ratios {list(ratios)}; "
                f"give one per device, or leave them out for even shards"
            )
        if any(ratio < 1 for ratio in ratios):
            raise PlanError(
                f"stage on devices {list(self.devices)} has ratios {list(ratios)}, but each must be at "
                f"least 1; leave a device that is to hold nothing out of the stage"
            )
        object.__setattr__(self, "ratios", reduced(ratios))
        if self.blocks is not None and self.blocks < 0:
            raise PlanError(f"stage on devices {list(self.devices)} has {self.blocks} blocks; give 0 or more")
        if self.context not in (1, len(self.devices)):
            raise PlanError(
                f"stage on devices {list(self.devices)} has context {self.context}; give {len(self.devices)} to share "
                f"the sequence between all of them, or leave it out (no group is both context and tensor parallel)"
            )
        if self.recompute < 0:
            raise PlanError(f"stage on devices {list(self.devices)} has recompute {self.recompute}; give 0 or more")
        if self.blocks is not None:
            self.check_recompute(self.blocks)

    def check_recompute(self, blocks: int) -> None:
        """Raise `PlanError` where fewer blocks than are to be recomputed come to this stage."""
        if self.recompute > blocks:
            raise PlanError(
                f"stage on devices {list(self.devices)} recomputes {self.recompute} blocks, but holds {blocks}; give a "
                f"recompute of at most that, or leave it out (only repeated blocks of a model are recomputed)"
            )

    @property
    def shares_sequence(self) -> bool:
        """Tell whether the devices share the sequence, instead of what the model's parameters have in common."""
        return self.context > 1

    @property
    def is_even(self) -> bool:
        """Tell whether all shards have the same size."""
        return len(set(self.ratios)) == 1

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of this stage, defaults left out."""
        result: dict[str, Any] = {"devices": list(self.devices)}
        if not self.is_even:
            result["ratios"] = list(self.ratios)
        if self.shares_sequence:
            result["context"] = self.context
        if self.blocks is not None:
            result["blocks"] = self.blocks
        return result | ({"recompute": self.recompute} if self.recompute else {})

    def __str__(self) -> str:
        devices = ",".join(map(str, self.devices))
        ratios = "" if self.is_even else " " + ":".join(map(str, self.ratios))
        context = " context" if self.shares_sequence else ""
        blocks = "" if self.blocks is None else f"x{self.blocks}"
        return f"[{devices}{ratios}{context}]{blocks}" + (f" recompute {self.recompute}" if self.recompute else "")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages one after another. `rows` is its relative share of the batch, cut into `micro_batches`.

    `max_length` is the longest sequence that it takes, None: any that the plan does.
    """

    stages: tuple[Stage, ...]
    rows: int = 1
    micro_batches: int = 1
    max_length: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        if not self.stages:
            raise PlanError("a pipeline has no stages; give at least one, such as {'devices': [0]}")
        if self.rows < 1:
            raise PlanError(f"{self} has rows {self.rows}; give 1 or more, or leave the pipeline out")
        if self.micro_batches < 1:
            raise PlanError(f"{self} has {self.micro_batches} micro-batches; give 1 or more")
        if self.max_length is not None and self.max_length < 1:
            raise PlanError(f"{self} has max_length {self.max_length}; give 1 or more, or leave it out")
        given = [stage.blocks for stage in self.stages]
        if None in given and any(blocks is not None for blocks in given):
            raise PlanError(f"{self} gives blocks for some stages only: {given}; give them for all or for none")
        if 0 in given[1:-1]:
            raise PlanError(f"{self} has a stage without blocks in the middle: {given}; leave that stage out")

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
                f"repeated blocks; make them add up, or leave 'blocks' out"
            )
        return given

    def _even_blocks(self, num_blocks: int) -> tuple[int, ...]:
        if 0 < num_blocks < len(self.stages):
            raise PlanError(
                f"{self} has {len(self.stages)} stages, but the model has only {num_blocks} repeated blocks; "
                f"use fewer stages"
            )
        small, more = divmod(num_blocks, len(self.stages))
        return tuple(small + (i < more) for i in range(len(self.stages)))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of this pipeline."""
        stages = [stage.to_json() for stage in self.stages]
        limit = {} if self.max_length is None else {"max_length": self.max_length}
        return {"rows": self.rows, "micro_batches": self.micro_batches} | limit | {"stages": stages}

    def __str__(self) -> str:
        return " > ".join(map(str, self.stages))


def reduced(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Divide whole numbers by their greatest common divisor."""
    common = math.gcd(*numbers)
    return tuple(number // common for number in numbers)


def check_devices(devices: tuple[int, ...], what: str) -> None:
    """Raise `PlanError` for no devices, a negative one, or one that stands twice."""
    if not devices:
        raise PlanError(f"{what} has no devices; give at least one")
    if min(devices) < 0:
        raise PlanError(f"{what} has device {min(devices)} in {list(devices)}; devices are ranks, from 0")
    twice = sorted({device for device in devices if devices.count(device) > 1})
    if twice:
        raise PlanError(f"{what} uses devices {twice} twice ({list(devices)}); use each device once")


def read_pipeline(value: Mapping[str, Any], where: str) -> Pipeline:
    """Read one entry of `pipelines`; raise `PlanError` with its place."""
    fields = Fields(value, where, PlanError, ("rows", "micro_batches", "max_length", "stages"), LATER)
    stages = fields.objects("stages")
    parts: dict[str, Any] = {
        "stages": tuple(_read_stage(s, f"{where}.stages[{i}]") for i, s in enumerate(stages)),
        "rows": fields.integer("rows", 1),
        "micro_batches": fields.integer("micro_batches", 1),
        "max_length": fields.integer("max_length", None),
    }
    return located(Pipeline, parts, where)


def _read_stage(value: Mapping[str, Any], where: str) -> Stage:
    fields = Fields(value, where, PlanError, ("devices", "ratios", "blocks", "context", "recompute"), LATER)
    parts: dict[str, Any] = {
        "devices": fields.integers("devices"),
        "ratios": fields.integers("ratios", ()),
        "blocks": fields.integer("blocks", None),
        "context": fields.integer("context", 1),
        "recompute": fields.integer("recompute", 0),
    }
    return located(Stage, parts, where)
