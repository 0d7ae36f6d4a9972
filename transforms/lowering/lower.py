"""Lower a device graph to a callable: as it is, or by functorch's joint graph and a compiler.

Requires: a device graph.
Ensures: a function of the slots' values, in order, with the results in order and ordinary autograd behind it. What the
graph says is recomputed is, whether it is run as it is or compiled.

Let every communication op of a device graph say in which form it runs, by the links between its ranks.

Requires: a device graph.
Ensures: ops of ranks on several nodes carry their form where another than the flat one is cheaper; without links, or
on one node, the graph is as it was.

    %all_reduce = hetu.all_reduce(%linear, [0, 1, 2, 3], 'duplicate')                                ->
    %all_reduce = hetu.all_reduce(%linear, [0, 1, 2, 3], 'duplicate', 'nodes 0,0,1,1 from 65536')

Make a device graph's runs that are recomputed into _checkpointed modules of their own.

%a = aten.gelu(%x)                                 %run = call_module[recomputed_0](%x, %w)
%y = aten.linear(%a, %w)           ->              %y = getitem(%run, 0)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from hetu_fx.base.torch_private import aot_autograd, is_boxed
from hetu_fx.comm_ops.resolve.lowering import Lowering
from hetu_fx.errors import EnvironmentProblem
from hetu_fx.transforms.lowering.traffic import comm_call, communications
from hetu_fx.transforms.specialize.device_graph import DeviceGraph

Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
Backend = str | Compiler | None


def check_backend(backend: Backend) -> None:
    """Raise EnvironmentProblem for a backend that `lower` does not know."""
    if not (backend is None or callable(backend) or backend in ("aot_eager", "inductor")):
        raise EnvironmentProblem(
            f"compile={backend!r} is not known; use None, 'aot_eager', 'inductor' or a function of a GraphModule and "
            f"example inputs"
        )


def lower(device: DeviceGraph, backend: Backend) -> Callable[..., Any]:
    """Return the callable of a device graph.

    Args:
        device: the graph.
        backend: None runs the graph eagerly; "aot_eager" partitions the joint graph by min-cut rematerialisation and
            runs both halves eagerly; "inductor" compiles with torch.compile; a callable compiles each half, given
            its GraphModule and example inputs.
    """
    module = _checkpointed(device)
    if backend is None:
        return module.forward
    if backend == "inductor":
        return torch.compile(module, backend="inductor", dynamic=True)
    if backend == "aot_eager":
        return _aot(module, lambda graph_module, _: graph_module.forward)
    check_backend(backend)
    assert callable(backend)
    return _aot(module, backend)


def _boxed(compiler: Compiler) -> Compiler:
    """Let compiled functions take their arguments as one list, which they may empty to free memory early."""

    def compile_boxed(module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        made = compiler(module, examples)
        boxed: Callable[..., Any] = made if is_boxed(made) else make_boxed_func(made)
        return boxed

    return compile_boxed


def _aot(module: fx.GraphModule, compiler: Compiler) -> Callable[..., Any]:
    """Compile by functorch's joint graph, anew where sizes of 1, grad mode or leaves that want gradients change.

    What the partition recomputes in backward is never communication: it keeps the results of ops that it does not know.
    """
    backend = aot_autograd(
        fw_compiler=_boxed(compiler),
        bw_compiler=_boxed(compiler),
        partition_fn=min_cut_rematerialization_partition,
    )
    return torch.compile(module, backend=backend, dynamic=True)


@dataclass(frozen=True)
class ChooseForms:
    """Choose the forms by a lowering; changes the graph in place, and gives it back."""

    lowering: Lowering
    name: str = "choose_forms"

    def __call__(self, device: DeviceGraph) -> DeviceGraph:
        for node in communications(device):
            call = comm_call(node)
            form: Any = self.lowering.with_algorithm(call).args[len(call.args) :]
            node.args = (*node.args, *form)
        return device


class Checkpointed(nn.Module):
    """Keeps only what it is given, and runs `body` again in backward (under functorch: tags it to be run again)."""

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__()
        self.body = body

    def forward(self, *inputs: Any) -> Any:
        """Run the body; it draws from no generator, so that none need be put back."""
        return checkpoint(self.body, *inputs, use_reentrant=False, preserve_rng_state=False)


def _checkpointed(device: DeviceGraph) -> fx.GraphModule:
    """Return the module of a device graph."""
    if not device.recomputed:
        return fx.GraphModule(nn.Module(), device.graph)
    outer, values, modules = fx.Graph(), dict[fx.Node, fx.Node](), nn.Module()
    ends = {run[-1]: (f"recomputed_{number}", run) for number, run in enumerate(device.recomputed)}
    inside = {node for run in device.recomputed for node in run}
    for node in device.graph.nodes:
        if node in ends:
            name, run = ends[node]
            inputs, results = _ends(run)
            modules.add_module(name, Checkpointed(_body(run, inputs, results)))
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
