"""Make a device graph a module that recomputes what the graph says, instead of keeping it for backward."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from hetu_fx.plans.recomputed import RecomputedOps
from hetu_fx.transforms.lowering.saved_ops import contexts_of
from hetu_fx.transforms.specialize.device_graph import DeviceGraph


class CheckpointedRun(nn.Module):
    """Keeps only what it is given, and runs `body` again in backward (under functorch: tags it to be run again).

    What ops make that are not among `ops` is kept too.
    """

    def __init__(self, body: fx.GraphModule, ops: RecomputedOps) -> None:
        super().__init__()
        self.body, self.ops = body, ops
        self._options: dict[str, Any] = {} if ops == "all" else {"context_fn": contexts_of(ops)}

    def forward(self, *inputs: Any) -> Any:
        """Run the body; it draws from no generator, so that none need be put back."""
        return checkpoint(self.body, *inputs, use_reentrant=False, preserve_rng_state=False, **self._options)


@dataclass(frozen=True)
class Checkpoint:
    """Make the runs that are recomputed modules of their own, which keep only what they are given.

    Requires: a device graph.
    Ensures: a module of the slots' values, in order, with the results in order and ordinary autograd behind it. What
        the graph says is recomputed is, whether it is run as it is or compiled.

        %a = aten.gelu(%x)              ->      %run = call_module[recomputed_0](%x, %w)
        %y = aten.linear(%a, %w)                %y = getitem(%run, 0)
    """

    name: ClassVar[str] = "checkpoint"

    def __call__(self, device: DeviceGraph) -> fx.GraphModule:
        if not device.recomputed:
            return fx.GraphModule(nn.Module(), device.graph)
        outer, values, modules = fx.Graph(), dict[fx.Node, fx.Node](), nn.Module()
        ends = {run[-1]: (f"recomputed_{number}", run) for number, run in enumerate(device.recomputed)}
        inside = {node for run in device.recomputed for node in run}
        for node in device.graph.nodes:
            if node in ends:
                name, run = ends[node]
                inputs, results = _ends(run)
                modules.add_module(name, CheckpointedRun(_body(run, inputs, results), device.recomputed_ops))
                made = outer.call_module(name, tuple(values[n] for n in inputs))
                values |= {n: outer.call_function(operator.getitem, (made, i)) for i, n in enumerate(results)}
            elif node not in inside:
                values[node] = outer.node_copy(node, values.__getitem__)
        return fx.GraphModule(modules, outer)


def _ends(run: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return what a run reads of others, and what others read of it."""
    own = set(run)
    inputs = dict.fromkeys(n for node in run for n in node.all_input_nodes if n not in own)
    return list(inputs), [node for node in run if not own.issuperset(node.users)]


def _body(run: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    values = {node: graph.placeholder(node.name) for node in inputs}
    for node in run:
        values[node] = graph.node_copy(node, values.__getitem__)
    graph.output(tuple(values[node] for node in results))
    return fx.GraphModule(nn.Module(), graph)
