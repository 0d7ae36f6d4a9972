"""Ops that draw random numbers: every factor passes through.

What makes masks equal under every plan is another matter (transforms): here it is only said which calls draw, and where
those that draw by counter are told which part of the whole tensor they draw.
"""

from __future__ import annotations

from dataclasses import replace

from hetu_fx.deduction.rules.build import built, dims_of, kept, literals
from hetu_fx.deduction.rules.call import Call
from hetu_fx.deduction.rules.forms import Traits
from hetu_fx.deduction.rules.rule import Factoring, Rule


def dropout(call: Call) -> Factoring:
    """Drop elements at random in training."""
    draws = bool(call.arguments.get("train", True)) and call.arguments.get("p", 0.5) != 0
    return replace(kept(call), random=draws)


def _channel_dropout(call: Call) -> Factoring:
    """Drop whole channels at random in training: batch and channels pass through, space too."""
    return dropout(call)


def _drawn_like(call: Call) -> Factoring:
    """Draw a tensor of another's shape."""
    return replace(kept(call), random=True)


def drawn(call: Call) -> Factoring:
    """Draw a tensor of a given shape."""
    dims = dims_of(call.results[0])
    return Factoring((), (dims,), literals=literals(call, "size", dims), random=True)


def _drawn_by_counter(call: Call) -> Factoring:
    """Draw for every element of the first operand; every device reads the whole state."""
    dims = dims_of(call.operands[0].shape)
    return Factoring((dims, (("state",),)), (dims,), whole=frozenset({"state"}))


RULES: tuple[Rule, ...] = (
    *built(dropout, "dropout", "native_dropout", "alpha_dropout"),
    *built(_channel_dropout, "feature_dropout", "feature_alpha_dropout"),
    *built(_drawn_like, "rand_like", "randn_like", "bernoulli", "bernoulli.p"),
    *built(drawn, "rand", "randn"),
    *built(_drawn_by_counter, "hetu.uniform.default", traits=Traits(counter_at=5)),
    *built(_drawn_by_counter, "hetu.dropout.default", traits=Traits(counter_at=6)),
)
