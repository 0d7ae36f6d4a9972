"""What is said of a plan that is wrong: what differs, which op differs first, and a case to report.

Forward: every value of the graph becomes an output, of one device and of the plan, and they are held against each other
in the order of the graph. Where all are right, a gradient is wrong on its way back: the parameters are looked at in the
order in which backward comes to them.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from hetu_fx.base.dtypes import carries_gradient
from hetu_fx.check.kept import code_digest
from hetu_fx.check.trial import Case, Found, Tolerance
from hetu_fx.check.trial_blocks import KeptBlocks
from hetu_fx.check.verdict import differences
from hetu_fx.errors import HetuFxError
from hetu_fx.graph import meta
from hetu_fx.graph.bind import Batch, flatten_batch
from hetu_fx.graph.containers import Entries, TensorSlot
from hetu_fx.graph.graph import OBSERVED, Graph, LeafKind, OutputKind, OutputLeaf
from hetu_fx.graph.row_dims import AskedRowDims
from hetu_fx.plans.plan import Plan
from hetu_fx.program.captures import Programs
from hetu_fx.program.program import Program
from hetu_fx.program.reads import Reads
from hetu_fx.program.tracer import Tracer
from hetu_fx.switching.graph_execution import GraphExecution
from hetu_fx.transforms.layouts.analysed_graph import Analyse
from hetu_fx.transforms.passes import run_pass

_FEW = 5  # gradients that are named


def failure_text(plan: Plan, case: Case, found: Found, captured: GraphExecution | None, blocks: KeptBlocks) -> str:
    """Return the message of an error for a plan that is wrong."""
    names = blocks.original_names()
    first = "" if captured is None else _first_wrong(case, found, captured)
    lines = [
        f"the plan {plan.summary()} was tried on a small case of the model, and does not give what one device gives: "
        f"{differences_text(found)}",
        *([first] if first else []),
        *_hints(case, found),
        f"case: {json.dumps(_case(case, plan, blocks))}",
    ]
    return "\n".join(_with_names(line, names) for line in lines)


def _hints(case: Case, found: Found) -> list[str]:
    if found.remembers and case.eager is None:
        return [
            "on one device, too, a second equal step gives something else: the forward uses what it keeps in Python (a "
            "counter, an iterator) or reads elsewhere (a clock, a file), and a graph repeats the first value",
            "hint: keep it in a buffer (register_buffer), set it outside of the forward, or use "
            'hetu_fx.auto_parallelize(..., capture="eager")',
        ]
    if case.eager is not None:
        return [
            "each replica has run all rows, and yet they differ",
            "hint: let the module follow from its inputs, parameters and the random numbers of torch, random and "
            "numpy.random alone, or use one device (hetu_fx.Plan.single())",
        ]
    return [
        "hint: report the case below, and use another plan until it is fixed; check=False trains anyway, with the "
        "difference above"
    ]


def differences_text(found: Found) -> str:
    """Return what differs from one device, and by how much."""
    if found.failure:
        return f"its ranks do not go through a step: {found.failure}"
    said = []
    if found.loss_is_wrong:
        right, made = found.losses
        which = f" of step {found.step}" if found.step > 1 else ""
        said.append(f"the loss{which} is {made:.10g}, not {right:.10g}")
    wrong, total = found.wrong, len(found.gradients or {}) + len(found.buffers or {})
    if wrong:
        most = sorted(wrong.items(), key=lambda entry: -entry[1])[:_FEW]
        named = ", ".join(f"{name} by {difference:.1e}" for name, difference in most)
        said.append(f"{len(wrong)} of {total} gradients and buffers differ, relative to their norms: {named}")
    return "; ".join(said)


def _with_names(line: str, names: Mapping[str, str]) -> str:
    """Return a text in which shortened lists have the numbers of the whole model's."""
    for short, path in sorted(names.items(), key=lambda pair: -len(pair[0])):
        if short != path:
            line = line.replace(f"{short}.", f"<{path}>.").replace(f"'{short}'", f"'<{path}>'")
    for path in names.values():
        line = line.replace(f"<{path}>", path)
    return line


def _case(case: Case, plan: Plan, blocks: KeptBlocks) -> dict[str, Any]:
    """Return what somebody needs to try the same again."""
    given = flatten_batch(case.batch)[1]
    inputs = {name: f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for name, x in given.items()}
    return {
        "plan": case.plan.to_json(),
        "whole_plan": plan.to_json() | {"predicted": None},
        "rows": case.rows,
        "inputs": inputs,
        "parameters": sum(p.numel() for p in case.model.parameters()),
        "model": type(case.model).__qualname__,
        "blocks": [len(blocks.kept), len(blocks.paths)],
        "dtype": str(case.dtype),
        "capture": "graph" if case.eager is None else "eager",
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "hetu_fx": code_digest()[:12]},
    }


_FEW_PARTS = 12  # values that are looked at at once, where all together are refused


def _first_wrong(case: Case, found: Found, captured: GraphExecution) -> str:
    """Say what differs first; empty where nothing does."""
    graph = captured.program.graph
    if found.failure:
        return ""
    node = _first_wrong_value(case, captured, found.tolerance) if found.loss_is_wrong else None
    if node is not None:
        return f"the first value that differs is that of {_describe_op(node)}"
    if found.loss_is_wrong:
        where = "" if graph.loss is None else f", which {_describe_op(graph.loss)} makes"
        return f"all values before it are right: what differs first is the loss{where}"
    return _of_gradients(graph, found)


