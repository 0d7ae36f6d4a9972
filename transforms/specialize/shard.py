"""One device's part of a call of an op whose looked-across factor is cut, and how to write its form.

See `hetu_fx.transforms.specialize.sharded_forms`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hetu_fx.annotations.annotation import Annotation, Duplicate, Partial, Split
from hetu_fx.comm_ops.resolve.resolution import Resolution
from hetu_fx.comm_ops.resolve.resolve import resolve_edge
from hetu_fx.graph import meta
from hetu_fx.graph.calls import bound, operand, overload

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Shard:
    """One device's part of an op's factor, and how to write ops and communication for it.

    Fields:
        node: the op in the logical graph.
        args, kwargs: its arguments on this device, tensors as local nodes.
        devices, position: the devices that share the factor, and which of them this one is.
        sizes: the part of the factor that each device has.
        emit: adds a call of an op to the device graph.
        communicate: adds the calls of a resolution.
    """

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    devices: tuple[int, ...]
    position: int
    sizes: tuple[int, ...]
    emit: Callable[..., fx.Node]
    communicate: Callable[[fx.Node, Resolution], fx.Node]

    @property
    def given(self) -> dict[str, Any]:
        """Return all arguments by name, defaults filled in."""
        return bound(overload(self.node), self.args, self.kwargs)

    @property
    def first(self) -> int:
        """Return the first index of this device's part."""
        return sum(self.sizes[: self.position])

    @property
    def rank(self) -> int:
        """Return how many dims the first operand has."""
        return len(meta.shape(operand(self.node)))

    @property
    def dim(self) -> int:
        """Return the dim argument counted from the front."""
        return int(self.given["dim"]) % max(self.rank, 1)

    def total(self, summand: fx.Node) -> fx.Node:
        """Sum a value with the first operand's dims over the devices; its cotangent is the same on all of them."""
        ways = len(self.devices)
        source, target = (Annotation.on(self.devices, state) for state in (Partial(ways), Duplicate(ways)))
        return self.communicate(summand, resolve_edge(source, target, target, (None,) * self.rank))

    def joined(self, piece: fx.Node, dim: int, *, summed: bool) -> fx.Node:
        """Put pieces of size 2 in `dim` side by side, one per device; `summed` if cotangents are summands."""
        ways = len(self.devices)
        source, target = (Annotation.on(self.devices, state) for state in (Split.even(dim, ways), Duplicate(ways)))
        gradient = Annotation.on(self.devices, Partial(ways)) if summed else target
        shape = tuple(2 * ways if i == dim else None for i in range(self.rank))
        return self.communicate(piece, resolve_edge(source, target, gradient, shape))

    def log_sum_exp(self, scores: fx.Node, dim: int, *, summed: bool) -> fx.Node:
        """Return log sum exp over all parts, with `dim` kept at size 1; a part may be all minus infinity."""
        emit = self.emit
        peak = emit(aten.nan_to_num.default, emit(aten.amax.default, emit(aten.detach.default, scores), [dim], True))
        part = emit(aten.sum.dim_IntList, emit(aten.exp.default, emit(aten.sub.Tensor, scores, peak)), [dim], True)
        both = self.joined(emit(aten.cat.default, [peak, part], dim), dim, summed=summed)
        peaks = emit(aten.detach.default, emit(aten.slice.Tensor, both, dim, 0, None, 2))
        parts = emit(aten.slice.Tensor, both, dim, 1, None, 2)
        top = emit(aten.amax.default, peaks, [dim], True)
        weights = emit(aten.exp.default, emit(aten.sub.Tensor, peaks, top))
        total = emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, parts, weights), [dim], True)
        return emit(aten.add.Tensor, emit(aten.log.default, total), top)

    def places(self, indices: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Return indices counted from the start of the part (0 where they lie elsewhere), and where they do."""
        place = self.emit(aten.sub.Tensor, indices, self.first)
        before = self.emit(aten.lt.Scalar, place, 0)
        after = self.emit(aten.ge.Scalar, place, self.sizes[self.position])
        elsewhere = self.emit(aten.logical_or.default, before, after)
        return self.emit(aten.masked_fill.Scalar, place, elsewhere, 0), elsewhere

    def picked(self, values: fx.Node, dim: int, indices: fx.Node) -> fx.Node:
        """Pick along the cut dim; zero where the index lies in another part."""
        place, elsewhere = self.places(indices)
        return self.emit(aten.masked_fill.Scalar, self.emit(aten.gather.default, values, dim, place), elsewhere, 0.0)
