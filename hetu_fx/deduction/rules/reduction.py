"""Reductions: sums and (weighed by the count) means are partial, everything else keeps its dims whole."""

from __future__ import annotations

from hetu_fx.deduction.rules.build import FIRST, broadcast, built, dims_of, kept, names
from hetu_fx.deduction.rules.call import Call
from hetu_fx.deduction.rules.rule import Factoring, Rule


def _summed_away(call: Call) -> Factoring:
    """Sum over dims: partial where they are cut."""
    return _reduction(call, linear=True)


def _counted_away(call: Call) -> Factoring:
    """Count over dims: partial where they are cut, but not linear."""
    return _reduction(call)


def _averaged_away(call: Call) -> Factoring:
    """Average over dims: partial, weighed by the shard's count, where they are cut."""
    return _reduction(call, linear=True, averaged=True)


def _looked_over(call: Call) -> Factoring:
    """Reduce over dims in a way that cannot be done in parts: they stay whole."""
    return _reduction(call, whole=True)


def _reduction(call: Call, *, linear: bool = False, averaged: bool = False, whole: bool = False) -> Factoring:
    dims = dims_of(call.operands[0].shape)
    gone = call.dims("dim", len(dims))
    target = tuple(dim for i, dim in enumerate(dims) if i not in gone)
    if call.arguments.get("keepdim"):
        target = tuple(() if i in gone else dim for i, dim in enumerate(dims))
    reduced = names(dims, gone)
    return Factoring(
        (dims,),
        (target,) * len(call.results),
        whole=reduced if whole else frozenset(),
        linear=FIRST if linear else (),
        averaged=reduced if averaged else frozenset(),
    )


def _compared_along(call: Call) -> Factoring:
    """Compare directions along a dim, which stays whole and is gone; operands are broadcast."""
    target = dims_of(call.results[0])
    rank = len(target) + 1
    dim = call.dim("dim", rank, 1)
    full = (*target[:dim], ("d",), *target[dim:])
    operands = tuple(broadcast(operand.shape, full) for operand in call.operands)
    return Factoring(operands, (target,), whole=names(full, [dim]))


def running(call: Call) -> Factoring:
    """Accumulate along a dim, which stays whole."""
    return kept(call, [call.dim("dim", len(call.operands[0].shape))])


def _running_sum(call: Call) -> Factoring:
    """Sum up along a dim, which stays whole; linear."""
    return kept(call, [call.dim("dim", len(call.operands[0].shape))], linear=True)


LOOKED_OVER = """
    amax amin aminmax max min max.dim min.dim argmax argmin median median.dim prod prod.dim_int any any.dim any.dims
    all all.dim all.dims logsumexp std std.dim std.correction var var.dim var.correction var_mean.correction
    std_mean.correction std_mean.dim var_mean.dim norm.Scalar norm.ScalarOpt_dim linalg_vector_norm mode
""".split()

RULES: tuple[Rule, ...] = (
    *built(_summed_away, "sum", "sum.dim_IntList", "nansum"),
    *built(_counted_away, "count_nonzero", "count_nonzero.dim_IntList"),
    *built(_averaged_away, "mean", "mean.dim"),
    *built(_looked_over, *LOOKED_OVER),
    *built(_compared_along, "cosine_similarity"),
    *built(running, "cumprod", "logcumsumexp", "cummax", "cummin"),
    *built(_running_sum, "cumsum"),
)
