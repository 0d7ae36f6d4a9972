"""Aligns the distinct ops of a model: what each way makes of them, and how the ways compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from hetu_fx.base.progress import Tell, nobody
from hetu_fx.errors import AlignError
from hetu_fx.graph.graph import Graph
from hetu_fx_align.call import Call
from hetu_fx_align.distinct import DistinctOp, distinct_ops
from hetu_fx_align.judge import Tolerances, Verdict, judge
from hetu_fx_align.run import Made
from hetu_fx_align.tolerances import class_of
from hetu_fx_align.way import Runner, Way


@dataclass(frozen=True, eq=False)
class AlignedOp:
    """A distinct op, and how it does in each way."""

    op: DistinctOp
    verdicts: tuple[Verdict, ...]

    @property
    def is_within(self) -> bool:
        """Tell whether every way keeps to what is allowed."""
        return all(verdict.verdict == "within" for verdict in self.verdicts)

    @property
    def share(self) -> float:
        """Return the largest error relative to what is allowed; infinite where a way fails."""
        return max((_share(verdict) for verdict in self.verdicts), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        call, op = self.op.call, self.op
        place = {"node": op.node, "module": op.module, "line": op.line, "count": op.count}
        told = {"op": call.name, "class": class_of(call.op).name, "shapes": call.shapes, **place}
        return {**told, "ways": [verdict.to_json() for verdict in self.verdicts]}


def _share(verdict: Verdict) -> float:
    if verdict.verdict == "fails":
        return float("inf")
    return verdict.worst.share if verdict.worst else 0.0


Runners = tuple[Runner, ...]


def runners_of(ways: Sequence[Way]) -> Runners:
    """Return what runs calls in these ways.

    Raises:
        AlignError: there is no way, or two have the same name.
    """
    names = [way.name for way in ways]
    if len(set(names)) < len(names) or not names:
        raise AlignError(f"ways are {names}\nhint: give different ones, such as fp32,bf16")
    return tuple(map(Runner, ways))


def align_ops(
    graph: Graph, leaves: Mapping[fx.Node, Any], runners: Runners, tolerances: Tolerances, tell: Tell = nobody
) -> tuple[AlignedOp, ...]:
    """Run every distinct op of a graph in every way, forward and backward; the worst come first."""
    ops = distinct_ops(graph, leaves)
    found = []
    for done, op in enumerate(ops):
        tell(op.call.name, done, len(ops))
        found.append(AlignedOp(op, align_call(op.call, runners, tolerances)))
    return tuple(sorted(found, key=lambda one: one.share, reverse=True))


def align_call(call: Call, runners: Runners, tolerances: Tolerances) -> tuple[Verdict, ...]:
    """Run one call in every way and judge each; ways that are to be of the same dtype must make the same dtypes."""
    judged = [judge(runner, call, tolerances) for runner in runners]
    first = judged[0][1]
    return tuple(
        _of_same_dtypes(verdict, made, first, runner.way, runners[0].way)
        for (verdict, made), runner in zip(judged, runners, strict=True)
    )


def _of_same_dtypes(verdict: Verdict, made: Made | None, first: Made | None, way: Way, other: Way) -> Verdict:
    """Return a verdict that says where a way makes other dtypes than the first one."""
    if made is None or first is None or way.dtype is not other.dtype:
        return verdict
    kinds, wanted = ([str(output.dtype) for output in one.outputs] for one in (made, first))
    if kinds == wanted:
        return verdict
    says = f"makes {', '.join(kinds)} where {other.name} makes {', '.join(wanted)}"
    return Verdict(verdict.way, "differs", verdict.findings, says)
