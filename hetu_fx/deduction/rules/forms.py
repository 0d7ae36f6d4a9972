"""How ops run on parts of what they cannot simply be cut in: calls on one device, and what a form of an op is.

A rule names factors `sharded` (the op looks across them), `placed` (it goes by position along them) or operands
`travelling` (parts of them go round from device to device). Where such a factor is cut, the op as it is would be wrong
on a part; a form of it is right. Forms stand beside the rules of their family. They only add calls to a device's graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx

from hetu_fx.annotations.annotation import Annotation, Duplicate, Partial, Split
from hetu_fx.comm_ops.resolve.resolution import Resolution
from hetu_fx.comm_ops.resolve.resolve import resolve
from hetu_fx.deduction.rules.call import Call
from hetu_fx.graph import meta
from hetu_fx.graph.calls import Size, operand
from hetu_fx.graph.edit import append_size
from hetu_fx.graph.meta import HALVES, sum_dtype

aten = torch.ops.aten


class OnMissingFactor(Enum):
    """What the result of a sharded form is, where it lacks the factor that is cut."""

    WHOLE = "whole"  # the same on every device
    SUM = "sum"  # a summand
    SPREAD = "spread"  # the entries that the part makes, zeros elsewhere


@dataclass(frozen=True, slots=True)
class ShardedForm:
    """How an op runs where a sharded factor of it is cut.

    Attributes:
        write: writes it into the device graph, and returns its result.
        lacking: what the result is where it lacks the factor.
    """

    write: Callable[[PartCall], fx.Node]
    lacking: OnMissingFactor = OnMissingFactor.WHOLE


@dataclass(frozen=True, eq=False)
class PartCall:
    """A call of an op on a part of a factor in which it cannot simply be cut, and how to write what it is instead.

    Attributes:
        node: the op in the logical graph.
        given: all its arguments on this device by name, tensors as local nodes.
        devices, position: the devices that share the factor, and which of them this one is.
        sizes: the part of the factor that each device has.
        start: where this device's part begins in the whole factor.
        travelling: by operand that travels, the part of it that each device has.
        emit: adds a call of an op to the device graph.
        communicate: adds the calls of a resolution.
        fused: adds a call of a communication op by name, and gives its first result.
    """

    node: fx.Node
    given: Mapping[str, Any]
    devices: tuple[int, ...]
    position: int
    sizes: Sequence[Size]
    start: Size
    travelling: Mapping[int, Sequence[Size]]
    emit: Callable[..., fx.Node]
    communicate: Callable[[fx.Node, Resolution], fx.Node]
    fused: Callable[..., fx.Node]

    @property
    def first(self) -> int:
        """Return the first index of this device's part of a factor of known size."""
        return known_size(self.start)

    @property
    def size(self) -> int:
        """Return how much this device has of a factor of known size."""
        return known_size(self.sizes[self.position])

    def stop(self) -> Size:
        """Return where this device's part ends, computed in the graph where only the run tells."""
        size = self.sizes[self.position]
        return append_size(operator.add, size, self.start) if isinstance(size, fx.Node) else self.first + size

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
        return self.communicate(summand, resolve(source, target, (None,) * self.rank, target))

    def joined(self, piece: fx.Node, dim: int, *, summed: bool) -> fx.Node:
        """Put pieces of size 2 in `dim` side by side, one per device; `summed` if cotangents are summands."""
        ways = len(self.devices)
        source, target = (Annotation.on(self.devices, state) for state in (Split.even(dim, ways), Duplicate(ways)))
        gradient = Annotation.on(self.devices, Partial(ways)) if summed else target
        shape = tuple(2 * ways if i == dim else None for i in range(self.rank))
        return self.communicate(piece, resolve(source, target, shape, gradient))

    def in_full(self) -> fx.Node:
        """Return the first operand, `self` of torch's schema, in a dtype that sums can be made in."""
        given: fx.Node = self.given["self"]
        dtype = meta.dtype(operand(self.node))
        return self.emit(aten.to.dtype, given, sum_dtype(dtype)) if dtype in HALVES else given

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
        after = self.emit(aten.ge.Scalar, place, self.size)
        elsewhere = self.emit(aten.logical_or.default, before, after)
        return self.emit(aten.masked_fill.Scalar, place, elsewhere, 0), elsewhere

    def pick_rows(self, values: fx.Node, dim: int, indices: fx.Node) -> fx.Node:
        """Pick along the cut dim; zero where the index lies in another part."""
        place, elsewhere = self.places(indices)
        return self.emit(aten.masked_fill.Scalar, self.emit(aten.gather.default, values, dim, place), elsewhere, 0.0)


def known_size(size: Size) -> int:
    """Return a size that is known before the run."""
    assert isinstance(size, int), "only the run tells it"
    return size


@dataclass(frozen=True, slots=True)
class OpTraits:
    """What is known of an op besides how its dims relate; what is left out does not hold.

    Attributes:
        vanishing: operands each entry of which makes a few entries of the result alone, zeros where it is zero.
            Summands that do not overlap go through such an op one by one, even where it is not linear: f(a + b) is
            f(a) + f(b) where at most one of a and b is not zero, and f(0) = 0.
        inverse: operands that the op divides by: n times as large, each makes the result an n-th.
        counter_at: for an op that draws by counter, the argument that says which part of the whole tensor it draws.
        sharded: its form where a factor is cut that it looks across.
        placed: its form where a factor is cut along which it goes by position.
        ring: its form where parts of operands go round.
        points: tells of a call which operands have values that are positions in another, in which, and in what dim.
        needs_entries: libraries refuse to do it on a tensor without entries; a cut dim is the same dim of its result.
    """

    vanishing: frozenset[int] = frozenset()
    inverse: frozenset[int] = frozenset()
    counter_at: int | None = None
    sharded: ShardedForm | None = None
    placed: Callable[[PartCall], fx.Node] | None = None
    ring: Callable[[PartCall], fx.Node] | None = None
    points: Callable[[Call], Iterable[tuple[int, int, int]]] | None = None
    needs_entries: bool = False


NO_TRAITS = OpTraits()
KEEPS_ZEROS = OpTraits(vanishing=frozenset({0}))
