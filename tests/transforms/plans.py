"""Put plans on captured models without devices: programs, device graphs, and what these say as text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from hetu_fx.annotations.annotation import Annotation, cotangent
from hetu_fx.annotations.local import local_part
from hetu_fx.comm_ops.ops.table import join_parts, take_part
from hetu_fx.comm_ops.resolve.resolution import OpCall
from hetu_fx.graph import meta
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.program.program import Program, make_program
from hetu_fx.program.tracer import Tracer
from hetu_fx.transforms.layouts.annotate import Annotate
from hetu_fx.transforms.layouts.deduce import Deduce
from hetu_fx.transforms.layouts.deduced_graph import DeducedGraph
from hetu_fx.transforms.lowering.graph_traffic import communications
from hetu_fx.transforms.lowering.recompute import Recompute
from hetu_fx.transforms.show import op_name
from hetu_fx.transforms.specialize.device_graph import DeviceGraph, GraphSlot, SlotKind
from hetu_fx.transforms.specialize.specialize import Specialize
from tests.model_zoo import captured
from tests.oracles.traffic import adjoint_calls

Batch = Mapping[str, Tensor] | tuple[Tensor, ...]


def program_of(model: nn.Module, batch: Batch, loss_fn: Callable[..., Tensor] | None = None) -> Program:
    """Capture a model in its own mode; parameters that need no gradient are frozen."""
    return Tracer(model, loss_fn).trace(batch, model.training)[0]


@functools.cache
def zoo_program(name: str) -> Program:
    """Return a model of the zoo in training mode as a program, made once per process."""
    return make_program(captured(name)[1], frozenset())


def pipeline(*stages: Sequence[int], ratios: Sequence[int] = (), rows: int = 1, micro_batches: int = 1) -> Pipeline:
    """Write a pipeline by the devices of its stages; `ratios` are the first stage's."""
    first, *rest = stages
    made = (Stage(tuple(first), tuple(ratios)), *(Stage(tuple(devices)) for devices in rest))
    return Pipeline(made, share=rows, micro_batches=micro_batches)


def deduced(program: Program, plan: Plan, *, wants_values: bool = False) -> DeducedGraph:
    """Put a plan on a program and deduce all states: once for all ranks and readers, as ranks of one process do."""
    return _deduced(program, plan, wants_values)


@functools.lru_cache(maxsize=32)
def _deduced(program: Program, plan: Plan, wants_values: bool) -> DeducedGraph:
    return Deduce()(Annotate(plan, wants_values)(program.analysed))


def device_graph(program: Program, plan: Plan, rank: int, *, wants_values: bool = False) -> DeviceGraph:
    """Specialize a program for one rank of the plan."""
    whole = deduced(program, plan, wants_values=wants_values)
    made = Specialize(rank)(whole)
    assert made is not None
    return Recompute(whole.annotated)(made)


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
    devices: Mapping[int, DeviceGraph], feed: Callable[[int, GraphSlot], Any]
) -> dict[int, dict[tuple[str, str], Tensor]]:
    """Run the graphs of all ranks of one stage in one process; return each rank's results by (kind, name).

    What they communicate is differentiable: the backward plays the adjoints.
    """
    runs = {rank: _interpret(device, feed) for rank, device in devices.items()}
    waiting = {rank: next(run) for rank, run in runs.items()}
    while not any(isinstance(call, dict) for call in waiting.values()):
        met = {rank: value for group in _meetings(waiting) for rank, value in _met(group, waiting)}
        waiting = {rank: run.send(met[rank]) for rank, run in runs.items()}
    return waiting


def _meetings(waiting: Mapping[int, tuple[OpCall, Tensor]]) -> list[tuple[int, ...]]:
    """Return who meet with each other: those that a call names, or all."""
    named = {rank: call.args[5 if call.op == "ring_attention" else 0] for rank, (call, _) in waiting.items()}
    groups = dict.fromkeys(tuple(ranks) if isinstance(ranks, list) else tuple(waiting) for ranks in named.values())
    assert sorted(rank for group in groups for rank in group) == sorted(waiting), f"ranks meet crosswise: {named}"
    return list(groups)


