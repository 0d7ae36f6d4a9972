"""Pipelines of stages: which devices hold what part of the model, one after another.

A `Pipeline` is stages one after another, with its share of the batch. It checks and canonicalises itself: equal meaning
is an equal value.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetu_fx.base.json_values import many
from hetu_fx.base.records import Key, record
from hetu_fx.errors import PlanError
from hetu_fx.plans.stage import LATER, STAGE, Stage


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages one after another. `share` is its share of the batch relative to others', cut into `micro_batches`.

    `max_length` is the longest sequence that it takes, None: any that the plan does.
    """

    stages: tuple[Stage, ...]
    share: int = 1
    micro_batches: int = 1
    max_length: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        if not self.stages:
            raise PlanError("a pipeline has no stages; give at least one, such as {'devices': [0]}")
        if self.share < 1:
            raise PlanError(f"{self} has rows {self.share}; give 1 or more, or leave the pipeline out")
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
