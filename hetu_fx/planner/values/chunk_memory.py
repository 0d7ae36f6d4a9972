"""What a device holds whose stage is in chunks: of each chunk so many micro-batches, which differ from one to another.

The moments are those of `device_memory`; those amid micro-batches are found by going through the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hetu_fx.planner.values.device_memory import HeldShard, Instant, Moment, at_ends, instants_of
from hetu_fx.planner.values.footprint import StageFootprint
from hetu_fx.planner.values.line import ZERO, Line
from hetu_fx.plans.schedule import Order, Phase


def joined(chunks: Sequence[HeldShard]) -> HeldShard:
    """Return what lasts of all chunks together; of several there is no one footprint."""
    if len(chunks) == 1:
        return chunks[0]
    return HeldShard(
        parameters=sum(one.parameters for one in chunks),
        owned=sum(one.owned for one in chunks),
        copied=sum(one.copied for one in chunks),
        synced=sum(one.synced for one in chunks),
        footprint=StageFootprint(ZERO, (), (), (), max(one.footprint.largest for one in chunks)),
        handed=sum(one.handed for one in chunks),
        state=chunks[0].state,
    )


def chunk_instants(chunks: Sequence[HeldShard], order: Order, micro_batches: int) -> tuple[Instant, ...]:
    """Return what a device holds that runs an order of actions, of so many micro-batches of each chunk."""
    whole, passages = joined(chunks), _passages(order, len(chunks))
    most = [max(one.kept[chunk] + (one.chunk == chunk) for one in passages) for chunk in range(len(chunks))]
    sent = sum(min(micro_batches, count + 1) * one.handed for count, one in zip(most, chunks, strict=True))
    passing = (moment for one in passages for moment in _passing(one, chunks, sent))
    return instants_of(whole, (*at_ends(whole, sent), *passing))


@dataclass(frozen=True, slots=True)
class _Passage:
    """What is held when a micro-batch passes a chunk.

    Attributes:
        phase: in which it passes.
        chunk: that it passes.
        kept: how many other micro-batches each chunk keeps.
        gradients: of which chunks gradients have been made before.
    """

    phase: Phase
    chunk: int
    kept: tuple[int, ...]
    gradients: tuple[bool, ...]


@lru_cache(maxsize=512)
def _passages(order: Order, num_chunks: int) -> tuple[_Passage, ...]:
    """Return the passages of an order that are unlike each other."""
    kept, made, found = [0] * num_chunks, [False] * num_chunks, dict[_Passage, None]()
    for action in order:
        chunk, phase = action.chunk, action.phase
        kept[chunk] -= phase is not Phase.FORWARD
        found[_Passage(phase, chunk, tuple(kept), tuple(made))] = None
        kept[chunk] += phase in (Phase.FORWARD, Phase.INPUT_GRADIENT)
        made[chunk] |= phase in (Phase.BACKWARD, Phase.WEIGHT_GRADIENT)
    return tuple(found)


def _passing(passage: _Passage, chunks: Sequence[HeldShard], sent: float) -> Iterator[Moment]:
    """Yield the moments of a passage."""
    lines = _lines(chunks[passage.chunk], passage.phase, is_first=not passage.gradients[passage.chunk])
    gradients = sum(one.gradients for one, is_made in zip(chunks, passage.gradients, strict=True) if is_made)
    below = ZERO
    for count, one in zip(passage.kept, chunks, strict=True):
        kept = one.footprint.kept
        below += Line(count * kept.fixed, count * kept.slope)
    for line in lines:
        yield Moment(str(passage.phase), {"gradients": gradients}, line + below, sent)


def _lines(chunk: HeldShard, phase: Phase, *, is_first: bool) -> Sequence[Line]:
    """Return what is held of a micro-batch that passes a chunk, and of the gradients that it is the first to make.

    Of one whose weights' gradients wait all is kept, as in a stage that is whole.
    """
    footprint = chunk.footprint
    match phase:
        case Phase.FORWARD:
            return footprint.forward
        case Phase.BACKWARD:
            return footprint.backward if is_first else footprint.later
        case Phase.INPUT_GRADIENT:
            return footprint.later
        case Phase.WEIGHT_GRADIENT:
            return (footprint.kept + Line(chunk.gradients if is_first else 0.0),)
