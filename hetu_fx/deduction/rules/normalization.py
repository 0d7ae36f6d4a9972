"""Normalizations: what they normalize over stays whole, everything else passes through."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from hetu_fx.deduction.rules.build import built, dims_of, grouped, kept, names, replaced
from hetu_fx.deduction.rules.call import Call
from hetu_fx.deduction.rules.forms import ShardedCall, ShardedForm, Traits
from hetu_fx.deduction.rules.rule import NOTHING, Dims, Factoring, LiteralSize, Rule
from hetu_fx.deduction.rules.size import integer
from hetu_fx.graph import meta
from hetu_fx.graph.calls import operand
from hetu_fx.graph.meta import HALVES

aten = torch.ops.aten


def softmax(call: Call) -> Factoring:
    """Normalize over one dim, which may be cut where the op has a form for that."""
    factoring = kept(call)
    return replace(factoring, sharded=names(factoring.operands[0], [call.dim()]))


def _over_last_dims(call: Call) -> Factoring:
    """Normalize over the last dims, which stay whole and which weight and bias have (layer and RMS norm)."""
    dims = dims_of(call.operands[0].shape)
    count = len(call.arguments["normalized_shape"])
    last = range(len(dims) - count, len(dims))
    operands = (dims, *(dims[len(dims) - count :] for _ in call.operands[1:]))
    statistics = tuple(() if i in last else dim for i, dim in enumerate(dims))
    results = tuple(dims if shape == call.operands[0].shape else statistics for shape in call.results)
    return Factoring(operands, results, whole=names(dims, last))


def _over_groups(call: Call) -> Factoring:
    """Normalize over groups of channels and space: batch and groups pass through, the rest stays whole."""
    shape = call.operands[0].shape
    group, rest, sizes = grouped(shape[1], integer(call.integer("num_groups")), "group", "channel")
    dims = replaced(dims_of(shape), {1: (*group, *rest)})
    operands = (dims, *(((*group, *rest),) for _ in call.operands[1:]))
    found = (LiteralSize(call.at("num_groups"), group),) if group else ()
    return Factoring(operands, (dims,), sizes, names(dims[2:]).union(rest), literals=found)


def _over_all_but_one(call: Call) -> Factoring:
    """Scale a weight to a length for each entry of one dim (weight norm); that dim passes, all others stay whole."""
    dims = dims_of(call.operands[0].shape)
    dim = call.dim()
    length = tuple(factors if i == dim else () for i, factors in enumerate(dims))
    return Factoring((dims, length), (dims,), whole=names(dims, [i for i in range(len(dims)) if i != dim]))


def _per_channel(call: Call, *, instances: bool = False) -> Factoring:
    """Normalize over batch and space (batch norm), or over space for each instance: channels pass.

    With running statistics a batch norm passes everything, an instance norm looks over the batch, too.
    """
    dims = dims_of(call.operands[0].shape)
    channel: Dims = (dims[1],)
    operands = (dims, *(channel for _ in call.operands[1:]))
    results = tuple(_channel_or_all(len(shape), dims, channel) for shape in call.results)
    trains = bool(call.arguments.get("training", call.arguments.get("train", True)))
    over_rows = call.position("running_mean") is not None if instances else trains
    rows, space = (names(dims[:1]) if over_rows else NOTHING), (names(dims[2:]) if over_rows or instances else NOTHING)
    return Factoring(operands, results, whole=rows | space)


def _channel_or_all(rank: int, dims: Dims, channel: Dims) -> Dims:
    return channel if rank == 1 else dims if rank == len(dims) else ()


def _log_softmax_over_parts(shard: ShardedCall) -> fx.Node:
    """Subtract log sum exp over all parts."""
    return _cast_back(shard, _normalized(shard))


def _softmax_over_parts(shard: ShardedCall) -> fx.Node:
    """Divide by the sum over all parts."""
    return _cast_back(shard, shard.emit(aten.exp.default, _normalized(shard)))


def _normalized(shard: ShardedCall) -> fx.Node:
    scores, asked = shard.in_full(), shard.given["dtype"]
    scores = scores if asked is None else shard.emit(aten.to.dtype, scores, asked)
    return shard.emit(aten.sub.Tensor, scores, shard.log_sum_exp(scores, shard.dim, summed=True))


def _cast_back(shard: ShardedCall, result: fx.Node) -> fx.Node:
    dtype = meta.dtype(operand(shard.node))
    narrow = shard.given["dtype"] is None and dtype in HALVES
    return shard.emit(aten.to.dtype, result, dtype) if narrow else result


BATCH_NORMS = """
    batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
    _batch_norm_with_update_functional
""".split()

RULES: tuple[Rule, ...] = (
    *built(softmax, "softmax.int", traits=Traits(sharded=ShardedForm(_softmax_over_parts))),
    *built(softmax, "log_softmax.int", traits=Traits(sharded=ShardedForm(_log_softmax_over_parts))),
    *built(softmax, "_softmax", "_log_softmax", "_safe_softmax"),
    *built(_over_last_dims, "layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"),
    *built(_over_groups, "group_norm"),
    *built(_over_all_but_one, "_weight_norm"),
    *built(_per_channel, *BATCH_NORMS),
    *built(_per_channel, "instance_norm", instances=True),
)
