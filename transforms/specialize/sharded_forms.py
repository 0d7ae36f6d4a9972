"""Ops that look across a factor, written for devices that each have a part of it.

A rule names such factors `sharded` (see `hetu_fx.deduction.rules.rule`): the op cannot be run as it is on a part, but a
form of it can. This table has the forms. Look-ups read only what lies in the part and give zero elsewhere, so that the
sum over devices is the result; what is normalized exchanges two numbers per row, the part's peak and sum.

    cross entropy of scores z split over the vocabulary, target t:
        m_i = max z_i,  s_i = sum exp(z_i - m_i)                       one gather of rows x (m_i, s_i)
        log sum exp z = m + log sum_i s_i exp(m_i - m),  m = max m_i
        z[t]          = sum_i (z_i[t] if t lies in part i)             one sum of rows

A product of groups of rows with a matrix each, where each device has the matrices of some groups (experts).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import fx

from hetu_fx.deduction.factors.factors import FactorClass
from hetu_fx.graph import meta
from hetu_fx.graph.calls import callee, operand
from hetu_fx.graph.meta import HALVES, sum_dtype
from hetu_fx.transforms.layouts.states import SUMMED, WHOLE, AxisState, Spread
from hetu_fx.transforms.specialize.shard import Shard

aten = torch.ops.aten


def grouped_product(shard: Shard) -> fx.Node:
    """Multiply the rows of the groups that the part has; zero for all other rows.

    Rows are turned so that the part's first comes first, and turned back; whatever the op does with rows that belong
    to no group comes to nothing, forward and backward.
    """
    rows, matrices, ends, *others = shard.given.values()
    start, own_ends = _groups(shard, ends)
    number = _numbers(shard, rows)
    elsewhere = shard.emit(aten.unsqueeze.default, _outside(shard, number, start, own_ends), 1)
    if start is not None:
        count = shard.emit(aten.select.int, ends, 0, -1)
        turned, back = (
            shard.emit(aten.remainder.Tensor, shard.emit(op, number, start), count)
            for op in (aten.add.Tensor, aten.sub.Tensor)
        )
        own_ends = shard.emit(aten.sub.Tensor, own_ends, start)
    kept = shard.emit(aten.masked_fill.Scalar, rows, elsewhere, 0.0)
    given = kept if start is None else shard.emit(aten.index_select.default, kept, 0, turned)
    product = shard.emit(callee(shard.node), given, matrices, own_ends, *others)
    product = product if start is None else shard.emit(aten.index_select.default, product, 0, back)
    return shard.emit(aten.masked_fill.Scalar, product, elsewhere, 0.0)


def _groups(shard: Shard, ends: fx.Node) -> tuple[fx.Node | None, fx.Node]:
    """Return the first row of the part's groups (None for row 0), and where each of them ends."""
    last = shard.first + shard.sizes[shard.position]
    start = shard.emit(aten.select.int, ends, 0, shard.first - 1) if shard.first else None
    return start, shard.emit(aten.slice.Tensor, ends, 0, shard.first, last)


def _numbers(shard: Shard, rows: fx.Node) -> fx.Node:
    """Number the rows from 0, on whatever device they are."""
    ones = shard.emit(
        aten.ones_like.default,
        shard.emit(aten.select.int, rows, 1, 0),
        dtype=torch.int64,
    )
    return shard.emit(aten.sub.Tensor, shard.emit(aten.cumsum.default, ones, 0), 1)


def _outside(shard: Shard, number: fx.Node, start: fx.Node | None, ends: fx.Node) -> fx.Node:
    after = shard.emit(aten.ge.Tensor, number, shard.emit(aten.select.int, ends, 0, -1))
    if start is None:
        return after
    return shard.emit(aten.logical_or.default, after, shard.emit(aten.lt.Tensor, number, start))


NONE, MEAN = 0, 1  # torch's codes of the reduction argument; 2 is the sum


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
    return shard.picked(shard.given["self"], shard.dim, shard.given["index"])


def log_softmax(shard: Shard) -> fx.Node:
    """Subtract log sum exp over all parts."""
    return _cast_back(shard, _log_softmax(shard))


def softmax(shard: Shard) -> fx.Node:
    """Divide by the sum over all parts."""
    return _cast_back(shard, shard.emit(aten.exp.default, _log_softmax(shard)))


def _log_softmax(shard: Shard) -> fx.Node:
    scores, asked = _in_full(shard), shard.given["dtype"]
    scores = scores if asked is None else shard.emit(aten.to.dtype, scores, asked)
    return shard.emit(aten.sub.Tensor, scores, shard.log_sum_exp(scores, shard.dim, summed=True))


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
    each = shard.emit(aten.sub.Tensor, normalizer, shard.total(expected))
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
    dtype = meta.dtype(operand(shard.node))
    return shard.emit(aten.to.dtype, scores, sum_dtype(dtype)) if dtype in HALVES else scores


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


class Lacking(Enum):
    """What a form's result is, where it lacks the factor that is cut."""

    WHOLE = "whole"  # the same on every device
    SUM = "sum"  # a summand
    SPREAD = "spread"  # the entries that the part makes, zeros elsewhere


@dataclass(frozen=True, slots=True)
class Form:
    """How an op runs where a sharded factor of it is cut.

    Fields:
        write: writes it into the device graph, and returns its result.
        lacking: what the result is where it lacks the factor.
    """

    write: Callable[[Shard], fx.Node]
    lacking: Lacking = Lacking.WHOLE

    def result(self, factor: FactorClass) -> AxisState:
        """Return the state of a result that lacks `factor`, which is cut."""
        if self.lacking is Lacking.SPREAD:
            return Spread(factor)
        return SUMMED if self.lacking is Lacking.SUM else WHOLE


FORMS: Mapping[str, Form] = {
    "aten.embedding.default": Form(embedding, Lacking.SUM),
    "aten.gather.default": Form(gather, Lacking.SUM),
    "aten.log_softmax.int": Form(log_softmax),
    "aten.softmax.int": Form(softmax),
    "aten.cross_entropy_loss.default": Form(cross_entropy),
    "aten.nll_loss.default": Form(nll, Lacking.SUM),
    "aten.nll_loss_nd.default": Form(nll, Lacking.SUM),
    "aten._grouped_mm.default": Form(grouped_product, Lacking.SPREAD),
    "transformers.grouped_mm_fallback.default": Form(grouped_product, Lacking.SPREAD),
}


def has_form(node: fx.Node) -> bool:
    """Tell whether the op that a node calls has a form."""
    return str(node.target) in FORMS


def form_of(node: fx.Node) -> Form:
    """Return the form of the op that a node calls, whose rule names a sharded factor."""
    return FORMS[str(node.target)]
