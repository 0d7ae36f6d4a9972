"""Ops that look across a factor, written for devices that each have a part of it.

A rule names such factors `sharded` (see `hetu_fx.deduction.rule`): the op cannot be run as it is on a part, but a
form of it can. This table has the forms. Look-ups read only what lies in the part and give zero elsewhere, so that the
sum over devices is the result; what is normalized exchanges two numbers per row, the part's peak and sum.

    cross entropy of scores z split over the vocabulary, target t:
        m_i = max z_i,  s_i = sum exp(z_i - m_i)                       one gather of rows x (m_i, s_i)
        log sum exp z = m + log sum_i s_i exp(m_i - m),  m = max m_i
        z[t]          = sum_i (z_i[t] if t lies in part i)             one sum of rows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hetu_fx.annotations.annotation import Annotation, Duplicate, Partial, Split
from hetu_fx.comm_ops.resolution import Resolution
from hetu_fx.comm_ops.resolve import resolve_edge
from hetu_fx.graph import meta
from hetu_fx.graph.calls import bound, operand, overload

aten = torch.ops.aten

NONE, MEAN = 0, 1  # torch's codes of the reduction argument; 2 is the sum
HALVES = (torch.float16, torch.bfloat16)


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

    def dim(self, name: str = "dim") -> int:
        """Return a dim argument counted from the front."""
        return int(self.given[name]) % max(self.rank, 1)

    def total(self, summand: fx.Node, rank: int) -> fx.Node:
        """Sum a value of `rank` dims over the devices; its cotangent is the same on all of them."""
        ways = len(self.devices)
        source, target = (Annotation.on(self.devices, state) for state in (Partial(ways), Duplicate(ways)))
        return self.communicate(summand, resolve_edge(source, target, target, (None,) * rank))

    def joined(self, piece: fx.Node, dim: int, rank: int, *, summed: bool) -> fx.Node:
        """Put pieces of size 2 in `dim` side by side, one per device; `summed` if cotangents are summands."""
        ways = len(self.devices)
        source, target = (Annotation.on(self.devices, state) for state in (Split.even(dim, ways), Duplicate(ways)))
        gradient = Annotation.on(self.devices, Partial(ways)) if summed else target
        shape = tuple(2 * ways if i == dim else None for i in range(rank))
        return self.communicate(piece, resolve_edge(source, target, gradient, shape))

    def log_sum_exp(self, scores: fx.Node, dim: int, *, summed: bool) -> fx.Node:
        """Return log sum exp over all parts, with `dim` kept at size 1; a part may be all minus infinity."""
        emit = self.emit
        peak = emit(aten.nan_to_num.default, emit(aten.amax.default, emit(aten.detach.default, scores), [dim], True))
        part = emit(aten.sum.dim_IntList, emit(aten.exp.default, emit(aten.sub.Tensor, scores, peak)), [dim], True)
        both = self.joined(emit(aten.cat.default, [peak, part], dim), dim, self.rank, summed=summed)
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


def embedding(shard: Shard) -> fx.Node:
    """Look up the rows that lie in the part; zero elsewhere. The padding row gets no gradient, as without parts."""
    given = shard.given
    place, elsewhere = shard.places(given["indices"])
    padding = given["padding_idx"] - shard.first
    own_padding = padding if 0 <= padding < shard.sizes[shard.position] else -1
    found = shard.emit(aten.embedding.default, given["weight"], place, own_padding)
    return shard.emit(aten.masked_fill.Scalar, found, shard.emit(aten.unsqueeze.default, elsewhere, -1), 0.0)


def gather(shard: Shard) -> fx.Node:
    """Pick what lies in the part; zero elsewhere."""
    return shard.picked(shard.given["self"], shard.dim(), shard.given["index"])


def log_softmax(shard: Shard) -> fx.Node:
    """Subtract log sum exp over all parts."""
    return _cast_back(shard, _log_softmax(shard))


def softmax(shard: Shard) -> fx.Node:
    """Divide by the sum over all parts."""
    return _cast_back(shard, shard.emit(aten.exp.default, _log_softmax(shard)))


def _log_softmax(shard: Shard) -> fx.Node:
    scores, asked = _in_full(shard), shard.given["dtype"]
    scores = scores if asked is None else shard.emit(aten.to.dtype, scores, asked)
    return shard.emit(aten.sub.Tensor, scores, shard.log_sum_exp(scores, shard.dim(), summed=True))


def _cast_back(shard: Shard, result: fx.Node) -> fx.Node:
    dtype = meta.dtype(operand(shard.node))
    narrow = shard.given["dtype"] is None and dtype in HALVES
    return shard.emit(aten.to.dtype, result, dtype) if narrow else result


def cross_entropy(shard: Shard) -> fx.Node:
    """Compare scores with targets, labels smoothed or not; the same on every device."""
    given, dim = shard.given, _class_dim(shard)
    scores, smoothing = _in_full(shard), given["label_smoothing"]
    normalizer = shard.log_sum_exp(scores, dim, summed=False)
    expected = shard.picked(scores, dim, shard.emit(aten.unsqueeze.default, given["target"], dim))
    if smoothing:
        spread = shard.emit(aten.sum.dim_IntList, scores, [dim], True)
        expected = shard.emit(aten.mul.Tensor, expected, 1 - smoothing)
        expected = shard.emit(aten.add.Tensor, expected, spread, alpha=smoothing / sum(shard.sizes))
    each = shard.emit(aten.sub.Tensor, normalizer, shard.total(expected, shard.rank))
    return _reduced(shard, shard.emit(aten.squeeze.dim, each, dim))


def nll(shard: Shard) -> fx.Node:
    """Pick the negative scores of targets that lie in the part; a summand."""
    dim = _class_dim(shard)
    index = shard.emit(aten.unsqueeze.default, shard.given["target"], dim)
    own = shard.picked(_in_full(shard), dim, index)
    return _reduced(shard, shard.emit(aten.neg.default, shard.emit(aten.squeeze.dim, own, dim)))


def _class_dim(shard: Shard) -> int:
    return 1 if shard.rank > 1 else 0


def _in_full(shard: Shard) -> fx.Node:
    """Return the scores in a dtype that sums can be made in."""
    scores: fx.Node = shard.given["self"]
    halved = meta.dtype(operand(shard.node)) in HALVES
    return shard.emit(aten.to.dtype, scores, torch.float32) if halved else scores


def _reduced(shard: Shard, each: fx.Node) -> fx.Node:
    """Leave ignored targets out, and sum or average what is left."""
    given, dtype = shard.given, meta.dtype(operand(shard.node))
    ignored = shard.emit(aten.eq.Scalar, given["target"], given["ignore_index"])
    loss = shard.emit(aten.masked_fill.Scalar, each, ignored, 0.0)
    if given["reduction"] != NONE:
        loss = shard.emit(aten.sum.default, loss)
    if given["reduction"] == MEAN:
        count = shard.emit(aten.sum.default, shard.emit(aten.logical_not.default, ignored))
        loss = shard.emit(aten.div.Tensor, loss, count)
    return shard.emit(aten.to.dtype, loss, dtype) if dtype in HALVES else loss


@dataclass(frozen=True, slots=True)
class Form:
    """How an op runs where a sharded factor of it is cut.

    Fields:
        write: writes it into the device graph, and returns its result.
        sums: the result, where it lacks the factor, is a summand; else it is the same on every device.
    """

    write: Callable[[Shard], fx.Node]
    sums: bool


FORMS: Mapping[Any, Form] = {
    aten.embedding.default: Form(embedding, sums=True),
    aten.gather.default: Form(gather, sums=True),
    aten.log_softmax.int: Form(log_softmax, sums=False),
    aten.softmax.int: Form(softmax, sums=False),
    aten.cross_entropy_loss.default: Form(cross_entropy, sums=False),
    aten.nll_loss.default: Form(nll, sums=True),
    aten.nll_loss_nd.default: Form(nll, sums=True),
}
