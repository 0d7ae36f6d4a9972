"""Schedules on paper, as tables: what each device of a pipeline does, in order.

Those of the runtime (`hetu_fx.plans.schedule`), and one that only a simulation can run: a plan cannot name it.
A device may hold several chunks of the model; part k of the pipeline is chunk k // p of device k % p.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetu_fx.errors import PlanError
from hetu_fx.plans.plan import Schedule
from hetu_fx.plans.schedule import Action, Phase, actions, one_each


@dataclass(frozen=True, slots=True)
class Interleaved:
    """1F1B over `chunks` chunks per device (Narayanan et al., Megatron-LM, SC 2021, section 2.2)."""

    chunks: int

    def __post_init__(self) -> None:
        if self.chunks < 2:
            raise PlanError(f"an interleaved schedule has {self.chunks} chunks per device; give 2 or more")


PaperSchedule = Schedule | Interleaved
Row = tuple[Action, ...]


def num_chunks(schedule: PaperSchedule) -> int:
    """Return how many chunks of the model each device holds."""
    return schedule.chunks if isinstance(schedule, Interleaved) else 1


def table(schedule: PaperSchedule, num_devices: int, micro_batches: int) -> tuple[Row, ...]:
    """Return what each device of a pipeline does, in order.

    Raises `PlanError` for an interleaved schedule whose micro-batches are no multiple of its devices.
    """
    match schedule:
        case Interleaved(chunks):
            return tuple(_interleaved(device, num_devices, micro_batches, chunks) for device in range(num_devices))
        case other:
            return tuple(actions(other, device, num_devices, micro_batches) for device in range(num_devices))


def _interleaved(device: int, num_devices: int, micro_batches: int, chunks: int) -> Row:
    """Forwards of a round of p micro-batches through a chunk, then the next chunk; backwards the other way."""
    if micro_batches % num_devices:
        raise PlanError(
            f"an interleaved schedule runs rounds of as many micro-batches as there are stages, but there are "
            f"{micro_batches} micro-batches on {num_devices} stages; give a multiple of {num_devices}"
        )
    total = micro_batches * chunks
    forwards = [_turn(Phase.FORWARD, k, num_devices, chunks) for k in range(total)]
    backwards = [_turn(Phase.BACKWARD, k, num_devices, chunks) for k in range(total)]
    warm_up = min(total, 2 * (num_devices - device - 1) + (chunks - 1) * num_devices)
    return one_each(forwards, backwards, warm_up)


def _turn(work: Phase, k: int, num_devices: int, chunks: int) -> Action:
    rounds, within = divmod(k, num_devices * chunks)
    chunk, offset = divmod(within, num_devices)
    last = chunks - 1
    return Action(work, rounds * num_devices + offset, chunk if work is Phase.FORWARD else last - chunk)
