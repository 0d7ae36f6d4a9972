"""Ops that make tensors or drop elements: every factor of what is constant or random passes through, counting is whole.

What makes random numbers equal under every plan is another matter (transforms): here it is only said which calls draw,
and where those that draw by counter are told which part of the whole tensor they draw.
"""

from __future__ import annotations

from dataclasses import replace

from hetu_fx.deduction.rules.build import built, dims_of, kept, literals, names
from hetu_fx.deduction.rules.call import Call
from hetu_fx.deduction.rules.forms import Traits
from hetu_fx.deduction.rules.rule import Factoring, LiteralSize, Rule


def constant(call: Call, random: bool = False) -> Factoring:
    """Make a constant or random tensor of a given size; an operand only lends its dtype and device."""
    dims = dims_of(call.results[0])
    operands = tuple(dims_of(operand.shape, "u") for operand in call.operands)
    unread = frozenset(i for i, operand in enumerate(call.operands) if operand.argument == "self")
    return Factoring(operands, (dims,), literals=literals(call, "size", dims), unread=unread, random=random)


def counting(call: Call) -> Factoring:
    """Count up; whole, as values depend on the position, unless they are positions inside the shard."""
    dims = dims_of(call.results[0])
    if call.routed:
        return Factoring((), (dims,), literals=tuple(LiteralSize(call.at("end"), dim) for dim in dims))
    operands = tuple(dims_of(operand.shape, "u") for operand in call.operands)
    return Factoring(operands, (dims,), whole=names(dims))


def dropout(call: Call) -> Factoring:
    """Drop elements, or whole channels, at random in training."""
    draws = bool(call.arguments.get("train", True)) and call.arguments.get("p", 0.5) != 0
    return replace(kept(call), random=draws)


def _drawn_like(call: Call) -> Factoring:
    """Draw a tensor of another's shape."""
    return replace(kept(call), random=True)


def _drawn_by_counter(call: Call) -> Factoring:
    """Draw for every element of the first operand; every device reads the whole state."""
    dims = dims_of(call.operands[0].shape)
    return Factoring((dims, (("state",),)), (dims,), whole=frozenset({"state"}))


CONSTANTS = "zeros ones empty.memory_format full new_zeros new_ones new_full new_empty".split()
COUNTING = "arange arange.start arange.start_step linspace eye eye.m scalar_tensor hann_window".split()

RULES: tuple[Rule, ...] = (
    *built(constant, *CONSTANTS),
    *built(constant, "rand", "randn", random=True),
    *built(counting, *COUNTING),
    *built(dropout, "dropout", "native_dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"),
    *built(_drawn_like, "rand_like", "randn_like", "bernoulli", "bernoulli.p"),
    *built(_drawn_by_counter, "hetu.uniform.default", traits=Traits(counter_at=5)),
    *built(_drawn_by_counter, "hetu.dropout.default", traits=Traits(counter_at=6)),
)
