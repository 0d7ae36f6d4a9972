"""What the demo says and draws at its end, from what was measured."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from examples.demo.record import RunRecord, StepRecord, steady, throughput
from examples.demo.settings import DemoSettings
from examples.demo.terms import terms_text
from hetu_fx.show.lanes import write_html
from hetu_fx.show.table import table_text
from hetu_fx.show.timeline import Event, Timeline

PALETTE = ("#4c9be8", "#e8b84c", "#c77dba", "#2f6f4f", "#7d7d7d", "#8c6d4f", "#4cb8b0")
TOLERANCE = 1e-4
"""How far losses may be from those of one process, at any step."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The same training on one process: losses by step, seconds in all, and the threads it used."""

    losses: tuple[float, ...]
    seconds: float
    num_threads: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `from_pretrained` read: are the weights bit for bit the model's, and the held-out loss."""

    same_weights: bool
    held_out_loss: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """What stands side by side; throughputs are medians of tokens per second, None where nothing was measured."""

    difference: float
    healthy: float | None
    slowed: float | None
    even_healthy: float
    even_slowed: float

    @property
    def is_exact(self) -> bool:
        """Tell whether all losses are those of one process."""
        return self.difference <= TOLERANCE


def compare(run: RunRecord, reference: Reference, settings: DemoSettings) -> Comparison:
    """Work out the comparison."""
    healthy, slowed = phases(run, settings)
    return Comparison(
        difference=max(abs(r.loss - loss) for r, loss in zip(run.records, reference.losses, strict=True)),
        healthy=throughput(healthy),
        slowed=throughput(slowed),
        even_healthy=run.even_shares["healthy"].tokens_per_second,
        even_slowed=run.even_shares["slowed"].tokens_per_second,
    )


def phases(run: RunRecord, settings: DemoSettings) -> tuple[list[StepRecord], list[StepRecord]]:
    """Return the steady steps before a device was slowed, and those after a plan was made for that."""
    usual = steady(run.records, settings.length)
    before = [record for record in usual if not settings.is_slowed(record.step)]
    after = [r for r in usual if settings.is_slowed(r.step) and r.variant in run.new_plans]
    return before, after


def comparison_text(
    run: RunRecord, reference: Reference, loaded: Loaded, found: Comparison, settings: DemoSettings
) -> str:
    """Return the final screen."""
    return "\n\n".join(
        (
            _losses(run, reference, found),
            _speeds(run, found),
            *_predictions(run, settings),
            f"checkpoint, read by from_pretrained: weights {_same(loaded.same_weights)}; loss of a batch that was "
            f"not trained on: {loaded.held_out_loss:.6f}, of the parallel model {run.held_out_loss:.6f}",
        )
    )


