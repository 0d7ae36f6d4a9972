"""Ops that create tensors: constants can be made shard by shard, counting sequences cannot."""

from __future__ import annotations

from hetu_fx.deduction.rules.build import built, dims_of, literals, names
from hetu_fx.deduction.rules.call import Call
from hetu_fx.deduction.rules.rule import Factoring, LiteralSize, Rule


def constant(call: Call) -> Factoring:
    """Make a constant tensor of a given size; an operand only lends its dtype and device."""
    dims = dims_of(call.results[0])
    operands = tuple(dims_of(operand.shape, "u") for operand in call.operands)
    unread = frozenset(i for i, operand in enumerate(call.operands) if operand.argument == "self")
    return Factoring(operands, (dims,), literals=literals(call, "size", dims), unread=unread)


def counting(call: Call) -> Factoring:
    """Count up; whole, as values depend on the position, unless they are positions inside the shard."""
    dims = dims_of(call.results[0])
    if call.routed:
        return Factoring((), (dims,), literals=tuple(LiteralSize(call.at("end"), dim) for dim in dims))
    operands = tuple(dims_of(operand.shape, "u") for operand in call.operands)
    return Factoring(operands, (dims,), whole=names(dims, range(len(dims))))


CONSTANTS = "zeros ones empty.memory_format full new_zeros new_ones new_full new_empty".split()
COUNTING = "arange arange.start arange.start_step linspace eye eye.m scalar_tensor hann_window".split()

RULES: tuple[Rule, ...] = (*built(constant, *CONSTANTS), *built(counting, *COUNTING))
