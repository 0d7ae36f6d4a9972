"""Count what a device graph communicates, forward and backward, block by block.

The backward is read off the adjoints of the communication ops, each run once on a stand-in: an op has one where a
gradient flows through it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from hetu_fx.comm_ops import COMM_OPS
from hetu_fx.graph import meta
from hetu_fx.graph.blocks import block_index
from hetu_fx.graph.calls import overload
from hetu_fx.transforms.device_graph import DeviceGraph


@dataclass(frozen=True, slots=True)
class Traffic:
    """How often each communication op runs, by name; ops that send nothing are left out."""

    forward: Mapping[str, int] = field(default_factory=dict)
    backward: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """Write `forward 2 all_reduce; backward 2 all_reduce`."""
        return f"forward {_text(self.forward)}; backward {_text(self.backward)}"


def traffic_by_block(device: DeviceGraph, block_paths: Sequence[str]) -> dict[int | None, Traffic]:
    """Return the traffic of each repeated block of a device graph, and of all that stands outside of them (None).

    What is sent forward belongs to the block that makes the value, what is sent backward to the one that reads it.

    Args:
        device: the graph of one rank.
        block_paths: FQNs of the model's repeated blocks, as `Graph.block_paths` has them.
    """
    forward: defaultdict[int | None, Counter[str]] = defaultdict(Counter)
    backward: defaultdict[int | None, Counter[str]] = defaultdict(Counter)
    for node in communications(device):
        maker, reader = (block_index(meta.module_stack(at), block_paths) for at in (node, next(iter(node.users))))
        forward[maker].update(_sending([overload(node)._opname]))
        if node in device.differentiable:
            backward[reader].update(_sending([name for name, _ in adjoint_calls(node)]))
    return {block: Traffic(dict(forward[block]), dict(backward[block])) for block in {**forward, **backward}}


def communications(device: DeviceGraph) -> Iterator[fx.Node]:
    """Yield the nodes of a device graph that call communication ops, those that send nothing included."""
    targets = {record.overload for record in COMM_OPS.values()}
    return (node for node in device.graph.nodes if node.op == "call_function" and node.target in targets)


def _sending(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if COMM_OPS[name].cost(1.0, (0, 1), _UNIT) > 0)


def adjoint_calls(node: fx.Node) -> list[tuple[str, tuple[Any, ...]]]:
    """Return (op, arguments after the tensor) of what the backward of a communication calls, in order."""
    calls: list[tuple[str, tuple[Any, ...]]] = []
    with _Recorder(calls):
        COMM_OPS[overload(node)._opname].adjoint(torch.empty(0), *node.args[1:])
    return calls


class _Recorder(TorchDispatchMode):
    """Notes the communication ops that are called, and passes their operand on."""

    def __init__(self, calls: list[tuple[str, tuple[Any, ...]]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note and skip a communication op, run any other."""
        run: Callable[..., Any] = func
        if func.namespace != "hetu":
            return run(*args, **(kwargs or {}))
        self.calls.append((func._opname, tuple(args[1:])))
        return args[0]


class _Unit:
    """A topology in which a byte takes a second."""

    def bytes_per_second(self, a: int, b: int) -> float:
        """Return the speed of every link."""
        return 1.0

    def latency_seconds(self, a: int, b: int) -> float:
        """Return the latency of every link."""
        return 0.0

    def node_of(self, rank: int) -> int:
        """Return the node, of which there is one."""
        return 0


_UNIT = _Unit()


def _text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "nothing"
