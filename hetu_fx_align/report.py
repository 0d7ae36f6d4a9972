"""What `hetu-fx-align` finds: ops by how far off they are, runs of the whole model, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hetu_fx.base.progress import Tell, nobody
from hetu_fx.graph.bind import Batch
from hetu_fx.transforms.rewrites.op_overrides import ON_HOST, UP_CAST, OpOverrides
from hetu_fx_align.align import AlignedOp, Runners, align_call, align_ops, runners_of
from hetu_fx_align.call import Call
from hetu_fx_align.distinct import DistinctOp
from hetu_fx_align.drift import WholeRun, whole_run
from hetu_fx_align.interpret import graph_to_align, values_of_leaves
from hetu_fx_align.judge import Tolerances
from hetu_fx_align.saved import save_call
from hetu_fx_align.way import Way


@dataclass(frozen=True, eq=False)
class Report:
    """How ways compare on a model, or on one op alone.

    Attributes:
        ways: that were compared.
        ops: distinct ops, the worst first.
        whole: a run of the whole model for each way; none for one op alone.
    """

    ways: tuple[Way, ...]
    ops: tuple[AlignedOp, ...]
    whole: tuple[WholeRun, ...] = ()

    @property
    def is_within(self) -> bool:
        """Tell whether all ops keep to what is allowed, and no way drifts or fails."""
        return all(op.is_within for op in self.ops) and not any(run.first or run.says for run in self.whole)

    @property
    def overrides(self) -> OpOverrides:
        """Return what to do with ops: to run on the host what fails in a way, to up-cast what differs."""
        wrong = {
            op.op.call.name: ON_HOST if any(verdict.verdict == "fails" for verdict in op.verdicts) else UP_CAST
            for op in sorted(self.ops, key=lambda op: any(verdict.verdict == "fails" for verdict in op.verdicts))
            if not op.is_within
        }
        return OpOverrides(wrong)

    def summary(self) -> str:
        """Say in a line how many ops there are, and how many are not within what is allowed."""
        calls, wrong = sum(op.op.count for op in self.ops), [op for op in self.ops if not op.is_within]
        names = ", ".join(sorted({op.op.call.name for op in wrong}))
        told = f"{len(wrong)} are not within what is allowed: {names}" if wrong else "all are within what is allowed"
        return f"{len(self.ops)} distinct ops of {calls}; {told}"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "ways": [way.name for way in self.ways],
            "within": self.is_within,
            "ops": [op.to_json() for op in self.ops],
            "whole": [run.to_json() for run in self.whole],
            "overrides": dict(self.overrides.ops),
        }


def align_model(
    model: nn.Module, batch: Batch, ways: Sequence[Way], tolerances: Tolerances, tell: Tell = nobody
) -> Report:
    """Run a model's ops, each alone and all together, in every way and in the reference.

    Args:
        model: it returns its loss; its mode decides whether it is captured for training.
        batch: keyword arguments (mapping) or positional ones (tuple).
        ways: to compare.
        tolerances: by op, in the place of the table's.
        tell: is told how far it has come.

    Raises:
        CaptureError: the model cannot be captured.
        AlignError: it returns no loss.
    """
    graph = graph_to_align(model, batch)
    leaves, runners = values_of_leaves(graph, model, batch), runners_of(ways)
    ops = align_ops(graph, leaves, runners, tolerances, tell)
    whole = []
    for runner in runners:
        tell(f"the whole model, {runner.way.name}")
        whole.append(whole_run(graph, leaves, runner))
    return Report(tuple(ways), ops, tuple(whole))


def replay(call: Call, ways: Sequence[Way], tolerances: Tolerances) -> Report:
    """Run one op alone in every way."""
    runners: Runners = runners_of(ways)
    op = DistinctOp(call, "", "", "", 1)
    return Report(tuple(ways), (AlignedOp(op, align_call(call, runners, tolerances)),))


def save_worst(report: Report, folder: Path, count: int) -> None:
    """Save the inputs of the worst ops, each under its number and its name."""
    for number, op in enumerate(report.ops[:count], 1):
        save_call(op.op.call, folder / f"{number:02d}-{op.op.call.name}.json")
