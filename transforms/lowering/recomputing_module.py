"""Make a device graph a module that recomputes what the graph says, instead of keeping it for backward.

Where a stage recomputes only some ops, a table tells which of torch's keep what they make, whatever the model calls
them: `aten.linear` is `mm` or `addmm` then.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hetu_fx.comm_ops.ops.overlapped_products import GATHERED_PRODUCTS
from hetu_fx.plans.recomputed import RecomputedOps
from hetu_fx.transforms.rewrites import sequence_ops  # noqa: F401 - registers hetu::sequence_attention_forward
from hetu_fx.transforms.specialize.device_graph import DeviceGraph


def _ops(*names: str) -> frozenset[Any]:
    return frozenset(getattr(torch.ops.aten, name).default for name in names)


_OF_WEIGHTS = _ops("mm", "addmm", "_scaled_mm", "convolution") | {GATHERED_PRODUCTS.overload}
"""Products of two matrices: no op on a batch of them is one."""

_OF_ACTIVATIONS = _ops(
    "bmm",
    "baddbmm",
    "_grouped_mm",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
) | {torch.ops.hetu.sequence_attention_forward.default}

SAVED: Mapping[RecomputedOps, frozenset[Any]] = {
    "all": frozenset(),
    "attention": _OF_WEIGHTS,
    "pointwise": _OF_WEIGHTS | _OF_ACTIVATIONS,
}


def checkpoint_contexts(ops: RecomputedOps) -> Callable[[], Any]:
    """Return what `torch.utils.checkpoint` takes as `context_fn` for those ops to be recomputed; not for all."""
    return partial(create_selective_checkpoint_contexts, partial(_policy, SAVED[ops]))


def _policy(saved: frozenset[Any], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE


class CheckpointedRun(nn.Module):
    """Keeps only what it is given, and runs `body` again in backward (under functorch: tags it to be run again).

    What ops make that are not among `ops` is kept too.
    """

    def __init__(self, body: fx.GraphModule, ops: RecomputedOps) -> None:
        super().__init__()
        self.body, self.ops = body, ops
        self._options: dict[str, Any] = {} if ops == "all" else {"context_fn": checkpoint_contexts(ops)}

    def forward(self, *inputs: Any) -> Any:
        """Run the body; it draws from no generator, so that none need be put back."""
        return checkpoint(self.body, *inputs, use_reentrant=False, preserve_rng_state=False, **self._options)


@dataclass(frozen=True)
class RecomputingModule:
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
