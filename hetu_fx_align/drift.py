"""Where a whole forward and backward drifts: one graph interpreted in a way and in the reference, side by side.

A value drifts where it is farther from the reference than what its ops allow. What they allow together is measured: the
reference runs once more, with every result and every gradient off by as much as the op's tolerance says, at random.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import fx

from hetu_fx.graph import meta
from hetu_fx.graph.calls import overload
from hetu_fx.graph.graph import Graph
from hetu_fx_align.difference import difference
from hetu_fx_align.interpret import is_op, module_of_node
from hetu_fx_align.run import first_line
from hetu_fx_align.seen import Leaves, Noise, Seen, in_float64, seen_run, wide
from hetu_fx_align.tolerances import is_compared
from hetu_fx_align.way import Runner

MARGIN = 4.0
"""A value may be so many times as far off as in the run that is disturbed at random; errors of real ops add up more
evenly than random ones."""

NOISES = 2
"""So many disturbed runs; the larger error counts."""

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Drift:
    """The first op whose results, or whose gradients, are farther off than what all ops before it allow.

    Attributes:
        direction: `forward` or `backward`.
        module: the innermost around the op; "" for the model itself.
        op: its name.
        node: of the graph.
        line: of the user's code.
        error: relative to the reference's norm.
        allowed: error that is allowed there.
    """

    direction: str
    module: str
    op: str
    node: str
    line: str
    error: float
    allowed: float


@dataclass(frozen=True)
class ModuleDrift:
    """The largest error of what a module's own ops make, and of the gradients that they hand on."""

    module: str
    forward: float
    backward: float


@dataclass(frozen=True)
class WholeRun:
    """How a way does in a whole forward and backward.

    Attributes:
        way: its name.
        first: where it drifts first, forward and backward; neither where it does not.
        modules: errors by module, in the order in which they run.
        loss: of the way.
        reference: the loss of the reference.
        says: why the way could not run the whole.
    """

    way: str
    first: tuple[Drift, ...] = ()
    modules: tuple[ModuleDrift, ...] = ()
    loss: float | None = None
    reference: float | None = None
    says: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values; numbers that are not finite are null."""
        found: dict[str, Any] = _finite(asdict(self))
        return found


def _finite(value: Any) -> Any:
    """Return JSON values with null for numbers that are not finite."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def whole_run(graph: Graph, leaves: Leaves, runner: Runner) -> WholeRun:
    """Run a graph forward and backward in a way and in the reference, and find where it drifts first."""
    own = {
        node: runner.way.tensor(value.detach()).requires_grad_(value.requires_grad) for node, value in leaves.items()
    }
    try:
        made = seen_run(graph, own, lambda call: runner.run(runner.way.adapt_call(call)), None)
    except Exception as error:  # whatever a way raises is what is to be told of it
        return WholeRun(runner.way.name, says=first_line(error))
    exact = {node: wide(value) for node, value in own.items()}
    reference = seen_run(graph, exact, in_float64, None)
    noise = Noise(runner.way.dtype, reference)
    disturbed = [seen_run(graph, exact, in_float64, noise) for _ in range(NOISES)]
    rows = [_row(node, made, reference, disturbed, noise) for node in graph.graph.nodes if is_op(node)]
    first = (*_first("forward", rows),) or (*_first("backward", rows[::-1]),)  # gradients follow a loss that drifts
    return WholeRun(runner.way.name, first, _by_module(rows), made.loss, reference.loss)


@dataclass(frozen=True, eq=False)
class _Row:
    """The errors of an op's results and of the gradients that it hands on, and what is allowed, by direction."""

    node: fx.Node
    error: Mapping[str, float]
    allowed: Mapping[str, float]


def _row(node: fx.Node, made: Seen, reference: Seen, disturbed: list[Seen], noise: Noise) -> _Row:
    error = _errors(node, made, reference)
    noises = [_errors(node, one, reference) for one in disturbed]
    least = {way: noise.share(node, backward=way == "backward") for way in DIRECTIONS}
    return _Row(node, error, {way: max(least[way], *(MARGIN * one[way] for one in noises)) for way in DIRECTIONS})


def _errors(node: fx.Node, one: Seen, reference: Seen) -> dict[str, float]:
    """Return the largest error of an op's results, and of the gradients that it hands on."""
    results = zip(one.results[node], reference.results[node], strict=True)
    mine, theirs = one.gradients.get(node, {}), reference.gradients.get(node, {})
    pairs = {
        "forward": [pair for pair in results if is_compared(overload(node), pair[1])],
        "backward": [(mine[place], theirs[place]) for place in theirs if place in mine],
    }
    return {
        way: max((difference(*pair, reference.scales[way]).error for pair in found), default=0.0)
        for way, found in pairs.items()
    }


def _first(direction: str, rows: list[_Row]) -> Iterator[Drift]:
    for row in rows:
        error, bound = row.error[direction], row.allowed[direction]
        if error > bound:
            node = row.node
            yield Drift(
                direction, module_of_node(node), str(node.target), node.name, meta.source_line(node), error, bound
            )
            return


def _by_module(rows: list[_Row]) -> tuple[ModuleDrift, ...]:
    found: dict[str, tuple[float, float]] = {}
    for row in rows:
        name = module_of_node(row.node)
        forward, backward = found.get(name, (0.0, 0.0))
        found[name] = max(forward, row.error["forward"]), max(backward, row.error["backward"])
    return tuple(ModuleDrift(name, *errors) for name, errors in found.items())
