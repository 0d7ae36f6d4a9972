"""Put plans on captured models without devices: programs, device graphs, and what these say as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from hetu_fx.graph.capture import capture
from hetu_fx.graph.show import op_name
from hetu_fx.plan import Pipeline, Plan, Stage
from hetu_fx.switching.program import Program, make_program
from hetu_fx.transforms.annotate import Annotate
from hetu_fx.transforms.deduce import Deduce
from hetu_fx.transforms.deduced import DeducedGraph
from hetu_fx.transforms.device_graph import DeviceGraph, Slot
from hetu_fx.transforms.specialize import Specialize

Batch = Mapping[str, Tensor] | tuple[Tensor, ...]


def program_of(model: nn.Module, batch: Batch, loss_fn: Callable[..., Tensor] | None = None) -> Program:
    """Capture a model in its own mode; parameters that need no gradient are frozen."""
    frozen = frozenset(name for name, p in model.named_parameters() if not p.requires_grad)
    return make_program(capture(model, batch, loss_fn=loss_fn, training=model.training), frozen)


def pipeline(*stages: Sequence[int], ratios: Sequence[int] = (), rows: int = 1, micro_batches: int = 1) -> Pipeline:
    """Write a pipeline by the devices of its stages; `ratios` are the first stage's."""
    first, *rest = stages
    made = (Stage(tuple(first), tuple(ratios)), *(Stage(tuple(devices)) for devices in rest))
    return Pipeline(made, rows=rows, micro_batches=micro_batches)


def deduced(program: Program, plan: Plan, *, wants_values: bool = False) -> DeducedGraph:
    """Put a plan on a program and deduce all states."""
    return Deduce()(Annotate(plan, wants_values)(program.graph, program.factors, program.flow))


def device_graph(program: Program, plan: Plan, rank: int, *, wants_values: bool = False) -> DeviceGraph:
    """Specialize a program for one rank of the plan."""
    made = Specialize(rank)(deduced(program, plan, wants_values=wants_values))
    assert made is not None
    return made


def talk(device: DeviceGraph) -> list[str]:
    """Write each hetu:: node as `op args: what it reads -> who reads it`."""
    return [_line(node, device) for node in device.graph.nodes if is_hetu(node)]


def is_hetu(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "hetu"


def _line(node: fx.Node, device: DeviceGraph) -> str:
    source, *arguments = node.args
    readers = ", ".join(_called(user, device) for user in node.users)
    assert isinstance(source, fx.Node)
    return f"{node.target._opname} {' '.join(map(str, arguments))}: {_called(source, device)} -> {readers}"


def _called(node: fx.Node, device: DeviceGraph) -> str:
    """Name a node by its op and the parameter that it reads."""
    names = {n: slot.name for n, slot in zip(device.graph.find_nodes(op="placeholder"), device.slots, strict=True)}
    if node.op != "call_function":
        return names.get(node, node.op)
    read = [names[arg].removesuffix(".weight") for arg in node.all_input_nodes if arg in names]
    return f"{op_name(node)}({', '.join(read)})" if read else op_name(node)


def run_in_lockstep(
    devices: Mapping[int, DeviceGraph], feed: Callable[[int, Slot], Any]
) -> dict[int, dict[tuple[str, str], Tensor]]:
    """Run the graphs of all ranks of one stage in one process; return each rank's results by (kind, name)."""
    runs = {rank: _interpret(device, feed) for rank, device in devices.items()}
    waiting = {rank: next(run) for rank, run in runs.items()}
    while not any(isinstance(call, dict) for call in waiting.values()):
        names = {call.target._opname for call, _ in waiting.values()}
        assert len(names) == 1, f"ranks meet in different ops: {names}"
        total = torch.stack([x for _, x in waiting.values()]).sum(0)
        waiting = {rank: run.send(total if names == {"all_reduce"} else waiting[rank][1]) for rank, run in runs.items()}
    return waiting


def _interpret(device: DeviceGraph, feed: Callable[[int, Slot], Any]) -> Iterator[Any]:
    """Yield (node, operand) at each communication, to be sent its result; at last the results."""
    slots, env = iter(device.slots), {}
    for node in device.graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        if node.op == "placeholder":
            env[node] = feed(device.rank, next(slots))
        elif node.op == "output":
            yield {(r.kind.value, r.name): value for r, value in zip(device.results, args[0], strict=True)}
        elif is_hetu(node):
            assert node.target._opname in ("identity", "all_reduce")
            env[node] = yield node, args[0]
        else:
            env[node] = node.target(*args, **kwargs)