def _met(group: tuple[int, ...], waiting: Mapping[int, tuple[OpCall, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    calls, values = zip(*(waiting[rank] for rank in group), strict=True)
    found = attended(calls, values) if calls[0].op == "ring_attention" else Meeting.apply(calls, *values)
    return zip(group, found, strict=True)


class Meeting(torch.autograd.Function):
    """One communication of all ranks at once."""

    @staticmethod
    def forward(ctx: Any, calls: Sequence[OpCall], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.calls = calls
        return play(calls, values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        for step in zip(*map(adjoint_calls, ctx.calls), strict=True):
            gradients = play(step, gradients)
        return (None, *gradients)


def attended(calls: Sequence[OpCall], queries: Sequence[Tensor]) -> tuple[tuple[Tensor], ...]:
    """Do what ring attention does, on keys and values put together: what the ring itself does is tested by itself."""
    assert len({str(call.args[5:]) for call in calls}) == 1, f"ranks meet in different calls: {calls}"
    keys, values = (torch.cat([call.args[i] for call in calls], -2) for i in (0, 1))
    found = []
    for position, (call, query) in enumerate(zip(calls, queries, strict=True)):
        key, value, mask, query_places, key_places, _, sizes, parts, is_causal, scale = call.args
        assert [x.shape[-2] for x in (query, key, value)] == [sizes[position], parts[position], parts[position]]
        if is_causal:
            rows = sum(sizes[:position]) + torch.arange(sizes[position])
            mask = torch.arange(keys.shape[-2]) <= rows.unsqueeze(1)
        if query_places is not None:
            same = (query_places[:, :, None, 0] == key_places[:, None, :, 0]).unsqueeze(1)
            mask = same if mask is None else same & mask
        grouped = query.shape[-3] != keys.shape[-3]
        options = {"attn_mask": mask, "scale": scale, "enable_gqa": grouped}
        found.append((nn.functional.scaled_dot_product_attention(query, keys, values, **options),))
    return tuple(found)


def play(calls: Sequence[OpCall], values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Do what the collective of all ranks does; they must all have come for the same."""
    assert len({(call.op, str(call.args)) for call in calls}) == 1, f"ranks meet in different calls: {calls}"
    name, args = calls[0].op, calls[0].args
    if name == "identity":
        return tuple(value.clone() for value in values)
    if name == "all_gather":
        return tuple(join_parts(values, args[1], args[3]).clone() for _ in values)
    if name == "all_to_all":
        _, dim, sizes, outer, inner, joined, _, before, _ = args
        parts = [[take_part(value, dim, sizes, at, outer, inner) for value in values] for at in range(len(values))]
        return tuple(join_parts(found, joined, before).clone() for found in parts)
    if name == "repartition":
        _, dim, _, outer, inner, parts = args
        whole = join_parts(values, dim, outer)
        return tuple(take_part(whole, dim, parts, at, outer, inner).clone() for at in range(len(values)))
    if name in ("all_reduce", "reduce_scatter"):
        values = [torch.stack(list(values)).sum(0)] * len(values)
    if name in ("local_slice", "reduce_scatter"):
        _, dim, sizes, outer, inner = args
        values = [take_part(value, dim, sizes, at, outer, inner) for at, value in enumerate(values)]
    return tuple(value.clone() for value in values)


def _interpret(device: DeviceGraph, feed: Callable[[int, GraphSlot], Any]) -> Iterator[Any]:
    """Yield (call, operand) at each communication, to be sent its result; at last the results."""
    slots, env, comms = iter(device.slots), {}, set(communications(device))
    for node in device.graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        if node.op == "placeholder":
            env[node] = feed(device.rank, next(slots))
        elif node.op == "output":
            yield {(r.kind.value, r.name): value for r, value in zip(device.results, args[0], strict=True)}
        elif node in comms:
            env[node] = yield OpCall(node.target._opname, tuple(args[1:])), args[0]
        else:
            env[node] = node.target(*args, **kwargs)


def feeder(
    program: Program, plan: Plan, model: nn.Module, inputs: Mapping[str, Tensor], *, wants_values: bool = False
) -> Callable[[int, GraphSlot], Tensor]:
    """Feed each rank its parts of the parameters, and the inputs whole."""
    made = deduced(program, plan, wants_values=wants_values)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    leaves = {leaf.name: leaf.node for leaf in program.graph.leaves}

    def feed(rank: int, slot: GraphSlot) -> Tensor:
        if slot.kind is SlotKind.INPUT:
            return inputs[slot.name]
        if slot.kind is SlotKind.CONSTANT:
            return program.graph.constants[slot.name]
        if slot.kind is SlotKind.RANDOM_STATE:
            return torch.tensor([3, 1, 0])
        if slot.kind is SlotKind.COUNT:
            number = program.prologue(inputs)[program.counts.index(slot.name)]
            return torch.tensor(number, dtype=meta.dtype(leaves[slot.name]))
        lies = made.value_annotation(leaves[slot.name], made.annotated.layouts[0])
        return local_part(tensors[slot.name], lies, rank)

    return feed


def same_as_one_device(
    model: nn.Module, batch: Batch, plan: Plan, *, loss_fn: Callable[..., Tensor] | None = None, limit: float = 1e-10
) -> dict[int, DeviceGraph]:
    """Compare a plan of one stage with the model itself: loss, outputs, every gradient; return the device graphs."""
    return program_as_one_device(program_of(model, batch, loss_fn), model, batch, plan, loss_fn=loss_fn, limit=limit)


def program_as_one_device(
    program: Program,
    model: nn.Module,
    batch: Batch,
    plan: Plan,
    *,
    loss_fn: Callable[..., Tensor] | None = None,
    limit: float = 1e-10,
) -> dict[int, DeviceGraph]:
    """Compare as `same_as_one_device` does, with a program that is there already."""
    inputs = batch if isinstance(batch, Mapping) else {str(i): x for i, x in enumerate(batch)}
    losses, parts, devices = _trained(program, model, plan, inputs)
    expected = loss_of(model, batch, loss_fn)
    expected.backward()
    for loss in losses:
        torch.testing.assert_close(loss, expected, rtol=limit, atol=limit)
    wholes = {name: parameter.grad for name, parameter in model.named_parameters()}
    _same_gradients(wholes, deduced(program, plan, wants_values=True), parts, limit)
    return devices


def same_in_group(
    program: Program, model: nn.Module, plan: Plan, inputs: Mapping[str, Tensor], *, limit: float
) -> dict[int, DeviceGraph]:
    """Compare a plan of one stage with the program on one device: loss and every gradient; return the device graphs."""
    losses, parts, devices = _trained(program, model, plan, inputs)
    (expected,), alone, _ = _trained(program, model, Plan.single(), inputs)
    for loss in losses:
        torch.testing.assert_close(loss, expected, rtol=limit, atol=limit)
    wholes = {name: part.grad for (_, name), part in alone.items()}
    _same_gradients(wholes, deduced(program, plan, wants_values=True), parts, limit)
    return devices


def _trained(
    program: Program, model: nn.Module, plan: Plan, inputs: Mapping[str, Tensor]
) -> tuple[list[Tensor], dict[tuple[int, str], Tensor], dict[int, DeviceGraph]]:
    """Run all ranks forward and backward; return losses, parts of parameters with gradients, and device graphs."""
    devices = {rank: device_graph(program, plan, rank, wants_values=True) for rank in plan.devices}
    given = feeder(program, plan, model, inputs, wants_values=True)
    parts: dict[tuple[int, str], Tensor] = {}

    def feed(rank: int, slot: GraphSlot) -> Tensor:
        value = given(rank, slot)
        if slot.kind is not SlotKind.PARAMETER:
            return value
        return parts.setdefault((rank, slot.name), value.detach().clone().requires_grad_(value.requires_grad))

    results = run_in_lockstep(devices, feed)
    losses = [found["loss", program.loss_name] for found in results.values()]
    torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])
    return losses, parts, devices


def loss_of(model: nn.Module, batch: Batch, loss_fn: Callable[..., Tensor] | None) -> Tensor:
    output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    if loss_fn is not None:
        return loss_fn(output, **batch) if isinstance(batch, Mapping) else loss_fn(output, *batch)
    return output["loss"] if isinstance(output, Mapping) else output


def _same_gradients(
    wholes: Mapping[str, Tensor | None], made: DeducedGraph, parts: Mapping[tuple[int, str], Tensor], limit: float
) -> None:
    for leaf in made.parameters():
        lies, whole = made.parameter_annotations(leaf)[1], wholes[leaf.name]
        held = {rank: parts[rank, leaf.name].grad for rank in lies.ranks}
        if whole is None:
            assert all(gradient is None for gradient in held.values()), leaf.name
            continue
        floor = limit * max(float(whole.abs().max()), 1e-3)
        for rank in held:
            found, expected = _added_up(rank, held, lies, whole.shape), local_part(whole, cotangent(lies), rank)
            torch.testing.assert_close(found, expected, rtol=limit, atol=floor, msg=leaf.name)


def _added_up(rank: int, held: Mapping[int, Tensor | None], lies: Annotation, shape: torch.Size) -> Tensor:
    """Add up the summands of a rank's part, of which the rank has one; a rank that adds nothing has no gradient."""
    regions = {other: lies.region(other, shape) for other in held}
    mine = {regions[other].summand: held[other] for other in held if regions[other].boxes == regions[rank].boxes}
    mine[regions[rank].summand] = held[rank]
    return torch.stack([gradient for gradient in mine.values() if gradient is not None]).sum(0)