def _describe_op(node: fx.Node) -> str:
    """Return an op with its module and the user's line."""
    stack = meta.module_stack(node)
    module = f" in {stack[-1][0]!r} ({stack[-1][1].rpartition('.')[2]})" if stack and stack[-1][0] else ""
    line = meta.source_line(node)
    return f"{node.target}{module}{f' at {line}' if line else ''}"


def _of_gradients(graph: Graph, found: Found) -> str:
    """Say which gradients differ; backward comes to the last parameter of the graph first."""
    readers = {leaf.name: _reader(graph, leaf.node) for leaf in graph.leaves_of(LeafKind.PARAMETER)}
    order = {node: place for place, node in enumerate(graph.graph.nodes)}
    wrong = [name for name in found.wrong if readers.get(name) is not None]
    if not wrong:
        return ""
    last = max(wrong, key=lambda name: order[readers[name]])
    node = readers[last]
    assert node is not None, "it is among those with a reader"
    return (
        f"all values are right: on the way back, the first gradient that differs is that of {last!r}, which "
        f"{_describe_op(node)} reads"
    )


def _reader(graph: Graph, leaf: fx.Node) -> fx.Node | None:
    """Return the last op that reads a parameter."""
    return next(
        (node for node in reversed(graph.graph.nodes) if node in leaf.users and node.op == "call_function"), None
    )


def _first_wrong_value(case: Case, captured: GraphExecution, tolerance: Tolerance) -> fx.Node | None:
    """Return the first op of the graph whose value under the plan is not that of one device, if one is found."""
    program = captured.program
    nodes = [node for node in program.graph.graph.nodes if _can_be_seen(node)]
    for group in (nodes, *_some(nodes)):
        try:
            return _first_of(group, case, tolerance)
        except (HetuFxError, RuntimeError):  # a value that cannot be an output: fewer are looked at
            continue
    return None


def _some(nodes: list[fx.Node]) -> Iterator[list[fx.Node]]:
    """Yield fewer and fewer of the nodes, spread over the graph."""
    step = 2
    while len(nodes) // step >= _FEW_PARTS:
        yield nodes[::step]
        step *= 2


def _can_be_seen(node: fx.Node) -> bool:
    return node.op == "call_function" and meta.is_tensor(node) and carries_gradient(meta.dtype(node))


def _first_of(nodes: list[fx.Node], case: Case, tolerance: Tolerance) -> fx.Node | None:
    shared = replace(case, rows=None)
    names = tuple(node.name for node in nodes)
    how = shared.how()
    programs = Programs(how.copied(case.model), case.loss_fn, row_dims=AskedRowDims(how.row_dims))
    programs.tracer = _Probing(names, programs)
    probing = GraphExecution(programs, case.batch, None)
    right = _values(replace(shared, plan=Plan.single(0)), probing)
    made = _values(shared, probing)
    for node in nodes:
        if node.name not in right or node.name not in made:
            continue
        alone, found = ({node.name: values[node.name]} for values in (right, made))
        if differences(alone, found, tolerance.negligible)[node.name] > tolerance.relative:
            return node
    return None


def _values(case: Case, probing: GraphExecution) -> Mapping[str, Tensor]:
    """Return what the probed nodes make in a step of a case, by their names."""
    seen = _Seen()
    probing.observers = seen  # type: ignore[assignment]
    case.how().train(case.model, [case.batch], case.plan, probing)
    return seen.values


class _Probing(Tracer):
    """Makes programs that have the values of some nodes among their outputs."""

    def __init__(self, nodes: tuple[str, ...], programs: Programs) -> None:
        super().__init__(programs.model, programs.loss_fn)
        self.nodes = nodes

    def trace(self, batch: Batch, training: bool) -> tuple[Program, Reads]:
        """Capture the model; see `Tracer`."""
        program, reads = super().trace(batch, training)
        return _probed(program, self.nodes), reads


class _Seen:
    """Takes what observed values are, from whichever rank tells first: all have them whole."""

    names: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def tell(self, found: Mapping[str, Tensor]) -> None:
        """Take them."""
        for name, value in found.items():
            self.values.setdefault(name, value.detach().clone())


def _probed(program: Program, names: tuple[str, ...]) -> Program:
    """Return a program that has the values of nodes among its outputs."""
    graph = program.graph.clone()
    nodes = {node.name: node for node in graph.graph.nodes}
    labels = [f"{OBSERVED} {name}" for name in names]
    graph.output_node.args = ((*graph.output_values, *(nodes[name] for name in names)),)
    outputs = (*graph.outputs, *(OutputLeaf(label, OutputKind.VALUE) for label in labels))
    observed = Entries(dict, tuple(labels), tuple(map(TensorSlot, labels)))
    leaves = program.graph.leaves_of(LeafKind.PARAMETER)
    frozen = frozenset(leaf.name for leaf in leaves if leaf.node not in program.flow.differentiable)
    return Program(run_pass(Analyse(frozen), graph.evolve(outputs=outputs, observed=observed)))
