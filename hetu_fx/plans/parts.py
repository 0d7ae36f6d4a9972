"""What a pipeline's micro-batches go through: its parts, and which stage holds which of them.

A stage is a group of devices, a part a run of blocks that follow each other. Under most schedules a stage holds one
part; where its blocks are dealt out in chunks it holds several, between which the parts of all other stages stand. So
what is about devices goes by stages, and what is about blocks, neighbours and hand-overs by parts: here alone stands
how the two belong together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from hetu_fx.errors import PlanError
from hetu_fx.plans.stage import Pipeline, Stage


@dataclass(frozen=True, slots=True)
class DeviceDeal:
    """How the parts of a pipeline are dealt out, round by round: of p stages part k is chunk k // p of stage k % p.

    `chunks` is how many parts each stage holds.
    """

    num_stages: int
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.num_stages < 1 or self.chunks < 1:
            raise PlanError(
                f"{self.num_stages} stages cannot hold {self.chunks} parts each\nhint: give 1 or more of both"
            )

    @classmethod
    def of(cls, num_parts: int, chunks: int) -> DeviceDeal:
        """Return the deal of so many parts, of which each stage holds so many."""
        if num_parts % chunks:
            raise PlanError(
                f"{num_parts} parts cannot be dealt out in {chunks} chunks per stage\nhint: give a multiple"
            )
        return cls(num_parts // chunks, chunks)

    @classmethod
    def of_stages(cls, num_stages: int, chunks: int) -> DeviceDeal:
        """Return the deal of so many chunks per stage; a stage that is alone stays whole."""
        return cls(num_stages, chunks if num_stages > 1 else 1)

    @property
    def num_parts(self) -> int:
        """Return the number of parts."""
        return self.num_stages * self.chunks

    def part(self, stage: int, chunk: int) -> int:
        """Return which part a chunk of a stage is."""
        return chunk * self.num_stages + stage

    def stage(self, part: int) -> int:
        """Return the stage that holds a part."""
        return part % self.num_stages

    def chunk(self, part: int) -> int:
        """Return which chunk of its stage a part is."""
        return part // self.num_stages

    def held(self, stage: int) -> range:
        """Return the parts that a stage holds."""
        return range(stage, self.num_parts, self.num_stages)


@dataclass(frozen=True, slots=True)
class PartedPipeline:
    """A pipeline and its parts, for a model of some number of repeated blocks.

    Attributes:
        pipeline: as the plan has it: its stages are groups of devices.
        parts: what each part is on its own: the devices of its stage, and how they share it, its own number of blocks,
            and how many of these it recomputes.
        deal: which stage holds which part.
        stops: where each part's blocks begin, and where the last one's end.
    """

    pipeline: Pipeline
    parts: tuple[Stage, ...]
    deal: DeviceDeal
    stops: tuple[int, ...]

    @classmethod
    def of(cls, pipeline: Pipeline, num_blocks: int, chunks: int = 1) -> PartedPipeline:
        """Deal out a pipeline's blocks in so many chunks per stage; a stage that is alone stays whole.

        Raises `PlanError` where blocks do not add up to `num_blocks`, and for a stage of fewer blocks than chunks.
        """
        deal = DeviceDeal.of_stages(len(pipeline.stages), chunks)
        blocks = pipeline.blocks(num_blocks)
        if num_blocks and deal.chunks > 1 and min(blocks) < chunks:
            raise PlanError(
                f"{pipeline} has {list(blocks)} blocks, fewer than {chunks} chunks per stage\nhint: use fewer chunks"
            )
        parts = tuple(_dealt(pipeline.stages, blocks, deal))
        return cls(pipeline, parts, deal, tuple(accumulate((part.blocks or 0 for part in parts), initial=0)))

    @property
    def micro_batches(self) -> int:
        """Return into how many micro-batches its rows are cut."""
        return self.pipeline.micro_batches

    @property
    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the blocks [start, stop) of each part."""
        return pairwise(self.stops)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Return the number of blocks of each part."""
        return tuple([stop - start for start, stop in self.ranges])

    def recomputed(self, part: int) -> range:
        """Return which blocks a part recomputes: its first ones.

        Backward comes to them last, when what the others have kept is free already.
        """
        start = self.stops[part]
        return range(start, start + self.parts[part].recompute)


def _dealt(stages: Sequence[Stage], blocks: Sequence[int], deal: DeviceDeal) -> Iterator[Stage]:
    """Yield the parts in order."""
    if deal.chunks == 1:
        yield from map(_with_blocks, stages, blocks)
        return
    chunks = [tuple(stage.chunks(deal.chunks, count)) for stage, count in zip(stages, blocks, strict=True)]
    yield from (chunks[deal.stage(part)][deal.chunk(part)] for part in range(deal.num_parts))


def _with_blocks(stage: Stage, blocks: int) -> Stage:
    return stage if stage.blocks == blocks else replace(stage, blocks=blocks)
