"""What a plan is expected to cost: seconds and bytes per device, by term, with the reason and a runner-up.

And plans in words: what each device does, what a stage is, what changes from one plan to another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetu_fx.base.checks import check_not_negative
from hetu_fx.base.documents import table_text
from hetu_fx.base.json_values import many, numbers
from hetu_fx.base.records import Key, record
from hetu_fx.errors import PlanError
from hetu_fx.plans.stage import Pipeline, Stage, ratios_text

if TYPE_CHECKING:
    from hetu_fx.plans.plan import Plan


@dataclass(frozen=True, slots=True)
class DeviceCost:
    """One device's share of a step: `(term, seconds)` and `(term, bytes)` pairs, in display order.

    `limit_bytes` is the memory that the device has, None if nobody said.
    """

    rank: int
    seconds: tuple[tuple[str, float], ...]
    bytes: tuple[tuple[str, int], ...]
    limit_bytes: int | None = None

    @property
    def total_seconds(self) -> float:
        """Return the seconds over all terms."""
        return math.fsum(seconds for _, seconds in self.seconds)

    @property
    def total_bytes(self) -> int:
        """Return the bytes over all terms."""
        return sum(count for _, count in self.bytes)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A plan's predicted step: seconds, terms per device, why it was chosen, and the next best plan."""

    seconds: float
    devices: tuple[DeviceCost, ...] = ()
    why: str = ""
    runner_up: str | None = None
    runner_up_seconds: float | None = None

    def __post_init__(self) -> None:
        ranks = [device.rank for device in self.devices]
        if len(set(ranks)) < len(ranks):
            raise PlanError(f"prediction names a device twice: ranks {ranks}; give one entry per device")
        check_not_negative(PlanError, "prediction", seconds=self.seconds)

    def __str__(self) -> str:
        terms = list(dict.fromkeys(t for d in self.devices for t, _ in d.seconds))
        header = ["device", "step ms", *(f"{t} ms" for t in terms), "MB"]
        rows = [_row(device, terms) for device in self.devices]
        lines = [f"predicted step: {self.seconds * 1e3:.3g} ms", table_text(header, rows)]
        if self.why:
            lines.append(self.why)
        if self.runner_up is not None:
            lines.append(f"runner-up: {self.runner_up}{self._runner_up_time()}")
        return "\n".join(lines)

    def _runner_up_time(self) -> str:
        """Say how long the runner-up takes, and by how much that is more."""
        if self.runner_up_seconds is None:
            return ""
        more = f", {100 * (self.runner_up_seconds / self.seconds - 1):+.1f} %" if self.seconds else ""
        return f" ({self.runner_up_seconds * 1e3:.3g} ms{more})"


def _row(device: DeviceCost, terms: list[str]) -> list[str]:
    seconds = dict(device.seconds)
    cells = [f"{seconds.get(term, 0.0) * 1e3:.3g}" for term in terms]
    return [str(device.rank), f"{device.total_seconds * 1e3:.3g}", *cells, f"{device.total_bytes / 1e6:.3g}"]


_DEVICE = record(
    DeviceCost,
    PlanError,
    seconds=Key(numbers(PlanError), written="always"),
    bytes=Key(numbers(PlanError, int), written="always"),
)
PREDICTION = record(Prediction, PlanError, devices=Key(many(_DEVICE.values), written="always"))


HEADER = ("device", "stage", "rows", "shard", "blocks", "memory MB", "busy")


def device_rows(plan: Plan) -> Iterator[list[str]]:
    """Yield the cells of each device's row of the table, under `HEADER`; none for a plan without prediction.

    rows: its pipeline's share of the batch; shard: its share of what its stage cuts; memory: what it needs, of what
    it has; busy: the share of the step in which it does not wait for others.
    """
    costs = {} if plan.predicted is None else {device.rank: device for device in plan.predicted.devices}
    total = sum(pipeline.share for pipeline in plan.pipelines)
    for i, j, stage in plan.stages:
        pipeline = plan.pipelines[i]
        for rank, (context, tensor) in zip(stage.devices, stage.shares, strict=True):
            if rank in costs:
                shares = _percent(pipeline.share / total), _percent(context * tensor)
                yield [str(rank), f"{i}.{j}", *shares, _blocks(stage), _memory(costs[rank]), _busy(costs[rank])]


def _memory(cost: DeviceCost) -> str:
    need = f"{cost.total_bytes / 1e6:.4g}"
    if cost.limit_bytes is None:
        return need
    return f"{need} of {cost.limit_bytes / 1e6:.4g} ({_percent(cost.total_bytes / cost.limit_bytes)})"


def _busy(cost: DeviceCost) -> str:
    total = cost.total_seconds
    return _percent(1 - dict(cost.seconds).get("idle", 0.0) / total) if total else ""


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def rows_text(pipeline: Pipeline) -> str:
    """Return a pipeline's share and parts: `3 rows in 2`."""
    noun = "row" if pipeline.share == 1 else "rows"
    parts = f" in {pipeline.micro_batches}" if pipeline.micro_batches > 1 else ""
    return f"{pipeline.share} {noun}{parts}{_limit_text(pipeline)}"


def _limit_text(pipeline: Pipeline) -> str:
    return "" if pipeline.max_length is None else f", up to {pipeline.max_length} tokens"


def stage_row(pipeline: Pipeline, index: int, position: int, stage: Stage) -> list[str]:
    """Return the cells of a stage's row in the table of a plan; what is the pipeline's stands with its first stage."""
    rows = f"{pipeline.share}{_limit_text(pipeline)}"
    first = [str(index), rows, str(pipeline.micro_batches)] if position == 0 else ["", "", ""]
    return [
        *first,
        str(position),
        ",".join(map(str, stage.devices)),
        ratios_text(stage.ratios) + _context(stage),
        _blocks(stage),
    ]


def _context(stage: Stage) -> str:
    shared = " context" if stage.shares_sequence else ""
    return f"{shared} {ratios_text(stage.context_ratios)}" if stage.is_grid else shared


def _blocks(stage: Stage) -> str:
    blocks = "even" if stage.blocks is None else str(stage.blocks)
    return blocks + (f", recompute {stage.recompute}" if stage.recompute else "")


def diff(before: Plan, after: Plan) -> str:
    """Return what changes from one plan to another, one line each, or `no difference`."""
    old, new = _facts(before), _facts(after)
    lines = [f"- {key}: {old[key]}" for key in old if key not in new]
    lines += [f"+ {key}: {new[key]}" for key in new if key not in old]
    lines += [f"  {key}: {old[key]} -> {new[key]}" for key in old if key in new and old[key] != new[key]]
    return "\n".join(lines) or "no difference"


def _facts(plan: Plan) -> dict[str, str]:
    facts = {"name": str(plan.name), "schedule": plan.schedule, "zero": str(plan.zero)}
    facts |= {"max_length": str(plan.max_length), "split": str(dict(plan.split))}
    facts["sequence_parallel"] = str(plan.sequence_parallel)
    for index, pipeline in enumerate(plan.pipelines):
        facts[f"pipelines[{index}]"] = f"{rows_text(pipeline)}: {pipeline}"
    return facts
