"""Losses: rows are summed away (a mean is partial, weighed by the shard's count); classes may be cut."""

from __future__ import annotations

import torch
from torch import fx

from hetu_fx.deduction.rules.build import broadcast, broadcast_shape, built, dims_of, names
from hetu_fx.deduction.rules.call import Call
from hetu_fx.deduction.rules.forms import Lacking, ShardedCall, ShardedForm, Traits
from hetu_fx.deduction.rules.rule import NOTHING, Dims, Factoring, Rule
from hetu_fx.graph import meta
from hetu_fx.graph.calls import operand
from hetu_fx.graph.meta import HALVES

NONE, MEAN = 0, 1  # torch's codes of the reduction argument; 2 is the sum
aten = torch.ops.aten


def _classified(call: Call) -> Factoring:
    """Compare scores per class with targets: all dims but the classes are rows.

    The class dim may be cut, if targets are indices (not probabilities) and classes are not weighed.
    """
    shape = call.operands[0].shape
    dims = dims_of(shape)
    at = 1 if len(shape) > 1 else 0
    rows = dims[:at] + dims[at + 1 :]
    operands = tuple(_of_rank(len(op.shape), op.argument, dims, rows, dims[at]) for op in call.operands)
    cut = call.position("weight") is None and operands[1] == rows
    classes = names(dims, [at])
    return _reduced(call, operands, rows, NOTHING if cut else classes, classes if cut else NOTHING)


def _of_rank(rank: int, argument: str, dims: Dims, rows: Dims, classes: tuple[str, ...]) -> Dims:
    if argument == "weight":
        return (classes,)
    return dims if rank == len(dims) else rows


def compared(call: Call) -> Factoring:
    """Compare each element with its target: every dim is rows."""
    rows = dims_of(broadcast_shape([operand.shape for operand in call.operands]))
    return _reduced(call, tuple(broadcast(operand.shape, rows) for operand in call.operands), rows, NOTHING, NOTHING)


def _reduced(
    call: Call, operands: tuple[Dims, ...], rows: Dims, whole: frozenset[str], sharded: frozenset[str]
) -> Factoring:
    reduction = call.integer("reduction")
    results: tuple[Dims, ...] = (rows if reduction == NONE else (),) + ((),) * (len(call.results) - 1)
    averaged = names(rows) if reduction == MEAN else NOTHING
    return Factoring(operands, results, whole=whole, averaged=averaged, sharded=sharded)


def _cross_entropy_over_parts(shard: ShardedCall) -> fx.Node:
    """Compare scores with targets, labels smoothed or not; the same on every device."""
    given, dim = shard.given, _class_dim(shard)
    scores, smoothing = shard.in_full(), given["label_smoothing"]
    normalizer = shard.log_sum_exp(scores, dim, summed=False)
    expected = shard.picked(scores, dim, shard.emit(aten.unsqueeze.default, given["target"], dim))
    if smoothing:
        spread = shard.emit(aten.sum.dim_IntList, scores, [dim], True)
        expected = shard.emit(aten.mul.Tensor, expected, 1 - smoothing)
        expected = shard.emit(aten.add.Tensor, expected, spread, alpha=smoothing / sum(shard.sizes))
    each = shard.emit(aten.sub.Tensor, normalizer, shard.total(expected))
    return _over_rows(shard, shard.emit(aten.squeeze.dim, each, dim))


def _pick_own_scores(shard: ShardedCall) -> fx.Node:
    """Pick the negative scores of targets that lie in the part; a summand."""
    dim = _class_dim(shard)
    index = shard.emit(aten.unsqueeze.default, shard.given["target"], dim)
    own = shard.picked(shard.in_full(), dim, index)
    return _over_rows(shard, shard.emit(aten.neg.default, shard.emit(aten.squeeze.dim, own, dim)))


def _class_dim(shard: ShardedCall) -> int:
    return 1 if shard.rank > 1 else 0


def _over_rows(shard: ShardedCall, each: fx.Node) -> fx.Node:
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


RULES: tuple[Rule, ...] = (
    *built(_classified, "cross_entropy_loss", traits=Traits(sharded=ShardedForm(_cross_entropy_over_parts))),
    *built(_classified, "nll_loss", "nll_loss_nd", traits=Traits(sharded=ShardedForm(_pick_own_scores, Lacking.SUM))),
    *built(_classified, "nll_loss2d"),
    *built(
        compared,
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div"),
        *("binary_cross_entropy_with_logits", "soft_margin_loss", "poisson_nll_loss"),
    ),
)