def _losses(run: RunRecord, reference: Reference, found: Comparison) -> str:
    count = len(run.records)
    shown = sorted({0, count // 3, 2 * count // 3, count - 1})
    rows = [
        ["hetu_fx, 4 unequal processes", *(f"{run.records[i].loss:.6f}" for i in shown)],
        ["one process", *(f"{reference.losses[i]:.6f}" for i in shown)],
    ]
    table = table_text(["loss", *(f"step {i + 1}" for i in shown)], rows)
    verdict = "at most" if found.is_exact else "MORE THAN"
    alone = f"one process: {reference.seconds:.0f} s on {reference.num_threads} threads"
    return (
        f"{table}\nlargest difference over all {count} steps: {found.difference:.1e}, {verdict} {TOLERANCE:g} ({alone})"
    )


def _speeds(run: RunRecord, found: Comparison) -> str:
    rows = [
        ["as they were measured", *_pair(found.healthy, found.even_healthy)],
        [run.slowed, *_pair(found.slowed, found.even_slowed)],
    ]
    table = table_text(["tokens per second; devices", "hetu_fx", "DDP, even shares", "times"], rows)
    return table if found.slowed else f"{table}\nno step ran on a plan made for the slowed device"


def _pair(ours: float | None, theirs: float) -> list[str]:
    if ours is None:
        return ["not measured", f"{theirs:.0f}", ""]
    return [f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}"]


def _variants(run: RunRecord) -> str:
    rows = [_variant_row(name, plan, run.records) for name, plan in run.plans.items()]
    return table_text(["variant", "steps", "predicted s", "measured s", "first step s"], rows)


def _variant_row(name: str, plan: dict[str, Any], records: Sequence[StepRecord]) -> list[str]:
    seconds = [record.seconds for record in records if record.variant == name]
    predicted = plan.get("predicted", {}).get("seconds")
    cells = [f"{predicted:.2f}" if predicted else "", f"{median(seconds[1:]):.2f}" if seconds[1:] else ""]
    return [name, str(len(seconds)), *cells, f"{seconds[0]:.2f}" if seconds else ""]


def _predictions(run: RunRecord, settings: DemoSettings) -> list[str]:
    """Return predicted beside measured: of every variant, and by term of those for the devices before and after."""
    tables = (_variants(run), *(terms_text(run, steps) for steps in phases(run, settings)))
    return [table for table in tables if table]


def _same(same: bool) -> str:
    return "bit for bit the parallel model's" if same else "DIFFER from the parallel model's"


def around_the_change(run: RunRecord, settings: DemoSettings, steps: int = 3) -> Timeline:
    """Return the measured timeline from some steps before the slow-down to some steps on the new plan."""
    new = (record.step for record in run.records if record.variant in run.new_plans)
    last = next(new, settings.slow_at)
    first = max(0, settings.slow_at - steps)
    prefixes = {f"step {step + 1}: " for step in range(first, min(last + steps + 1, settings.steps))}
    chosen: list[Event] = [e for e in run.measured.events if e.name[: e.name.index(":") + 2] in prefixes]
    return Timeline(tuple(chosen), f"measured, steps {first + 1} to {first + len(prefixes)}: {run.slowed}")


def write_files(folder: Path, run: RunRecord, settings: DemoSettings) -> None:
    """Write plans and timelines; the picture of the run is drawn by `draw_run`."""
    from hetu_fx.plans.plan import Plan

    (folder / "plans").mkdir(exist_ok=True)
    for name, plan in run.plans.items():
        Plan.from_json(plan).write(folder / "plans" / f"{name}.json")
    run.measured.write_chrome(folder / "timeline.json")
    write_html(around_the_change(run, settings), folder / "timeline.html")
    run.predicted.write_chrome(folder / "predicted_timeline.json")
    write_html(run.predicted, folder / "predicted_timeline.html")


def draw_run(
    path: str | os.PathLike[str],
    run: RunRecord,
    reference: Reference,
    found: Comparison,
    settings: DemoSettings,
) -> None:
    """Draw the run: losses beside those of one process, tokens per second by step, and the comparison with DDP."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    grid = figure.add_gridspec(2, 3)
    _draw_losses(figure.add_subplot(grid[0, :2]), run, reference, found)
    _draw_steps(figure.add_subplot(grid[1, :2]), run, settings)
    _draw_bars(figure.add_subplot(grid[:, 2]), run, found)
    figure.savefig(os.fspath(path), format="png", dpi=120)


def _draw_losses(axes: Any, run: RunRecord, reference: Reference, found: Comparison) -> None:
    steps = [record.step + 1 for record in run.records]
    axes.plot(steps, reference.losses, color="#b0b0b0", linewidth=5, label="one process")
    axes.plot(steps, [r.loss for r in run.records], color="#2f6f4f", label="hetu_fx, 4 unequal devices")
    axes.set_title(f"loss (largest difference {found.difference:.1e})", fontsize=10)
    axes.legend(frameon=False)


def _draw_steps(axes: Any, run: RunRecord, settings: DemoSettings) -> None:
    for color, name in zip(itertools.cycle(PALETTE), run.plans, strict=False):
        chosen = [record for record in run.records if record.variant == name]
        values = [record.tokens_per_second for record in chosen]
        axes.bar([record.step + 1 for record in chosen], values, color=color, label=f"plan {name!r}")
    axes.axvline(settings.slow_at + 0.5, color="#d1605e", linestyle="--")
    axes.set_title(f"tokens per second (dashed: {run.slowed})", fontsize=10)
    axes.set_xlabel("step (the first step on a plan makes its graphs)")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0.0, -0.25), ncols=3)


def _draw_bars(axes: Any, run: RunRecord, found: Comparison) -> None:
    heights = [found.healthy or 0.0, found.even_healthy, found.slowed or 0.0, found.even_slowed]
    labels = ["hetu_fx", "DDP", "hetu_fx,\nnew plan", "DDP"]
    colors = ["#2f6f4f", "#b0b0b0"] * 2
    positions = [0.0, 1.0, 2.5, 3.5]
    bars = axes.bar(positions, heights, color=colors)
    axes.bar_label(bars, [f"{height:.0f}" for height in heights])
    axes.set_xticks(positions, labels, fontsize=8)
    axes.set_title("tokens per second\nas measured | one slowed down", fontsize=10)
